"""The front's handle on the engine, over a scripted engine: queue, streams, ends, states."""

import asyncio
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from helpers.serve import CARD, STATS, Answer, NullListener, eventually, run, run_timeless, scripted_engine

from octavo.errors import (
    CapacityError,
    EngineError,
    ModelError,
    OverloadedError,
    RequestError,
    RequestTimeoutError,
)
from octavo.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, StreamChunk
from octavo.sampling_params import SamplingParams
from octavo.serve.async_engine import AsyncEngine
from octavo.serve.messages import Died, Item, News, Observed, Ready, Stage
from octavo.serve.settings import ServeSettings

PARAMS = SamplingParams(max_tokens=5)


def submit(engine, request_id="a", ids=(0, 1), **options):
    return engine.submit(list(ids), PARAMS, request_id=request_id, **options)


ONE_ROW = replace(CARD, max_num_seqs=1)


def waiting_news(*started):
    return News([], STATS, 0.001, 1, started)


def held(gate):
    """An engine that takes requests and says nothing of them until the gate opens."""
    return Answer(["abc"], gate=gate)


# Streams and results


def test_a_stream_gives_the_pieces_and_then_the_output():
    async def test():
        engine, link = await scripted_engine(Answer(["ab", "c", ""], stop_reason="x"))
        async with submit(engine, prompt="the prompt", stream=True) as generation:
            await generation.accepted()
            chunks = [chunk async for chunk in generation]
        assert [chunk.text for chunk in chunks] == ["ab", "c", ""]
        assert [chunk.output is None for chunk in chunks] == [True, True, False]
        output = chunks[-1].output
        assert (output.text, output.prompt, output.prompt_token_ids) == ("abc", "the prompt", [0, 1])
        assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == ("stop", "x")
        assert await generation.result() is output
        assert link.aborted == []
        await engine.close()

    run(test())


def test_a_result_needs_no_stream():
    async def test():
        engine, _ = await scripted_engine(Answer(["ab", "c"]))
        output = await submit(engine).result()
        assert (output.text, output.token_ids, output.prompt_token_ids) == ("abc", [0, 1, 2], [0, 1])
        await engine.close()

    run(test())


def test_log_probabilities_of_a_whole_answer_come_piece_by_piece():
    async def test():
        listener = NullListener()
        engine, link = await scripted_engine(Answer([], gate=asyncio.Event()), listener=listener)
        params = SamplingParams(max_tokens=5, logprobs=1, n=2)
        generation = engine.submit([0], params, request_id="a")
        left = engine.submit([0], params, request_id="left")
        await left.accepted()
        assert [one.stream for one in link.submitted] == [True, True]

        def entry(token):
            return {token: Logprob(-token / 4, 1)}

        link.tell("left", [StreamChunk(0, "x", [1], logprobs=[entry(1)])])
        left.abort()
        link.tell("a", [StreamChunk(0, "x", [1], logprobs=[entry(1)]), StreamChunk(1, "", [9])])
        outputs = [CompletionOutput(0, "xyz", [1, 2, 3], "stop"), CompletionOutput(1, "", [9], "stop")]
        output = RequestOutput("a", None, [], outputs, 0, RequestMetrics(None, None, None, 0.1, 0))
        link.tell("a", [StreamChunk(0, "yz", [2, 3], logprobs=[entry(2), entry(3)])], output)
        assert await generation.result() is output
        assert [one.logprobs for one in outputs] == [[entry(1), entry(2), entry(3)], None]
        assert engine._logprobs == {}
        steps = [news for name, news in listener.heard if name == "step"]
        assert all(item.chunks == [] for news in steps for item in news.items if item.request_id == "a")
        await engine.close()

    run(test())


def test_more_log_probabilities_of_a_prompt_than_fit_between_two_steps_are_refused():
    async def test():
        card = replace(CARD, max_model_len=20_000)
        engine, link = await scripted_engine(held(asyncio.Event()), card=card)
        params = SamplingParams(prompt_logprobs=20)
        engine.submit([0] * 5000, params, request_id="fits")
        with pytest.raises(RequestError, match=r"prompt_logprobs=20 for 5001 tokens is 100,020 .* lower it"):
            engine.submit([0] * 5001, params, request_id="more")
        engine.submit([0] * 19_999, SamplingParams(prompt_logprobs=0), request_id="none but its own")
        assert [one.request_id for one in link.submitted] == ["fits", "none but its own"]
        await engine.close()

    run(test())


