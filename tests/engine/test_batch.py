"""The index tensors of a step, against what the schedule and the block tables say token by token."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import torch
from helpers.engine import ScriptedEngine

from octavo.engine.batch import Batch, BatchBuilder, upload
from octavo.engine.schedule import Schedule


def builder_for(engine: ScriptedEngine) -> BatchBuilder:
    return BatchBuilder(
        engine.cache.block_table,
        num_rows=engine.scheduler.max_num_rows,
        max_blocks_per_row=-(-engine.max_model_len // engine.block_size),
        block_size=engine.block_size,
        overlap=True,
    )


def check_batch(engine: ScriptedEngine, plan: Schedule, batch: Batch) -> None:
    ids, positions, slots, cu_q, cu_k = [], [], [], [0], [0]
    for b, (seq, num_new) in enumerate(zip(plan.sequences, plan.num_new_tokens, strict=True)):
        table = engine.cache.block_table(seq.seq_id)
        start = seq.num_computed_tokens
        for i in range(start, start + num_new):
            ids.append(seq.token_ids[i])
            positions.append(i)
            slots.append(table[i // engine.block_size] * engine.block_size + i % engine.block_size)
        cu_q.append(cu_q[-1] + num_new)
        cu_k.append(cu_k[-1] + start + num_new)
        row = batch.metadata.block_table[b].tolist()
        assert row[: len(table)] == table[: len(row)]
        assert set(row[len(table) :]) <= {-1}
    meta = batch.metadata
    assert batch.input_ids.tolist() == ids
    assert batch.positions.tolist() == positions
    assert meta.slot_mapping.tolist() == slots
    assert meta.cu_seqlens_q.tolist() == cu_q
    assert meta.cu_seqlens_k.tolist() == cu_k
    assert meta.max_seqlen_q == max(plan.num_new_tokens)
    assert meta.max_seqlen_k == max(b - a for a, b in pairwise(cu_k))
    assert meta.block_table.shape == (len(plan.sequences), -(-meta.max_seqlen_k // engine.block_size))
    assert batch.logits_rows.tolist() == [cu_q[row + 1] - 1 for row in plan.sampled_rows]
    assert batch.sampled_rows.tolist() == [seq.row for seq in plan.sampled]
    buffers = set()
    for tensor, dtype in (
        (batch.input_ids, torch.int64),
        (batch.positions, torch.int64),
        (batch.logits_rows, torch.int64),
        (batch.sampled_rows, torch.int64),
        (meta.slot_mapping, torch.int64),
        (meta.cu_seqlens_q, torch.int32),
        (meta.cu_seqlens_k, torch.int32),
        (meta.block_table, torch.int32),
    ):
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 16 == 0
        buffers.add(tensor.untyped_storage().data_ptr())
    assert len(buffers) == 1, "parts of one buffer, so that one copy takes them to a GPU"


def test_mixed_step_spelled_out() -> None:
    engine = ScriptedEngine(num_blocks=16, block_size=4, max_num_batched_tokens=16, max_prefill_share=1.0)
    engine.add([10, 11, 12, 13, 14], max_tokens=4)
    engine.step()
    engine.add([20, 21, 22], max_tokens=4)
    plan = engine.scheduler.schedule()
    assert plan is not None
    first, second = plan.sequences
    engine.cache.block_table(first.seq_id)[:] = [7, 2]
    engine.cache.block_table(second.seq_id)[:] = [5]
    batch = builder_for(engine).build(plan)
    assert batch.input_ids.tolist() == [first.token_ids[5], 20, 21, 22]
    assert batch.positions.tolist() == [5, 0, 1, 2]
    assert batch.metadata.slot_mapping.tolist() == [2 * 4 + 1, 20, 21, 22]
    assert batch.metadata.cu_seqlens_q.tolist() == [0, 1, 4]
    assert batch.metadata.cu_seqlens_k.tolist() == [0, 6, 9]
    assert batch.metadata.block_table.tolist() == [[7, 2], [5, -1]]
    assert batch.logits_rows.tolist() == [0, 3]


def test_ids_that_the_host_does_not_know_yet() -> None:
    engine = ScriptedEngine(num_blocks=16, block_size=4, max_num_batched_tokens=16, max_prefill_share=1.0)
    first = engine.add([10, 11, 12], max_tokens=4).sequences[0]
    second = engine.add([20, 21], max_tokens=4).sequences[0]
    builder = builder_for(engine)
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert builder.build(plan).unknown.tolist() == []
    engine.scheduler.advance(plan)
    third = engine.add([30, 31, 32], max_tokens=4).sequences[0]
    plan = engine.scheduler.schedule()
    assert plan is not None
    batch = builder.build(plan)
    assert batch.input_ids.tolist() == [0, 0, 30, 31, 32]
    assert batch.positions.tolist() == [3, 2, 0, 1, 2]
    assert batch.unknown.tolist() == [0, 1]
    assert batch.unknown_rows.tolist() == [first.row, second.row]
    assert batch.sampled_rows.tolist() == [first.row, second.row, third.row]


def test_parts_of_a_memory_that_was_given_stay_where_they_are() -> None:
    memory = torch.full((20,), -9, dtype=torch.int64)
    places = set()
    for value, length in ((3, 4), (5, 1), (7, 3)):
        parts = upload(
            [np.full(3, value), np.full(5, value, dtype=np.int32), np.arange(length)], memory.device, memory
        )
        assert [part.tolist() for part in parts] == [[value] * 3, [value] * 5, [*range(length)]]
        places.add(tuple(part.data_ptr() - memory.data_ptr() for part in parts))
    assert places == {(0, 32, 64)}
    assert memory[12:].tolist() == [-9] * 8, "what was not given is not written"


def test_rows_stay_right_through_forks_preemption_and_reuse() -> None:
    rng = random.Random(3)
    for block_size in (1, 4):
        engine = ScriptedEngine(
            num_blocks=40 // block_size,
            block_size=block_size,
            max_num_seqs=5,
            max_num_batched_tokens=9,
            max_model_len=60,
        )
        builder = builder_for(engine)
        num_preempted = num_copied = 0
        for _ in range(300):
            if rng.random() < 0.3:
                prompt = [rng.randrange(2) for _ in range(rng.randint(1, 20))]
                engine.add(prompt, max_tokens=rng.randint(1, 15), n=rng.randint(1, 3))
            plan = engine.scheduler.schedule()
            if plan is None:
                continue
            check_batch(engine, plan, builder.build(plan))
            num_preempted += len(plan.preempted)
            num_copied += len(plan.copies)
            token_ids = engine.runner.run(plan)
            engine.scheduler.advance(plan)
            engine.scheduler.commit(plan, token_ids)
        assert num_preempted > 10
        assert num_copied > 10 or block_size == 1
