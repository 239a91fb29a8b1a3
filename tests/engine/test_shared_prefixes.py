"""Decode steps that read common keys once for eight sequences: when they are taken, and what they answer."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from helpers.graph import Replaying
from helpers.models import saved, tiny_hf_model

from octavo.cache.spec import KVCacheSpec
from octavo.config import EngineConfig
from octavo.engine import graph
from octavo.engine.build import build_engine
from octavo.engine.core import Engine
from octavo.engine.request import Request
from octavo.engine.sampler import Sampler
from octavo.engine.shared_prefixes import Sharing, shared_bucket_sizes, sharing_for
from octavo.kernels.shared_prefixes import SharedPrefixes
from octavo.models.registry import LoadedModel, load_model
from octavo.sampling_params import SamplingParams

VOCAB_SIZE = 101
SYSTEM = [(7 * i + 3) % VOCAB_SIZE for i in range(25)]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "gpt2": ("gpt2", {}),
    "some layers with a window": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    model_type, options = MODELS[request.param]
    folder = saved(tiny_hf_model(model_type, **options), tmp_path_factory.mktemp("model"))
    return load_model(folder, dtype="float32")


class Steps:
    """How an engine's decode steps ran: of each form how often, and the common keys that were found."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.forms: Counter[graph.Form] = Counter()
        self.found: set[int] = set()
        form_of, find = graph.DecodeGraphs._form, graph.find_shared_prefixes

        def counted(graphs: graph.DecodeGraphs, num_rows: int) -> graph.Form:
            form = form_of(graphs, num_rows)
            self.forms[form] += 1
            return form

        def kept(*arguments: Any) -> SharedPrefixes:
            shared = find(*arguments)
            self.found.update(shared.lens.tolist())
            return shared

        monkeypatch.setattr(graph.DecodeGraphs, "_form", counted)
        monkeypatch.setattr(graph, "find_shared_prefixes", kept)

    @property
    def num_shared(self) -> int:
        return sum(num for form, num in self.forms.items() if form.shares)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(monkeypatch)


def soon(engine: Engine) -> Sharing | None:
    """Sharing pays from two blocks of four tokens on, as soon as anybody reads one byte less."""
    sharing = sharing_for(engine.runner.kv_cache.spec, engine.runner.model.weights_form)
    return sharing and Sharing(sharing.bytes_per_token, sharing.block_size, 8, 1)


def engine_for(loaded: LoadedModel, capture: Replaying | None, **options: Any) -> Engine:
    sizes = {"num_blocks": 240, "block_size": 4, "max_num_seqs": 20, "max_num_batched_tokens": 96}
    engine = build_engine(EngineConfig(model="m", **(sizes | options)), loaded, None)
    engine.runner.sampler = Sampler(VOCAB_SIZE, with_kernel=True)
    if capture is not None:
        capture.serve(engine, soon(engine))
    # What stands in the cache at the beginning is nobody's, and may reach nobody.
    for layer in engine.runner.kv_cache.layers:
        layer.k.fill_(torch.nan)
        layer.v.fill_(torch.nan)
    return engine


def warm(engine: Engine) -> None:
    """Have the system prompt computed, so that those who come find it."""
    engine.add_request(SYSTEM, SamplingParams(max_tokens=1))
    while engine.has_work:
        engine.step()


def add(engine: Engine, num: int, *, common: int = 24, seed: int = 0, **options: Any) -> list[Request]:
    """Requests that begin with so many tokens of the system prompt."""
    rng = random.Random(seed)
    return [
        engine.add_request(
            SYSTEM[:common] + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 7))],
            SamplingParams(**({"max_tokens": rng.randint(6, 24), "seed": i, "ignore_eos": True} | options)),
        )
        for i in range(num)
    ]


def answers(engine: Engine, requests: list[Request]) -> list[Any]:
    while engine.has_work:
        engine.step()
        engine.scheduler.check()
    assert engine.cache.num_owned == 0
    assert not [seq.error for request in requests for seq in request.sequences if seq.error]
    return [
        (completion.token_ids, completion.finish_reason)
        for request in requests
        if request.output is not None
        for completion in request.output.outputs
    ]


# The same answer


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.9}, {"temperature": 1.0, "top_k": 9, "top_p": 0.9}], ids=str
)
def test_a_system_prompt_in_the_prefix_cache(
    loaded: LoadedModel, steps: Steps, overlap: bool, options: dict[str, Any]
) -> None:
    def run(capture: Replaying | None) -> list[Any]:
        engine = engine_for(loaded, capture, overlap=overlap)
        warm(engine)
        return answers(engine, add(engine, 20, **options))

    expected = run(None)
    assert not steps.forms
    assert run(Replaying()) == expected
    assert steps.num_shared > 5
    assert {24, 0} <= steps.found


