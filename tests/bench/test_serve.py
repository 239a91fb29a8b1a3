"""The load generator against scripted servers: what it sends, when, and what it makes of the answers."""

import asyncio
import json
import math
import subprocess
import sys
import time
from array import array

import pytest
from helpers import stub_server as stub
from helpers.serve import wait_until
from helpers.stub_server import stub_server

from octavo.bench import serve_null
from octavo.bench.serve import Answer, Load, LoadGenerator, Target, only_model, run_load
from octavo.bench.serve_calls import Call
from octavo.bench.serve_http import Connections, Endpoint, ResponseError, ResponseReader, ServerError, get
from octavo.bench.serve_report import Slo, Spread, as_rows, as_text, summarise
from octavo.errors import ConfigError


def target(url, **options):
    return Target(Endpoint.parse(url), "m", **options)


def calls(number, **options):
    return [Call(None, "a b c", 3, **options) for _ in range(number)]


def only_answer(script, *, call=None, **options):
    with stub_server(lambda path, body: script) as server:
        load = run_load(target(server.base_url, **options), [call or Call(None, "a b c", 3)])
    (answer,) = load.answers
    return answer


# Addresses


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("localhost:8000/", "http://localhost:8000/v1"),
        ("https://api.example.com/openai/v1/", "https://api.example.com/openai/v1"),
        ("http://[::1]:80/v1", "http://[::1]/v1"),
    ],
)
def test_an_address_is_taken_as_openai_clients_take_it(given, url):
    assert Endpoint.parse(given).url == url


@pytest.mark.parametrize("given", ["", "ftp://x/v1", "http://", "http://x:99999/v1"])
def test_what_is_no_address_is_named(given):
    with pytest.raises(ConfigError, match="base_url"):
        Endpoint.parse(given)


# HTTP


class Collected:
    def __init__(self):
        self.status, self.data, self.is_over = 0, b"", False

    def head(self, status, headers):
        self.status = status

    def body(self, data, now):
        self.data += data

    def end(self, now):
        self.is_over = True

    def lost(self, what, now):
        raise AssertionError(what)


CHUNKED = stub.HEAD + stub.chunk(b"hello ") + b"5;x=y\r\nworld\r\n0\r\nTrailer: 1\r\n\r\n"
SIZED = b"HTTP/1.1 404 Not Found\r\nContent-Length: 11\r\n\r\nhello world"
TO_THE_END = b"HTTP/1.0 200 OK\r\nServer: x\r\n\r\nhello world"
AFTER_100 = b"HTTP/1.1 100 Continue\r\n\r\n" + SIZED


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("response", "status", "can_be_reused"),
    [(CHUNKED, 200, True), (SIZED, 404, True), (TO_THE_END, 200, False), (AFTER_100, 404, True)],
    ids=["chunked", "sized", "to the end", "after a 100"],
)
def test_a_response_is_read_however_it_is_cut(response, status, can_be_reused, size):
    collected = Collected()
    reader = ResponseReader(collected)
    for i in range(0, len(response), size):
        reader.feed(response[i : i + size], 0.0)
    assert reader.feed_eof(0.0)
    assert (collected.status, collected.data, collected.is_over) == (status, b"hello world", True)
    assert reader.can_be_reused is can_be_reused


@pytest.mark.parametrize(
    ("response", "what"),
    [
        (b"SSH-2.0\r\n\r\n", "no status line"),
        (stub.HEAD + b"zz\r\n", "no chunk size"),
        (stub.HEAD + b"-5\r\n", "no chunk size"),
        (stub.HEAD + b"1_0\r\n", "no chunk size"),
        (stub.HEAD + b"1" * 70_000, "no chunk size"),
        (stub.HEAD + b"2\r\nabcd", "longer than it said"),
        (SIZED + b"more", "bytes after the end"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000, "the header does not end"),
    ],
)
def test_what_is_no_response_is_told_apart(response, what):
    with pytest.raises(ResponseError, match=what):
        ResponseReader(Collected()).feed(response, 0.0)


def test_news_keep_the_time_of_their_arrival_and_are_read_in_slices():
    heard = []

    class Slow:
        def read(self, news, now):
            heard.append((news, now))
            time.sleep(0.0005)  # the work of reading, longer than a slice

    async def test():
        connections = Connections(Endpoint.parse("http://x"))
        for i in range(4):
            connections.note(Slow(), b"%d" % i, float(i))
        asyncio.get_running_loop().call_soon(heard.append, "the loop's turn")
        while len(heard) < 5:
            await asyncio.sleep(0)

    asyncio.run(test())
    assert heard == [(b"0", 0.0), "the loop's turn", (b"1", 1.0), (b"2", 2.0), (b"3", 3.0)]


