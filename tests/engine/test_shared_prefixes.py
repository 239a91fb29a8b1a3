"""Decode steps that read common keys once for eight sequences: when they are taken, and what they answer."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from helpers.attention_cases import prepare
from helpers.graph import Replaying
from helpers.models import saved, tiny_hf_model
from helpers.shared_prefixes import attended, decode

from octavo.cache.spec import KVCacheSpec
from octavo.cache.storage import storage_dtype
from octavo.config import EngineConfig
from octavo.engine import graph
from octavo.engine.build import build_engine
from octavo.engine.core import Engine
from octavo.engine.request import Request
from octavo.engine.sampler import Sampler
from octavo.engine.shared_prefixes import Sharing, parts_bytes, sharing_for
from octavo.kernels import shared_prefixes
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


def sharing_of(engine: Engine) -> Sharing | None:
    spec = engine.runner.kv_cache.spec
    return sharing_for(spec, engine.runner.model.weights_form, spec.num_kv_heads, torch.float32)


def soon(engine: Engine) -> Sharing | None:
    """Sharing pays from two blocks of four tokens on, as soon as anybody reads one byte less."""
    sharing = sharing_of(engine)
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
    # After the others, so that these do not pay for what they take.
    assert list(graphs._graphs)[-3:] == [(20, True, True), (16, True, True), (8, True, True)]
    assert len(graphs._graphs) == 2 * len(graphs.bucket_sizes) + 3


def test_a_tiny_model_alone_is_not_worth_it(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Steps(monkeypatch)
    engine = engine_for(loaded, None)
    Replaying().serve(engine, sharing_of(engine))
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
    assert sharing_for(spec, "dense", 32, torch.bfloat16) == Sharing(4096, 16, group=4, rows_at_once=64)
    assert sharing_for(spec, "invariant", 32, torch.bfloat16) is None
    windows = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=8, windows=(4, None))
    assert sharing_for(windows, "float32", 2, torch.float32) == Sharing(64, 16, group=2, rows_at_once=16)
    everywhere = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=8, windows=(4, 9))
    assert sharing_for(everywhere, "dense", 2, torch.bfloat16) is None


@pytest.mark.parametrize("group", [1, 2, 7, 8, 9, 16, 71])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [("bfloat16", "bfloat16"), ("bfloat16", "float8_e4m3"), ("bfloat16", "float32"), ("float32", "float32")],
)
def test_an_octet_reads_its_keys_once_for_each_tile_of_the_kernel(
    group: int, head_dim: int, dtype: str, cache_dtype: str
) -> None:
    decode_parameters = pytest.importorskip("octavo.kernels.triton.decode_parameters")
    spec = KVCacheSpec(num_layers=1, num_kv_heads=2, head_dim=head_dim, dtype=cache_dtype)
    q = torch.empty((20, 2 * group, head_dim), dtype=getattr(torch, dtype))
    k = torch.empty((1, 16, 2, head_dim), dtype=storage_dtype(spec))
    tile = decode_parameters.query_rows({"q": q, "k": k, "GROUP": group, "HEAD_DIM": head_dim}, 8)
    sharing = sharing_for(spec, "dense", 2 * group, q.dtype)
    assert sharing is not None
    spared = [max(0, num - -(-num * group // tile)) for num in (8, 8, 4)]
    assert sharing._spared(20).tolist() == spared


def test_when_any_step_could_be_worth_it() -> None:
    sharing = Sharing(10, 4, 8, 1000)
    assert sharing.can_pay(9, 15)  # seven rows less of 150 bytes
    assert not sharing.can_pay(9, 14)
    assert not sharing.can_pay(7, 16)
    assert sharing.can_pay(1000, 9)
    assert not sharing.can_pay(1000, 8), "nobody has a token to itself"
    wide = Sharing(10, 4, 8, 1000, group=16, rows_at_once=64)
    assert wide.can_pay(9, 17)  # two tiles of rows: six rows less of 170 bytes
    assert not wide.can_pay(9, 16)


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
        ([0, 1] * 4 + [1] * 4, 7 * 4 + 3 * 4, [1, 3, 5, 7, 8, 9, 10, 11, 0, 2, 4, 6]),
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


def rows_of(*groups: tuple[int, int]) -> npt.NDArray[np.int32]:
    """A table of 8 blocks a row: in each group so many rows, of which so many leading blocks are common."""
    tables: list[list[int]] = []
    for num_rows, num_common in groups:
        first = 1000 * (1 + len(tables))
        tables += [
            [first + c if c < num_common else first + 10 * (1 + i) + c for c in range(8)]
            for i in range(num_rows)
        ]
    return np.array(tables, dtype=np.int32)


def alone(num: int) -> list[tuple[int, int]]:
    return [(1, 0)] * num


def saved_by(table: npt.NDArray[np.int32], order: npt.NDArray[np.int64], group: int, at_once: int) -> int:
    """Blocks that octets of that order need not read, in plain Python; two common blocks are the least."""
    rows, saved = table[order].tolist(), 0
    for first in range(0, len(rows), 8):
        octet = rows[first : first + 8]
        columns = [{*blocks} for blocks in zip(*octet, strict=True)]
        num = next((c for c, blocks in enumerate(columns) if len(blocks) > 1 or -1 in blocks), len(columns))
        spared = len(octet) - -(-len(octet) * group // at_once)
        saved += max(0, spared) * num if num > 1 else 0
    return saved


@pytest.mark.parametrize(
    ("groups", "saved"),
    [
        *(([*alone(k), (8, 6), *alone(8 - k)], 7 * 6) for k in range(8)),
        ([(9, 6)] * 8, 8 * 7 * 6),
        ([(12, 6)] * 8, 8 * 7 * 6),
        ([(12, 6)], 7 * 6 + 3 * 6),
        ([(12, 6), (9, 5), (13, 4)], 7 * 15 + 1 * 4),  # two left in the end, of the five of the last group
        ([(4, 6)] * 2, 0),
        ([(6, 6)] * 4, 0),
        ([(5, 6), *alone(8)], 4 * 6),  # the last octet is not whole, and goes to those that are alike
        ([(8, 2), *alone(3), (3, 6), *alone(2)], 7 * 2),
        ([(8, 1), (8, 2)], 7 * 2),  # one block is not enough
    ],
    ids=str,
)
def test_octets_are_of_sequences_that_begin_alike(groups: list[tuple[int, int]], saved: int) -> None:
    table = rows_of(*groups)
    rows = np.arange(len(table))
    order = Sharing(1, 4, 8, 1).order(table, rows)
    assert (0 if order is None else saved_by(table, order, 1, 64)) == saved
    if order is not None:
        assert sorted(order.tolist()) == rows.tolist()
        assert Sharing(1, 4, 8, saved * 4).order(table, rows) is not None
        assert Sharing(1, 4, 8, saved * 4 + 1).order(table, rows) is None


def test_those_alike_for_longest_have_octets_of_their_own() -> None:
    table = rows_of((5, 3), (8, 7), (3, 3))
    table[:, :3] = [7, 8, 9]
    order = Sharing(1, 4, 8, 1).order(table, np.arange(16))
    assert order is not None
    assert saved_by(table, order, 1, 64) == 7 * 7 + 7 * 3


def test_many_query_heads_of_a_kv_head_spare_less() -> None:
    """Eight entries of 16 heads are two tiles of 64 rows, and four are one."""
    table, rows = rows_of((12, 6)), np.arange(12)
    saved = (8 - 2) * 6 + (4 - 1) * 6
    assert Sharing(1, 4, 8, saved * 4, 16, 64).order(table, rows) is not None
    assert Sharing(1, 4, 8, saved * 4 + 1, 16, 64).order(table, rows) is None
    assert Sharing(1, 4, 8, 1, 64, 64).order(table, rows) is None, "a tile for each entry, as ever"


@pytest.mark.parametrize("seed", range(40))
def test_what_pays_is_counted_to_the_block(seed: int) -> None:
    rng = random.Random(seed)
    group, at_once = rng.choice([(1, 64), (16, 64), (8, 16)])
    ids = iter(rng.sample(range(10_000), 10_000))

    def begun(table: list[int], num_rows: int) -> list[list[int]]:
        """So many rows that go on from there: all alike for a while, then each part of them."""
        table = table + [next(ids) for _ in range(rng.randint(1, 6))]
        if num_rows == 1 or len(table) > 18:
            return [(table + [next(ids)] * (i > 0))[:20] for i in range(num_rows)]
        cuts = sorted(rng.sample(range(1, num_rows), rng.randint(0, min(2, num_rows - 1))))
        parts = [b - a for a, b in zip([0, *cuts], [*cuts, num_rows], strict=True)]
        return [row for part in parts for row in begun(table, part)]

    tables = [row for _ in range(rng.randint(1, 4)) for row in begun([], rng.randint(1, 30))]
    rng.shuffle(tables)
    tables = [row + [-1] * (20 - len(row)) for row in tables]
    table, rows = np.array(tables, dtype=np.int32), np.arange(len(tables))
    order = Sharing(1, 4, 8, 1, group, at_once).order(table, rows)
    if order is None:
        return
    assert sorted(order.tolist()) == rows.tolist()
    saved = 4 * saved_by(table, order, group, at_once)
    assert saved > 0
    assert Sharing(1, 4, 8, saved, group, at_once).order(table, rows) is not None
    assert Sharing(1, 4, 8, saved + 1, group, at_once).order(table, rows) is None


def test_bad_logits_end_the_sequence_that_the_entry_was(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries in an order of their own, and one with NaN among them."""
    systems = [SYSTEM[:24], SYSTEM[:3] + SYSTEM[12:] + SYSTEM[:8]]
    orders: list[list[int]] = []
    order_of = Sharing.order

    def noted(*arguments: Any) -> Any:
        order = order_of(*arguments)
        if order is not None:
            orders.append(order.tolist())
        return order

    monkeypatch.setattr(Sharing, "order", noted)

    def run() -> list[Request]:
        engine = engine_for(loaded, Replaying(), overlap=True)
        for system in systems:
            engine.add_request([*system, 1], SamplingParams(max_tokens=1))
        while engine.has_work:
            engine.step()
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        requests = [engine.add_request([*systems[i % 2], i, 5], params) for i in range(16)]
        orders.clear()
        for _ in range(60):
            engine.step()
        assert not engine.has_work
        return requests

    expected = run()
    compute_logits, num_steps = loaded.model.compute_logits, 0

    def poisoned(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal num_steps
        logits = compute_logits(hidden).clone()
        if len(hidden) == 16 and orders:
            num_steps += 1
            if num_steps == 5:
                logits[3] = torch.nan
        return logits

    monkeypatch.setattr(type(loaded.model), "compute_logits", lambda self, hidden: poisoned(hidden))
    found = run()
    order = orders[0]
    assert len({3, order[3], order.index(3)}) == 3
    errors = {i: request.sequences[0].error for i, request in enumerate(found) if request.sequences[0].error}
    assert errors == {order[3]: graph.BAD_LOGITS}
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        tokens, whole = one.sequences[0].output_token_ids, other.sequences[0].output_token_ids
        assert tokens == (whole[: len(tokens)] if i in errors else whole)


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


def test_memory_is_reckoned_for_what_the_two_parts_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[torch.Tensor] = []
    attend_part = shared_prefixes.attend_part

    def kept(*arguments: Any) -> Any:
        out, lse, kernel = attend_part(*arguments)
        held.extend((out, lse))
        return out, lse, kernel

    monkeypatch.setattr(shared_prefixes, "attend_part", kept)
    inputs = prepare(decode(*(70 + b for b in range(11)), dtype=torch.bfloat16), "cpu", share=4)
    attended(inputs, 16)
    assert len(held) == 4
    assert sum(part.nbytes for part in held) == parts_bytes(*inputs.arguments["q"].shape)
