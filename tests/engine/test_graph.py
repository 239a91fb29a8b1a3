"""Decode steps from graphs, with a stand-in for CUDA's: it runs the step again, on the same tensors."""

from __future__ import annotations

import gc
import logging
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers.graph import Replaying
from helpers.models import saved, tiny_hf_model

from octavo.config import EngineConfig
from octavo.engine.batch import BatchBuilder
from octavo.engine.build import build_engine
from octavo.engine.core import Engine
from octavo.engine.graph import BAD_LOGITS, CudaCapture, bucket_sizes, is_plain
from octavo.engine.request import Request
from octavo.engine.sampler import Sampler
from octavo.engine.sampling_plan import SamplingPlan, kernel_row
from octavo.engine.shared_prefixes import Sharing
from octavo.models.registry import LoadedModel, load_model
from octavo.sampling_params import SamplingParams

VOCAB_SIZE = 101


@pytest.fixture(scope="module", params=["qwen3", "gpt2"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    model = tiny_hf_model(request.param)
    return load_model(saved(model, tmp_path_factory.mktemp("model")), dtype="float32")


def engine_for(loaded: LoadedModel, capture: Replaying | None, **options: Any) -> Engine:
    options = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 24} | options
    engine = build_engine(EngineConfig(model="m", **options), loaded, None)
    # Filtered draws go through the tokens in another order than on a CPU.
    engine.runner.sampler = Sampler(VOCAB_SIZE, with_kernel=True)
    if capture is not None:
        capture.serve(engine)
    return engine


def requests_for(engine: Engine, options: list[dict[str, Any]], seed: int = 0) -> list[Request]:
    rng = random.Random(seed)
    return [
        engine.add_request(
            [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 20))],
            SamplingParams(**({"max_tokens": rng.randint(2, 20), "seed": i, "ignore_eos": True} | given)),
        )
        for i, given in enumerate(options)
    ]


def outputs(engine: Engine, requests: list[Request]) -> list[Any]:
    while engine.has_work:
        engine.step()
        engine.scheduler.check()
    assert engine.cache.num_owned == 0
    found = []
    for request in requests:
        assert request.output is not None
        found += [(c.token_ids, c.finish_reason, c.logprobs) for c in request.output.outputs]
    return found


PLAIN: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 5, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 0.7, "top_k": 1},
    {"n": 3, "temperature": 1.0},
    {"stop_token_ids": list(range(0, VOCAB_SIZE, 7))},
    {"ignore_eos": False},
]
OTHERS: list[dict[str, Any]] = [
    {"logprobs": 2},
    {"repetition_penalty": 1.3},
    {"min_tokens": 2},
    {"logit_bias": {5: 30.0}},
    {"allowed_token_ids": [1, 2, 3]},
]


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (6, [1, 2, 4, 6]),
        (33, [1, 2, 4, 8, 16, 24, 32, 33]),
        (256, [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256]),
    ],
)
def test_buckets(most: int, sizes: list[int]) -> None:
    assert bucket_sizes(most) == sizes


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("limits", [{}, {"num_blocks": 14}, {"max_num_seqs": 3}], ids=str)
def test_graphs_give_the_tokens_of_steps_without(
    loaded: LoadedModel, overlap: bool, limits: dict[str, int]
) -> None:
    eager = engine_for(loaded, None, **limits)
    expected = outputs(eager, requests_for(eager, PLAIN * 2))
    capture = Replaying()
    engine = engine_for(loaded, capture, overlap=overlap, **limits)
    assert outputs(engine, requests_for(engine, PLAIN * 2)) == expected
    assert capture.num_replays > 20
    assert capture.num_captures <= 2 * len(bucket_sizes(engine.scheduler.max_num_rows))
    if "num_blocks" in limits:
        assert engine.stats().num_preemptions > 0