# Answers


def test_a_stream_is_counted_by_its_usage_and_timed_by_its_pieces():
    script = [
        stub.HEAD,
        stub.piece(""),
        0.05,
        stub.piece("a"),
        0.1,
        stub.piece("b", "length"),
        stub.usage(5, 4, 2),
    ]
    answer = only_answer([*script, stub.event("[DONE]"), stub.END])
    assert (answer.error, answer.finish_reason) == ("", "length")
    assert (answer.num_prompt_tokens, answer.num_output_tokens, answer.num_cached_tokens) == (5, 4, 2)
    assert len(answer.text_s) == 2  # a piece without text is none
    assert answer.ttft_s >= 0.05
    assert answer.gaps_s == [answer.text_s[1] - answer.text_s[0]]
    assert answer.tpot_s == pytest.approx(answer.gaps_s[0] / 3)  # of four tokens, three came after the first
    assert answer.e2e_s >= 0.15


def test_without_usage_pieces_are_counted_and_that_is_said():
    script = [stub.HEAD, stub.piece("a"), stub.piece("b"), stub.event("[DONE]"), stub.END]
    with stub_server(lambda path, body: script) as server:
        load = run_load(target(server.base_url), calls(2))
    assert [answer.num_tokens for answer in load.answers] == [2, 2]
    assert "the server did not count the tokens of 2 answers" in as_text(summarise(load))


def test_a_whole_answer_and_a_completion_are_read_too():
    body = {"choices": [{"text": "abc", "finish_reason": "stop"}], "usage": {"completion_tokens": 3}}
    answer = only_answer([stub.whole("200 OK", json.dumps(body).encode())], is_chat=False, is_stream=False)
    assert (answer.error, answer.num_tokens, answer.finish_reason) == ("", 3, "stop")


OVERLOADED = {"error": {"message": "full", "type": "rate_limit_error", "code": "rate_limit_exceeded"}}


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ([stub.whole("429 Too Many", json.dumps(OVERLOADED).encode())], "http 429 rate_limit_exceeded"),
        ([stub.whole("502 Bad Gateway", b"<html>", "text/html")], "http 502"),
        (
            [stub.HEAD, stub.piece("a"), stub.event({"error": {"type": "server_error"}})],
            "error event server_error",
        ),
        (
            [stub.HEAD, stub.event({"object": "error", "type": "BadRequestError"})],
            "error event BadRequestError",
        ),
        ([stub.HEAD, stub.piece("a"), stub.END], "stream without [DONE]"),
        ([stub.HEAD, stub.event("{oops"), stub.END], "malformed event"),
        ([stub.HEAD, stub.event("[1]"), stub.END], "malformed event"),
        ([stub.HEAD, stub.event({"choices": [3]}), stub.END], "malformed event"),
        ([stub.HEAD, stub.piece("a"), stub.HANG_UP], "connection lost in mid-answer"),
        ([stub.HEAD, stub.piece("a"), stub.RESET], "connection lost in mid-answer"),
        ([stub.HANG_UP], "connection lost before the answer"),
        ([b"nonsense\r\n\r\n"], "bad response: no status line: 'nonsense'"),
        ([stub.whole("200 OK", b'{"choices": []}')], "not a stream"),
    ],
)
def test_failures_are_told_apart(script, error):
    answer = only_answer(script)
    if error.startswith("bad response"):
        assert (answer.error, answer.detail) == ("connection lost before the answer", error)
    else:
        assert answer.error == error
    assert not answer.is_ok


def test_a_call_that_takes_too_long_fails_and_its_connection_ends():
    with stub_server(lambda path, body: [stub.HEAD, stub.piece("a"), stub.WAIT_FOR_EOF]) as server:
        load = run_load(target(server.base_url, timeout_s=1.0), calls(1))
        assert server.lost.wait(60)
    assert load.answers[0].error == "timeout"
    assert load.answers[0].e2e_s >= 1


def test_a_server_that_is_not_there_fails_the_call():
    with stub_server(lambda path, body: []) as server:
        gone = server.base_url
    (answer,) = run_load(target(gone), calls(1)).answers
    assert answer.error == "connect failed"
    assert "ConnectionRefusedError" in answer.detail


