"""Large whole answers are made beside the event loop, and are what small ones would be."""

import asyncio
import json
import threading
from typing import Any

import pytest
from helpers.chat import CHATML, tokenizer_with
from helpers.live import BIG_CARD
from helpers.serve import Answer, run, scripted_client
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import JSONResponse

from octavo.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from octavo.serve import whole_answer as module
from octavo.serve.whole_answer import MAX_INLINE_ENTRIES, encode_in_slices, whole_answer

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    scalars | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=12)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner)
    ),
    max_leaves=60,
)


@given(values)
def test_slices_join_to_what_one_call_writes(value: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SLICE", 3)
        assert encode_in_slices(value).encode() == JSONResponse(value).body


def output(num_tokens: int, width: int, *, of_prompt: bool = False) -> RequestOutput:
    entries = [{i: Logprob(-0.5, i + 1) for i in range(width)} for _ in range(num_tokens)]
    choice = CompletionOutput(0, "x", [0] * num_tokens, "stop", logprobs=None if of_prompt else entries)
    metrics = RequestMetrics(None, None, None, 1.0, 0)
    prompt = [None, *entries] if of_prompt else None
    return RequestOutput("a", None, [], [choice], 0, metrics, prompt_logprobs=prompt)


@pytest.mark.parametrize("of_prompt", [False, True])
@pytest.mark.parametrize("is_large", [False, True])
def test_only_many_log_probabilities_leave_the_event_loop(is_large: bool, of_prompt: bool) -> None:
    num_tokens = MAX_INLINE_ENTRIES // 10 + is_large
    threads = []

    def shape() -> dict[str, Any]:
        threads.append(threading.get_ident())
        return {"a": "é", "b": list(range(250))}

    answer = asyncio.run(whole_answer([output(num_tokens, 10, of_prompt=of_prompt)], shape))
    assert (threads != [threading.get_ident()]) is is_large
    assert answer.headers["content-type"] == "application/json"
    assert json.loads(bytes(answer.body)) == {"a": "é", "b": list(range(250))}
    assert asyncio.run(whole_answer([output(0, 0)], shape)).body == answer.body


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "a"}],
        "logprobs": True,
        "top_logprobs": 2,
    },
    "/v1/completions": {"prompt": ["a", "b"], "logprobs": 2},
    "/v1/responses": {"input": "a", "top_logprobs": 2, "include": ["message.output_text.logprobs"]},
}


@pytest.mark.parametrize("path", BODIES)
def test_every_route_answers_the_same_in_either_way(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> tuple[str, int]:
        tokenizer = tokenizer_with(default=CHATML)
        async with scripted_client(Answer(["abc", "d"]), tokenizer=tokenizer, card=BIG_CARD) as (client, _):
            answer = await client.post(path, json=BODIES[path])
        assert answer.status_code == 200
        body = answer.json()
        return json.dumps(body.get("choices") or body["output"][-1]["content"]), len(in_threads)

    in_threads: list[Any] = []

    def spied(value: Any) -> str:
        in_threads.append(value)
        return encode_in_slices(value)

    monkeypatch.setattr(module, "encode_in_slices", spied)
    inline, num_before = run(ask())
    monkeypatch.setattr(module, "MAX_INLINE_ENTRIES", 0)
    beside, num_after = run(ask())
    assert num_before == 0 < num_after
    assert "logprob" in inline
    assert beside == inline
