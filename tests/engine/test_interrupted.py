"""Ctrl-C at any moment of a step: nothing is lost, every request ends, and the engine goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers.core import answer, make_engine, run

from octavo.cache.allocator import BlockAllocator
from octavo.cache.manager import KVCacheManager
from octavo.cache.prefix_index import PrefixIndex
from octavo.engine import scheduler as scheduler_module
from octavo.engine.core import Engine
from octavo.engine.output import OutputProcessor
from octavo.engine.request import Request
from octavo.engine.scheduler import Scheduler
from octavo.sampling_params import SamplingParams

PARAMS = SamplingParams(max_tokens=9, seed=0, ignore_eos=True)


def interrupt(
    patch: pytest.MonkeyPatch, owner: Any, name: str, nth: int, *, after: bool = True
) -> Callable[[], bool]:
    """Have the n-th call of `owner.name` from now on interrupted before or after its work; returns what
    tells whether that came to be.
    """
    original = getattr(owner, name)
    num_calls = 0

    def interrupted(*arguments: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == nth and not after:
            raise KeyboardInterrupt
        result = original(*arguments, **options)
        if num_calls == nth:
            raise KeyboardInterrupt
        return result

    patch.setattr(owner, name, interrupted)
    return lambda: num_calls >= nth


def run_to_the_end(engine: Engine) -> None:
    """Step over an interrupt."""
    for _ in range(400):
        if not engine.has_work:
            return
        try:
            engine.step()
        except KeyboardInterrupt:
            engine.scheduler.check()
    raise AssertionError("a request never ends")


def check_that_it_goes_on(engine: Engine, requests: list[Request]) -> None:
    for request in requests:
        assert request.output is not None, f"{request.request_id} never ended"
        assert sum(chunk.output is not None for chunk in request.chunks) == 1
        assert request.chunks[-1].output is request.output
    assert engine.cache.num_owned == 0
    assert not engine.requests
    assert not engine.output._texts
    output = run(engine, [1, 2], PARAMS, request_id="r0").output
    assert output is not None
    assert output.token_ids == answer([1, 2], 9, 0)
    engine.close()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (KVCacheManager, "_take"),
        (KVCacheManager, "_release"),
        (KVCacheManager, "close"),
        (KVCacheManager, "commit"),
        (KVCacheManager, "fork"),
        (KVCacheManager, "open"),
        (BlockAllocator, "allocate"),
        (BlockAllocator, "release"),
        (BlockAllocator, "share"),
        (PrefixIndex, "extend"),
        (PrefixIndex, "forget"),
        (PrefixIndex, "drop"),
        (Scheduler, "_release"),
        (Scheduler, "finish"),
        (OutputProcessor, "_emit"),
        (OutputProcessor, "_end_finished"),
        (OutputProcessor, "process"),
        (scheduler_module, "insort"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_whatever_is_interrupted_nothing_is_lost(
    owner: Any, name: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Three prompts whose answers do not fit at once: they fork, preempt, evict and find prefixes.
    nth = 0
    came_to_be = True
    while came_to_be:
        nth += 1
        assert nth < 500
        engine = make_engine(overlap=True, num_blocks=8, max_num_seqs=4, budget=24, max_model_len=32)
        requests = []
        with monkeypatch.context() as patch:
            for i in range(3):
                params = SamplingParams(n=1 + (i == 1), max_tokens=12, seed=i, ignore_eos=True)
                requests.append(
                    engine.add_request([1, 2, 3, 4, i + 5] + [9] * i, params, request_id=f"r{i}", stream=True)
                )
            is_done = interrupt(patch, owner, name, nth, after=after)
            run_to_the_end(engine)
            came_to_be = is_done()
        check_that_it_goes_on(engine, requests)
    assert nth > 1, "it is never called"


@pytest.mark.parametrize("nth", range(1, 6))
def test_what_finishes_while_a_launch_is_interrupted_is_let_go_of(
    nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(overlap=True, run_ahead=1)
    for name, num in (("a", 3), ("b", 9)):
        engine.add_request([3, 4], SamplingParams(max_tokens=num, ignore_eos=True), request_id=name)
    with monkeypatch.context() as patch:
        interrupt(patch, engine.runner, "launch", nth, after=False)
        run_to_the_end(engine)
    assert not engine.requests
    assert run(engine, [1, 2], PARAMS, request_id="a").output is not None
