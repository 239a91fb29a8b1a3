"""The rows of `octavo bench kernels`.

Names: ``decode/<B>x<context>/<heads>-<kv heads>-<head_dim>/<block size>/<dtype of the cache>``; for prefill
``<B>x<new tokens>``, ``+<context>`` where tokens are cached already, ``packed`` for keys outside a cache.
A quantised cache has one scale at most, or with ``-token-scales`` one for each token and head, as an engine's
has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from octavo.bench.attention_work import AttentionShape, attention, ragged_lengths
from octavo.bench.kernel_work import Memory, Work, fused_write, kv_write, rms_norm, sampling, silu_and_mul


@dataclass(frozen=True)
class Case:
    """A row by name. `value` says what is reported: "us", or "TFLOP/s"."""

    name: str
    build: Callable[[Memory], Work] = field(compare=False)
    unit: str = "us"
    bar: float | None = None  # what the project promises: at most so many us, at least so many TFLOP/s
    bar_over_floor: float | None = None  # or at most so many times the floor
    quick: bool = False
    small: bool = True  # its inputs are well below a few GB even on their own

    @property
    def family(self) -> str:
        return self.name.split("/")[0]


QWEN3_0_6B, QWEN3_8B, ONE_KV_HEAD, SMOLLM2 = (16, 8, 128), (32, 8, 128), (8, 1, 128), (9, 3, 64)
# At most so many microseconds for 8 KV heads of 128 in bf16: the project's own bars.
_DECODE_BARS = {
    "1x1024": 8.5, "1x8192": 14.0, "1x32768": 38.0, "32x1024": 36.0, "32x8192": 240.0, "256x1024": 262.0,
    "256x8192": 1880.0, "256xragged2048": 270.0,
}  # fmt: skip
_LARGE_OVER_FLOOR = 1 / 0.95  # from a gigabyte of keys and values on


def _spelled(heads: tuple[int, int, int]) -> str:
    return "-".join(map(str, heads))


def _decode(
    batch: int,
    context: int,
    heads: tuple[int, int, int],
    block_size: int,
    cache: str = "bf16",
    *,
    ragged: bool = False,
    q_len: int = 1,
    invariant: bool = False,
    token_scales: bool = False,
    quick: bool = False,
) -> Case:
    lens = ragged_lengths(batch, context) if ragged else (context,) * batch
    what = f"{batch}x{'ragged' if ragged else ''}{context}{f'q{q_len}' if q_len > 1 else ''}"
    shape = AttentionShape(lens, q_len, heads, block_size, cache, invariant, token_scales)
    form = "-invariant" if invariant else "-token-scales" if token_scales else ""
    name = f"decode/{what}/{_spelled(heads)}/{block_size}/{cache}{form}"
    has_bar = heads in (QWEN3_0_6B, QWEN3_8B) and cache == "bf16" and not invariant
    return Case(
        name,
        functools.partial(attention, shape),
        bar=_DECODE_BARS.get(what) if has_bar else None,
        quick=quick,
    )


def _prefill(
    batch: int,
    new: int,
    heads: tuple[int, int, int],
    block_size: int,
    cache: str = "bf16",
    *,
    past: int = 0,
    invariant: bool = False,
    bar: float | None = None,
    quick: bool = False,
) -> Case:
    what = f"{batch}x{new}{f'+{past}' if past else ''}"
    shape = AttentionShape((new + past,) * batch, new, heads, block_size, cache, invariant)
    where = block_size or "packed"
    name = f"prefill/{what}/{_spelled(heads)}/{where}/{cache}{'-invariant' if invariant else ''}"
    return Case(name, functools.partial(attention, shape), "TFLOP/s", bar, quick=quick)


def cases() -> Iterator[Case]:
    """Every row, in the order of the table."""
    for heads in (QWEN3_0_6B, QWEN3_8B):
        for block_size in (16, 64):
            first = heads == QWEN3_0_6B and block_size == 16
            for batch, context in (
                (1, 1024),
                (1, 8192),
                (1, 32768),
                (32, 1024),
                (32, 8192),
                (256, 1024),
                (256, 8192),
            ):
                yield _decode(batch, context, heads, block_size, quick=first and batch * context <= 1 << 18)
            yield _decode(256, 2048, heads, block_size, ragged=True, quick=first)
    for heads in (ONE_KV_HEAD, SMOLLM2):
        for batch, context in ((1, 8192), (32, 8192), (256, 1024), (256, 8192)):
            yield _decode(batch, context, heads, 16, quick=(batch, context) == (32, 8192))
    yield _decode(8, 32768, QWEN3_0_6B, 16, quick=True)
    for cache in ("fp8", "int8"):
        for batch, context in ((8, 32768), (256, 1024)):
            yield _decode(batch, context, QWEN3_0_6B, 16, cache, quick=batch == 8)
            yield _decode(batch, context, QWEN3_0_6B, 16, cache, token_scales=True)
    for batch, context in ((1, 8192), (32, 8192), (256, 1024)):
        yield _decode(batch, context, QWEN3_0_6B, 16, invariant=True)
    yield _decode(32, 8192, QWEN3_0_6B, 16, q_len=4)

    for block_size in (16, 64, 0):
        first = block_size == 16
        paged = block_size > 0
        yield _prefill(1, 8192, QWEN3_8B, block_size, bar=560 if paged else None, quick=True)
        yield _prefill(4, 4096, QWEN3_8B, block_size)
        yield _prefill(16, 1024, QWEN3_8B, block_size, bar=400 if paged else None, quick=first)
        yield _prefill(1, 2048, QWEN3_8B, block_size, past=30720, bar=590 if paged else None, quick=first)
    for batch, new in ((1, 8192), (16, 1024)):
        yield _prefill(batch, new, QWEN3_0_6B, 16)
    yield _prefill(1, 8192, ONE_KV_HEAD, 16)
    yield _prefill(1, 8192, SMOLLM2, 16, bar=300, quick=True)
    yield _prefill(1, 128, QWEN3_8B, 16, past=32640)
    yield _prefill(1, 8192, QWEN3_8B, 16, "fp8")
    yield _prefill(1, 8192, QWEN3_8B, 16, invariant=True)

    for tokens, bar in ((1, None), (256, 2.8), (8192, 18.0)):
        for cache in ("bf16", "fp8"):
            name = f"kv_write/{tokens}/8-128/16/{cache}"
            build = functools.partial(kv_write, tokens, QWEN3_8B, 16, cache)
            yield Case(
                name, build, bar=bar if cache == "bf16" else None, quick=tokens > 1 and cache == "bf16"
            )
    for tokens, bar in ((1, None), (256, 3.0), (8192, None)):
        for heads, cache in ((QWEN3_0_6B, "bf16"), (QWEN3_8B, "bf16"), (QWEN3_8B, "fp8")):
            name = f"kv_write_fused/{tokens}/{_spelled(heads)}/16/{cache}"
            build = functools.partial(fused_write, tokens, heads, 16, cache)
            over = 1.3 if tokens == 8192 else None
            yield Case(name, build, bar=bar, bar_over_floor=over, quick=tokens > 1 and heads == QWEN3_0_6B)

    bars = {("top_k+top_p", 64): 60.0, ("top_k+top_p", 256): 150.0, ("greedy", 256): 45.0}
    for how in ("greedy", "temperature", "top_k+top_p"):
        for batch in (1, 64, 256):
            build = functools.partial(sampling, batch, 151_936, how)
            yield Case(f"sample/{batch}x151936/{how}", build, bar=bars.get((how, batch)), quick=batch == 64)

    for tokens in (1, 256, 8192):
        quick = tokens == 256
        yield Case(
            f"rms_norm/{tokens}x4096/bf16", functools.partial(rms_norm, tokens, 4096, False), quick=quick
        )
        yield Case(
            f"rms_norm_add/{tokens}x4096/bf16", functools.partial(rms_norm, tokens, 4096, True), quick=quick
        )
        yield Case(
            f"silu_and_mul/{tokens}x12288/bf16", functools.partial(silu_and_mul, tokens, 12288), quick=quick
        )
