"""What is served, and its tokenizer: /v1/models, /tokenize, /detokenize, /health."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from fastapi import APIRouter, Request
from pydantic import Field
from pydantic_core import to_json
from starlette.responses import JSONResponse, Response

from octavo.errors import RequestError
from octavo.serve.api_errors import ERROR_RESPONSES, ApiError, named_text
from octavo.serve.chat_prompt import check_tools, render_prompt
from octavo.serve.chat_protocol import ChatRequest, Message, Tool
from octavo.serve.guard import body_size
from octavo.serve.protocol import MAX_ITEMS, AnyObject, Body, Many

if TYPE_CHECKING:
    from octavo.serve.async_engine import AsyncEngine
    from octavo.serve.settings import ServeSettings

router = APIRouter()

_READS: Final[dict[int | str, dict[str, Any]]] = {
    status: ERROR_RESPONSES[status] for status in (401, 404, 503)
}
_STARTED_S: Final = int(time.time())


def model_names(engine: AsyncEngine, settings: ServeSettings) -> tuple[str, ...]:
    """The names that clients may ask for; the first is the one in answers."""
    return settings.served_model_names or (engine.model.name,)


def check_model(request: Request, asked: str | None) -> str:
    """The name to answer under. ApiError (404) when it is none that is served; nothing is looked up by it."""
    names = model_names(request.app.state.engine, request.app.state.settings)
    if asked is None:
        return names[0]
    if asked not in names:
        raise ApiError(
            404,
            f"the model {asked[:100]!r} is not served here; this server has {', '.join(names)}",
            param="model",
            code="model_not_found",
        )
    return asked


@router.get("/v1/models", tags=["models"], responses=_READS)
async def list_models(request: Request) -> dict[str, Any]:
    """The names that `model` may have. They all mean the one loaded model."""
    engine: AsyncEngine = request.app.state.engine
    names = model_names(engine, request.app.state.settings)
    return {"object": "list", "data": [_model_object(engine, name) for name in names]}


@router.get("/v1/models/{model:path}", tags=["models"], responses=_READS)
async def get_model(request: Request, model: str) -> dict[str, Any]:
    """One of them."""
    return _model_object(request.app.state.engine, check_model(request, model))


def _model_object(engine: AsyncEngine, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": _STARTED_S,
        "owned_by": "octavo",
        "max_model_len": engine.model.max_model_len,
    }


class TokenizeRequest(Body):
    """A text, or the messages of a chat; exactly one of the two."""

    model: str | None = None
    prompt: str | None = None
    messages: Many[Message] | None = Field(None, max_length=MAX_ITEMS)
    add_special_tokens: bool | None = Field(
        None, description="Default: true for a prompt, false for messages."
    )
    add_generation_prompt: bool | None = Field(None, description="Default: true.")
    tools: Many[Tool] | None = Field(None, max_length=MAX_ITEMS)
    chat_template_kwargs: AnyObject | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Many[int]
    skip_special_tokens: bool | None = Field(None, description="Default: false.")


@router.post("/tokenize", tags=["tokenizer"], responses=ERROR_RESPONSES)
async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """The token ids of a text as completions would see it, or of messages as chat would."""
    check_model(request, body.model)
    engine: AsyncEngine = request.app.state.engine
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "expected exactly one of prompt and messages", param="prompt")
    tokenizer = engine.tokenizer
    if body.prompt is not None:
        for name in ("add_generation_prompt", "tools", "chat_template_kwargs"):
            if getattr(body, name) is not None:
                raise ApiError(400, f"{name} belongs to messages, and a prompt was given", param=name)
        text = body.prompt

        def encode() -> list[int]:
            return tokenizer.encode(text, add_special_tokens=body.add_special_tokens is not False)

    elif not body.messages:
        raise ApiError(400, "messages: the list is empty; expected at least one", param="messages")
    else:
        settings: ServeSettings = request.app.state.settings
        if body.tools:
            check_tools(settings)
        chat = ChatRequest(
            messages=body.messages,
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt,
            chat_template_kwargs=body.chat_template_kwargs,
        )

        def encode() -> list[int]:
            try:
                prompt = render_prompt(chat, tokenizer, settings, has_tools=bool(body.tools))
                return tokenizer.encode(prompt, add_special_tokens=body.add_special_tokens is True)
            except RequestError as error:
                raise named_text(error, chat, "messages") from error

    max_model_len = engine.model.max_model_len

    def answer() -> bytes:
        tokens = encode()
        facts: dict[str, Any] = {"tokens": tokens, "count": len(tokens), "max_model_len": max_model_len}
        if body.return_token_strs:
            facts["token_strs"] = [tokenizer.token_text(token) for token in tokens]
        return to_json(facts)

    return Response(await engine.off_loop(body_size.get(), answer), media_type="application/json")


@router.post("/detokenize", tags=["tokenizer"], responses=ERROR_RESPONSES, response_model=dict[str, Any])
async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
    """The text of token ids."""
    check_model(request, body.model)
    engine: AsyncEngine = request.app.state.engine
    tokenizer, vocab_size = engine.tokenizer, engine.model.vocab_size
    skips = body.skip_special_tokens is True

    def decode() -> str:
        for i, token in enumerate(body.tokens):
            if not 0 <= token < vocab_size:
                raise RequestError(f"tokens[{i}] is {token}, outside the vocabulary (0 to {vocab_size - 1})")
        return tokenizer.decode(body.tokens, skip_special_tokens=skips)

    return JSONResponse({"prompt": await engine.off_loop(body_size.get(), decode)})


@router.get("/health", tags=["server"], responses={503: {"description": "Loading, draining, stuck or dead."}})
@router.head("/health", tags=["server"], include_in_schema=False)
@router.get("/ping", tags=["server"], include_in_schema=False)
@router.head("/ping", tags=["server"], include_in_schema=False)
async def health(request: Request) -> Response:
    """Status 200 when requests are taken, else 503; the body says why."""
    engine: AsyncEngine = request.app.state.engine
    answer: dict[str, str] = {"status": engine.state}
    if engine.death is not None:
        answer["reason"] = str(engine.death)
    return JSONResponse(answer, 200 if engine.state == "ready" else 503)
