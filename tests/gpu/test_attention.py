"""Attention on the GPU against the formula in float64: each option, dtype and shape on each path."""

from dataclasses import replace

import pytest
import torch
from helpers.attention_cases import Case, prepare

# Nothing, one key, no keys, more queries than keys, ends of blocks and one beside them, one long among short.
DECODE = Case(
    lens_q=(1, 1, 2, 8, 0, 5, 1, 3, 4, 1, 7, 1),
    lens_k=(1, 16, 17, 300, 4, 0, 1000, 2, 64, 5000, 1025, 15),
)
PREFILL = Case(lens_q=(9, 64, 130, 33, 0, 20, 257, 128), lens_k=(9, 64, 400, 1000, 4, 10, 257, 3000))
MIXED = Case(lens_q=DECODE.lens_q + PREFILL.lens_q, lens_k=DECODE.lens_k + PREFILL.lens_k)
# For what multiplies the number of compiled kernels.
SHORT = {
    "decode": Case(lens_q=(1, 3, 1), lens_k=(300, 17, 1)),
    "prefill": Case(lens_q=(40, 9, 130), lens_k=(40, 300, 130)),
    "mixed": Case(lens_q=(40, 1), lens_k=(40, 300)),
}
PATHS = {"decode": DECODE, "prefill": PREFILL, "mixed": MIXED}

OPTIONS = {
    "full": {"causal": False},
    "causal": {},
    "window": {"window": (100, 0)},
    "two-sided-window": {"causal": False, "window": (37, 20)},
    "right-bound-alone": {"causal": False, "window": (-1, 2)},
    "narrow-window": {"window": (0, 0)},
    "softcap": {"softcap": 5.0},
    "alibi": {"alibi": "head"},
    "alibi-per-sequence-full": {"alibi": "batch", "causal": False},
    "sinks": {"sinks": True},
    "sinks-window": {"sinks": True, "window": (70, 0)},
    "scale": {"softmax_scale": 0.3},
    "negative-scale": {"softmax_scale": -0.1},
    "everything": {"softcap": 8.0, "alibi": "batch", "sinks": True, "window": (90, 0), "softmax_scale": 0.2},
}


def on(*paths: str) -> pytest.MarkDecorator:
    """Only these paths: a kernel that is compiled for nothing new takes time for nothing."""
    return pytest.mark.parametrize("path", paths, indirect=True)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_on_every_path(path: str, options: dict) -> None:
    prepare(replace(PATHS[path], **options), "cuda").check()


def test_an_ordinary_prompt_takes_the_kernel_of_its_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.kernels.triton import prefill_hopper

    kernel, calls = prefill_hopper.prefill_attention, []

    def counted(*args: object, **options: object) -> None:
        calls.append(kernel)
        kernel(*args, **options)

    monkeypatch.setattr(prefill_hopper, "prefill_attention", counted)
    prepare(Case((4096,), (4096,), heads=(16, 8), head_dim=128), "cuda").check()
    assert len(calls) == (torch.cuda.get_device_capability() == (9, 0))


@pytest.mark.parametrize("spare", [1, 127, 300])
def test_a_batch_padded_with_sequences_of_no_tokens(path: str, spare: int) -> None:
    """As steps from a graph are, whose spare rows are a sequence without keys."""
    case = PATHS[path]
    lens_q, lens_k = (*case.lens_q, 100, *[0] * spare), (*case.lens_k, 0, *[0] * spare)
    prepare(replace(case, lens_q=lens_q, lens_k=lens_k), "cuda").check()


@on("decode", "prefill-hopper", "prefill-hopper-split", "prefill-whole", "mixed")
@pytest.mark.parametrize("name", ["full", "causal", "window", "everything"])
def test_options_over_packed_keys(path: str, name: str) -> None:
    prepare(replace(PATHS[path], block_size=0, **OPTIONS[name]), "cuda").check()


@on("mixed")
@pytest.mark.parametrize("name", ["full", "causal", "sinks-window", "everything"])
def test_options_in_a_mixed_batch(path: str, name: str) -> None:
    prepare(replace(PATHS[path], **OPTIONS[name]), "cuda").check()


@pytest.mark.parametrize("block_size", [1, 2, 8, 16, 32, 64, 128, 256, 1024])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_block_size_and_dtype(dtype: torch.dtype, block_size: int) -> None:
    prepare(replace(MIXED, dtype=dtype, block_size=block_size), "cuda").check()


@on("decode", "prefill-whole")
@pytest.mark.parametrize("head_dim", [1, 8, 40, 59, 80, 96, 111, 112, 120, 160, 192, 224])
def test_every_head_dim(path: str, head_dim: int) -> None:
    prepare(replace(SHORT[path], head_dim=head_dim), "cuda").check()