@pytest.mark.parametrize("overlap", [False, True])
def test_many_answers_to_one_prompt(loaded: LoadedModel, steps: Steps, overlap: bool) -> None:
    def run(capture: Replaying | None) -> list[Any]:
        engine = engine_for(loaded, capture, overlap=overlap)
        return answers(engine, add(engine, 2, n=9, temperature=1.0, max_tokens=15))

    expected = run(None)
    assert len({tuple(tokens) for tokens, _ in expected}) > 10
    assert run(Replaying()) == expected
    assert steps.num_shared > 5
    assert max(steps.found) >= 24


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "limits",
    [
        {"num_blocks": 60},
        {"max_num_batched_tokens": 12},
        {"max_num_seqs": 9},
        {"block_size": 1, "num_blocks": 960},
    ],
    ids=str,
)
def test_rows_leave_and_come_and_are_preempted(
    loaded: LoadedModel, steps: Steps, overlap: bool, limits: dict[str, int]
) -> None:
    def run(capture: Replaying | None) -> list[Any]:
        engine = engine_for(loaded, capture, overlap=overlap, **limits)
        warm(engine)
        requests = add(engine, 12) + add(engine, 6, common=0, seed=1) + add(engine, 12, common=10, seed=2)
        requests += add(engine, 1, n=9, temperature=1.0, seed=3, common=17)
        found = answers(engine, requests)
        assert (engine.stats().num_preemptions > 0) == (limits.get("num_blocks") == 60)
        return found

    expected = run(None)
    assert run(Replaying()) == expected
    assert steps.num_shared > 5
    assert {form.shares for form in steps.forms} == {True, False}
    assert max(steps.found) >= 8


@pytest.mark.parametrize("seed", range(6))
def test_requests_are_aborted_in_the_middle_of_an_octet(loaded: LoadedModel, steps: Steps, seed: int) -> None:
    """Which step that is depends on when ids are read, so that the answers of the others are compared."""

    def run(capture: Replaying | None, overlap: bool) -> list[Any]:
        rng = random.Random(seed)
        engine = engine_for(loaded, capture, overlap=overlap)
        warm(engine)
        requests = add(engine, 17, seed=seed, temperature=0.8, max_tokens=22)
        doomed = rng.sample(requests, 5)
        late = []
        for round_, request in enumerate(doomed):
            for _ in range(rng.randint(1, 4)):
                engine.step()
                engine.scheduler.check()
            engine.abort(request.request_id)
            late += add(engine, round_ % 3, seed=100 + round_, common=rng.choice((0, 12, 24)))
        return answers(engine, [r for r in requests if r not in doomed] + late)

    expected = run(None, False)
    assert run(Replaying(), False) == expected
    assert steps.num_shared > 5
    assert run(Replaying(), True) == expected


# When it is taken


def test_steps_without_anything_in_common_are_plain(loaded: LoadedModel, steps: Steps) -> None:
    engine = engine_for(loaded, Replaying())
    requests = add(engine, 20, common=0)
    answers(engine, requests)
    assert steps.forms
    assert not steps.num_shared


def test_a_step_is_padded_to_a_bucket_that_shares(loaded: LoadedModel, steps: Steps) -> None:
    engine = engine_for(loaded, Replaying(), max_num_seqs=20)
    warm(engine)
    for num, bucket in ((2, 8), (8, 8), (9, 16), (17, 20)):
        steps.forms.clear()
        answers(engine, add(engine, num, max_tokens=4))
        assert {form for form in steps.forms if form.shares} == {graph.Form(bucket, True, True)}
    graphs = engine.runner._graphs
    assert graphs is not None
    assert [form for form in graphs._graphs if form.shares] == [
        (20, True, True),
        (16, True, True),
        (8, True, True),
    ]
    assert len(graphs._graphs) == 2 * len(graphs.bucket_sizes) + 3


