import json
import sys

import pytest
from helpers import stub_server as stub
from helpers.stub_server import stub_server

from octavo.bench.report import read_result
from octavo.cli.bench_serve import LoadOptions

MODELS = stub.whole("200 OK", b'{"data": [{"id": "first"}, {"id": "second"}]}')


def script(path, body):
    return [MODELS] if path == "/v1/models" else stub.answer("a", "b", "c", "d")


def bench(octavo, url, *options):
    return octavo("bench", "serve", "--base-url", url, *options)


def test_it_prints_a_summary_and_writes_a_result_a_picture_and_every_call(octavo, tmp_path, monkeypatch):
    files = {name: tmp_path / name for name in ("r.json", "p.png", "c.jsonl")}
    options = (
        "--num-requests", "12", "--concurrency", "3", "--output-len", "4", "--goodput", "ttft:5000",
        "--api-key", "sk-geheim", "--header=X-Secret: sk-geheim", "--json", files["r.json"],
        "--plot", files["p.png"], "--requests", files["c.jsonl"],
    )  # fmt: skip
    with stub_server(script) as server:
        monkeypatch.setattr(sys, "argv", ["octavo", "bench", "serve", *map(str, options)])
        status, out, err = bench(octavo, server.base_url, *options)
    assert (status, err) == (0, "")
    assert out.startswith("12 calls in ")
    assert "12 answered, 0 dropped by the client as planned, 0 failed" in out
    assert "goodput" in out
    assert server.requests[0][0] == "/v1/models"
    assert server.requests[-1][2]["model"] == "first"
    assert server.requests[-1][1]["authorization"] == "Bearer sk-geheim"
    result = read_result(files["r.json"])
    rows = {row["name"]: row for row in result["rows"]}
    assert rows["calls"]["value"] == 12  # the warm-up is none of them
    assert rows["TTFT, p99"]["details"]["count"] == 12
    assert rows["goodput"]["details"]["bounds"] == "ttft 5000 ms"
    assert "sk-geheim" not in files["r.json"].read_text()
    assert "--api-key ... '--header=...'" in result["command"].replace("--header=...", "'--header=...'")
    calls = [json.loads(line) for line in files["c.jsonl"].read_text().splitlines()]
    assert [len(call["text_s"]) for call in calls] == [4] * 12
    assert calls == sorted(calls, key=lambda call: call["due_s"])
    assert files["p.png"].read_bytes().startswith(b"\x89PNG")
    assert files["p.png"].stat().st_size > 10_000


def test_a_failed_call_makes_the_exit_status_1(octavo):
    def sometimes(path, body):
        if path == "/v1/models":
            return [MODELS]
        return stub.answer("a") if body["max_tokens"] == 4 else [stub.whole("503 Busy", b"{}")]

    with stub_server(sometimes) as server:
        status, out, _ = bench(octavo, server.base_url, "--num-requests", "3")
    assert status == 1
    assert "3 failed" in out
    assert "failed: 3 x http 503, such as: {}" in out


def test_a_server_that_refuses_the_first_call_is_told_in_one_line(octavo):
    refusal = stub.whole("401 No", b'{"error": {"message": "which key?", "code": "invalid_api_key"}}')
    with stub_server(lambda path, body: [refusal]) as server:
        status, out, err = bench(octavo, server.base_url, "--model", "m")
    assert (status, out) == (1, "")
    assert err.count("\n") == 1
    assert "failed: http 401 invalid_api_key" in err
    assert "which key?" in err


def test_no_server_at_all_is_told_in_one_line(octavo):
    with stub_server(script) as server:
        gone = server.base_url
    status, out, err = bench(octavo, gone)
    assert (status, out) == (1, "")
    assert "is the server running there?" in err


def test_the_key_of_the_environment_is_used(octavo, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "from-env")
    with stub_server(script) as server:
        bench(octavo, server.base_url, "--num-requests", "1")
    assert {headers.get("authorization") for _, headers, _ in server.requests} == {"Bearer from-env"}


