"""Steps that are no plain decode steps, from graphs of the model, with a stand-in for CUDA's."""

from __future__ import annotations

import logging
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.grammar import smollm2_tokenizer
from helpers.graph import Replaying
from helpers.models import saved, tiny_hf_model

from octavo.config import EngineConfig
from octavo.engine import mixed_graphs
from octavo.engine.batch import Batch
from octavo.engine.build import build_engine
from octavo.engine.core import Engine
from octavo.engine.mixed_graphs import MixedGraphs, kept_bytes, token_buckets
from octavo.engine.request import Request
from octavo.engine.sampler import Sampler
from octavo.models.registry import LoadedModel, load_model
from octavo.sampling_params import SamplingParams
from octavo.structured_output import StructuredOutput

VOCAB_SIZE = 101
SIZES: dict[str, Any] = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 24}


@pytest.fixture(scope="module", params=["qwen3", "gpt2", "mixtral"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    model = tiny_hf_model(request.param)
    return load_model(saved(model, tmp_path_factory.mktemp("model")), dtype="float32")


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_graphs, "_BUCKETS", (4, 8, 16))


class Both:
    """An engine, and the same with all its graphs."""

    def __init__(self, loaded: LoadedModel, **options: Any) -> None:
        self.eager = engine_for(loaded, **(options | {"overlap": False}))
        self.engine = engine_for(loaded, **options)
        self.decodes, self.others = Replaying(), Replaying()
        self.decodes.serve(self.engine)
        self.others.serve_others(self.engine)

    def outputs(self, kinds: list[dict[str, Any]], seed: int = 0) -> list[Any]:
        """What both answer; that they do the same is asserted."""
        expected = finished(self.eager, requests_for(self.eager, kinds, seed))
        found = finished(self.engine, requests_for(self.engine, kinds, seed))
        assert found == expected
        return found

    @property
    def num_eager_steps(self) -> int:
        return self.engine.stats().num_steps - self.decodes.num_replays - self.others.num_replays


def engine_for(loaded: LoadedModel, **options: Any) -> Engine:
    engine = build_engine(EngineConfig(model="m", **(SIZES | options)), loaded, None)
    engine.runner.sampler = Sampler(VOCAB_SIZE, with_kernel=True)
    return engine


def mixed_graphs_of(engine: Engine) -> MixedGraphs:
    mixed = engine.runner._mixed
    assert mixed is not None
    return mixed


def requests_for(engine: Engine, kinds: list[dict[str, Any]], seed: int) -> list[Request]:
    """Prompts of which every third begins as the one before."""
    rng = random.Random(seed)
    requests, prompt = [], [0]
    for i, given in enumerate(kinds):
        start = prompt if i % 3 == 2 else []
        prompt = [*start, *(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 20)))]
        options = {"max_tokens": rng.randint(2, 20), "seed": i, "ignore_eos": True} | given
        requests.append(engine.add_request(prompt, SamplingParams(**options)))
    return requests


def finished(engine: Engine, requests: list[Request]) -> list[Any]:
    while engine.has_work:
        engine.step()
        engine.scheduler.check()
    assert engine.cache.num_owned == 0
    found: list[Any] = []
    for request in requests:
        assert request.output is not None
        found += [(c.token_ids, c.finish_reason, c.logprobs) for c in request.output.outputs]
        found.append(request.prompt_logprobs)
    return found


KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 5, "top_p": 0.9},
    {"n": 3, "temperature": 1.0},
    {"stop_token_ids": list(range(0, VOCAB_SIZE, 7))},
    {"logprobs": 2},
    {"prompt_logprobs": 1, "logprobs": 1},
    {"repetition_penalty": 1.3, "temperature": 1.0},
    {"presence_penalty": 0.6, "frequency_penalty": 0.2},
    {"min_tokens": 2, "ignore_eos": False},
    {"logit_bias": {5: 3.0}, "n": 2, "temperature": 1.0},
    {"allowed_token_ids": [1, 2, 3], "temperature": 1.0, "min_p": 0.1},
]


def test_buckets() -> None:
    assert token_buckets(16384) == [4, 8, 16, 1024]
    assert token_buckets(16) == [4, 8, 16]
    assert token_buckets(9) == [4, 8, 9]
    assert token_buckets(1) == [1]
    assert kept_bytes(9, 10, 3, 7) == 10 * (4 + 8 + 9) + 2 * (3 + 1) * 7 * 4


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"num_blocks": 14},
        {"max_num_seqs": 3},
        {"max_num_batched_tokens": 7, "max_prefill_share": 1.0},
        {"enable_prefix_caching": False, "block_size": 1, "num_blocks": 256},
    ],
    ids=str,
)
def test_every_step_comes_from_a_graph_and_gives_the_tokens_of_one_without(
    loaded: LoadedModel, overlap: bool, limits: dict[str, Any]
) -> None:
    both = Both(loaded, overlap=overlap, **limits)
    both.outputs(KINDS * 2)
    both.outputs([{}] * 9, seed=1)  # plain rows: prompts come while others decode
    both.outputs([{"max_tokens": 30}], seed=2)
    assert both.num_eager_steps == 0
    assert min(both.decodes.num_replays, both.others.num_replays) > 20
    stats = both.engine.stats()
    assert (stats.num_preemptions > 0) == ("num_blocks" in limits and limits["num_blocks"] == 14)
    assert (stats.num_hit_tokens > 0) == ("enable_prefix_caching" not in limits)


