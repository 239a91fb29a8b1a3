"""A front that lags: what the engine has said of one stream meanwhile is written as one piece."""

from __future__ import annotations

import asyncio
import json
import socket
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.chat import CHATML, QWEN3_STYLE, WEATHER, tokenizer_with, user
from helpers.live import BIG_CARD
from helpers.serve import (
    STATS,
    Answer,
    NullListener,
    events_of,
    eventually,
    run,
    scripted_client,
    scripted_engine,
)

from octavo.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, StreamChunk
from octavo.sampling_params import SamplingParams
from octavo.serve.channel import EngineChannel, FrontChannel, _Frames
from octavo.serve.engine_process import _is_token
from octavo.serve.messages import Abort, Accepted, Died, Item, News, Observed, Refused, Submit

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


class Told:
    """What an engine tells of requests, one `News` a step: `pieces` of each continuation, then the end."""

    def __init__(self, submit: Submit, texts: list[list[str]], ends: str = "length") -> None:
        self.items: list[Item] = []
        outputs = [
            CompletionOutput(i, "".join(one), list(range(len(one))), ends) for i, one in enumerate(texts)
        ]
        num_steps = max(map(len, texts))
        for at in range(num_steps):
            chunks = [
                StreamChunk(
                    i,
                    pieces[at],
                    [at],
                    ends if at == len(pieces) - 1 else None,
                    logprobs=None if submit.params.logprobs is None else [{at: Logprob(-at / 4, 1)}],
                )
                for i, pieces in enumerate(texts)
                if at < len(pieces)
            ]
            output = None
            if at == num_steps - 1:
                metrics = RequestMetrics(0.0, 0.0, 0.0, 0.0, 0)
                output = RequestOutput(submit.request_id, None, [], outputs, 0, metrics)
            self.items.append(Item(submit.request_id, chunks, output))


def steps(*told: Told) -> list[News]:
    """The steps in which all these requests ran together; lone tokens in columns, as the engine has them."""
    news = [News([], STATS, 0.001, len(told)) for _ in range(max(len(one.items) for one in told))]
    for one in told:
        for step, item in zip(news, one.items, strict=False):
            if item.output is None and len(item.chunks) == 1 and _is_token(item.chunks[0]):
                step.tokens.request_ids.append(item.request_id)
                step.tokens.texts.append(item.chunks[0].text)
                step.tokens.token_ids.append(item.chunks[0].token_ids[0])
            else:
                step.items.append(item)
    return news


def ask_at_once(
    path: str, bodies: list[dict[str, Any]], texts: list[list[list[str]]], **options: Any
) -> tuple[list[list[Any]], dict[str, float]]:
    """The events of each answer when all its engine had to say came at once, and what /metrics says then."""

    async def test() -> tuple[list[list[Any]], dict[str, float]]:
        async with scripted_client(Answer(gate=asyncio.Event()), card=BIG_CARD, **options) as (client, link):
            asking = []
            for body in bodies:  # one after the other, so that the order is known
                asking.append(asyncio.create_task(client.post(path, json=body)))
                await eventually(lambda: len(link.submitted) == len(asking))
            for _ in range(50):
                await asyncio.sleep(0)
            told = [Told(submit, one) for submit, one in zip(link.submitted, texts, strict=True)]
            link.engine.receive(*steps(*told))
            answers = await asyncio.gather(*asking)
            metrics = (await client.get("/metrics")).text
        assert [answer.status_code for answer in answers] == [200] * len(answers), answers[0].text
        values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line.startswith("octavo"))
        return [events_of(answer.text) for answer in answers], {k: float(v) for k, v in values.items()}

    return run(test())


def opened(events: list[str]) -> list[Any]:
    """The events' JSON; [DONE] is there, once, and last."""
    assert events.count("[DONE]") == 1
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def test_five_steps_that_came_together_are_one_event_of_a_stream():
    (events,), metrics = ask_at_once(COMPLETIONS, [{"prompt": "ab", **USAGE}], [[list("abcde")]])
    piece, usage = opened(events)
    (choice,) = piece["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abcde", "length")
    assert usage["usage"]["completion_tokens"] == 5
    assert metrics["octavo_step_seconds_count"] == 5
    assert metrics["octavo_time_to_first_token_seconds_count"] == 1
    assert metrics["octavo_inter_token_latency_seconds_count"] == 0
    assert metrics["octavo_request_output_tokens_sum"] == 5


def test_two_streams_get_an_event_each_and_their_own_text():
    answers, metrics = ask_at_once(
        COMPLETIONS, [{"prompt": "a", **USAGE}, {"prompt": "b", **USAGE}], [[list("abcde")], [list("xyz")]]
    )
    for events, text in zip(answers, ("abcde", "xyz"), strict=True):
        piece, usage = opened(events)
        assert piece["choices"][0]["text"] == text
        assert usage["usage"]["completion_tokens"] == len(text)
    assert metrics["octavo_time_to_first_token_seconds_count"] == 2
    assert metrics['octavo_requests_total{finish_reason="length"}'] == 2


def test_each_of_two_continuations_gets_one_event():
    (events,), _ = ask_at_once(
        COMPLETIONS, [{"prompt": "a", "n": 2, **USAGE}], [[list("abcde"), list("xyz")]]
    )
    *pieces, usage = opened(events)
    told = [(one["index"], one["text"], one["finish_reason"]) for piece in pieces for one in piece["choices"]]
    assert told == [(0, "abcde", "length"), (1, "xyz", "length")]
    assert usage["usage"]["completion_tokens"] == 8