def test_pieces_that_a_reader_leaves_lying_are_joined_and_nothing_is_lost():
    async def test():
        engine, link = await scripted_engine(Answer([], gate=asyncio.Event()))
        generation = submit(engine, stream=True)
        for at in range(1000):
            link.tell("a", [StreamChunk(at % 2, "xy"[at % 2], [at])])
        assert max(len(piece.texts) for piece in generation._pending.values()) <= 64
        first, second = await anext(generation), await anext(generation)
        assert (first.text, second.text) == ("x" * 500, "y" * 500)
        assert first.token_ids == list(range(0, 1000, 2))
        assert second.token_ids == list(range(1, 1000, 2))
        await engine.close()

    run(test())


def test_pieces_that_came_before_an_error_can_be_read():
    async def test():
        engine, link = await scripted_engine(Answer([], gate=asyncio.Event()))
        generation = submit(engine, stream=True)
        link.tell("a", [StreamChunk(0, "so far", [1])])
        engine.receive(Died("no more"))
        assert (await anext(generation)).text == "so far"
        with pytest.raises(EngineError, match="the engine died: no more"):
            await anext(generation)

    run(test())


# Refusals


@pytest.mark.parametrize(
    ("kind", "error"), [("RequestError", RequestError), ("CapacityError", CapacityError)]
)
@pytest.mark.parametrize("wait", ["accepted", "result", "__anext__"])
def test_what_the_engine_refuses_raises_its_own_error(kind, error, wait):
    async def test():
        listener = NullListener()
        engine, _ = await scripted_engine(Answer(refuse=(kind, "not this")), listener=listener)
        with pytest.raises(error, match="not this"):
            await getattr(submit(engine), wait)()
        assert engine.num_active == engine.num_waiting == 0
        assert ("refused", "capacity" if kind == "CapacityError" else "invalid") in listener.heard
        await engine.close()

    run(test())


def test_a_prompt_beyond_the_context_does_not_travel():
    async def test():
        engine, link = await scripted_engine(Answer())
        with pytest.raises(RequestError, match=r"prompt has 200 tokens; max_model_len=200 .* at most 199"):
            submit(engine, ids=[0] * 200)
        await submit(engine, ids=[0] * 199).accepted()
        assert len(link.submitted) == 1
        await engine.close()

    run(test())


def test_an_id_may_be_used_once_at_a_time():
    async def test():
        engine, _ = await scripted_engine(held(asyncio.Event()))
        submit(engine)
        with pytest.raises(RequestError, match="'a' is already running"):
            submit(engine)
        await engine.close()

    run(test())


# The queue


def test_the_queue_is_bounded_by_count_and_says_when_to_come_back():
    async def test():
        gate = asyncio.Event()
        settings = ServeSettings(max_waiting_requests=2)
        engine, link = await scripted_engine(held(gate), settings, card=ONE_ROW)
        first = submit(engine, "a")
        submit(engine, "b")
        submit(engine, "c")
        with pytest.raises(
            OverloadedError, match=r"busy: 2 requests are waiting, of at most 2 \("
        ) as refused:
            submit(engine, "d")
        assert refused.value.retry_after_s == 1.0
        engine.receive(waiting_news("a"))
        with pytest.raises(OverloadedError, match="2 requests are waiting, of at most 2"):
            submit(engine, "d")
        first.abort()  # its row is free for another
        submit(engine, "d")
        with pytest.raises(OverloadedError):
            submit(engine, "e")
        assert [one.request_id for one in link.submitted] == ["a", "b", "c", "d"]
        await engine.close()

    run(test())