@pytest.mark.parametrize("overlap", [False, True])
def test_grammars(overlap: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    tokenizer = smollm2_tokenizer()
    model = tiny_hf_model("qwen3", vocab_size=tokenizer.vocab_size)
    loaded = load_model(saved(model, tmp_path_factory.mktemp("model")), dtype="float32")

    def answers(others: Replaying | None) -> list[Any]:
        config = EngineConfig(model="m", overlap=overlap and others is not None, **SIZES)
        engine = build_engine(config, loaded, tokenizer)
        if others is not None:
            Replaying().serve(engine)
            others.serve_others(engine)
        regex = SamplingParams(
            structured_output=StructuredOutput(regex="(yes|no)[a-z ]{30,40}"),
            temperature=1.0,
            seed=1,
            n=2,
            max_tokens=60,
        )
        free = SamplingParams(max_tokens=12, ignore_eos=True)
        return finished(engine, [engine.add_request([i + 1, 7], (free, regex)[i % 2]) for i in range(4)])

    others = Replaying()
    found = answers(others)
    assert found == answers(None)
    assert [found[2][1], found[3][1]] == ["stop", "stop"]
    assert others.num_replays > 5


def watched(mixed: MixedGraphs, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Batch, list[Any]]]:
    """The batches that are replayed, and what they hold then."""
    seen: list[tuple[Batch, list[Any]]] = []
    replay = mixed.replay

    def replaying(batch: Batch) -> torch.Tensor:
        meta = batch.metadata
        parts = (batch.input_ids, batch.positions, meta.slot_mapping, meta.cu_seqlens_q, meta.cu_seqlens_k)
        seen.append((batch, [part.tolist() for part in (*parts, meta.block_table)]))
        return replay(batch)

    monkeypatch.setattr(mixed, "replay", replaying)
    return seen


