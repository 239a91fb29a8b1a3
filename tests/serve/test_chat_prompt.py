"""From a chat request to the prompt: what the template gets, and what is refused on the way."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from helpers.chat import CHATML, PARTS, QWEN3_STYLE, WEATHER, assistant, tokenizer_with, user
from helpers.live import BIG_CARD
from helpers.serve import Answer, run, scripted_client, scripted_engine
from helpers.tokenizers_by_hand import byte_level

from octavo.errors import RequestError
from octavo.serve import chat_prompt
from octavo.serve.api_errors import ApiError
from octavo.serve.chat_prompt import PreparedChat, call_rules, prepare_chat, render_prompt
from octavo.serve.chat_protocol import ChatRequest, template_messages, template_tools
from octavo.serve.settings import ServeSettings
from octavo.text.recipe import TokenizerRecipe
from octavo.text.tokenizer import Tokenizer

QWEN3 = tokenizer_with(default=QWEN3_STYLE)
PLAIN = tokenizer_with(default=CHATML)
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
TOOL_TALK = [
    user("Weather?"),
    assistant(None, tool_calls=[CALL]),
    {"role": "tool", "tool_call_id": "call_1", "content": "12°"},
]


def request(*messages: dict[str, Any], **fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": list(messages) or [user("Hi")], **fields})


def prepared(
    body: ChatRequest,
    tokenizer: Tokenizer = QWEN3,
    settings: ServeSettings | None = None,
    max_model_len: int = BIG_CARD.max_model_len,
) -> PreparedChat:
    async def prepare() -> PreparedChat:
        chosen = settings or ServeSettings()
        card = replace(BIG_CARD, max_model_len=max_model_len)
        engine, _ = await scripted_engine(Answer(), chosen, card=card, tokenizer=tokenizer)
        try:
            return await prepare_chat(body, engine, chosen)
        finally:
            await engine.close()

    return run(prepare())


def test_the_prompt_is_rendered_and_encoded_without_another_bos() -> None:
    chat = prepared(request(user("Hi")))
    assert chat.prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert QWEN3.decode(chat.prompt_token_ids) == chat.prompt


def test_messages_become_what_templates_read() -> None:
    body = request(
        {"role": "developer", "content": "Be brief.", "name": "boss"},
        user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
        assistant(None, tool_calls=[CALL, {**CALL, "id": None}], refusal=None, annotations=[], audio=None),
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "12°"}]},
        assistant(None, reasoning_content="Hm."),
        assistant(None, refusal="No."),
        assistant([{"type": "refusal", "refusal": "No!"}]),
    )
    function = {"name": "weather", "arguments": {"city": "Köln"}}
    assert template_messages(body.messages) == [
        {"role": "system", "content": "Be brief.", "name": "boss"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": function},
                {"type": "function", "function": function},
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "12°"}]},
        {"role": "assistant", "content": "", "reasoning_content": "Hm."},
        {"role": "assistant", "content": "No."},
        {"role": "assistant", "content": [{"type": "text", "text": "No!"}]},
    ]


@pytest.mark.parametrize(
    ("written", "read"), [("", {}), ('{"a": 1}', {"a": 1}), ("{a}", "{a}"), ("[1]", "[1]")]
)
def test_arguments_go_back_as_objects_unless_they_are_none(written: str, read: object) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": written}}
    (message,) = template_messages(request(assistant("", tool_calls=[call])).messages)
    assert message["tool_calls"][0]["function"]["arguments"] == read


def test_text_parts_are_joined_or_passed_on_as_the_template_reads_them() -> None:
    body = request(user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]))
    assert "user\na\nb<|im_end|>" in prepared(body, PLAIN).prompt
    assert "[text:a][text:b]" in prepared(body, tokenizer_with(default=PARTS)).prompt


def test_tools_are_shown_without_what_is_no_business_of_the_model() -> None:
    tool = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    body = request(tools=[tool, {"type": "function", "function": {"name": "now"}}])
    assert template_tools(body.tools or []) == [WEATHER, {"type": "function", "function": {"name": "now"}}]


def test_a_template_that_knows_tools_is_given_them() -> None:
    chat = prepared(request(*TOOL_TALK, tools=[WEATHER]))
    assert '<tools>\n{"type": "function", "function": {"name": "weather"' in chat.prompt
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>' in chat.prompt
    assert "<tool_response>\n12°\n</tool_response>" in chat.prompt
    assert chat.format.has_tools


def test_a_template_that_does_not_is_told_in_words() -> None:
    system = {"role": "system", "content": "Be brief."}
    chat = prepared(request(system, *TOOL_TALK, tools=[WEATHER]), PLAIN)
    first, second, third, fourth, last = chat.prompt.split("<|im_start|>")[1:]
    assert first.startswith("system\nBe brief.\n\n# Tools\n")
    assert '\n{"type": "function", "function": {"name": "weather", ' in first
    assert second == "user\nWeather?<|im_end|>\n"
    assert third == (
        'assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call><|im_end|>\n'
    )
    assert fourth == "user\n<tool_response>\n12°\n</tool_response><|im_end|>\n"
    assert last == "assistant\n"
    # Without a system message of its own, the tools are one; without tools, past calls are still told.
    assert prepared(request(tools=[WEATHER]), PLAIN).prompt.startswith("<|im_start|>system\n# Tools\n")
    past = prepared(request(*TOOL_TALK), PLAIN).prompt
    assert "# Tools" not in past
    assert third in past


def test_the_tool_parser_setting_decides() -> None:
    with pytest.raises(RequestError, match="tools: this model's chat template does not read it"):
        prepared(request(tools=[WEATHER]), PLAIN, ServeSettings(tool_parser="hermes"))
    with pytest.raises(ApiError, match="tools: this server was started with tool_parser 'none'") as caught:
        prepared(request(tools=[WEATHER]), settings=ServeSettings(tool_parser="none"))
    assert caught.value.param == "tools"


NAMED = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NAMED]


LONG = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"title": "a" * 10**5}}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("choice", "parallel", "names", "must_call", "many", "is_free"),
    [
        (None, None, ["weather", "now"], False, True, True),
        ("auto", True, ["weather", "now"], False, True, True),
        ("auto", False, ["weather", "now"], False, False, False),
        ("required", None, ["weather", "now"], True, True, False),
        ("required", False, ["weather", "now"], True, False, False),
        (NAMED, True, ["now"], True, False, False),
        (allowed("auto", "now", "now"), None, ["now"], False, True, False),
        (allowed("auto", "weather", "now"), None, ["weather", "now"], False, True, True),
        (allowed("required", "now"), None, ["now"], True, True, False),
    ],
)
def test_tool_choice_decides_which_calls_may_be_made(
    choice: Any, parallel: bool | None, names: list[str], must_call: bool, many: bool, is_free: bool
) -> None:
    rules = call_rules(
        request(tools=TOOLS, tool_choice=choice, parallel_tool_calls=parallel), ServeSettings()
    )
    assert rules is not None
    assert [function.name for function in rules.functions] == names
    assert (rules.must_call, rules.many, rules.is_free) == (must_call, many, is_free)


def test_tool_choice_none_keeps_tools_from_the_model_and_calls_from_being_read() -> None:
    chat = prepared(request(tools=TOOLS, tool_choice="none"))
    assert chat.prompt == prepared(request()).prompt
    assert not chat.format.has_tools
    assert chat.params.structured_output is None
    assert prepared(request(tools=[], tool_choice="auto")).prompt == chat.prompt


def test_schemas_that_are_too_long_are_refused_before_the_prompt_is_written(monkeypatch: Any) -> None:
    monkeypatch.setattr(chat_prompt, "render_prompt", lambda *_, **__: pytest.fail("it was written"))
    wide = {"type": "function", "function": {"name": "f", "parameters": {"enum": ["a" * 10**6]}}}
    message = "tools: the parameters of 'f' cannot be kept to: json_schema has 1,000,013 characters"
    with pytest.raises(ApiError, match=message) as caught:
        prepared(request(tools=[wide], tool_choice="required"))
    assert caught.value.param == "tools"


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"tool_choice": "required"}, "only for requests with tools", "tool_choice"),
        ({"tool_choice": NAMED, "tools": [WEATHER]}, r"names 'now', .* \(weather\)", "tool_choice"),
        ({"tool_choice": allowed("auto", "x"), "tools": TOOLS}, "names 'x'", "tool_choice"),
        (
            {"structured_outputs": {"regex": "a" * 10**6}},
            "^structured_outputs.regex has",
            "structured_outputs",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"title": "a" * 10**6}}}},
            "^response_format.json_schema.schema has",
            "response_format",
        ),
        (
            {"tools": [LONG, {"type": "function", "function": {**LONG["function"], "name": "g"}}]},
            "^tools has",
            "tools",
        ),
        ({"tools": [WEATHER, WEATHER]}, "two functions are named 'weather'", "tools"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "cannot bring a template", "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "field of the request itself", "chat_template_kwargs"),
        (
            {"chat_template_kwargs": {"enable_thinkin": False}},
            r"does not read it \(did you mean 'enable_thinking'\?\)",
            "chat_template_kwargs",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], message: str, param: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        prepared(request(**fields), max_model_len=10**6)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_reasoning_follows_the_template_the_request_and_the_setting() -> None:
    assert prepared(request()).format.reasons is False
    assert prepared(request(), PLAIN).format.reasons is None
    assert prepared(request(), settings=ServeSettings(reasoning_parser="none")).format.reasons is None
    assert prepared(request(), PLAIN, ServeSettings(reasoning_parser="think")).format.reasons is False
    opening = tokenizer_with(
        default=CHATML.replace("assistant\\n'", "assistant\\n<think>\\n'") + "{# </think> #}"
    )
    assert prepared(request(), opening).format.reasons is True


def test_thinking_is_turned_off_for_the_prompt_and_the_grammar() -> None:
    formats = {"response_format": {"type": "json_object"}}
    off = prepared(request(chat_template_kwargs={"enable_thinking": False}, **formats))
    assert off.prompt.endswith("assistant\n<think>\n\n</think>\n\n")
    assert off.params.structured_output is not None
    assert off.params.structured_output.json_object
    on = prepared(request(**formats))
    assert on.params.structured_output is not None
    assert "think" in (on.params.structured_output.lark or "")
    assert prepared(request(reasoning_effort="none")).prompt == off.prompt
    assert prepared(request(reasoning_effort="high")).prompt == prepared(request()).prompt


def test_an_effort_that_nothing_reads_is_refused() -> None:
    assert prepared(request(reasoning_effort="none"), PLAIN).prompt == prepared(request(), PLAIN).prompt
    with pytest.raises(ApiError, match="knows neither reasoning_effort nor enable_thinking") as caught:
        prepared(request(reasoning_effort="low"), PLAIN)
    assert caught.value.param == "reasoning_effort"
    reads = tokenizer_with(default="{{ reasoning_effort }}{{ messages[0].content }}")
    assert prepared(request(reasoning_effort="low"), reads).prompt == "lowHi"


def test_a_last_message_can_be_continued() -> None:
    body = request(user("Hi"), assistant("Well, "), continue_final_message=True)
    assert prepared(body, PLAIN).prompt.endswith("<|im_start|>assistant\nWell, ")
    with pytest.raises(RequestError, match="continue_final_message: cannot be combined"):
        prepared(request(assistant("a"), continue_final_message=True, add_generation_prompt=True), PLAIN)


@pytest.mark.parametrize(("is_special", "skips"), [(False, True), (True, False)], ids=["added", "special"])
def test_tags_that_are_special_tokens_are_kept_in_the_text(is_special: bool, skips: bool) -> None:
    tags = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    backend = byte_level({}, special=tags if is_special else [], added=[] if is_special else tags)
    tokenizer = Tokenizer(TokenizerRecipe(backend, "by hand", chat_templates={"default": QWEN3_STYLE}))
    assert prepared(request(), tokenizer).params.skip_special_tokens is skips
    asked = request(skip_special_tokens=True)
    assert prepared(asked, tokenizer).params.skip_special_tokens is True


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(RequestError, match=re.escape("messages: the model has no chat template")):
        render_prompt(request(), tokenizer_with(), ServeSettings(), has_tools=False)


def test_tokenize_gives_the_prompt_that_a_chat_would_have() -> None:
    async def both() -> tuple[list[int], list[int]]:
        async with scripted_client(Answer(["x"]), card=BIG_CARD, tokenizer=PLAIN) as (client, link):
            body = {
                "messages": [{"role": "developer", "content": "Be brief."}, *TOOL_TALK],
                "tools": [WEATHER],
            }
            tokens = (await client.post("/tokenize", json=body)).json()["tokens"]
            await client.post("/v1/chat/completions", json=body)
            return tokens, list(link.submitted[0].prompt_token_ids)

    tokens, submitted = run(both())
    assert tokens == submitted
    assert "# Tools" in PLAIN.decode(tokens)


@pytest.mark.parametrize(
    "message",
    [
        assistant(None, refusal="a" * 2001),
        assistant([{"type": "refusal", "refusal": "a" * 2001}]),
        assistant("a", reasoning_content="a" * 2001),
        assistant("a", name="a" * 2001),
        user("a" * 2001),
    ],
)
def test_where_the_text_of_a_long_request_is_worked_on_does_not_hang_on_its_field(message: Any) -> None:
    async def test() -> None:
        async with scripted_client(Answer(["a"]), card=BIG_CARD, tokenizer=QWEN3) as (client, link):
            sizes: list[int] = []
            work = link.engine.off_loop

            async def noted(size: int, job: Any, **options: Any) -> Any:
                sizes.append(size)
                return await work(size, job, **options)

            link.engine.off_loop = noted  # type: ignore[method-assign,assignment]
            for path in ("/v1/chat/completions", "/tokenize"):
                answer = await client.post(path, json={"messages": [message]})
                assert answer.status_code == 200, answer.text
                assert sizes.pop() > 2001
            assert (await client.post("/tokenize", json={"prompt": "b"})).json()["count"] == 1
            assert sizes.pop() < 20

    run(test())