@pytest.mark.parametrize("n", [1, 3])
def test_requests_for_which_there_are_free_rows_do_not_wait(n):
    """A row for each continuation of those that run, until they end; and one waits, which is the limit."""

    async def test():
        settings = ServeSettings(max_waiting_requests=1)
        engine, _ = await scripted_engine(held(asyncio.Event()), settings)
        params = SamplingParams(max_tokens=8, n=n, temperature=1.0)
        running = engine.submit([1, 2], params, request_id="many")
        engine.receive(waiting_news("many"))
        engine.receive(waiting_news("many"))  # what is told twice holds no more rows
        num_free = CARD.max_num_seqs - n
        engine.check_room(num_free + 1, 1)
        problem = (
            rf"0 requests are waiting, of at most 1 \(.*\), and {num_free} more can run now; {num_free + 2} "
        )
        with pytest.raises(OverloadedError, match=problem):
            engine.check_room(num_free + 2, 1)
        for i in range(num_free + 1):
            submit(engine, str(i))
        with pytest.raises(OverloadedError, match=r"1 requests are waiting, of at most 1 \([^,]*; try"):
            submit(engine, "e")
        engine.receive(waiting_news(*map(str, range(num_free))))
        with pytest.raises(OverloadedError, match="1 requests are waiting, of at most 1"):
            submit(engine, "e")
        running.abort()
        engine.receive(waiting_news("many"))
        engine.check_room(n, 1)
        with pytest.raises(OverloadedError):
            engine.check_room(n + 1, 1)
        await engine.close()

    run(test())


@pytest.mark.parametrize("n", [3, 4])
def test_a_request_takes_a_row_for_each_of_its_continuations(n):
    """On an engine of four rows one of three or four runs, two wait, and that is all."""

    async def test():
        settings = ServeSettings(max_waiting_requests=2)
        engine, link = await scripted_engine(
            held(asyncio.Event()), settings, card=replace(CARD, max_num_seqs=4)
        )
        params = SamplingParams(max_tokens=8, n=n, temperature=1.0)
        problem = r"2 requests are waiting, of at most 2 \([^,]*; try"
        for i in range(3):
            engine.submit([1, 2], params, request_id=str(i))
        for _ in range(2):
            with pytest.raises(OverloadedError, match=problem):
                engine.submit([1, 2], params, request_id="e")
            engine.receive(waiting_news("0"))
        assert (len(link.submitted), engine.num_waiting) == (3, 2)
        await engine.close()

    run(test())


def test_an_aborted_request_makes_room_in_the_queue_at_once():
    async def test():
        settings = ServeSettings(max_waiting_requests=1)
        engine, _ = await scripted_engine(held(asyncio.Event()), settings, card=ONE_ROW)
        submit(engine, "runs")
        submit(engine, "a").abort()
        assert (engine.num_waiting, engine.num_active) == (1, 1)
        submit(engine, "b")
        with pytest.raises(OverloadedError):
            submit(engine, "c")
        await engine.close()

    run(test())


def test_the_queue_is_bounded_by_tokens():
    async def test():
        engine, _ = await scripted_engine(held(asyncio.Event()), ServeSettings(max_waiting_tokens=10))
        submit(engine, "long", ids=[0] * 10)
        with pytest.raises(OverloadedError, match="10 prompt tokens are waiting and 1 more came"):
            submit(engine, "short", ids=[0])
        engine.receive(waiting_news("long"))
        submit(engine, "six", ids=[0] * 6)
        submit(engine, "four", ids=[0] * 4)
        with pytest.raises(OverloadedError):
            submit(engine, "one", ids=[0])
        await engine.close()

    run(test())


@pytest.mark.parametrize(
    ("max_waiting_tokens", "num_tokens", "problem"),
    [
        (10, 11, "prompt has 11 tokens; this server queues at most 10; .* larger --max-waiting-tokens"),
        (10, 200, "prompt has 200 tokens; max_model_len=200 leaves room for at most 199 and one new token"),
        (1000, 200, "prompt has 200 tokens; max_model_len=200"),
    ],
)
def test_a_prompt_that_is_never_taken_hears_so_at_any_load(max_waiting_tokens, num_tokens, problem):
    async def test():
        settings = ServeSettings(max_waiting_tokens=max_waiting_tokens, max_waiting_requests=1)
        engine, _ = await scripted_engine(held(asyncio.Event()), settings, card=ONE_ROW)
        for name in ("idle", "busy"):
            with pytest.raises(RequestError, match=problem):
                submit(engine, "long", ids=[0] * num_tokens)
            if name == "idle":
                submit(engine, "first", ids=[0])
                submit(engine, "second", ids=[0])
        with pytest.raises(OverloadedError):
            submit(engine, "short", ids=[0])
        await engine.close()

    run(test())


