"""The observer's payloads, put together by a reader, always give what the engine really holds."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest
from helpers.observed import Observed, busy_engine

from octavo.serve.observer import MAX_STEPS, MAX_WAITING_ROWS


class Reader:
    """Puts payloads together as the page does."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, Any]] = {}
        self.owners: dict[int, int] = {}
        self.last: dict[str, Any] = {}

    def read(self, payload: bytes) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(payload)
        if "full" in message:
            self.rows.clear()
            self.owners.clear()
        else:
            assert message["seq"] == self.last["seq"] + 1
        for seq_id in message["gone"]:
            del self.rows[seq_id]
        for seq_id, request_id, index, num_prompt, longest in message["new"]:
            self.rows[seq_id] = {
                "who": (request_id, index),
                "sizes": (num_prompt, longest),
                "blocks": [],
            }
        for seq_id, *facts in _groups(message["rows"], 5):
            self.rows[seq_id]["facts"] = facts
        for seq_id, start, block_ids in message["tables"]:
            self.rows[seq_id]["blocks"][start:] = block_ids
        for block_id, owners in _groups(message["blocks"], 2):
            self.owners[block_id] = owners
        self.last = message
        return message

    def check(self, engine: Observed) -> None:
        """Compare with the scheduler's and the allocator's own lists."""
        truth: dict[int, dict[str, Any]] = {}
        scheduler = engine.scheduler
        for seq in [*scheduler.running, *scheduler.waiting]:
            is_running = seq in scheduler.running
            truth[seq.seq_id] = {
                "who": (seq.request.request_id, seq.index),
                "sizes": (seq.num_prompt_tokens, seq.max_total_tokens),
                "facts": [
                    len(seq.token_ids),
                    seq.num_computed_tokens,
                    seq.request.num_cached_tokens,
                    int(is_running),
                ],
                "blocks": engine.cache.block_table(seq.seq_id) if is_running else [],
            }
        assert self.rows == truth
        allocator = engine.cache._allocator
        cached = set(allocator.cached_in_order())
        for block_id, count in enumerate(allocator.ref_counts):
            assert self.owners.get(block_id, 0) == (count or (-1 if block_id in cached else 0)), block_id


def _groups(numbers: list[int], size: int) -> list[list[int]]:
    assert len(numbers) % size == 0
    return [numbers[i : i + size] for i in range(0, len(numbers), size)]


@pytest.mark.parametrize("seed", range(8))
def test_changes_add_up_to_what_the_engine_holds(seed: int) -> None:
    chance = random.Random(seed)
    engine = Observed(num_blocks=24, max_num_seqs=6, max_num_batched_tokens=24)
    reader = Reader()
    second: Reader | None = None
    engine.observer.start()
    reader.read(engine.observer.payload())
    evicted: list[int] = []
    preempted = 0
    for _ in range(300):
        if chance.random() < 0.4:
            prompt = [chance.choice((1, 2))] * chance.choice((3, 8, 21)) + [chance.randrange(50)]
            engine.add(prompt, chance.randrange(1, 24), n=chance.choice((1, 1, 3)))
        if chance.random() < 0.05 and engine.scheduler.running:
            engine.abort(chance.choice(engine.scheduler.running).request)
        if chance.random() < 0.01:
            engine.cache.reset_prefix_cache()
        engine.step()
        if chance.random() < 0.5:
            message = reader.read(engine.observer.payload())
            if chance.random() < 0.05:  # another reader begins, who only then is like the first
                engine.observer.start()
                second = Reader()
                second.read(engine.observer.snapshot())
                second.check(engine)
            elif second is not None:
                second.read(json.dumps(message).encode())
                second.check(engine)
            evicted += message.get("evicted", [])
            preempted += len(message["preempted"])
            reader.check(engine)
    assert engine.cache.num_evictions >= len(evicted) > 0
    assert engine.scheduler.num_preemptions >= preempted > 0