@pytest.mark.parametrize("block_size", [0, 16, 64])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_head_dims_of_most_models(path: str, head_dim: int, block_size: int) -> None:
    prepare(replace(SHORT[path], head_dim=head_dim, block_size=block_size), "cuda").check()


HEADS = [(8, 8), (4, 2), (6, 2), (8, 2), (5, 1), (14, 2), (8, 1), (32, 2), (71, 1), (28, 4), (9, 3), (64, 8)]


@on("decode", "prefill-whole", "prefill-hopper", "prefill-hopper-split")
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_every_head_ratio(path: str, heads: tuple[int, int]) -> None:
    prepare(replace(PATHS[path], heads=heads, head_dim=128 if heads[1] % 2 else 64), "cuda").check()


FP8, INT8 = torch.float8_e4m3fn, torch.int8
QUANTISED = [(FP8, "none"), (FP8, "tensor"), (FP8, "token"), (INT8, "tensor"), (INT8, "token")]


@on("decode", "prefill-whole", "prefill-split")
@pytest.mark.parametrize(("cache_dtype", "scales"), QUANTISED, ids=str)
def test_quantised_caches(path: str, cache_dtype: torch.dtype, scales: str) -> None:
    prepare(replace(PATHS[path], cache_dtype=cache_dtype, scales=scales, head_dim=128), "cuda").check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("cache_dtype", "scales"), QUANTISED, ids=str)
def test_other_queries_over_quantised_caches(
    dtype: torch.dtype, cache_dtype: torch.dtype, scales: str
) -> None:
    prepare(replace(MIXED, cache_dtype=cache_dtype, scales=scales, dtype=dtype), "cuda").check()


@on("decode", "prefill-whole")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_over_a_quantised_cache(path: str, options: dict) -> None:
    case = replace(PATHS[path], cache_dtype=FP8, scales="token", **options)
    prepare(case, "cuda").check()


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [(torch.float32, torch.float16), (torch.float32, torch.bfloat16), (torch.float16, torch.float32)],
    ids=str,
)
def test_queries_and_caches_of_two_dtypes(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    inputs = prepare(replace(MIXED, dtype=dtype, cache_dtype=cache_dtype), "cuda")
    inputs.check()


@pytest.mark.parametrize("block_size", [0, 16], ids=["packed", "paged"])
def test_views_of_interleaved_memory(path: str, block_size: int) -> None:
    prepare(replace(PATHS[path], interleaved=True, block_size=block_size), "cuda").check()


def test_blocks_may_be_shared(path: str) -> None:
    lens_q = (PATHS[path].lens_q * 2)[:8]
    case = replace(PATHS[path], lens_q=lens_q, lens_k=(2000, 500, 400, 600, 900, 200, 300, 176))
    prepare(case, "cuda", share=10).check()


@on("decode", "prefill", "mixed")
def test_one_long_among_many_short(path: str) -> None:
    lens_q = {"decode": (1,) * 100, "prefill": (30,) * 100, "mixed": (1, 30) * 50}[path]
    case = Case(lens_q, (32768, *([40] * 99)), heads=(8, 2), head_dim=128)
    prepare(case, "cuda").check()


@pytest.mark.parametrize("number", [1, 2, 5, 17, 60])
def test_keys_divided_among_any_number_of_programs(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From none to more than there are tiles of keys."""
    from octavo.kernels.triton import decode, prefill, prefill_hopper

    monkeypatch.setattr(decode, "num_processors", lambda *_: number)
    monkeypatch.setattr(prefill, "_splits", lambda *_: number)
    monkeypatch.setattr(prefill_hopper, "splits_for", lambda *_: number)
    prepare(MIXED, "cuda").check()
    prepare(replace(MIXED, sinks=True, cache_dtype=FP8, scales="token"), "cuda").check()


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_bounds_that_are_far_too_large(batch_invariant: bool) -> None:
    """A captured step bounds lengths by what a sequence may ever reach, not by what it has."""
    inputs = prepare(DECODE, "cuda")
    right, _ = inputs.check(batch_invariant=batch_invariant)
    out, _ = inputs.check(max_seqlen_q=8, max_seqlen_k=10**6, batch_invariant=batch_invariant)
    if batch_invariant:
        assert torch.equal(out, right)


@on("decode", "prefill")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_in_batch_invariant_mode(path: str, options: dict) -> None:
    prepare(replace(PATHS[path], **options), "cuda").check(batch_invariant=True)


def test_an_empty_batch_and_no_rows() -> None:
    for case in (Case((), ()), Case((0, 0), (3, 0)), Case((0, 0), (3, 0), block_size=0)):
        out, lse = prepare(case, "cuda").run()
        assert out.shape == (0, 4, 64)
        assert lse.shape == (4, 0)
