"""The engine process's loop, in this process, over a real socket pair; and the messages on the wire."""

import json
import socket
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers.core import answer, letters, make_engine
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.stats import EngineStats
from octavo.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, StreamChunk
from octavo.sampling_params import SamplingParams
from octavo.serve import engine_process
from octavo.serve.channel import EngineChannel, _Frames
from octavo.serve.engine_process import EngineLoop
from octavo.serve.messages import (
    Abort,
    Accepted,
    Item,
    News,
    Observed,
    Refused,
    Stop,
    Submit,
    Tokens,
    Watch,
    decode,
    encode,
)

STATS = EngineStats(*range(11))
RAISES = 5
"""A prompt that begins with this id makes its steps raise."""


class Front:
    """The other end of the loop's socket, blocking, for tests."""

    def __init__(self, sock):
        self.socket = sock
        self.frames = _Frames()
        self.messages = []
        sock.settimeout(120)

    def send(self, *messages):
        data = b"".join(len(raw).to_bytes(8, "big") + raw for raw in map(encode, messages))
        self.socket.sendall(data)

    def receive(self):
        while not self.messages:
            data = self.socket.recv(65536)
            assert data, "the loop has gone"
            self.messages += self.frames.feed(data)
        return self.messages.pop(0)

    def until(self, *request_ids):
        """Everything up to the news in which the last of these requests ended."""
        open_ids, seen = set(request_ids), []
        while open_ids:
            seen.append(self.receive())
            if isinstance(seen[-1], News):
                open_ids -= {item.request_id for item in seen[-1].items if item.output}
            if isinstance(seen[-1], Refused):
                open_ids.discard(seen[-1].request_id)
        return seen


@pytest.fixture
def front():
    """The front of a loop that runs once its `thread` is started; it must end when it is told to."""
    ours, theirs = socket.socketpair()
    engine = make_engine(poison={RAISES: "raise"}, max_model_len=2000, num_blocks=600)
    channel = EngineChannel(theirs)
    thread = threading.Thread(target=EngineLoop(engine, channel).run)
    front = Front(ours)
    front.thread, front.channel = thread, channel
    yield front
    front.send(Stop())
    if not thread.ident:
        thread.start()
    thread.join(120)
    assert not thread.is_alive()
    channel.close()
    ours.close()


def items(messages, request_id):
    """What was told of a request, lone tokens too."""
    return [
        item
        for message in messages
        if isinstance(message, News)
        for item in [*message.items, *lone_tokens(message.tokens)]
        if item.request_id == request_id
    ]


def lone_tokens(tokens):
    columns = zip(tokens.request_ids, tokens.texts, tokens.token_ids, strict=True)
    return [Item(id_, [StreamChunk(0, text, [token_id])], None) for id_, text, token_id in columns]


def test_a_streamed_request_comes_back_piece_by_piece_in_one_message_a_step(front):
    front.thread.start()
    front.send(Submit("a", [1, 2, 3], SamplingParams(max_tokens=4, seed=9), stream=True))
    seen = front.until("a")
    assert seen[0] == Accepted(("a",))
    expected = answer([1, 2, 3], 4, 9)
    mine = items(seen, "a")
    assert [chunk.token_ids for item in mine for chunk in item.chunks] == [[token] for token in expected]
    assert "".join(chunk.text for item in mine for chunk in item.chunks) == letters(expected)
    assert mine[-1].output.token_ids == expected
    assert mine[-1].output.prompt_token_ids == []
    assert [message.started for message in seen[1:]] == [("a",), (), (), ()]
    assert [message.num_tokens for message in seen[1:]] == [4, 1, 1, 1]
    assert [len(message.tokens.texts) for message in seen[1:]] == [1, 1, 1, 0], "the last one ends it"
    assert seen[-1].stats.num_owned_blocks == 0


def test_log_probabilities_of_a_stream_travel_once(front):
    front.thread.start()
    front.send(Submit("a", [1, 2, 3], SamplingParams(max_tokens=3, seed=9, logprobs=1), stream=True))
    mine = items(front.until("a"), "a")
    expected = answer([1, 2, 3], 3, 9)
    told = [logprobs for item in mine for chunk in item.chunks for logprobs in chunk.logprobs]
    assert [next(iter(one)) for one in told] == expected
    output = mine[-1].output
    assert (output.token_ids, output.logprobs) == (expected, None)
    assert output.outputs[0].cumulative_logprob == -3.0


