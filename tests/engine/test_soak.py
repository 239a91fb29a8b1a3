"""The soak of tests/gpu, short, on a CPU: graphs are stood in for, and tokens are drawn as on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.graph import Replaying
from helpers.soak import VOCAB_SIZE, Soak, assert_answers_alone, model_folder

from octavo.config import EngineConfig
from octavo.engine.build import build_engine
from octavo.engine.core import Engine
from octavo.engine.graph import bucket_sizes
from octavo.engine.sampler import Sampler
from octavo.models.registry import load_model


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    loaded = load_model(model_folder(tmp_path, head_dim=16, max_model_len=128), dtype="float32")
    config = EngineConfig(
        model="m", overlap=True, num_blocks=48, block_size=4, max_num_seqs=12, max_num_batched_tokens=64
    )
    engine = build_engine(config, loaded, None)
    engine.runner.sampler = Sampler(VOCAB_SIZE, with_kernel=True)
    return engine


def test_hundreds_of_requests_with_aborts_at_a_pool_that_preempts(engine: Engine) -> None:
    capture = Replaying()
    capture.serve(engine)
    soak = Soak(engine, short_prompt=20, longest_prompt=120, most_tokens=24, wave=60, keep=True)
    idle_moments: list[int] = []
    soak.run(320, idle_moments.append)
    stats = engine.stats()
    assert idle_moments == [12, 24, 84, 144, 204, 264, 320]
    assert soak.num_graph_steps == capture.num_replays > 100
    assert capture.num_captures == 2 * len(bucket_sizes(12))
    assert stats.num_steps > soak.num_graph_steps + 100
    assert soak.most_under_way == 4
    assert stats.num_preemptions > 30
    assert stats.num_hit_tokens > 100
    assert stats.num_evictions > 100
    assert min(soak.num_aborted_waiting, soak.num_aborted_running) >= 4
    assert soak.num_cut_by_context > 0
    assert min(soak.num_ended[reason] for reason in ("length", "stop", "abort")) >= 15
    assert len(soak.answers) > 100
    assert_answers_alone(engine, soak.answers)