def test_a_tiny_model_alone_is_not_worth_it(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Steps(monkeypatch)
    engine = engine_for(loaded, None)
    sharing = sharing_for(engine.runner.kv_cache.spec, engine.runner.model.weights_form)
    Replaying().serve(engine, sharing)
    warm(engine)
    answers(engine, add(engine, 20))
    assert seen.forms
    assert not seen.num_shared
    graphs = engine.runner._graphs
    assert graphs is not None
    assert not [form for form in graphs._graphs if form.shares], "a graph that is never replayed"


def test_with_a_window_in_every_layer_there_is_no_such_graph(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model = tiny_hf_model("mistral", sliding_window=8)
    loaded = load_model(saved(model, tmp_path_factory.mktemp("model")), dtype="float32")
    engine = engine_for(loaded, Replaying())
    graphs = engine.runner._graphs
    assert graphs is not None
    assert not [form for form in graphs._graphs if form.shares]


def test_when_a_cache_may_be_shared() -> None:
    spec = KVCacheSpec(num_layers=3, num_kv_heads=8, head_dim=128, dtype="bfloat16", block_size=16)
    assert sharing_for(spec, "dense") == Sharing(4096, 16)
    assert sharing_for(spec, "invariant") is None
    windows = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=8, windows=(4, None))
    assert sharing_for(windows, "float32") == Sharing(64, 16)
    assert sharing_for(KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=8, windows=(4, 9)), "dense") is None


def test_when_any_step_could_be_worth_it() -> None:
    sharing = Sharing(10, 4, 8, 1000)
    assert sharing.can_pay(9, 15)  # seven rows less of 150 bytes
    assert not sharing.can_pay(9, 14)
    assert not sharing.can_pay(7, 16)
    assert sharing.can_pay(1000, 9)
    assert not sharing.can_pay(1000, 8), "nobody has a token to itself"


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, []), (7, []), (8, [8]), (20, [8, 16, 20]), (256, [8, 16, 32, 64, 128, 256])],
)
def test_buckets(most: int, sizes: list[int]) -> None:
    assert shared_bucket_sizes(most) == sizes
    assert set(sizes) <= set(graph.bucket_sizes(most))


TABLE = np.array(
    [
        [5, 6, 7, 8, -1],
        [5, 6, 7, 9, -1],
        [5, 1, 7, 8, -1],
        [1, 2, 3, 4, 0],
        [9, -1, -1, -1, -1],
        [5, 6, 3, 2, 1],
    ],
    dtype=np.int32,
)
"""Blocks of 4 tokens."""


@pytest.mark.parametrize(
    ("rows", "saved", "order"),
    [
        ([0], 0, None),
        ([0, 1], 3, [0, 1]),  # three blocks, read once instead of twice
        ([0, 2], 0, None),  # one block is not enough
        ([1, 0, 1, 0, 1], 12, [1, 3, 0, 2, 4]),  # a step never has a row twice, but sequences may be as alike
        ([3, 3], 5, [0, 1]),  # to the end of the table
        ([4, 4], 0, None),  # no block there at all
        ([0, 5], 2, [1, 0]),
        ([0, 1, 2], 0, None),  # one that differs spoils its octet
        ([0, 1] * 4 + [1] * 4, 3 * 7 + 4 * 3, [0, 2, 4, 6, 1, 3, 5, 7, 8, 9, 10, 11]),
        ([3, 0] * 8, 7 * 5 + 7 * 4, [*range(0, 16, 2), *range(1, 16, 2)]),  # an octet each
    ],
)
def test_what_is_saved_by_hand(rows: list[int], saved: int, order: list[int] | None) -> None:
    """Tokens of 10 bytes, and two blocks are enough."""

    def found(*limits: int) -> list[int] | None:
        order = Sharing(10, 4, *limits).order(TABLE, np.array(rows, dtype=np.int64))
        return None if order is None else order.tolist()

    assert found(8, saved * 40) == order
    assert found(8, saved * 40 + 1) is None
    assert found(21, 1) is None, "longer than the table is wide"


def test_two_system_prompts_that_alternate_share_all_the_same(loaded: LoadedModel, steps: Steps) -> None:
    """An octet is of neighbours: sequences that begin alike are made such."""

    def run(capture: Replaying | None, overlap: bool) -> list[Any]:
        engine = engine_for(loaded, capture, overlap=overlap)
        systems = [SYSTEM[:24], SYSTEM[:3] + SYSTEM[12:] + SYSTEM[:8]]
        for system in systems:
            engine.add_request([*system, 1], SamplingParams(max_tokens=1))
        while engine.has_work:
            engine.step()
        params = [
            SamplingParams(max_tokens=9 + i % 5, seed=i, temperature=0.8, ignore_eos=True) for i in range(16)
        ]
        requests = [engine.add_request([*systems[i % 2], i, 5], given) for i, given in enumerate(params)]
        return answers(engine, requests)

    expected = run(None, False)
    assert len({tuple(tokens) for tokens, _ in expected}) == 16
    assert run(Replaying(), False) == expected
    assert steps.found == {24, 0}
    assert steps.num_shared > 5
    assert run(Replaying(), True) == expected
