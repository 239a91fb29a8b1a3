"""Ten thousand random requests, with aborts and preemption: nothing is lost and nothing is left behind."""

from __future__ import annotations

from contextlib import closing

import pytest
from helpers.soak import Soak, assert_answers_alone, device_memory, model_folder

from octavo.config import EngineConfig
from octavo.engine.build import build_engine
from octavo.engine.core import Engine
from octavo.models.registry import load_model

MAX_MODEL_LEN = 1024
MiB = 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return model_folder(tmp_path_factory.mktemp("soak"), head_dim=128, max_model_len=MAX_MODEL_LEN)


def engine_for(folder: str, dtype: str, *, deterministic: bool = False) -> Engine:
    """Overlapped, with graphs, and with a pool that fewer requests outgrow than have rows."""
    loaded = load_model(folder, device="cuda", dtype=dtype, deterministic=deterministic)
    config = EngineConfig(
        model="m",
        device="cuda",
        deterministic=deterministic,
        num_blocks=192,
        max_num_seqs=128,
        max_num_batched_tokens=1024,
    )
    return build_engine(config, loaded, None)


def soak_of(engine: Engine, *, wave: int, keep: bool = False) -> Soak:
    return Soak(
        engine, short_prompt=40, longest_prompt=MAX_MODEL_LEN - 4, most_tokens=64, wave=wave, keep=keep
    )


def assert_everything_happened(soak: Soak) -> None:
    stats = soak.engine.stats()
    assert stats.num_steps > soak.num_graph_steps > stats.num_steps // 10
    assert soak.most_under_way == 4
    assert stats.num_preemptions > soak.num_added // 50
    assert stats.num_hit_tokens > soak.num_added
    assert stats.num_evictions > soak.num_added // 10
    assert soak.num_cut_by_context > 0
    few = soak.num_added // 100
    assert min(soak.num_aborted_waiting, soak.num_aborted_running) > few
    assert min(soak.num_ended[reason] for reason in ("length", "stop", "abort")) > few


def test_ten_thousand_requests_leave_nothing_behind(folder: str) -> None:
    with closing(engine_for(folder, "bfloat16")) as engine:
        soak = soak_of(engine, wave=400)
        graphs = engine.runner._graphs
        assert graphs is not None
        memory: dict[int, tuple[int, int]] = {}

        def on_idle(num_requests: int) -> None:
            memory[num_requests] = device_memory()
            if num_requests >= 256:  # each bucket had its turn
                sharing = len(graphs.shared_bucket_sizes)
                assert len(graphs._graphs) == 2 * len(graphs.bucket_sizes) + sharing

        soak.run(10_000, on_idle)
        assert_everything_happened(soak)
    allocated, reserved = zip(*(memory[num] for num in memory if num >= 2_000), strict=True)
    assert len(allocated) > 15
    # The sampler keeps the options of its last batch.
    assert max(allocated) - allocated[0] <= MiB, memory
    # What torch holds for tensors comes in pieces of 2 MiB and of 20.
    assert max(reserved) - reserved[0] <= 24 * MiB, memory


def test_a_deterministic_crowd_has_the_bits_of_each_request_alone(folder: str) -> None:
    with closing(engine_for(folder, "float32", deterministic=True)) as engine:
        soak = soak_of(engine, wave=250, keep=True)
        soak.run(1_200)
        assert_everything_happened(soak)
        assert_answers_alone(engine, soak.sample(40))
