"""Steps over nothing: within an engine's limits, at its limits, and harmless."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.models import saved, tiny_hf_model

from octavo.config import EngineConfig
from octavo.engine import sampler
from octavo.engine.build import build_engine
from octavo.engine.warm_up import (
    SAMPLING,
    empty_step,
    largest_step,
    layers_of_each_kind,
    sequences,
    smallest_step,
    steps_to_compile,
)
from octavo.models.config import ExpertsConfig
from octavo.models.registry import load_model
from octavo.sampling_params import SamplingParams


def config_of(num_seqs: int, num_tokens: int, length: int) -> EngineConfig:
    return EngineConfig(
        model="m", max_num_seqs=num_seqs, max_num_batched_tokens=num_tokens, max_model_len=length
    )


@pytest.mark.parametrize(
    ("limits", "num_new"),
    [
        ((3, 10, 100), [8, 1, 1]),
        ((3, 10, 4), [4, 4, 2]),
        ((3, 20, 4), [4, 4, 4]),  # no step is larger than all its sequences
        ((8, 4, 100), [1, 1, 1, 1]),
        ((1, 10, 100), [10]),
    ],
)
def test_the_largest_step(limits: tuple[int, int, int], num_new: list[int]) -> None:
    found, lengths = largest_step(config_of(*limits))
    assert found == num_new
    assert lengths == [*num_new[:-1], limits[2]]


@pytest.mark.parametrize("limits", [(1, 1, 1), (6, 40, 100), (256, 512, 4096), (5, 3, 2), (7, 900, 60)])
def test_every_step_is_one_that_could_be_scheduled(limits: tuple[int, int, int]) -> None:
    config = config_of(*limits)
    shapes = list(steps_to_compile(config))
    for num_new, lengths in shapes:
        assert 1 <= len(num_new) == len(lengths) <= limits[0]
        assert sum(num_new) <= limits[1]
        assert all(1 <= new <= length <= limits[2] for new, length in zip(num_new, lengths, strict=True))
    assert {len(new) for new, _ in shapes if max(new) == 1} >= {1, min(limits[0], limits[1])}
    assert max(max(new) for new, _ in shapes) == min(limits[1], limits[2])
    assert {max(lengths) for _, lengths in shapes} >= {1, limits[2]}
    assert largest_step(config) in shapes


@pytest.mark.parametrize(
    "limits", [(64, 1000, 4096), (64, 300, 4096), (1, 1000, 4096), (64, 8192, 256), (3, 8192, 256), (5, 7, 1)]
)
def test_steps_of_every_power_of_two_are_tried_and_the_largest(limits: tuple[int, int, int]) -> None:
    """Kernels over all tokens of a step are compiled apart by how many there are, in classes that double."""
    num_seqs, budget, longest = limits
    most = min(budget, num_seqs * longest)
    sizes = {sum(num_new) for num_new, _ in steps_to_compile(config_of(*limits))}
    assert sizes >= {most, *(2**i for i in range(14) if 2**i <= most)}
    num_rows = {len(num_new) for num_new, _ in steps_to_compile(config_of(*limits)) if max(num_new) == 1}
    assert num_rows >= {2**i for i in range(14) if 2**i <= min(num_seqs, budget)}


@pytest.mark.parametrize(
    ("windows", "with_experts", "expected"),
    [
        ((None,) * 5, None, [0, 1]),
        ((None,), None, [0]),
        ((7, 7, 7, None, 7, 7, 7, None), None, [0, 1, 3]),
        ((None, 7, 9, 7), None, [0, 1, 2]),
        ((None,) * 4, (False, True, False, True), [0, 1, 2]),
        ((7, None, 7, None), (False, False, True, True), [0, 1, 2, 3]),
    ],
)
def test_layers_of_each_kind_run_and_no_others(
    windows: tuple[int | None, ...], with_experts: tuple[bool, ...] | None, expected: list[int]
) -> None:
    """The first layer starts the residual stream, and is a kind of its own."""
    experts = None
    if with_experts is not None:
        experts = ExpertsConfig(
            layers=with_experts, num_experts=2, num_per_token=1, intermediate_size=4, normalised=True
        )
    config: Any = SimpleNamespace(num_layers=len(windows), sliding_window=windows, experts=experts)
    assert layers_of_each_kind(config) == expected


def test_a_step_of_some_layers_writes_to_their_caches_alone(tmp_path: Path) -> None:
    folder = saved(tiny_hf_model("llama", num_hidden_layers=4), tmp_path)
    engine = build_engine(EngineConfig(model="m", num_blocks=4, max_num_seqs=2), load_model(folder), None)
    runner = engine.runner
    for layer in runner.kv_cache.layers:
        layer.k.zero_()
    layers = runner.model.layers
    runner.warm_up([smallest_step()], [0, 2])
    assert [bool(layer.k.any()) for layer in runner.kv_cache.layers] == [True, False, True, False]
    assert runner.model.layers is layers


def test_a_step_over_nothing_spelled_out() -> None:
    batch = empty_step(([3, 1], [3, 9]), 4, torch.device("cpu"))
    assert batch.input_ids.tolist() == [0, 0, 0, 0]
    assert batch.positions.tolist() == [0, 1, 2, 8]
    assert batch.metadata.slot_mapping.tolist() == [0, 1, 2, 0]
    assert batch.metadata.cu_seqlens_q.tolist() == [0, 3, 4]
    assert batch.metadata.cu_seqlens_k.tolist() == [0, 3, 12]
    assert batch.metadata.block_table.tolist() == [[0, 0, 0], [0, 0, 0]]
    assert (batch.metadata.max_seqlen_q, batch.metadata.max_seqlen_k) == (3, 9)
    assert batch.logits_rows.tolist() == [2, 3]


def test_sampling_over_nothing_takes_the_memory_of_every_way_to_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = torch.randn(4, 50)
    seen = []

    def sample(work: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.append("a changed copy" if work is not logits else "raw")
        return draw(work, **options)

    def logprob_tables(*arguments: Any) -> Any:
        seen.append("log probabilities")
        return tables(*arguments)

    draw, tables = sampler.sampling.sample, sampler.logprob_tables
    monkeypatch.setattr(sampler.sampling, "sample", sample)
    monkeypatch.setattr(sampler, "logprob_tables", logprob_tables)
    chooses = sampler.Sampler(50, with_kernel=True)
    for params in SAMPLING:
        assert chooses.sample(logits, sequences(4, params)).errors == {}
    assert set(seen) == {"raw", "a changed copy", "log probabilities"}


def test_sequences_for_the_sampler() -> None:
    params = SamplingParams(temperature=0.5)
    found = sequences(3, params)
    assert [seq.token_ids for seq in found] == [[0]] * 3
    assert all(seq.params is params for seq in found)
    assert [seq.seed for seq in found] == [0, 1, 2]


def test_rows_of_a_prompt_come_to_the_head_aligned_as_any_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are compiled apart for tensors that begin elsewhere; rows of 200 bytes, as here, often do."""
    loaded = load_model(saved(tiny_hf_model("qwen3", hidden_size=50), tmp_path), dtype="float32")
    sizes: dict[str, Any] = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 3}
    engine = build_engine(EngineConfig(model="m", max_num_batched_tokens=64, **sizes), loaded, None)
    starts: list[int] = []
    head = type(loaded.model).compute_logits

    def watched(model: Any, hidden: torch.Tensor) -> torch.Tensor:
        starts.append(hidden.data_ptr() % 16)
        return head(model, hidden)

    monkeypatch.setattr(type(loaded.model), "compute_logits", watched)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    requests = [engine.add_request(range(1, length), params) for length in (4, 6, 8)]
    while engine.has_work:
        engine.step()
    assert [len(request.prompt_logprobs or []) for request in requests] == [3, 5, 7]
    assert starts == [0] * 4