def test_padding_spelled_out(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    both = Both(loaded, max_prefill_share=1.0)
    engine = both.engine
    seen = watched(mixed_graphs_of(engine), monkeypatch)
    first = engine.add_request([10, 11, 12, 13, 14], SamplingParams(max_tokens=3, ignore_eos=True))
    engine.step()
    second = engine.add_request([20, 21, 22, 23, 24, 25], SamplingParams(max_tokens=3, ignore_eos=True))
    engine.step()
    tables = [engine.cache.block_table(request.sequences[0].seq_id) for request in (first, second)]
    (a, b), (c, d) = tables
    _, (ids, positions, slots, cu_q, cu_k, table) = seen[1]
    assert ids == [first.sequences[0].token_ids[5], 20, 21, 22, 23, 24, 25, 0]
    assert positions == [5, 0, 1, 2, 3, 4, 5, 0]
    assert slots == [4 * b + 1, *(4 * c + i for i in range(4)), 4 * d, 4 * d + 1, -1]
    assert cu_q == [0, 1, 7, 8, 8, 8, 8, 8]
    assert cu_k == [0, 6, 12, 12, 12, 12, 12, 12]
    assert [row[:2] for row in table[:2]] == [[a, b], [c, d]]
    assert all(block == -1 for row in table[2:] for block in row)
    assert both.others.num_replays == 2
    engine.close()


def test_padding_writes_nowhere_and_reads_nothing(loaded: LoadedModel) -> None:
    both = Both(loaded)
    engine, layers = both.engine, both.engine.runner.kv_cache.layers
    request = engine.add_request([5, 6, 7, 8, 9], SamplingParams(max_tokens=3, ignore_eos=True, logprobs=0))
    for layer in layers:
        layer.k[:] = layer.v[:] = torch.nan
    engine.step()
    engine.step()
    first, second = engine.cache.block_table(request.sequences[0].seq_id)
    owned = [(first, 0), (first, 1), (first, 2), (first, 3), (second, 0), (second, 1)]
    for layer in layers:
        for cache in (layer.k, layer.v):
            written = (~torch.isnan(cache).all(dim=3).all(dim=2)).nonzero().tolist()
            assert written == sorted(map(list, owned))
    assert both.others.num_replays == 2
    hidden = [result for _, result in mixed_graphs_of(engine)._graphs.values() if result[0, 0] != -7]
    assert hidden
    assert all(torch.isfinite(result).all() for result in hidden), "rows of padding are numbers, too"
    engine.close()


def test_a_small_step_after_a_large_one_holds_nothing_of_it(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"max_num_seqs": 200, "max_num_batched_tokens": 240, "num_blocks": 900, "max_prefill_share": 1.0}
    both = Both(loaded, **sizes)
    seen = watched(mixed_graphs_of(both.engine), monkeypatch)
    both.outputs([{"max_tokens": 3, "logprobs": 0}] * 200)
    many = len(seen)
    assert max(len(batch.metadata.block_table) for batch, _ in seen) == 201
    both.outputs([{"max_tokens": 3, "logprobs": 0}] * 3, seed=5)
    batch, (ids, _, slots, cu_q, cu_k, _) = seen[-1]
    assert len(seen) > many
    assert batch.metadata.block_table.shape[0] == 4
    assert (ids[3:], slots[3:], cu_q, cu_k[3:]) == ([0], [-1], [0, 1, 2, 3, 4], [cu_k[3]] * 2)
    assert both.num_eager_steps == 0


def test_a_full_bucket_of_rows_has_no_padding(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    both = Both(loaded, max_num_seqs=8, max_prefill_share=1.0)
    seen = watched(mixed_graphs_of(both.engine), monkeypatch)
    both.outputs([{"max_tokens": 12, "logprobs": 0, "ignore_eos": True}] * 8)
    full = [parts for batch, parts in seen if batch.metadata.block_table.shape[0] == len(parts[0]) == 8]
    assert [cu_q for _, _, slots, cu_q, _, _ in full if -1 not in slots].count(list(range(9))) > 2
    assert both.num_eager_steps == 0


def test_steps_of_too_many_tokens_are_launched_as_ever(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixed_graphs, "MOST_TOKENS", 10)
    both = Both(loaded)
    assert mixed_graphs_of(both.engine).buckets == [4, 8, 10]
    both.outputs([{"max_tokens": 3}] * 7)
    assert both.num_eager_steps > 0
    assert both.others.num_replays > 0


def test_prompts_of_long_contexts_are_launched_as_ever(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixed_graphs, "LONGEST_CONTEXT", 14)
    both = Both(loaded, max_num_batched_tokens=7, max_prefill_share=1.0)
    params = SamplingParams(max_tokens=9, ignore_eos=True, logprobs=0)
    expected = finished(both.eager, [both.eager.add_request(range(22), params)])
    assert finished(both.engine, [both.engine.add_request(range(22), params)]) == expected
    # Two chunks, the one token that is left, and eight that decode; a third chunk ends at 21 tokens.
    assert (both.num_eager_steps, both.others.num_replays, both.decodes.num_replays) == (1, 11, 0)


def test_all_are_made_before_requests_come_the_largest_first(
    loaded: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="octavo")
    both = Both(loaded)
    mixed = mixed_graphs_of(both.engine)
    made = [24, 16, 8, 4]
    assert list(mixed._graphs) == made
    assert any(
        record.getMessage().startswith("4 graphs of other steps captured") for record in caplog.records
    )
    both.outputs(KINDS)
    assert list(mixed._graphs) == made
    assert both.others.num_captures == 4


def test_where_one_cannot_be_had_none_is_kept(
    loaded: LoadedModel, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Any]] = []

    class HalfWay(Replaying):
        def __call__(self, step: Callable[[], torch.Tensor]) -> Any:
            if self.num_captures == 2:
                raise torch.OutOfMemoryError("no room")
            replay, result = super().__call__(step)
            made.extend((weakref.ref(replay), weakref.ref(result)))
            return replay, result

    eager, engine = engine_for(loaded), engine_for(loaded)
    expected = finished(eager, requests_for(eager, KINDS, 0))
    decodes = Replaying()
    decodes.serve(engine)
    left_over: list[Any] = []
    monkeypatch.setattr(engine.runner, "_give_memory_back", lambda: left_over.append([ref() for ref in made]))
    HalfWay().serve_others(engine)
    assert left_over == [[None] * 4], "memory goes back once, when nothing holds it any more"
    assert engine.runner._mixed is None
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [
        "no CUDA graph for a step of 8 tokens (OutOfMemoryError: no room); steps that are no plain decode "
        "steps are launched one kernel at a time"
    ]
    assert finished(engine, requests_for(engine, KINDS, 0)) == expected
    assert decodes.num_replays > 0


def test_without_graphs_of_decode_steps_there_are_no_others(loaded: LoadedModel) -> None:
    def refusing(step: Callable[[], torch.Tensor]) -> Any:
        raise torch.OutOfMemoryError("no room")

    engine, others = engine_for(loaded), Replaying()
    engine.runner.use_graphs(64, refusing)
    others.serve_others(engine)
    assert others.num_captures == 0
    assert engine.runner._mixed is None