def test_padding_writes_nowhere_and_reads_nothing(loaded: LoadedModel) -> None:
    capture = Replaying()
    engine = engine_for(loaded, capture, max_num_seqs=16)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    requests = [engine.add_request([i + 1, 1], params) for i in range(9)]
    engine.step()
    tables = [engine.cache.block_table(request.sequences[0].seq_id) for request in requests]
    owned = {block for table in tables for block in table}
    unowned = [block for block in range(64) if block not in owned]
    for layer in engine.runner.kv_cache.layers:
        layer.k[unowned] = layer.v[unowned] = torch.nan
    before = [layer.k.clone() for layer in engine.runner.kv_cache.layers]
    engine.step()
    assert capture.num_replays == 1
    for layer, old in zip(engine.runner.kv_cache.layers, before, strict=True):
        assert torch.isnan(layer.k[unowned]).all()
        written = (layer.k != old).any(dim=3).any(dim=2)[sorted(owned)]
        assert written.sum() == 9
    engine.step()
    assert engine.runner._graphs is not None
    assert engine.runner._graphs._state[:2, 9:16].tolist() == [[16] * 7, [0] * 7], "it stays where it is"
    assert not [request.sequences[0].error for request in requests if request.sequences[0].error]
    engine.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_rows_of_other_kinds_come_and_go(loaded: LoadedModel, overlap: bool) -> None:
    mixed = [options for pair in zip(PLAIN, OTHERS * 2, strict=False) for options in pair]
    eager = engine_for(loaded, None)
    expected = outputs(eager, requests_for(eager, mixed, seed=3))
    capture = Replaying()
    engine = engine_for(loaded, capture, overlap=overlap)
    assert outputs(engine, requests_for(engine, mixed, seed=3)) == expected
    assert 0 < capture.num_replays < engine.stats().num_steps


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("with_neighbour", [False, True])
def test_the_last_token_of_a_prompt_that_forks_is_no_decode_step(
    loaded: LoadedModel, overlap: bool, with_neighbour: bool
) -> None:
    def answers(capture: Replaying | None) -> list[Any]:
        engine = engine_for(
            loaded, capture, max_num_batched_tokens=16, max_prefill_share=1.0, overlap=overlap
        )
        requests = []
        if with_neighbour:
            requests.append(engine.add_request([7, 8], SamplingParams(max_tokens=20, ignore_eos=True)))
            engine.step()
        # One token is left after the chunk that takes the whole step: 16 tokens, or 15 beside the neighbour.
        prompt = list(range(16 if with_neighbour else 17))
        params = SamplingParams(max_tokens=6, n=3, temperature=1.0, seed=1, ignore_eos=True)
        requests.append(engine.add_request(prompt, params))
        return outputs(engine, requests)

    capture = Replaying()
    found = answers(capture)
    assert found == answers(None)
    assert [reason for _, reason, _ in found] == ["length"] * len(found)
    assert capture.num_replays > 3


def test_a_sequence_that_comes_back_to_another_row_keeps_its_options(loaded: LoadedModel) -> None:
    def answers(capture: Replaying | None) -> list[Any]:
        limits = {"num_blocks": 14, "max_num_batched_tokens": 12, "enable_prefix_caching": False}
        engine = engine_for(loaded, capture, **limits)
        params = SamplingParams(max_tokens=24, temperature=1.0, seed=5, ignore_eos=True)
        requests = [engine.add_request([1, 2, 3, 4], params)]
        (seq,) = requests[0].sequences
        while seq.num_tokens < 11:
            engine.step()
        row = seq.row
        # It is preempted while this prompt is computed, which leaves without a decode step in between.
        requests.append(engine.add_request([7] * 40, SamplingParams(max_tokens=1), priority=-1))
        rows = {row}
        while engine.has_work:
            engine.step()
            rows.add(seq.row)
        assert engine.stats().num_preemptions == 1
        assert len(rows - {-1}) == 2
        return outputs(engine, requests)

    assert answers(Replaying()) == answers(None)


def test_finished_requests_are_let_go_of(loaded: LoadedModel) -> None:
    def kept() -> list[str]:
        gc.collect()
        found = [thing.request_id for thing in gc.get_objects() if type(thing) is Request]
        return [name for name in found if name.startswith("mine")]

    engine = engine_for(loaded, Replaying(), overlap=True)
    params = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=5)
    for i in range(6):
        engine.add_request([i + 1, 3], params, request_id=f"mine {i}")
    engine.step()
    assert len(kept()) == 6
    outputs(engine, [])
    # The sampler keeps the sequences of its last batch, so another one follows.
    outputs(engine, [engine.add_request([9], SamplingParams(max_tokens=3, ignore_eos=True))])
    assert kept() == []


@pytest.mark.parametrize("options", PLAIN)
def test_plain_rows_are_those_the_kernel_alone_draws(options: dict[str, Any]) -> None:
    assert is_plain(SamplingParams(**options))