def test_one_failure_leaves_the_neighbours_alone():
    def script(path, body):
        is_bad = "bad" in body["messages"][0]["content"]
        return [stub.HEAD, stub.RESET] if is_bad else stub.answer("a", "b", "c")

    mixed = [Call(None, "bad" if i % 5 == 0 else "good", 3) for i in range(50)]
    with stub_server(script) as server:
        load = run_load(target(server.base_url), mixed, concurrency=8)
    summary = summarise(load)
    assert (summary.num_ok, summary.num_failed, summary.num_other_length) == (40, 10, 0)
    assert list(summary.errors) == ["connection lost in mid-answer"]


# What is sent


def test_a_request_holds_what_was_asked_for():
    options = {
        "api_key": "secret",
        "extra_body": {"top_p": 0.5},
        "headers": {"X-Team": "a"},
        "temperature": 0.7,
    }
    with stub_server(lambda path, body: stub.answer("a")) as server:
        run_load(target(server.base_url, **options), calls(1))
        run_load(target(server.base_url, is_chat=False, ignore_eos=False), [Call(None, [1, 2], 4)])
    (path, headers, body), (other_path, other_headers, other) = server.requests
    assert path == "/v1/chat/completions"
    assert (headers["authorization"], headers["x-team"]) == ("Bearer secret", "a")
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "a b c"}],
        "max_tokens": 3,
        "temperature": 0.7,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "top_p": 0.5,
    }
    assert other_path == "/v1/completions"
    assert "authorization" not in other_headers
    assert (other["prompt"], other["max_tokens"], "ignore_eos" in other) == ([1, 2], 4, False)


def test_a_key_is_in_no_repr():
    assert "secret" not in repr(target("http://x", api_key="secret"))


def test_connections_are_reused_and_one_that_was_closed_idle_is_replaced():
    with stub_server(lambda path, body: stub.answer("a")) as server:
        assert run_load(target(server.base_url), calls(6), concurrency=2).num_connections == 2

    answered = []

    def close_after(path, body):
        answered.append(path)
        # The second request comes on a connection that the server closes without a word, as idle ones are.
        return [*stub.answer("a")] if len(answered) != 2 else [stub.HANG_UP]

    with stub_server(close_after) as server:
        load = run_load(target(server.base_url), calls(3))
    assert [answer.error for answer in load.answers] == ["", "", ""]
    assert (load.num_connections, len(answered)) == (2, 4)


# Loops


def test_a_closed_loop_keeps_so_many_calls_open_and_no_more():
    with stub_server(lambda path, body: [0.02, *stub.answer("a")]) as server:
        load = run_load(target(server.base_url), calls(20), concurrency=5)
    spans = [(a.due_s, a.end_s) for a in load.answers]
    most = max(sum(begin <= moment < end for begin, end in spans) for moment, _ in spans)
    assert (len(spans), most, load.num_connections) == (20, 5, 5)


def test_an_open_loop_sends_on_time_while_the_server_stalls():
    # Nothing is answered before all have asked: a closed loop would wait for ever.
    at = [0.02 * i for i in range(20)]
    with stub_server(lambda path, body: [lambda: len(server.requests) == 20, *stub.answer("a")]) as server:
        load = run_load(target(server.base_url, timeout_s=20.0), [Call(at_s, "a", 1) for at_s in at])
    assert [answer.error for answer in load.answers] == [""] * 20
    # The first was due when the run began, and waited until the last was due.
    assert max(answer.ttft_s for answer in load.answers) >= at[-1]
    assert sorted(answer.due_s for answer in load.answers) == at


def test_waiting_for_a_place_counts_from_when_the_call_was_due():
    # Ten calls due at once, one open at a time, 30 ms each: the last waits for nine others.
    with stub_server(lambda path, body: [0.03, *stub.answer("a")]) as server:
        load = run_load(target(server.base_url), [Call(0.0, "a", 1) for _ in range(10)], concurrency=1)
    assert max(answer.ttft_s for answer in load.answers) >= 0.3
    assert max(answer.sent_s - answer.due_s for answer in load.answers) >= 0.27


def test_after_the_duration_nothing_is_sent_and_what_is_open_ends():
    def endless():
        while True:
            yield Call(None, "a", 1)

    with stub_server(lambda path, body: [0.1, *stub.answer("a")]) as server:
        load = run_load(target(server.base_url), endless(), concurrency=3, duration_s=1.0)
    # Each client sends once at least, and again for as long as the duration lasts.
    assert 3 <= len(load.answers) <= 33
    assert all(answer.is_ok and answer.due_s < 1 for answer in load.answers)