def test_a_request_that_is_not_streamed_is_told_of_once(front):
    front.thread.start()
    front.send(Submit("a", [1, 2, 3], SamplingParams(max_tokens=4, seed=9)))
    seen = front.until("a")
    told = [(item.chunks, item.output.token_ids) for item in items(seen, "a")]
    assert told == [([], answer([1, 2, 3], 4, 9))]
    assert len(seen) == 5, "accepted, and one message for each of four steps"


def test_all_that_waits_is_taken_before_a_step(front):
    params = SamplingParams(max_tokens=2)
    front.send(*(Submit(str(i), [1, 2], params) for i in range(8)))
    front.thread.start()
    seen = front.until(*map(str, range(8)))
    assert seen[0] == Accepted(tuple(map(str, range(8))))
    assert len([message for message in seen if isinstance(message, News)]) == 2
    assert seen[1].num_tokens == 8 * 3


def test_what_the_engine_refuses_is_refused_alone(front):
    good = SamplingParams(max_tokens=2)
    front.send(
        Submit("long", [1] * 2000, good),
        Submit("bad id", [1, 99], good),
        Submit("stop", [1], SamplingParams(stop_token_ids=[1000])),
        Submit("good", [1], good),
    )
    front.thread.start()
    seen = front.until("good")
    refused = {message.request_id: message for message in seen if isinstance(message, Refused)}
    assert {id_: message.kind for id_, message in refused.items()} == dict.fromkeys(
        ("long", "bad id", "stop"), "RequestError"
    )
    assert "prompt has 2000 tokens" in refused["long"].message
    assert Accepted(("good",)) in seen
    assert items(seen, "good")[-1].output.finish_reason == "length"


def test_a_submission_nobody_thought_of_harms_nobody(front):
    params = SamplingParams(max_tokens=2)
    front.send(Submit("odd", None, params), Submit("good", [1], params))
    front.thread.start()
    seen = front.until("good")
    odd = next(message for message in seen if isinstance(message, Refused))
    assert (odd.request_id, odd.kind) == ("odd", "EngineError")
    assert "TypeError" in odd.message
    assert items(seen, "good")[-1].output.finish_reason == "length"


def test_an_abort_is_answered_with_the_output_so_far_and_frees_the_blocks(front):
    front.thread.start()
    front.send(Submit("a", [1, 2, 3], SamplingParams(max_tokens=1900, ignore_eos=True), stream=True))
    front.receive()
    front.receive()
    front.send(Abort("a"), Abort("a"), Abort("nobody"))
    seen = front.until("a")
    output = items(seen, "a")[-1].output
    assert output.finish_reason == "abort"
    assert 0 < len(output.token_ids) < 1900
    last = seen[-1]
    assert (last.stats.num_owned_blocks, last.stats.num_running, last.num_tokens) == (0, 0, 0)


def test_a_step_that_raises_ends_what_ran_in_it_and_nothing_else(front):
    front.thread.start()
    front.send(Submit("bad", [RAISES], SamplingParams(max_tokens=3)))
    seen = front.until("bad")
    output = items(seen, "bad")[-1].output
    assert (output.finish_reason, output.error) == ("error", "the step failed: ZeroDivisionError: boom")
    front.send(Submit("good", [1], SamplingParams(max_tokens=3, seed=4, ignore_eos=True)))
    assert items(front.until("good"), "good")[-1].output.token_ids == answer([1], 3, 4)


def test_the_observer_speaks_while_somebody_watches_and_first_in_full(front):
    front.thread.start()
    front.send(Watch(True))
    first = front.receive()
    assert isinstance(first, Observed)
    assert first.is_full
    assert b'"full"' in first.payload
    front.send(Submit("a", [1, 2, 3], SamplingParams(max_tokens=3)))
    front.until("a")
    later = front.receive()
    while not isinstance(later, Observed):
        later = front.receive()
    assert not later.is_full
    assert b'"full"' not in later.payload
    front.send(Watch(True))
    change, full = front.receive(), front.receive()
    assert (change.is_full, full.is_full) == (False, True), "who watched already gets what changed"
    assert json.loads(change.payload)["seq"] == json.loads(full.payload)["seq"]
    front.send(Watch(False), Submit("b", [1, 2, 3], SamplingParams(max_tokens=3)))
    assert not any(isinstance(message, Observed) for message in front.until("b"))