def test_a_payload_in_full() -> None:
    engine = Observed(num_blocks=8, block_size=4)
    first = engine.add([1] * 9, max_tokens=9)
    engine.observer.start()
    message = json.loads(engine.observer.payload())
    assert message.pop("full") == {
        "num_blocks": 8,
        "block_size": 4,
        "max_num_rows": 16,
        "max_model_len": 1024,
        "max_num_batched_tokens": 64,
    }
    assert message.pop("stats")["num_waiting"] == 1
    assert message == {
        "seq": 0,
        "time_s": 12.5,
        "blocks": [],
        "new": [[0, "r0", 0, 9, 18]],
        "rows": [0, 9, 0, 0, 0],
        "tables": [],
        "gone": [],
        "preempted": [],
        "steps": [],
    }
    engine.step()
    engine.step()
    message = json.loads(engine.observer.payload())
    del message["stats"]
    assert message == {
        "seq": 1,
        "time_s": 12.5,
        "blocks": [0, 1, 1, 1, 2, 1],
        "evicted": [],
        "new": [],
        "rows": [0, 11, 10, 0, 1],
        "tables": [[0, 0, [0, 1, 2]]],
        "gone": [],
        "preempted": [],
        "steps": [250000, 9, 0, 250000, 0, 1],
    }
    second = engine.add([1] * 9, max_tokens=9)  # shares two blocks
    engine.step()
    message = json.loads(engine.observer.payload())
    assert message["tables"] == [[1, 0, [0, 1, 3]]]
    assert message["blocks"] == [0, 2, 1, 2, 3, 1]
    assert message["rows"] == [0, 12, 11, 0, 1, 1, 10, 9, 8, 1]
    engine.abort(first)
    engine.abort(second)
    message = json.loads(engine.observer.payload())
    assert message["gone"] == [0, 1]
    assert message["blocks"] == [0, -1, 1, -1, 2, 0, 3, 0]


def test_evictions_and_preemptions_are_told_once() -> None:
    engine = Observed(num_blocks=4, block_size=4, max_num_batched_tokens=16, watermark_blocks=0)
    engine.add([1] * 8, max_tokens=1)
    engine.drain()
    assert engine.cache.num_cached == 2
    engine.observer.start()
    engine.observer.payload()
    engine.add([2] * 7, max_tokens=8)
    engine.add([3] * 7, max_tokens=8)
    evicted, preempted = [], []
    while engine.step():
        message = json.loads(engine.observer.payload())
        evicted += message["evicted"]
        preempted += message["preempted"]
    assert len(evicted) == engine.cache.num_evictions > 1
    assert preempted == [2]
    assert engine.scheduler.num_preemptions == 1


def test_a_snapshot_takes_nothing_from_those_who_watch_already() -> None:
    engine = Observed(num_blocks=4, block_size=4, max_num_batched_tokens=16, watermark_blocks=0)
    engine.add([1] * 8, max_tokens=1)
    engine.observer.start()
    first = json.loads(engine.observer.payload())
    engine.drain()
    engine.observer.start()
    engine.add([2] * 15, max_tokens=1)
    engine.step()
    change = json.loads(engine.observer.payload())
    assert "full" not in change
    assert (len(change["steps"]), len(change["evicted"])) == (6, engine.cache.num_evictions)
    assert change["evicted"]
    everything = json.loads(engine.observer.snapshot())
    assert everything["full"] == first["full"]
    assert (everything["seq"], everything["steps"]) == (change["seq"], [])
    engine.step()
    assert json.loads(engine.observer.payload())["seq"] == change["seq"] + 1


def test_nothing_is_recorded_while_nobody_watches() -> None:
    engine = Observed()
    engine.add([1] * 9)
    engine.step()
    assert engine.cache._allocator._changes is None
    engine.observer.start()
    engine.observer.payload()
    engine.step()
    assert engine.cache._allocator._changes is not None
    engine.observer.stop()
    engine.drain()
    assert engine.cache._allocator._changes is None
    assert engine.observer._steps == []
    assert engine.observer._rows == {}


def test_long_queues_and_many_steps_are_bounded() -> None:
    engine = Observed(max_num_seqs=1)
    for _ in range(MAX_WAITING_ROWS + 5):
        engine.add([1, 2], max_tokens=MAX_STEPS + 9)
    engine.observer.start()
    message = json.loads(engine.observer.payload())
    assert len(message["new"]) == MAX_WAITING_ROWS
    assert message["stats"]["num_waiting"] == MAX_WAITING_ROWS + 5
    for _ in range(MAX_STEPS + 3):
        engine.step()
    message = json.loads(engine.observer.payload())
    assert len(message["steps"]) == 3 * MAX_STEPS
    assert message["steps"][:3] == [250000, 0, 1]


def test_a_look_at_a_thousand_rows_is_cheap() -> None:
    """Ten looks a second may take a tenth of a core at the very most, on a machine busy with other things."""
    engine = busy_engine()
    engine.observer.start()
    engine.observer.payload()
    seconds = []
    for _ in range(10):
        for _ in range(3):
            engine.step()
        began = time.process_time()
        message = json.loads(engine.observer.payload())
        seconds.append(time.process_time() - began)
        assert len(message["rows"]) == 5000
    assert sum(owners > 1 for owners in engine.cache.num_owners_of(range(50_000))) == 5 * 21
    assert sorted(seconds)[5] < 0.010