def test_clients_that_hang_up_do_so_at_their_piece_and_the_server_sees_it():
    pieces = [item for _ in range(200) for item in (stub.piece("a"), 0.005)]
    with stub_server(lambda path, body: [stub.HEAD, *pieces, stub.WAIT_FOR_EOF]) as server:
        load = run_load(target(server.base_url), calls(4, drop_after=3), concurrency=4)
        wait_until(lambda: server.num_lost == 4)
    assert [(a.is_dropped, len(a.text_s), a.error) for a in load.answers] == [(True, 3, "")] * 4
    summary = summarise(load)
    assert (summary.num_dropped, summary.num_ok, summary.num_failed) == (4, 0, 0)
    assert summary.e2e is None
    assert summary.ttft.count == 4


def test_a_run_that_is_cut_tells_what_was_answered_and_hangs_up():
    def endless(path, body):
        is_short = body["max_tokens"] == 1
        return stub.answer("a") if is_short else [stub.HEAD, stub.piece("a"), stub.WAIT_FOR_EOF]

    async def test():
        generator = LoadGenerator(target(server.base_url))
        lens = [1, 1, 1, 9, 9]
        running = asyncio.create_task(generator.run([Call(None, "a", n) for n in lens], concurrency=2))
        while not (len(generator.answers) == 3 and generator.num_open == 2 and len(server.requests) == 5):
            await asyncio.sleep(0.005)
        running.cancel()
        return await running

    with stub_server(endless) as server:
        load = asyncio.run(asyncio.wait_for(test(), 60))
        assert server.lost.wait(60)
    assert (len(load.answers), load.is_cut) == (3, True)
    assert "note: interrupted" in as_text(summarise(load))


def test_no_call_at_all_is_an_error():
    with pytest.raises(ConfigError, match="no call"):
        run_load(target("http://127.0.0.1:1"), [])


# The generator's own cost


@pytest.mark.parametrize("is_chat", [True, False])
def test_the_null_server_shows_what_the_generator_adds(is_chat):
    with serve_null.running(0.02) as url:
        assert asyncio.run(only_model(target(url))) == "null"
        load = run_load(
            target(url, reads_stamps=True, is_chat=is_chat), [Call(None, "a", 20)] * 64, concurrency=32
        )
    summary = summarise(load)
    assert (summary.num_ok, summary.num_other_length) == (64, 0)
    assert summary.delivery.count == 64 * 20
    # What the generator adds is a millisecond on an idle machine. Here: are the stamps read, as seconds ago?
    assert 0 < summary.delivery.p50 < 30
    # Of 20 tokens at ticks of 20 ms, the first may come at once.
    assert summary.e2e.p50 > 18 * 0.02


def test_every_token_of_a_joined_piece_has_its_own_delay():
    now = time.perf_counter()
    text = f"{now - 3:.7f} {now - 2:.7f} {now - 1:.7f} "
    answer = only_answer(stub.answer(text), reads_stamps=True)
    first, second, third = answer.stamps_s
    assert (first - second, second - third) == (pytest.approx(1, abs=1e-5), pytest.approx(1, abs=1e-5))
    assert 1 <= third < 1 + time.perf_counter() - now
    assert list(answer.stamped_s) == [answer.text_s[0]] * 3


