"""Bodies that are wrong in very many places are refused at once: errors are not made for each of them."""

import gzip
import json
import time

import pytest
from helpers.serve import Answer, run, scripted_client

NUM = 50_000
ZEROS = [0] * NUM
SURROGATES = {f"\ud800{i}": 0 for i in range(NUM)}
MESSAGES = [{"role": "user", "content": "a"}]


def test_a_long_path_is_not_told_in_full():
    async def test():
        async with scripted_client(Answer(["a"])) as (client, _):
            for answer in (await client.get("/" + "a" * 5000), await client.put("/v1/models/" + "a" * 5000)):
                assert answer.status_code in (404, 405)
                assert "aaa..." in answer.json()["error"]["message"]
                assert len(answer.text) < 500

    run(test())


def test_a_body_that_is_compressed_is_told_so():
    async def test():
        async with scripted_client(Answer(["a"])) as (client, _):
            headers = {"content-type": "application/json", "content-encoding": "gzip"}
            content = gzip.compress(b'{"prompt": "a"}')
            answer = await client.post("/v1/completions", content=content, headers=headers)
            assert answer.status_code == 400
            assert answer.json()["error"]["message"] == (
                "the body cannot be read with Content-Encoding 'gzip'; send it as plain JSON"
            )
            plain = await client.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
            assert plain.status_code == 200

    run(test())


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", {"messages": ZEROS}, "messages[0]"),
        ("chat/completions", {"messages": [{"role": "user", "content": ZEROS}]}, "messages[0].content[0]"),
        ("chat/completions", {"messages": MESSAGES, "tools": ZEROS}, "tools[0]"),
        ("chat/completions", {"messages": MESSAGES, "documents": ZEROS}, "documents[0]"),
        ("chat/completions", {"messages": MESSAGES, "documents": [SURROGATES]}, "documents"),
        (
            "chat/completions",
            {"messages": MESSAGES, "chat_template_kwargs": SURROGATES},
            "chat_template_kwargs",
        ),
        ("chat/completions", {"messages": MESSAGES, **SURROGATES}, None),
        ("chat/completions", {"messages": [{"role": "user", "content": "a", **SURROGATES}]}, "messages[0]"),
        ("completions", {"prompt": [1, *["a"] * NUM]}, "prompt[1]"),
        ("completions", {"prompt": ["a", *ZEROS]}, "prompt[1]"),
        ("completions", {"prompt": [["a"] * NUM] * 3}, "prompt[0][0]"),
        ("completions", {"prompt": "a", "stop": ZEROS}, "stop[0]"),
        ("completions", {"prompt": "a", "stop_token_ids": [-1] * NUM}, "stop_token_ids[0]"),
        ("completions", {"prompt": "a", "allowed_token_ids": ["a"] * NUM}, "allowed_token_ids[0]"),
        ("completions", {"prompt": "a", "logit_bias": dict.fromkeys(range(NUM), "a")}, "logit_bias"),
        ("completions", {"prompt": "a", "logit_bias": dict.fromkeys(range(9000), "a")}, "logit_bias.0"),
        ("completions", {"prompt": "a", "stop_token_ids": list(range(NUM))}, "stop_token_ids"),
        ("completions", {"prompt": "a", "allowed_token_ids": [1] * 3 * NUM}, "allowed_token_ids"),
        ("completions", {"prompt": [[1]] * NUM}, "prompt"),
        ("chat/completions", {"messages": MESSAGES * NUM}, "messages"),
        ("completions", {"prompt": "a", "metadata": dict.fromkeys(range(NUM), 0)}, "metadata"),
        (
            "completions",
            {"prompt": "a", "structured_outputs": {"choice": ZEROS}},
            "structured_outputs.choice[0]",
        ),
        ("responses", {"input": ZEROS}, "input[0]"),
        ("responses", {"input": "a", "tools": ZEROS}, "tools[0]"),
        ("responses", {"input": "a", "include": ZEROS}, "include[0]"),
    ],
)
def test_a_body_wrong_in_many_places_is_refused_at_once(path, body, param):
    async def test():
        async with scripted_client(Answer(["a"])) as (client, _):
            content = json.dumps(body)
            started = time.process_time()
            answer = await client.post(
                f"/v1/{path}", content=content, headers={"content-type": "application/json"}
            )
            spent_s = time.process_time() - started
            assert (answer.status_code, len(answer.text) < 2500) == (400, True), answer.text[:300]
            assert answer.json()["error"]["param"] == param
            assert spent_s < 2

    run(test())