def test_retry_after_is_how_long_the_last_one_waited():
    async def test():
        settings = ServeSettings(max_waiting_requests=1)
        engine, _ = await scripted_engine(held(asyncio.Event()), settings, card=ONE_ROW)
        generation = submit(engine, "a")
        generation.submitted_s -= 7
        engine.receive(waiting_news("a"))
        submit(engine, "b")
        with pytest.raises(OverloadedError) as refused:
            submit(engine, "c")
        assert 7 <= refused.value.retry_after_s < 8
        await engine.close()

    run(test())


# Ends


def test_an_abort_is_sent_once_and_its_end_is_told_once():
    async def test():
        listener = NullListener()
        engine, link = await scripted_engine(held(asyncio.Event()), listener=listener)
        generation = submit(engine, stream=True)
        await generation.accepted()
        generation.abort()
        generation.abort()
        with pytest.raises(EngineError, match="request a was aborted"):
            await generation.result()
        await eventually(lambda: any(name == "finished" for name, _ in listener.heard))
        ended = [output for name, output in listener.heard if name == "finished"]
        assert [(one.request_id, one.outputs[0].finish_reason) for one in ended] == [("a", "abort")]
        assert ended[0].prompt_token_ids == [0, 1]
        assert link.aborted == ["a"]
        generation.abort()
        assert link.aborted == ["a"]
        await engine.close()

    run(test())


def test_leaving_the_block_aborts_and_an_end_does_not():
    async def test():
        engine, link = await scripted_engine(Answer(["a", "b"]))
        async with submit(engine, "whole", stream=True) as generation:
            await generation.result()
        async with submit(engine, "left", stream=True) as generation:
            await anext(generation)
        assert link.aborted == ["left"]
        with pytest.raises(ZeroDivisionError):
            async with submit(engine, "raised"):
                raise ZeroDivisionError
        assert link.aborted == ["left", "raised"]
        await engine.close()

    run(test())


def test_an_abort_that_crosses_the_end_on_its_way_counts_once():
    async def test():
        listener = NullListener()
        engine, _ = await scripted_engine(held(asyncio.Event()), listener=listener)
        generation = submit(engine)
        await generation.accepted()
        generation.abort()
        output = RequestOutput(
            "a",
            None,
            [],
            [CompletionOutput(0, "", [], "stop")],
            0,
            RequestMetrics(None, None, None, 0.1, 0),
        )
        engine.receive(News([Item("a", [], output)], STATS, 0.001, 1))
        engine.receive(News([Item("a", [], output)], STATS, 0.001, 1))
        assert len([1 for name, _ in listener.heard if name == "finished"]) == 1
        assert (engine.num_active, engine.num_waiting) == (0, 0)
        await engine.close()

    run(test())


def test_a_request_that_takes_too_long_times_out_and_is_aborted():
    async def test():
        listener = NullListener()
        settings = ServeSettings(request_timeout_s=0.05)
        engine, link = await scripted_engine(held(asyncio.Event()), settings, listener=listener)
        generation = submit(engine)
        with pytest.raises(RequestTimeoutError, match=r"longer than 0\.05 s"):
            await generation.result()
        assert link.aborted == ["a"]
        assert ("refused", "timeout") in listener.heard
        assert engine.num_active == 0
        await engine.close()

    run_timeless(test())


def test_a_request_in_time_is_left_alone():
    async def test():
        engine, link = await scripted_engine(Answer(["a"]), ServeSettings(request_timeout_s=0.05))
        await submit(engine).result()
        await asyncio.sleep(0.1)
        assert link.aborted == []
        await engine.close()

    run_timeless(test())


# States


def test_a_dead_engine_ends_everything_and_refuses_at_once():
    async def test():
        listener = NullListener()
        engine, _ = await scripted_engine(held(asyncio.Event()), listener=listener)
        generations = [submit(engine, str(i)) for i in range(3)]
        await generations[0].accepted()
        engine.lost("the engine process ended (killed by SIGKILL)")
        for generation in generations:
            with pytest.raises(EngineError, match=r"died: the engine process ended \(killed by SIGKILL\)"):
                await generation.result()
        with pytest.raises(EngineError, match="dead"):
            submit(engine, "new")
        assert engine.state == "dead"
        assert (engine.num_active, engine.num_waiting) == (0, 0)
        assert listener.heard[-2:] == [("state", "dead"), ("refused", "dead")]
        await engine.close()

    run(test())