def test_it_loads_no_torch():
    code = (
        "import sys, octavo.bench.serve_null, octavo.bench.serve_report, octavo.cli.bench_serve\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run((sys.executable, "-c", code), check=True)


# GET


def test_a_model_list_that_is_none_is_told():
    refusal = [stub.whole("401 Unauthorized", b"{}")]
    way_out = pytest.raises(ServerError, match=r"gave 401.*give --api-key")
    with stub_server(lambda path, body: refusal) as server, way_out:
        asyncio.run(only_model(target(server.base_url)))
    with pytest.raises(ServerError, match="is the server running there"):
        asyncio.run(only_model(target(server.base_url)))
    with stub_server(lambda path, body: [stub.whole("200 OK", b'{"data": []}')]) as server:
        with pytest.raises(ServerError, match="lists no model"):
            asyncio.run(only_model(target(server.base_url)))
        status, body, seconds = asyncio.run(get(Endpoint.parse(server.base_url), "//health", {}))
    assert (status, body) == (200, b'{"data": []}')
    assert 0 < seconds < 60
    assert server.requests[-1][0] == "/health"


# Summaries


def made(ttft_s, gap_s, num, **changes):
    text_s = array("d", [1.0 + ttft_s + gap_s * i for i in range(num)])
    return Answer(
        1.0, 1.001, text_s[-1] + 0.01, text_s, asked_tokens=num, num_output_tokens=num, num_prompt_tokens=10,
        num_cached_tokens=4, **changes,
    )  # fmt: skip


def test_a_summary_of_known_answers():
    answers = [made(0.1, 0.01, 11), made(0.2, 0.02, 11), made(0.3, 0.03, 11), made(0.4, 0.04, 11)]
    answers.append(made(0.5, 0.05, 5, is_dropped=True))
    answers.append(Answer(1.0, 1.0, 1.2, error="http 500", detail="x"))
    summary = summarise(Load(answers, 10.0, 0.5, 6, 0.0), Slo.parse(["ttft:300", "tpot:25"]))
    assert (summary.num_calls, summary.num_ok, summary.num_dropped, summary.num_failed) == (6, 4, 1, 1)
    assert summary.output_tokens_per_s == pytest.approx((44 + 5) / 10)
    assert summary.prompt_tokens_per_s == pytest.approx(4.0)
    assert summary.cached_share == pytest.approx(0.4)
    assert summary.ttft == Spread(5, *map(pytest.approx, (0.3, 0.3, 0.46, 0.48, 0.496, 0.5)))
    assert summary.tpot.p50 == pytest.approx(0.025)
    gaps = (1.2 / 44, 0.03, 0.04, 0.05, 0.05, 0.05)  # ten of each of the first four, four of 0.05
    assert summary.itl == Spread(44, *map(pytest.approx, gaps))
    assert summary.e2e.max == pytest.approx(0.4 + 10 * 0.04 + 0.01)
    assert summary.num_good == 2  # the third is within ttft and not within tpot
    text = as_text(summary)
    assert "6 calls in 10.00 s: 4 answered, 1 dropped by the client as planned, 1 failed" in text
    assert "goodput 0.20 answers/s: 40.0 % kept ttft 300 ms, tpot 25 ms" in text
    assert "failed: 1 x http 500, such as: x" in text
    rows = {row.name: row for row in as_rows(summary)}
    assert rows["TTFT, p99"].value == pytest.approx(496.0)
    assert rows["failed"].details == {"http 500": 1}
    assert all(math.isfinite(row.value) for row in rows.values())


def test_bounds_of_every_measure():
    good = made(0.1, 0.01, 11)
    for spec, holds in (
        ("ttft:101", True), ("ttft:99", False), ("itl:10.1", True), ("itl:9.9", False),
        ("tpot:10.1", True), ("tpot:9.9", False), ("e2e:211", True), ("e2e:209", False),
    ):  # fmt: skip
        assert Slo.parse([spec]).is_met(good) is holds, spec
    assert not Slo.parse(["e2e:1000"]).is_met(made(0.1, 0.01, 11, is_dropped=True))
    assert Slo.parse([]) is None


@pytest.mark.parametrize("spec", ["ttft", "ttft:", "ttft:0", "ttft:x", "tfft:3", "e2e:inf"])
def test_a_bound_that_is_none_is_named(spec):
    with pytest.raises(ConfigError, match="goodput"):
        Slo.parse([spec])


def test_a_generator_at_its_limit_says_so():
    text = as_text(summarise(Load([made(0.1, 0.01, 3)], 10.0, 9.5, 1, 0.0)))
    assert "warning: the generator had little time left" in text


def test_several_tokens_a_piece_are_told():
    answer = made(0.1, 0.01, 5)
    answer.num_output_tokens = answer.asked_tokens = 10
    summary = summarise(Load([answer], 1.0, 0.1, 1, 0.0))
    assert summary.tokens_per_piece == 2.0
    assert summary.tpot.mean == pytest.approx(0.04 / 9)
    assert "a piece held 2.00 tokens on average" in as_text(summary)


def test_open_calls_can_be_watched():
    seen = []
    with stub_server(lambda path, body: [lambda: bool(seen), *stub.answer("a")]) as server:
        run_load(target(server.base_url), calls(2), concurrency=2, watch=lambda g: seen.append(g.num_open))
    assert seen[0] == 2
    assert LoadGenerator(target("http://x")).num_open == 0