def test_who_asks_again_and_again_is_told_no_more_often(front, monkeypatch):
    """Nor may what he is told take more of the loop's time than its share."""
    monkeypatch.setattr(engine_process, "OBSERVED_PERIOD_S", 0.05)
    front.thread.start()
    for is_slow in (False, True):
        if is_slow:
            monkeypatch.setattr(engine_process, "OBSERVED_SHARE", 1e-15)
        began = time.perf_counter()
        front.send(Watch(True))
        seen = [front.receive()]
        while len(seen) < 100 or time.perf_counter() - began < 0.2:
            front.send(Watch(False), Watch(True), Submit("a", [1], SamplingParams(max_tokens=1)))
            seen += front.until("a")
        num_told = sum(isinstance(message, Observed) for message in seen)
        num_periods = (time.perf_counter() - began) / 0.05
        assert 1 <= num_told <= (3 if is_slow else num_periods + 2)


@pytest.mark.parametrize(
    ("chunk", "is_token"),
    [
        (StreamChunk(0, "x", [3]), True),
        (StreamChunk(0, "", [3]), True),
        (StreamChunk(0, "x", []), False),
        (StreamChunk(0, "x", [3, 4]), False),
        (StreamChunk(1, "x", [3]), False),
        (StreamChunk(0, "x", [3], "stop"), False),
        (StreamChunk(0, "x", [3], logprobs=[{3: Logprob(-0.5, 1)}]), False),
    ],
)
def test_only_a_token_and_nothing_else_is_told_in_columns(front, chunk, is_token):
    def request(name, *chunks):
        return SimpleNamespace(request_id=name, chunks=list(chunks), output=None, stream=True)

    requests = [request("a", chunk), request("both", StreamChunk(0, "y", [1]), chunk), request("none")]
    EngineLoop(make_engine(), front.channel)._tell(requests, 0.001)
    news = front.receive()
    told = {item.request_id: item.chunks for item in news.items}
    assert (news.tokens == Tokens(["a"], [chunk.text], chunk.token_ids)) is is_token
    assert told == ({} if is_token else {"a": [chunk]}) | {"both": [StreamChunk(0, "y", [1]), chunk]}
    assert [one.chunks for one in requests] == [[], [], []]


def test_the_loop_ends_when_the_front_has_gone():
    ours, theirs = socket.socketpair()
    loop = EngineLoop(make_engine(), EngineChannel(theirs))
    ours.close()
    with pytest.raises(EOFError):
        loop.run()
    theirs.close()


def whole_output():
    choice = CompletionOutput(0, "ab", [1, 2], "stop", "x", [{1: Logprob(-0.5, 1, "a")}], -0.5)
    prompt = [None, {3: Logprob(-2.5, 7, "c"), 4: Logprob(-0.25, 1)}]
    metrics = RequestMetrics(0.1, None, 0.2, 1.0, 2)
    return RequestOutput("a", None, [], [choice], 3, metrics, prompt_logprobs=prompt, error="no")


def test_news_survive_the_wire():
    chunk = StreamChunk(1, "ab", [1, 2], "stop", 7, [{1: Logprob(-0.5, 1, "a"), 2: Logprob(-9.0, 40)}])
    news = News([Item("a", [chunk, StreamChunk(0, "")], whole_output())], STATS, 0.25, 17, ("a", "b"))
    assert decode(encode(news)) == news
    assert decode(encode(Abort("a"))) == Abort("a")
    tokens = Tokens(["a", "b"], ["", "x"], [7, 8])
    assert decode(encode(replace(news, tokens=tokens))) == replace(news, tokens=tokens) != news


@given(st.lists(st.binary(max_size=40), max_size=5), st.integers(1, 30))
def test_messages_are_whole_however_their_bytes_arrive(payloads, step):
    messages = [Observed(payload, False) for payload in payloads]
    data = b"".join(len(raw).to_bytes(8, "big") + raw for raw in map(encode, messages))
    frames, got = _Frames(), []
    for start in range(0, len(data), step):
        got += frames.feed(data[start : start + step])
    assert got == messages


def test_a_lost_gpu_ends_the_process_and_any_other_failed_step_does_not(monkeypatch):
    import torch

    from octavo.errors import EngineError
    from octavo.serve.engine_process import _check_device

    def lost():
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    _check_device("cpu")
    with pytest.raises(EngineError, match="the GPU is lost to this process: CUDA error: an illegal memory"):
        _check_device("cuda")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    _check_device("cuda")


def test_all_of_a_piece_crosses_the_pipe():
    numbers = [{3: Logprob(-0.5, 1, "d")}]
    chunk = StreamChunk(1, "x", [3], "error", 7, numbers, error="the options ask for too much")
    news = News([Item("r", [chunk], None)], STATS, 0.5, 1, ("r",))
    assert decode(encode(news)) == news