def test_a_trace_is_replayed(octavo, tmp_path):
    trace = tmp_path / "t.jsonl"
    lines = [{"timestamp": 100 * i, "input_length": 3, "output_length": 4} for i in range(5)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    with stub_server(script) as server:
        status, out, _ = bench(
            octavo, server.base_url, "--trace", trace, "--trace-speed", "10", "--api", "completions"
        )
    assert status == 0
    assert out.startswith("5 calls in ")
    assert [len(body["prompt"]) for path, _, body in server.requests if path == "/v1/completions"][1:] == [
        3
    ] * 5


def test_an_open_loop_for_a_while(octavo):
    options = ("--rate", "100", "--duration", "0.5", "--num-warmups", "0", "--output-len", "4")
    with stub_server(script) as server:
        status, out, _ = bench(octavo, server.base_url, *options)
    assert status == 0
    assert 25 <= int(out.split()[0]) <= 80  # Poisson with mean 50


@pytest.mark.parametrize(
    ("options", "num_calls"),
    [
        ({}, 200),
        ({"concurrency": 100}, 200),
        ({"concurrency": 256}, 512),
        ({"concurrency": 256, "num_requests": 12}, 12),
        ({"concurrency": 256, "rate": 5.0}, 200),
    ],
)
def test_every_client_has_calls_to_send(options, num_calls):
    assert len(list(LoadOptions(**options).calls(as_words=True))) == num_calls


def test_it_measures_itself(octavo):
    options = ("--concurrency", "4", "--num-requests", "8", "--output-len", "5", "--num-warmups", "0")
    status, out, err = octavo("bench", "serve", "--null-server", *options)
    assert (status, err) == (0, "")
    assert "8 answered" in out
    assert "a piece was heard of " in out
    assert "us of a core each" in out


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--api", "responses"), "--api must be chat or completions; got 'responses'"),
        (("--prompts", "ids"), "a chat takes no token ids"),
        (("--prompts", "letters"), "--prompts must be words or ids"),
        (("--num-requests", "0"), "--num-requests must be at least 1, got 0"),
        (("--concurrency", "0"), "--concurrency must be at least 1, got 0"),
        (("--duration", "0"), "--duration must be above 0 seconds"),
        (("--timeout", "nan"), "--timeout must be above 0 seconds"),
        (("--rate", "0"), "--rate must be above 0"),
        (("--rate", "-1"), "--rate must be above 0 calls a second (or inf), got -1.0"),
        (("--rate", "inf", "--duration", "3"), "say how many with --num-requests"),
        (("--rate", "1", "--trace", "x"), "--rate and --trace exclude each other"),
        (("--num-warmups", "-5"), "--num-warmups must be at least 0, got -5"),
        (("--burstiness", "1"), "--burstiness does nothing without --rate"),
        (("--trace-speed", "1"), "--trace-speed does nothing without --trace"),
        (("--prefix-len", "8"), "--prefix-len does nothing without --num-prefixes"),
        (("--num-prefixes", "2"), "--num-prefixes does nothing without --prefix-len"),
        (("--trace", "x", "--input-len", "256"), "--input-len is for drawn calls"),
        (("--trace", "x", "--output-len", "128"), "--output-len is for drawn calls"),
        (("--trace", "x", "--max-token-id", "9"), "--max-token-id is for drawn calls"),
        (("--trace", "x", "--drop-share", "0"), "--drop-share is for drawn calls"),
        (("--max-token-id", "9"), "--max-token-id is for prompts of ids"),
        (("--null-interval", "0.02"), "--null-interval does nothing without --null-server"),
        (("--null-server", "--base-url", "http://x"), "--null-server and --base-url exclude each other"),
        (("--drop-share", "0.1", "--no-stream"), "--drop-share needs streams"),
        (("--drop-share", "2"), "--drop-share must be from 0 to 1"),
        (("--input-len", "long"), "--input-len must be a number of tokens"),
        (("--goodput", "tfft:3"), "did you mean 'ttft'"),
        (("--extra-body", "[1]"), "--extra-body must be a JSON object"),
        (("--header", "nonsense"), "--header must look like 'Name: value'"),
        (("--header", "X: a\nY: b"), "--header must look like 'Name: value'"),
        (("--base-url", "ftp://x"), "--base-url must look like"),
        (("--base-url", "http://x:port"), "--base-url 'http://x:port' is no address"),
        (("--input-len", "zipf:3"), "--input-len must be a number of tokens"),
        (("--num-prefixes", "-1", "--prefix-len", "4"), "--num-prefixes and prefix_len go together"),
        (("--rate", "1", "--burstiness", "0"), "--burstiness must be above 0"),
        (("--trace", "no.jsonl"), "--trace: 'no.jsonl' cannot be read: No such file or directory"),
        (("--trace", "/"), "--trace: '/' cannot be read: Is a directory"),
        (("--trace", __file__), "--trace: entry 1 is no call"),
        (("--trace", "/dev/null", "--trace-speed", "0"), "--trace-speed must be above 0"),
        (("--trace", "/dev/null"), "--trace: '/dev/null' holds no call"),
        (("--temperature", "-1"), "--temperature must be at least 0, got -1.0"),
        (("--null-server", "--null-interval", "-1"), "--null-interval must be at least 0 seconds, got -1.0"),
        (("--api", "completions", "--max-token-id", "0"), "--max-token-id must be at least 1"),
        (("--plot", "r.gif"), "--plot: 'r.gif' must end in one of .png, .svg, .pdf"),
        (("--json", "/nowhere/r.json"), "--json: there is no folder '/nowhere'"),
    ],
)
def test_what_cannot_be_is_named_before_anything_is_sent(octavo, options, what):
    status, out, err = octavo("bench", "serve", *options)
    assert (status, out) == (2, "")
    assert err.startswith(f"octavo: error: {'--' if what.startswith('--') else ''}")
    assert what in err
    assert err.endswith("; see `octavo bench serve --help`\n")