def test_a_stuck_engine_fails_what_runs_and_comes_back_with_its_next_step():
    async def test():
        listener = NullListener()
        engine, link = await scripted_engine(
            held(asyncio.Event()), ServeSettings(stuck_s=0.1), listener=listener
        )
        await asyncio.sleep(0.25)
        assert engine.state == "ready", "without work nothing is stuck"
        generation = submit(engine)
        with pytest.raises(EngineError, match="no step for"):
            await generation.result()
        assert engine.state == "stuck"
        assert link.aborted == ["a"]
        with pytest.raises(EngineError, match="no step for"):
            submit(engine, "b")
        engine.receive(waiting_news())
        assert engine.state == "ready"
        assert [state for name, state in listener.heard if name == "state"] == ["ready", "stuck", "ready"]
        await engine.close()

    run_timeless(test())


def test_steps_keep_an_engine_from_being_stuck_and_idle_time_is_not_held_against_it():
    async def test():
        engine, _ = await scripted_engine(held(asyncio.Event()), ServeSettings(stuck_s=0.4))
        await asyncio.sleep(0.5)
        generation = submit(engine)
        for _ in range(3):
            await asyncio.sleep(0.2)
            assert not generation.is_over
            engine.receive(waiting_news())
        await engine.close()

    run_timeless(test())


def test_draining_lets_what_runs_end_and_takes_nothing_new():
    async def test():
        gate = asyncio.Event()
        engine, link = await scripted_engine(held(gate))
        generation = submit(engine)
        draining = asyncio.create_task(engine.drain(30))
        await eventually(lambda: engine.state == "draining")
        with pytest.raises(EngineError, match="shutting down"):
            submit(engine, "b")
        gate.set()
        assert (await generation.result()).text == "abc"
        await draining
        assert link.aborted == []
        await engine.close()

    run_timeless(test())


def test_draining_fails_what_does_not_end_in_time():
    async def test():
        engine, link = await scripted_engine(held(asyncio.Event()))
        generation = submit(engine)
        await engine.drain(0.05)
        with pytest.raises(EngineError, match="shutting down"):
            await generation.result()
        assert link.aborted == ["a"]
        await engine.close()
        await engine.close()

    run_timeless(test())


def test_loading_ends_when_both_model_and_tokenizer_are_there():
    async def test():
        listener = NullListener()
        engine = AsyncEngine(ServeSettings(), listener)

        class Link:
            def send(self, message):
                raise AssertionError("nothing is sent while loading")

            async def close(self, *, is_patient):
                assert not is_patient, "a process that loads does not listen"

        engine.start(Link(), lambda: None)
        with pytest.raises(EngineError, match="loading"):
            submit(engine)
        with pytest.raises(EngineError, match="loading"):
            _ = engine.model
        engine.receive(Stage("weights", 1.5))
        await asyncio.sleep(0.02)
        assert engine.state == "loading"
        await engine.close()
        assert listener.heard[1] == ("stage", Stage("weights", 1.5))

    run_timeless(test())


def test_a_model_that_cannot_be_loaded_raises_its_own_error():
    async def test():
        engine = AsyncEngine(ServeSettings(), NullListener())
        engine.receive(Died("model: there is none", "ModelError"))
        with pytest.raises(ModelError, match="there is none"):
            await engine.until_ready()
        assert engine.state == "dead"
        await engine.close()

    run(test())


def test_a_model_without_tokenizer_says_what_to_do():
    async def test():
        engine = AsyncEngine(ServeSettings(), NullListener())
        engine.start(StubLink(), lambda: None)
        engine.receive(Ready(CARD))
        await engine.until_ready()
        with pytest.raises(ModelError, match="has no tokenizer; give prompts as token ids"):
            assert engine.tokenizer
        await engine.close()

    run(test())


class StubLink:
    def __init__(self):
        self.sent = []

    def send(self, message):
        self.sent.append(message)

    async def close(self, *, is_patient):
        pass


# Text


def test_long_texts_are_worked_on_in_a_thread_and_short_ones_here():
    async def test():
        engine, _ = await scripted_engine(Answer())
        here = threading.get_ident()
        assert await engine.off_loop(2000, threading.get_ident) == here
        assert await engine.off_loop(2001, threading.get_ident) != here
        await engine.close()

    run(test())