def test_log_probabilities_of_a_joined_piece_are_those_of_all_its_tokens():
    (events,), _ = ask_at_once(COMPLETIONS, [{"prompt": "a", "logprobs": 1, **USAGE}], [[list("abcde")]])
    piece, _ = opened(events)
    logprobs = piece["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [0, -0.25, -0.5, -0.75, -1]
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4]


def test_a_chat_whose_thought_and_call_came_at_once_is_read_as_ever():
    pieces = ["<think>\nHm", "m.\n</think>\n\n<tool", '_call>\n{"name": "weather", "argum']
    pieces += ['ents": {"city": "Bonn"}}\n</tool_call>']
    body = {"messages": [user("Hi")], "tools": [WEATHER], **USAGE}
    (events,), _ = ask_at_once(CHAT, [body], [[pieces]], tokenizer=tokenizer_with(default=QWEN3_STYLE))
    *chunks, usage = opened(events)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas).strip() == "Hmm."
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(call.get("name", "") for call in calls) == "weather"
    assert json.loads("".join(call["arguments"] for call in calls)) == {"city": "Bonn"}
    assert usage["usage"]["completion_tokens"] == 4


def test_a_chat_gets_its_text_in_one_chunk():
    body = {"messages": [user("Hi")], **USAGE}
    (events,), _ = ask_at_once(CHAT, [body], [[list("abcde")]], tokenizer=tokenizer_with(default=CHATML))
    chunks = opened(events)
    told = [chunk["choices"][0]["delta"].get("content") for chunk in chunks if chunk["choices"]]
    assert [text for text in told if text] == ["abcde"]


async def submitted(*request_ids: str, **options: Any) -> tuple[Any, ...]:
    """An engine that has taken these streams and says nothing yet, and its link."""
    engine, link = await scripted_engine(Answer(gate=asyncio.Event()), **options)
    generations = []
    for request_id in request_ids:
        generations.append(engine.submit([0], SamplingParams(), request_id=request_id, stream=True))
        await generations[-1].accepted()
    return engine, link, *generations


def test_a_lone_step_is_told_before_the_next_one_comes():
    async def test():
        engine, link, generation = await submitted("a")
        told = []
        generation.on_news = lambda: told.append([chunk.text for chunk in generation.take()])
        first, second = steps(Told(link.submitted[0], [["a", "b"]]))
        engine.receive(first)
        assert told == [["a"]]
        engine.receive(second)
        assert told == [["a"], ["b"]]
        await engine.close()

    run(test())


def test_streams_are_woken_once_and_in_the_order_of_their_news():
    async def test():
        engine, link, one, other = await submitted("a", "b")
        woken = []
        for generation in (one, other):
            generation.on_news = lambda generation=generation: woken.append(generation.request_id)
        engine.receive(*steps(*(Told(submit, [list("abcde")]) for submit in reversed(link.submitted))))
        assert woken == ["b", "a"]
        assert [chunk.text for chunk in one.take()] == ["abcde"]
        assert one.output.text == "abcde"
        await engine.close()

    run(test())


def test_what_was_aborted_meanwhile_tells_nothing_and_ends_once():
    async def test():
        listener = NullListener()
        engine, link, one, other = await submitted("a", "b", listener=listener)
        told = steps(*(Told(submit, [list("abc")]) for submit in link.submitted))
        one.abort()
        engine.receive(*told)
        assert one.take() == []
        assert [chunk.text for chunk in other.take()] == ["abc"]
        assert [ids for name, ids in listener.heard if name == "told"][-1] == ["b"]
        assert [output.request_id for name, output in listener.heard if name == "finished"] == ["a", "b"]
        assert engine.num_active == 0
        await engine.close()

    run(test())


def test_pieces_before_a_death_in_one_read_come_before_its_error():
    async def test():
        engine, link, generation = await submitted("a")
        first, *_ = steps(Told(link.submitted[0], [list("ab")]))
        engine.receive(first, Died("no more"))
        assert (await anext(generation)).text == "a"
        with pytest.raises(Exception, match="the engine died: no more"):
            await anext(generation)

    run(test())


def test_words_between_steps_are_heard_in_their_order():
    async def test():
        engine, link = await scripted_engine(Answer(gate=asyncio.Event()))
        link.is_silent = True  # nothing is accepted but by the messages below
        taken, refused = (
            engine.submit([0], SamplingParams(), request_id=name, stream=True) for name in ("a", "b")
        )
        told = steps(Told(Submit("a", [0], SamplingParams()), [list("abc")]))
        engine.receive(Accepted(("a",)), told[0], Refused("b", "CapacityError", "no room"), *told[1:])
        await taken.accepted()
        assert [chunk.text async for chunk in taken] == ["abc"]
        with pytest.raises(Exception, match="no room"):
            await refused.accepted()
        await engine.close()

    run(test())


def test_the_channel_hands_over_together_what_came_together():
    async def test():
        ours, theirs = socket.socketpair()
        engine, calls, lost = EngineChannel(theirs), [], asyncio.Event()
        front = FrontChannel(lambda *messages: calls.append(messages), lost.set)
        sent = [Observed(bytes([i]), False) for i in range(6)]
        for message in sent[:5]:
            engine.send(message)
        await front.connect(ours)
        await eventually(lambda: calls)
        engine.send(sent[5])
        await eventually(lambda: len(calls) == 2)
        assert calls == [tuple(sent[:5]), (sent[5],)]
        engine.close()
        await lost.wait()

    run(test())


def test_the_channel_writes_to_the_transport_of_any_event_loop():
    written: list[bytes] = []
    front = FrontChannel(lambda *messages: None, lambda: None)
    front.send(Abort("early"))
    front.connection_made(SimpleNamespace(is_closing=lambda: False, write=written.append))  # type: ignore[arg-type]
    front.send(Abort("a"))
    assert _Frames().feed(b"".join(written)) == [Abort("a")]
