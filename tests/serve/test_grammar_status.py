"""What a request brought upon itself is told as its own fault, what the engine did is not."""

import httpx
import pytest
from helpers.chat import CHATML, tokenizer_with
from helpers.live import BIG_CARD
from helpers.serve import Answer, run, scripted_client

BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
}
REASONS = {
    "the options leave no token to choose: allowed_token_ids, min_tokens, structured_output, logit_bias": 400,
    "the options ask for too much: structured_output: Current row has 2073 items; max is 2000": 400,
    "the model's logits hold NaN; its weights or the dtype it runs in may be at fault": 500,
}


def ask(path: str, reason: str, *, stream: bool = False) -> httpx.Response:
    """What is answered when the engine ends the request with this error."""

    async def test() -> httpx.Response:
        script = Answer(["ab"], finish_reason="error", error=reason)
        tokenizer = tokenizer_with(default=CHATML)
        async with scripted_client(script, tokenizer=tokenizer, card=BIG_CARD) as (client, _):
            return await client.post(path, json=BODIES[path] | {"stream": stream})

    return run(test())


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("path", BODIES)
def test_a_request_that_ended_with_an_error(path: str, reason: str):
    answer = ask(path, reason)
    assert answer.status_code == REASONS[reason]
    error = answer.json()["error"]
    assert error["message"] == reason
    assert error["type"] == ("invalid_request_error" if answer.status_code == 400 else "server_error")


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_that_ends_so_says_why(path: str):
    reason = next(iter(REASONS))
    answer = ask(path, reason, stream=True)
    assert answer.status_code == 200
    assert reason in answer.text