@pytest.mark.parametrize("options", [*OTHERS, {"presence_penalty": 0.1}, {"frequency_penalty": -0.1}])
def test_rows_that_need_more_are_not_plain(options: dict[str, Any]) -> None:
    assert not is_plain(SamplingParams(**options))


def test_a_row_is_drawn_with_what_the_sampler_would_draw_it_with() -> None:
    options = [
        *PLAIN,
        {"temperature": 1e39},
        {"top_k": 3},
        {"temperature": 0.5, "top_k": 1000, "seed": -(2**63)},
    ]
    requests = [
        Request(
            str(i),
            [1, 2],
            SamplingParams(**o),
            seeds=[o.get("seed", i)] * o.get("n", 1),
            first_seq_id=i,
            arrival=i,
        )
        for i, o in enumerate(options)
    ]
    sequences = [request.sequences[0] for request in requests]
    expected = SamplingPlan(sequences, VOCAB_SIZE, torch.device("cpu"), None).kernel_options()
    rows = [kernel_row(seq, VOCAB_SIZE) for seq in sequences]
    assert torch.equal(torch.tensor([row.temperature for row in rows]), expected["temperature"])
    assert [row.top_k for row in rows] == expected["top_k"].tolist()
    assert torch.equal(torch.tensor([row.top_p for row in rows]), expected["top_p"])
    assert torch.equal(torch.tensor([row.min_p for row in rows]), expected["min_p"])
    assert [row.seed for row in rows] == expected["seeds"].tolist()
    for seq, row in zip(sequences, rows, strict=True):
        alone = SamplingPlan([seq], VOCAB_SIZE, torch.device("cpu"), None).kernel_options()
        assert row.has_filters == (alone["top_k"] is not None)


def test_every_graph_is_made_before_requests_come_the_largest_first(
    loaded: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="octavo")
    num_captures = 0

    class Counting(Replaying):
        def __call__(self, step: Callable[[], torch.Tensor], *, is_ready: bool = False) -> Any:
            nonlocal num_captures
            num_captures += 1
            return super().__call__(step)

    engine = engine_for(loaded, Counting())
    graphs = engine.runner._graphs
    assert graphs is not None
    forms = [(rows, filters, False) for rows in (6, 4, 2, 1) for filters in (True, False)]
    assert list(graphs._graphs) == forms
    assert any(record.getMessage().startswith("8 graphs of decode steps") for record in caplog.records)
    for num_requests, options in ((1, {}), (3, {"max_tokens": 5}), (6, {"temperature": 1.0, "top_k": 3})):
        outputs(engine, requests_for(engine, [options] * num_requests))
    assert num_captures == 8