def test_texts_that_wait_for_a_thread_count_like_requests_that_wait():
    async def test():
        settings = ServeSettings(max_waiting_requests=3, max_waiting_tokens=10_000)
        engine, _ = await scripted_engine(Answer(), settings, card=ONE_ROW)
        may_end = threading.Event()
        working = [asyncio.create_task(engine.off_loop(8000, may_end.wait)) for _ in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="3 requests are waiting, of at most 3"):
            await engine.off_loop(3000, may_end.wait)
        with pytest.raises(OverloadedError, match="max_waiting_requests"):
            engine.submit([1], PARAMS, request_id="a")
        assert engine.num_waiting == 0
        working.pop().cancel()
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match=r"6000 prompt tokens are waiting and 4001 more came"):
            await engine.off_loop(4 * 4001, may_end.wait)
        may_end.set()
        assert await asyncio.gather(*working) == [True] * 3
        assert await engine.off_loop(40_004, may_end.wait)
        await engine.close()

    run(test())


def test_a_text_that_is_one_prompt_takes_no_more_room_than_a_prompt_may_have():
    async def test():
        engine, _ = await scripted_engine(Answer(), ServeSettings(max_waiting_tokens=10_000))
        may_end = threading.Event()
        first = asyncio.create_task(engine.off_loop(8000, may_end.wait))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="2000 prompt tokens are waiting and 1250000 more came"):
            await engine.off_loop(5_000_000, may_end.wait)
        second = asyncio.create_task(engine.off_loop(5_000_000, may_end.wait, is_prompt=True))
        await asyncio.sleep(0)
        may_end.set()
        assert await asyncio.gather(first, second) == [True, True]
        await engine.close()

    run(test())


# Watching


def test_watchers_begin_with_a_full_payload_and_the_last_one_switches_it_off():
    async def test():
        engine, link = await scripted_engine(Answer())
        async with engine.watch() as first:
            assert link.watching
            engine.receive(Observed(b"delta of somebody else", False))
            engine.receive(Observed(b"full", True))
            engine.receive(Observed(b"delta", False))
            assert [await anext(first), await anext(first)] == [b"full", b"delta"]
            async with engine.watch() as second:
                engine.receive(Observed(b"delta 2", False))
                engine.receive(Observed(b"full 2", True))
                assert await anext(second) == b"full 2"
                engine.receive(Observed(b"delta 3", False))
                assert await anext(second) == b"delta 3"
            assert link.watching
            assert [await anext(first), await anext(first)] == [b"delta 2", b"delta 3"], "it was in step"
        assert not link.watching
        await engine.close()

    run(test())


def test_a_watcher_that_lags_starts_anew_instead_of_filling_memory():
    async def test():
        engine = AsyncEngine(ServeSettings(), NullListener())
        link = StubLink()
        engine.start(link, lambda: None)
        engine.receive(Ready(CARD))
        await engine.until_ready()
        async with engine.watch() as payloads:
            engine.receive(Observed(b"full", True))
            num_asked = len(link.sent)
            for i in range(100):
                engine.receive(Observed(b"%d" % i, False))
            assert len(link.sent) == num_asked + 1
            engine.receive(Observed(b"full again", True))
            assert await anext(payloads) == b"full again"
        await engine.close()

    run(test())


def test_a_watcher_ends_with_the_engine():
    async def test():
        engine, _ = await scripted_engine(Answer())
        async with engine.watch() as payloads:
            engine.lost("gone")
            assert [payload async for payload in payloads] == []
        async with engine.watch() as payloads:
            assert [payload async for payload in payloads] == []
        await engine.close()

    run(test())


def test_a_tokenizer_that_never_comes_does_not_keep_the_interpreter_from_its_end():
    program = """
import asyncio, threading
from octavo.serve.async_engine import AsyncEngine
from octavo.serve.settings import ServeSettings

class Link:
    def send(self, message): pass
    async def close(self, *, is_patient): pass

class Listener:
    def __getattr__(self, name): return lambda *arguments: None

async def main():
    engine = AsyncEngine(ServeSettings(), Listener())
    engine.start(Link(), threading.Event().wait)
    await asyncio.sleep(0)
    await engine.close()

asyncio.run(main())
print("closed", flush=True)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "closed\n", "")
