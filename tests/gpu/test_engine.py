"""The engine on a GPU: Transformers' tokens in float32, one answer however it runs, nothing compiled late."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from helpers.models import PagedDriver, hf_logits, random_ids, saved, tiny_hf_model

from octavo import SamplingParams
from octavo.config import EngineConfig
from octavo.engine.build import build_engine
from octavo.engine.core import Engine
from octavo.engine.request import Request
from octavo.kernels import backend
from octavo.kernels.triton.monitor import forbid_compiles
from octavo.models.registry import LoadedModel, load_model

VOCAB_SIZE = 503
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64},
    "qwen3": {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128},
    "mistral": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 16},
}
EXTRA: dict[str, dict[str, Any]] = {"mistral": {"sliding_window": 20}}
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", params=SHAPES)
def model_type(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def oracle(model_type: str) -> Any:
    """A random Transformers model in float32, on the GPU."""
    sizes = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 512, "intermediate_size": 256}
    model = tiny_hf_model(model_type, **SHAPES[model_type], **EXTRA.get(model_type, {}), **sizes)
    assert torch.get_float32_matmul_precision() == "highest"
    return model.to("cuda")


@pytest.fixture(scope="module")
def folder(oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(oracle, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def loaded(folder: str) -> LoadedModel:
    return load_model(folder, device="cuda", dtype="float32")


@pytest.fixture(scope="module")
def low(folder: str) -> LoadedModel:
    return load_model(folder, device="cuda", dtype="bfloat16")


def engine_for(loaded: LoadedModel, **options: Any) -> Engine:
    options = {"num_blocks": 256, "max_num_seqs": 16, "max_num_batched_tokens": 256} | options
    return build_engine(EngineConfig(model="m", **options), loaded, None)


@pytest.fixture(scope="module")
def plain(loaded: LoadedModel) -> Iterator[Engine]:
    """One step after the other, kernel by kernel: what other ways to run are held against."""
    made = engine_for(loaded, overlap=False, enforce_eager=True)
    yield made
    made.close()


@pytest.fixture
def engine(loaded: LoadedModel) -> Iterator[Callable[..., Engine]]:
    """Makes engines over the float32 model; they are closed afterwards."""
    made: list[Engine] = []

    def make(**options: Any) -> Engine:
        made.append(engine_for(loaded, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def prompts() -> list[list[int]]:
    """Prompts of 1 to 150 tokens, of which the longer ones begin alike."""
    start = random_ids(100, VOCAB_SIZE)
    lengths = [1, 2, 7, 8, 9, 16, 17, 33]
    short = [random_ids(length, VOCAB_SIZE, seed=length) for length in lengths]
    return short + [start + random_ids(length, VOCAB_SIZE, seed=length) for length in (1, 20, 50)]


def run(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    requests = [engine.add_request(prompt, params) for prompt in prompts]
    return finish(engine, requests)


def finish(engine: Engine, requests: list[Request]) -> list[list[int]]:
    while engine.has_work:
        engine.step()
    engine.scheduler.check()
    assert engine.cache.num_owned == 0
    assert not [seq.error for request in requests for seq in request.sequences if seq.error]
    return [seq.output_token_ids for request in requests for seq in request.sequences]


def greedy_choices(oracle: Any, prompt: list[int], output: list[int]) -> list[int]:
    """What Transformers chooses at every position of `output`, given what stands before it."""
    logits = hf_logits(oracle, prompt + output)
    choices: list[int] = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    return choices


# Against Transformers


def test_logits_are_those_of_transformers(oracle: Any, loaded: LoadedModel) -> None:
    ids = random_ids(90, VOCAB_SIZE)
    expected = hf_logits(oracle, ids)
    driver = PagedDriver(loaded, block_size=16)
    found = [driver.step({"a": ids[:50]})["a"]]
    beside = driver.step({"b": ids[:30], "a": ids[50:70]})
    found += [beside["a"]] + [driver.step({"a": ids[i : i + 1]})["a"] for i in range(70, 90)]
    torch.testing.assert_close(torch.cat(found), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(beside["b"], expected[:30], rtol=0, atol=1e-4)


def test_greedy_tokens_are_those_of_transformers(oracle: Any, engine: Callable[..., Engine]) -> None:
    found = run(engine(), prompts())
    assert [len(output) for output in found] == [24] * len(prompts())
    assert len({token for output in found for token in output}) > 50
    for prompt, output in zip(prompts(), found, strict=True):
        assert output == greedy_choices(oracle, prompt, output)


@pytest.mark.parametrize("block_size", [1, 4, 32])
def test_other_block_sizes(plain: Engine, engine: Callable[..., Engine], block_size: int) -> None:
    other = engine(block_size=block_size, num_blocks=4096 // block_size)
    assert run(other, prompts()) == run(plain, prompts())


def test_log_probabilities_are_those_of_transformers(oracle: Any, engine: Callable[..., Engine]) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    with_logprobs = engine()
    request = with_logprobs.add_request(prompts()[-1], params)
    (output,) = finish(with_logprobs, [request])
    expected = hf_logits(oracle, prompts()[-1] + output).log_softmax(-1)
    assert request.prompt_logprobs is not None
    found = [*request.prompt_logprobs[1:], *(request.sequences[0].logprobs or [])]
    tokens = [*prompts()[-1][1:], *output]
    assert len(found) == len(tokens)
    for position, (entries, token) in enumerate(zip(found, tokens, strict=True)):
        assert entries is not None
        assert token in entries
        for id_, logprob in entries.items():
            assert logprob.logprob == pytest.approx(float(expected[position, id_]), abs=2e-4)


# The same answer


def test_alone_or_together_chunked_or_whole_cold_or_warm(engine: Callable[..., Engine]) -> None:
    solo = engine(enable_prefix_caching=False)
    expected = [run(solo, [prompt])[0] for prompt in prompts()]
    warm = engine()
    assert run(warm, prompts()) == expected
    assert run(warm, prompts()) == expected
    assert warm.stats().num_hit_tokens > 300
    assert run(engine(max_num_batched_tokens=24), prompts()) == expected


WAYS: list[dict[str, Any]] = [
    {"overlap": True, "run_ahead": 1, "enforce_eager": True},
    {"overlap": True, "run_ahead": 4, "enforce_eager": True},
    {"overlap": False},
    {"overlap": True, "run_ahead": 4},
]


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_launched_ahead_or_from_graphs(
    plain: Engine, engine: Callable[..., Engine], options: dict[str, Any]
) -> None:
    drawn = SamplingParams(temperature=0.8, top_k=30, top_p=0.9, seed=3, max_tokens=24, ignore_eos=True)
    with_logprobs = SamplingParams(logprobs=2, max_tokens=24, ignore_eos=True)
    stopping = SamplingParams(max_tokens=24, stop_token_ids=list(range(0, VOCAB_SIZE, 9)), n=2)
    kinds = (GREEDY, drawn, with_logprobs, stopping)
    other = engine(**options)
    for params in kinds:
        assert run(other, prompts(), params) == run(plain, prompts(), params)
    requests = [other.add_request(prompt, kinds[i % 4]) for i, prompt in enumerate(prompts())]
    expected = [plain.add_request(prompt, kinds[i % 4]) for i, prompt in enumerate(prompts())]
    assert finish(other, requests) == finish(plain, expected)


def test_steps_with_prompts_come_from_graphs(plain: Engine, engine: Callable[..., Engine]) -> None:
    other = engine(num_blocks=512)
    mixed = other.runner._mixed
    assert mixed is not None
    sizes: list[tuple[int, int]] = []
    replay = mixed.replay

    def replaying(batch: Any) -> torch.Tensor:
        sizes.append((len(batch.input_ids), len(batch.logits_rows)))
        return replay(batch)

    vars(mixed)["replay"] = replaying
    kinds = (
        GREEDY,
        SamplingParams(temperature=0.8, top_k=30, seed=3, max_tokens=24, ignore_eos=True),
        SamplingParams(logprobs=2, prompt_logprobs=1, max_tokens=24, ignore_eos=True),
        SamplingParams(repetition_penalty=1.2, max_tokens=24, ignore_eos=True),
        SamplingParams(n=2, temperature=1.0, seed=4, max_tokens=24, ignore_eos=True),
    )
    found = []
    for one in (plain, other):
        requests = []
        for i, prompt in enumerate([*prompts(), *prompts()]):
            requests.append(one.add_request(prompt, kinds[i % len(kinds)]))
            one.step()  # what came before decodes beside the next prompt
        found.append(finish(one, requests))
    del vars(mixed)["replay"]
    assert found[1] == found[0]
    assert {bucket for bucket, _ in sizes} >= {16, 64, 128}
    assert max(num_sampled for _, num_sampled in sizes) > 8


def test_hidden_states_of_a_graph_are_those_of_launched_kernels(low: LoadedModel) -> None:
    """In bfloat16, where prompts have kernels that float32 has not; as close as other products are."""
    params = SamplingParams(max_tokens=1, logprobs=5)
    answers = []
    for options in ({"enforce_eager": True}, {}):
        one = engine_for(low, enable_prefix_caching=False, **options)
        requests = [one.add_request(prompt, params) for prompt in prompts()[-3:]]
        finish(one, requests)
        answers.append([request.sequences[0].logprobs for request in requests])
        assert (one.runner._mixed is None) == one.config.enforce_eager
        one.close()
    for expected, found in zip(*answers, strict=True):
        (before,), (after,) = expected or [], found or []
        common = before.keys() & after.keys()
        assert len(common) >= 3
        for token in common:
            assert after[token].logprob == pytest.approx(before[token].logprob, abs=0.1)


def test_graphs_once_captured_serve_without_another_compile_or_capture(engine: Callable[..., Engine]) -> None:
    ready = engine()
    run(ready, prompts())
    graphs = ready.runner._graphs
    assert graphs is not None
    mixed = ready.runner._mixed
    assert mixed is not None
    captured = set(graphs._graphs), set(mixed._graphs)
    assert min(map(len, captured)) > 2
    with forbid_compiles():
        run(ready, prompts())
        run(ready, prompts(), SamplingParams(max_tokens=8, logprobs=1))
    assert (set(graphs._graphs), set(mixed._graphs)) == captured


def test_preempted(plain: Engine, engine: Callable[..., Engine]) -> None:
    scarce = engine(num_blocks=24)
    assert run(scarce, prompts()) == run(plain, prompts())
    assert scarce.stats().num_preemptions > 0


def test_forked(engine: Callable[..., Engine]) -> None:
    forked = engine(max_num_seqs=4)
    (alone,) = run(forked, [prompts()[3]])
    three = run(forked, [prompts()[3]], SamplingParams(n=3, max_tokens=24, ignore_eos=True))
    assert three == [alone] * 3


def test_a_seeded_draw_does_not_depend_on_its_neighbours(engine: Callable[..., Engine]) -> None:
    drawing = engine()
    params = SamplingParams(temperature=1.0, top_k=40, top_p=0.95, seed=5, max_tokens=24, ignore_eos=True)
    (alone,) = run(drawing, [prompts()[4]], params)
    requests = [drawing.add_request(prompt, GREEDY) for prompt in prompts()]
    requests.insert(3, drawing.add_request(prompts()[4], params))
    assert finish(drawing, requests)[3] == alone
    assert run(drawing, [prompts()[4]]) != [alone]


# Other dtypes


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).square().mean().sqrt() / expected.std())


def test_bfloat16_is_close_to_float32(oracle: Any, low: LoadedModel) -> None:
    ids = random_ids(90, VOCAB_SIZE)
    found = PagedDriver(low, block_size=16).step({"a": ids})["a"]
    assert 0 < relative_error(found, hf_logits(oracle, ids)) < 0.05
    assert len(run(engine_for(low), prompts())) == len(prompts())


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_a_quantised_cache_costs_what_its_rounding_costs(low: LoadedModel, kv_cache_dtype: str) -> None:
    ids = random_ids(90, VOCAB_SIZE)
    dtype = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}[kv_cache_dtype]

    def logits(room: str, kv_cache_dtype: torch.dtype | None) -> torch.Tensor:
        driver = PagedDriver(low, block_size=16, kv_cache_dtype=kv_cache_dtype)
        with backend.use(room):
            return torch.cat([driver.step({"a": part})["a"] for part in (ids[:60], *([i] for i in ids[60:]))])

    exact = logits("auto", None)
    # The same rounding of K and V, in plain torch: what is more than that would be the kernels' own.
    cost = relative_error(logits("reference", dtype), exact)
    assert 0 < relative_error(logits("auto", dtype), exact) < 1.25 * cost
    # Without hits, which would have the same tokens computed in other chunks and rounded in other ways.
    quantised, plain = (
        engine_for(low, kv_cache_dtype=name, enable_prefix_caching=False) for name in (kv_cache_dtype, "auto")
    )
    assert quantised.runner.kv_cache.nbytes < 0.66 * plain.runner.kv_cache.nbytes
    expected_ids, found_ids = run(plain, prompts()), run(quantised, prompts())
    same = sum(a[0] == b[0] for a, b in zip(expected_ids, found_ids, strict=True))
    assert same >= len(prompts()) // 2
    assert run(quantised, prompts()) == found_ids


# What a step may and may not do


def test_no_request_waits_for_a_compiler(engine: Callable[..., Engine]) -> None:
    ready = engine(max_num_batched_tokens=128)
    drawn = SamplingParams(temperature=0.7, top_p=0.9, top_k=50, min_p=0.01, max_tokens=20, ignore_eos=True)
    with forbid_compiles():
        for batch in (prompts()[:1], prompts()[:5], prompts()):
            assert [len(ids) for ids in run(ready, batch)] == [GREEDY.max_tokens] * len(batch)
            assert [len(ids) for ids in run(ready, batch, drawn)] == [20] * len(batch)


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=0.8, top_p=0.9, top_k=50, max_tokens=8, ignore_eos=True),
        SamplingParams(n=3, max_tokens=8, ignore_eos=True),  # their first writes copy blocks
    ],
    ids=["greedy", "drawn", "forked"],
)
def test_a_launch_never_waits_for_the_device(
    engine: Callable[..., Engine], params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = engine()
    run(watched, prompts()[:4], params)
    launch = watched.runner.launch
    num_launches = 0

    def launching(plan: Any) -> Any:
        nonlocal num_launches
        num_launches += 1
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(watched.runner, "launch", launching)
    run(watched, prompts()[4:8], params)
    assert num_launches > 5


# Deterministic mode


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_a_deterministic_engine_has_the_same_bits_however_a_request_runs(
    folder: str, kv_cache_dtype: str
) -> None:
    model = load_model(folder, device="cuda", dtype="bfloat16", deterministic=True)
    with_logprobs = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=3)

    def make(**options: Any) -> Engine:
        return engine_for(model, deterministic=True, kv_cache_dtype=kv_cache_dtype, **options)

    def answers(engine: Engine, prompts: Sequence[Sequence[int]], salt: str = "") -> list[Any]:
        requests = [engine.add_request(prompt, with_logprobs, cache_salt=salt) for prompt in prompts]
        finish(engine, requests)
        # Log probabilities are float64 of the logits: equal ones come of equal bits.
        return [(r.output.token_ids, r.output.logprobs) for r in requests if r.output is not None]

    # Under a salt of its own nothing that ran before is in the cache.
    usual = make()
    together = answers(usual, prompts())
    assert len(together) == len(prompts())
    num_hits = usual.stats().num_hit_tokens
    for i, (prompt, expected) in enumerate(zip(prompts(), together, strict=True)):
        assert answers(usual, [prompt], f"alone {i}") == [expected]
    assert usual.stats().num_hit_tokens == num_hits
    assert answers(usual, list(reversed(prompts())), "reversed") == list(reversed(together))
    assert answers(usual, prompts()) == together, "from the cache"
    # Decode steps without log probabilities come from graphs.
    assert run(usual, prompts()) == [ids for ids, _ in together]
    usual.close()
    for options in (
        {"max_num_batched_tokens": 37},
        {"num_blocks": 24},  # preempts
        {"block_size": 32},
        {"enable_prefix_caching": False, "overlap": False, "enforce_eager": True},
    ):
        other = make(**options)
        assert answers(other, prompts()) == together, options
        other.close()