def test_bad_logits_end_their_row_alone(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(loaded, Replaying(), overlap=True)
    expected = outputs(engine, requests_for(engine, [{"max_tokens": 12}] * 3))
    compute_logits = loaded.model.compute_logits
    num_steps = 0

    def poisoned(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal num_steps
        logits = compute_logits(hidden).clone()
        num_steps += len(hidden) == 4  # three requests and one entry of padding
        if len(hidden) == 4:
            logits[3] = torch.nan
            logits[1] = torch.nan if num_steps == 5 else logits[1]
        return logits

    monkeypatch.setattr(type(loaded.model), "compute_logits", lambda self, hidden: poisoned(hidden))
    requests = requests_for(engine, [{"max_tokens": 12}] * 3)
    found = outputs(engine, requests)
    assert [found[0], found[2]] == [expected[0], expected[2]]
    tokens, reason, _ = found[1]
    assert reason == "error"
    assert 4 <= len(tokens) < 12
    assert tokens == expected[1][0][: len(tokens)]
    assert requests[1].output is not None
    assert requests[1].output.error == BAD_LOGITS


def test_without_graphs_where_they_cannot_be_had(
    loaded: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    def refusing(step: Callable[[], torch.Tensor], **_: bool) -> Any:
        raise torch.OutOfMemoryError("no room")

    eager = engine_for(loaded, None)
    expected = outputs(eager, requests_for(eager, PLAIN))
    engine = engine_for(loaded, None)
    engine.runner.use_graphs(64, refusing)
    assert outputs(engine, requests_for(engine, PLAIN)) == expected
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [
        "no CUDA graph for 6 rows (OutOfMemoryError: no room); steps are launched one kernel at a time"
    ]


def test_graphs_that_were_made_before_one_fails_are_let_go_of(
    loaded: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="octavo")
    made: list[weakref.ref[Any]] = []

    class HalfWay(Replaying):
        def __call__(self, step: Callable[[], torch.Tensor], *, is_ready: bool = False) -> Any:
            if self.num_captures == 3:
                made.append(weakref.ref(self))
                raise torch.OutOfMemoryError("no room")
            replay, result = super().__call__(step)
            made.extend((weakref.ref(replay), weakref.ref(result)))
            return replay, result

    eager = engine_for(loaded, None)
    expected = outputs(eager, requests_for(eager, PLAIN))
    engine = engine_for(loaded, None)
    caplog.clear()
    engine.runner.use_graphs(64, HalfWay())
    assert len(made) == 7, "the fourth failed, and no other was tried"
    assert [ref() for ref in made] == [None] * 7
    assert [record.getMessage() for record in caplog.records] == [
        "no CUDA graph for 4 rows (OutOfMemoryError: no room); steps are launched one kernel at a time"
    ]
    assert outputs(engine, requests_for(engine, PLAIN)) == expected


@pytest.mark.parametrize(("must_share", "level"), [(False, logging.INFO), (True, logging.WARNING)])
def test_without_those_that_share_the_others_serve(
    loaded: LoadedModel, caplog: pytest.LogCaptureFixture, must_share: bool, level: int
) -> None:
    made: list[weakref.ref[Any]] = []

    class AllButTheLast(Replaying):
        def __call__(self, step: Callable[[], torch.Tensor], *, is_ready: bool = False) -> Any:
            if self.num_captures == 11:
                raise torch.OutOfMemoryError("no room")
            replay, result = super().__call__(step)
            made.append(weakref.ref(replay))
            return replay, result

    def prompts(engine: Engine) -> list[Request]:
        params = SamplingParams(max_tokens=9, ignore_eos=True, n=9, temperature=1.0, seed=3)
        return [engine.add_request(list(range(20)), params)]

    eager = engine_for(loaded, None, max_num_seqs=9)
    expected = outputs(eager, prompts(eager))
    engine = engine_for(loaded, None, max_num_seqs=9)
    caplog.set_level(logging.INFO, logger="octavo")
    caplog.clear()
    capture = AllButTheLast()
    capture.serve(engine, Sharing(1, 4, 8, 1), must_share=must_share)
    assert [(record.levelno, record.getMessage()) for record in caplog.records[:-1]] == [
        (
            level,
            "no CUDA graph for 8 rows that share keys (OutOfMemoryError: no room); "
            "cascade_attention has no effect",
        )
    ]
    assert caplog.records[-1].getMessage().startswith("10 graphs of decode steps captured")
    assert [ref() is not None for ref in made] == [True] * 10 + [False]
    graphs = engine.runner._graphs
    assert graphs is not None
    forms = [(rows, filters, False) for rows in (9, 8, 4, 2, 1) for filters in (True, False)]
    assert list(graphs._graphs) == forms
    assert outputs(engine, prompts(engine)) == expected
    assert capture.num_replays > 5


def test_changes_bring_a_copy_of_the_table_up_to_date() -> None:
    rng = random.Random(0)
    tables: dict[int, list[int]] = {}
    batches = BatchBuilder(lambda seq_id: tables[seq_id], num_rows=4, max_blocks_per_row=6, block_size=4)
    assert batches.track_changes() == 6
    copy = torch.full((5, 6), -1, dtype=torch.int32)
    batches.update(copy)
    assert bool((copy == -1).all())
    sequences = []
    for i in range(4):
        request = Request(str(i), [1], SamplingParams(), seeds=[0], first_seq_id=i, arrival=i)
        request.sequences[0].row = i
        sequences += request.sequences
        tables[i] = []
    for _ in range(200):
        for seq in rng.sample(sequences, 2):
            table = tables[seq.seq_id]
            if len(table) == 6 or rng.random() < 0.2:  # its row begins again, with another sequence's blocks
                tables[seq.seq_id] = [rng.randrange(100) for _ in range(rng.randint(1, 3))]
                seq.num_synced_blocks = 0
            else:
                table.append(rng.randrange(100))
            seq.num_covered_tokens = 4 * len(tables[seq.seq_id])
        batches.sync_rows(sequences)
        if rng.random() < 0.5:
            batches.update(copy)
            for seq in sequences:
                table = tables[seq.seq_id]
                assert copy[seq.row, : len(table)].tolist() == table


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_changes_that_did_not_arrive_are_sent_again(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = {0: [5, 3], 1: [8]}
    batches = BatchBuilder(lambda seq_id: tables[seq_id], num_rows=2, max_blocks_per_row=3, block_size=4)
    batches.track_changes()
    copy = torch.full((2, 3), -1, dtype=torch.int32)
    for i, table in tables.items():
        (seq,) = Request(str(i), [1], SamplingParams(), seeds=[0], first_seq_id=i, arrival=i).sequences
        seq.row, seq.num_covered_tokens = i, 4 * len(table)
        batches.sync_rows([seq])

    def broken(*arguments: object) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "index_copy_", broken)
        with pytest.raises(error):
            batches.update(copy)
    batches.update(copy)
    assert copy.tolist() == [[5, 3, -1], [8, -1, -1]]


def test_a_step_is_tried_once_for_each_bucket_and_for_each_kind(loaded: LoadedModel) -> None:
    tried: list[int] = []

    class Telling(Replaying):
        def __call__(self, step: Callable[[], torch.Tensor], *, is_ready: bool = False) -> Any:
            if not is_ready:
                tried.append(self.num_captures)
            return super().__call__(step)

    engine = engine_for(loaded, None, max_num_seqs=17, max_num_batched_tokens=20)
    capture = Telling()
    capture.serve(engine, Sharing(1, 4, 8, 1))
    graphs = engine.runner._graphs
    assert graphs is not None
    forms = [(rows, filters, False) for rows in (17, 16, 8, 4, 2, 1) for filters in (True, False)]
    forms += [(rows, True, True) for rows in (17, 16, 8)]
    assert list(graphs._graphs) == forms
    once = [(rows, True, False) for rows in (17, 16, 8, 4, 2, 1)] + [(17, False, False), (17, True, True)]
    assert [forms[i] for i in tried] == sorted(once, key=forms.index)


class Cuda:
    """Stands in for the part of `torch.cuda` that captures: streams are names, and what happens is noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, breaks_off: bool = False) -> None:
        self.current, self.seen = "the engine's", list[str]()
        cuda = self

        class Stream(str):
            def wait_stream(self, other: str) -> None:
                cuda.seen.append(f"{self} waits for {other}")

        class Graph:
            def capture_begin(self, pool: object) -> None:
                cuda.seen.append(f"capture on {cuda.current} into {pool}")

            def capture_end(self) -> None:
                cuda.seen.append("end")
                if breaks_off:
                    raise RuntimeError("the capture is void")

            def pool(self) -> str:
                return "the pool"

            def replay(self) -> None: ...

        played: dict[str, Any] = {"Stream": lambda device: Stream("its own"), "stream": self.stream}
        played |= {"CUDAGraph": Graph, "current_stream": lambda device: Stream(self.current)}
        played |= {"synchronize": lambda device: self.seen.append("wait")}
        played |= {"empty_cache": lambda: self.seen.append("give back")}
        for name, value in played.items():
            monkeypatch.setattr(torch.cuda, name, value)

    @contextmanager
    def stream(self, wanted: str) -> Iterator[None]:
        before, self.current = self.current, wanted
        try:
            yield
        finally:
            self.current = before

    def step(self) -> torch.Tensor:
        self.seen.append(f"step on {self.current}")
        return torch.zeros(1)


def test_the_first_capture_makes_room_and_others_add_no_more_than_a_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = Cuda(monkeypatch)
    capture = CudaCapture(torch.device("cuda"))
    seen = []
    for is_ready in (True, True, False):
        capture(cuda.step, is_ready=is_ready)
        seen.append(cuda.seen)
        cuda.seen = []
    first = ["its own waits for the engine's", "step on its own", "the engine's waits for its own"]
    captured = ["step on its own", "end"]
    assert seen[0] == [*first, "wait", "give back", "capture on its own into None", *captured]
    assert seen[1] == ["capture on its own into the pool", *captured]
    assert seen[2] == ["step on the engine's", "capture on its own into the pool", *captured]
    assert cuda.current == "the engine's"


def test_a_capture_that_breaks_off_leaves_the_stream_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch, breaks_off=True)
    with pytest.raises(RuntimeError, match="the capture is void"):
        CudaCapture(torch.device("cuda"))(cuda.step)
    assert [what for what in cuda.seen if "step" in what] == ["step on its own", "step on its own"]
    assert cuda.current == "the engine's"
