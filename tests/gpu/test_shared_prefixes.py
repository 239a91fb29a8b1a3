"""Decode steps whose sequences begin alike, on a GPU: values, replayed graphs, and an engine's tokens."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest
import torch
from helpers.attention_cases import Case, prepare
from helpers.models import random_ids, saved, tiny_hf_model
from helpers.shared_prefixes import CASES, FP8, INT8, attended, check, decode, unshare

from octavo.config import EngineConfig
from octavo.engine import build, graph
from octavo.engine.build import build_engine
from octavo.engine.core import Engine
from octavo.engine.shared_prefixes import Sharing, sharing_for
from octavo.kernels import flash_attn_varlen_func
from octavo.kernels.shared_prefixes import attend_shared, find_shared_prefixes
from octavo.kernels.triton.monitor import forbid_compiles
from octavo.models.registry import LoadedModel, load_model
from octavo.sampling_params import SamplingParams

DEVICE = torch.device("cuda", 0)
VOCAB_SIZE = 503
LARGE = [
    (decode(*(2100 + 13 * b for b in range(24)), heads=(16, 8), head_dim=128), 2048),
    (decode(*(2100 + 13 * b for b in range(13)), heads=(32, 8), head_dim=128, interleaved=True), 2048),
    (decode(*(2100 + 13 * b for b in range(16)), heads=(32, 4), dtype=torch.float16), 2048),
    (
        decode(*(2100 + b for b in range(8)), heads=(16, 8), head_dim=128, cache_dtype=FP8, scales="token"),
        2048,
    ),
    (
        decode(*(2100 + b for b in range(8)), heads=(16, 8), cache_dtype=INT8, scales="token", block_size=64),
        2048,
    ),
]


@pytest.mark.parametrize(("case", "expected"), CASES + LARGE, ids=str)
def test_agrees_with_exact_attention(case: Case, expected: int) -> None:
    inputs = prepare(case, DEVICE, share=expected // case.block_size)
    assert check(inputs) == [expected if length else 0 for length in case.lens_k]


def test_same_inputs_same_bits() -> None:
    inputs = prepare(LARGE[0][0], DEVICE, share=128)
    unshare(inputs, 9, 40)
    out, lens = attended(inputs, 256)
    assert lens == [2048] * 8 + [640] * 8 + [2048] * 8
    for _ in range(20):
        assert torch.equal(attended(inputs, 256)[0], out)


def test_a_captured_step_serves_other_lengths_and_tables() -> None:
    """Whatever is common now, from nothing to all of it, and with entries that take no part."""
    batch, num_columns, size = 21, 80, 16
    shape = (2, batch * num_columns, size, 2, 64)
    k_cache, v_cache = torch.randn(shape, device=DEVICE).bfloat16()
    q = torch.randn(batch, 8, 64, device=DEVICE).bfloat16()
    own = torch.randperm(batch * num_columns, device=DEVICE).int().view(batch, num_columns)
    table = own.clone()
    sums_q = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE)
    sums_k = sums_q.clone()
    found: list[torch.Tensor] = []

    def step() -> torch.Tensor:
        shared = find_shared_prefixes(table, sums_k, size)
        found[:] = [shared.lens]
        return attend_shared(
            q, k_cache, v_cache, shared, sums_q, sums_k, num_columns * size, block_table=table
        )

    stream: Any = torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(stream):
        step()
        stream.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=stream):
            out = step()
    for num_common, real, lens in (
        (0, 21, []),
        (40, 21, [640] * 21),
        (15, 21, []),
        (79, 18, [1264] * 18),
        (30, 9, [480] * 8),
    ):
        table.copy_(own)
        table[:, :num_common] = own[0, :num_common]
        lens_k = torch.randint(num_common * size + 1, num_columns * size + 1, (batch,), device=DEVICE)
        lens_k[real:] = 0
        sums_k[1:] = lens_k.cumsum(0)
        captured.replay()
        torch.cuda.synchronize(DEVICE)
        assert found[0].tolist() == lens + [0] * (batch - len(lens))
        expected = flash_attn_varlen_func(
            q, k_cache, v_cache, sums_q, sums_k, 1, num_columns * size, causal=True, block_table=table
        )
        torch.testing.assert_close(out.float(), expected.float(), rtol=2**-7, atol=2**-9)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    sizes = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 1024, "intermediate_size": 256}
    model = tiny_hf_model(
        "qwen3", hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=64, **sizes
    )
    return load_model(saved(model, tmp_path_factory.mktemp("model")), device="cuda", dtype="float32")


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> Counter[graph.Form]:
    """The forms that decode steps take; the shared one pays as soon as a byte less is read."""
    counts: Counter[graph.Form] = Counter()
    form_of = graph.DecodeGraphs._form

    def counted(graphs: graph.DecodeGraphs, num_rows: int) -> graph.Form:
        form = form_of(graphs, num_rows)
        counts[form] += 1
        return form

    def soon(*arguments: Any) -> Sharing | None:
        sharing = sharing_for(*arguments)
        return sharing and Sharing(sharing.bytes_per_token, sharing.block_size, least_bytes=1)

    monkeypatch.setattr(graph.DecodeGraphs, "_form", counted)
    monkeypatch.setattr(build, "sharing_for", soon)
    return counts


def answers(engine: Engine) -> list[Any]:
    """Over a system prompt of 320 tokens: twenty questions, one of twelve answers, and a mixture."""
    system = random_ids(320, VOCAB_SIZE)
    greedy = SamplingParams(max_tokens=24, ignore_eos=True)
    drawn = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, top_k=30, seed=4, n=12)

    def finish(prompts: list[list[int]], params: SamplingParams) -> list[Any]:
        requests = [engine.add_request(prompt, params) for prompt in prompts]
        while engine.has_work:
            engine.step()
        engine.scheduler.check()
        return [(s.output_token_ids, s.error) for request in requests for s in request.sequences]

    found = finish([system], SamplingParams(max_tokens=1))
    found += finish([system + random_ids(9, VOCAB_SIZE, seed=i) for i in range(20)], greedy)
    found += finish([system + random_ids(3, VOCAB_SIZE, seed=50)], drawn)
    starts = [system, system[:280], random_ids(300, VOCAB_SIZE, seed=60)]
    found += finish([starts[i % 3] + random_ids(i + 1, VOCAB_SIZE, seed=70 + i) for i in range(24)], greedy)
    assert not [error for _, error in found if error]
    return found


def run(loaded: LoadedModel, **options: Any) -> list[Any]:
    sizes = {"num_blocks": 1200, "max_num_seqs": 20, "max_num_batched_tokens": 512}
    engine = build_engine(EngineConfig(model="m", **(sizes | options)), loaded, None)
    with forbid_compiles():
        found = answers(engine)
    engine.close()
    return found


def test_an_engine_answers_the_same_and_compiles_nothing_late(
    loaded: LoadedModel, forms: Counter[graph.Form]
) -> None:
    expected = run(loaded, enforce_eager=True, overlap=False)
    assert not forms
    assert run(loaded, cascade_attention=False) == expected
    assert {form.shares for form in forms} == {False}
    ways: list[dict[str, Any]] = [{}, {"overlap": False}, {"cascade_attention": True, "run_ahead": 4}]
    for options in ways:
        forms.clear()
        assert run(loaded, **options) == expected
        assert {form.bucket for form in forms if form.shares} >= {16, 20}
        assert {form.shares for form in forms} == {True, False}


@pytest.mark.parametrize("how", ["out of memory", "a call that no capture survives"])
def test_a_capture_that_breaks_off_leaves_the_ordinary_graphs_at_work(
    loaded: LoadedModel,
    forms: Counter[graph.Form],
    how: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = run(loaded, enforce_eager=True, overlap=False)
    find, stream = graph.find_shared_prefixes, torch.cuda.current_stream(DEVICE)

    def failing(*arguments: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            if how == "out of memory":
                raise torch.OutOfMemoryError("no room")
            torch.cuda.synchronize(DEVICE)
        return find(*arguments)

    monkeypatch.setattr(graph, "find_shared_prefixes", failing)
    caplog.set_level(logging.INFO, logger="octavo")
    assert run(loaded) == expected
    assert {form.shares for form in forms} == {False}
    assert torch.cuda.current_stream(DEVICE) == stream
    (record,) = [r for r in caplog.records if r.getMessage().endswith("cascade_attention has no effect")]
    assert record.levelno == logging.INFO
    assert record.getMessage().startswith("no CUDA graph for 20 rows that share keys")
