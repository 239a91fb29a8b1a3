"""Small odd inputs on which `backend.self_check` compares the implementations of each kernel.

A case takes an implementation and what draws its inputs, and returns every tensor it wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.grouped_linear import pack_experts
from octavo.kernels.linear import Form, pack_weight
from octavo.kernels.linear import linear as packed_linear
from octavo.kernels.reference.quantization import quantise

# Largest error allowed for results of a dtype; for 16 bits twice what rounding them makes.
BOUNDS = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
FORMS: dict[str, tuple[Form, ...]] = {"cpu": ("float32", "float16", "int8"), "reference": ("dense",)}


CPU = torch.device("cpu")


CACHE_SCALE = 0.03  # of the quantised caches: values of a normal draw fill their range


@dataclass(frozen=True)
class Draw:
    """Seeded normal values, rounded to `stored`, in the dtype `run`: float64 can start from the same ones.

    `cache` is the dtype of the caches where that is another: float8_e4m3fn or int8, with `scales`.
    """

    stored: torch.dtype
    run: torch.dtype
    device: torch.device = CPU
    cache: torch.dtype | None = None

    def __call__(self, *shape: int, seed: int = 0) -> Tensor:
        values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        return self.place(values.to(self.stored).to(self.run))

    def place(self, values: Tensor) -> Tensor:
        """The same values on the device."""
        return values.to(self.device)

    @property
    def scales(self) -> dict[str, float]:
        return {} if self.cache is None else {"k_scale": CACHE_SCALE, "v_scale": 2 * CACHE_SCALE}

    def cached(self, values: Tensor, scale: str) -> Tensor:
        """The values as a cache stores them, for one of the `scales`."""
        if self.cache is None:
            return values
        return quantise(values, self.scales[scale], self.cache)

    def int32(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def int64(self, *values: int) -> Tensor:
        return torch.tensor(values, device=self.device)

    @property
    def lse_dtype(self) -> torch.dtype:
        return torch.float64 if self.run == torch.float64 else torch.float32


Case = Callable[[Callable[..., Any], Draw], list[Tensor]]
Pairs = list[tuple[Tensor, Tensor]]  # what a kernel made, and the exact values


def beside(exact: list[Tensor], case: Case, kernel: Callable[..., Any], draw: Draw) -> Pairs:
    """What the kernel makes of a case, beside the exact values."""
    return [(ours.cpu(), value) for ours, value in zip(case(kernel, draw), exact, strict=True)]


def forms(kernel: str) -> Iterator[tuple[torch.dtype, torch.dtype | None, float]]:
    """(dtype, dtype of quantised caches or None, largest error allowed) of every check of a kernel."""
    for dtype, bound in BOUNDS.items():
        yield dtype, None, bound
    if kernel in QUANTISED:
        for cache in CACHE_DTYPES:
            yield torch.bfloat16, cache, QUANTISED[kernel]


def _attention(kernel: Callable[..., Any], draw: Draw) -> list[Tensor]:
    return _short_queries(kernel, draw) + _long_queries(kernel, draw)


def _short_queries(kernel: Callable[..., Any], draw: Draw) -> list[Tensor]:
    """A chunk with a past, a decode, nothing, more queries than keys; shuffled blocks, NaN elsewhere."""
    written: list[Tensor] = []
    table = draw.int32(6, 2, -1, 5, 0, 3, -1, -1, -1, 1, -1, -1).view(4, 3)
    cu_q, cu_k = draw.int32(0, 3, 4, 4, 8), draw.int32(0, 7, 18, 18, 20)
    shapes: tuple[tuple[int, int], ...] = ((64, 3), (40, 1), (96, 9))
    if draw.cache is not None or draw.stored == torch.float16:
        shapes = shapes[:1]  # each is a kernel to compile, and differs in nothing that the others do not show
    for head_dim, kv_heads in shapes:
        values = [draw(8, 4, kv_heads, head_dim, seed=s) for s in (1, 2)]
        for cache in values:
            for block, offset in ((2, 3), (3, 3), (1, 2), (4, 0), (7, 0)):
                cache[block, offset:] = float("nan")
        written += _attend(kernel, draw, draw(8, 9, head_dim), values, cu_q, cu_k, 4, 11, table)
    return written


def _long_queries(kernel: Callable[..., Any], draw: Draw) -> list[Tensor]:
    """A chunk with a past, and more queries than keys, each alone: what a GPU has other kernels for."""
    written: list[Tensor] = []
    values = [draw(5, 16, 3, 64, seed=s) for s in (1, 2)]
    for cache in values:
        for block, offset in ((0, 0), (1, 8), (3, 0)):
            cache[block, offset:] = float("nan")
    for rows, keys in ((14, 40), (20, 9)):
        lengths = draw.int32(0, rows), draw.int32(0, keys), rows, keys
        written += _attend(kernel, draw, draw(rows, 9, 64), values, *lengths, draw.int32(4, 2, 1).view(1, 3))
    return written


def _attend(
    kernel: Callable[..., Any],
    draw: Draw,
    q: Tensor,
    values: list[Tensor],
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    table: Tensor,
) -> list[Tensor]:
    """Out and LSE, with no option and with all of them."""
    written: list[Tensor] = []
    caches = [draw.cached(cache, scale) for cache, scale in zip(values, ("k_scale", "v_scale"), strict=True)]
    for window, softcap, extras in (((-1, -1), 0.0, False), ((2, 0), 5.0, True)):
        out = torch.full_like(q, float("nan"))
        lse = torch.full((9, len(q)), float("nan"), dtype=draw.lse_dtype, device=draw.device)
        slopes = draw.place(torch.linspace(0.0, 1.0, 9)) if extras else None
        sinks = draw.place(torch.linspace(-1.0, 1.0, 9)) if extras else None
        scores = {"softmax_scale": 0.2, "causal": True, "window_size": window, "softcap": softcap}
        places = {"block_table": table, "out": out, "lse": lse, **draw.scales}
        kernel(q, *caches, cu_q, cu_k, max_q, max_k, alibi_slopes=slopes, sinks=sinks, **scores, **places)
        written += [out, lse]
    return written


def _write(kernel: Callable[..., Any], draw: Draw) -> list[Tensor]:
    k, v = draw(5, 3, 40), draw(5, 3, 40, seed=1)
    # K and V interleaved: neither is contiguous.
    both = draw.place(torch.zeros(4, 2, 8, 3, 40, dtype=draw.cache or draw.run))
    kernel(k, v, both[:, 0], both[:, 1], draw.int64(31, 0, -1, 7, 8), **draw.scales)
    return [_values(both, draw)]


def _values(caches: Tensor, draw: Draw) -> Tensor:
    """What caches hold; of quantised ones, times the scale of K."""
    return caches if draw.cache is None else caches.float() * CACHE_SCALE


def _rotate_and_write(kernel: Callable[..., Any], draw: Draw) -> list[Tensor]:
    written = []
    table = _angles(draw)
    for interleaved, weights in ((False, True), (True, False)):
        qkv = draw(5, 6, 24)  # rotary dimension 20 of 24; 4 query heads, 1 KV head
        q, k, v = qkv.split_with_sizes([4, 1, 1], dim=1)
        both = draw.place(torch.zeros(2, 4, 8, 1, 24, dtype=draw.cache or draw.run))
        norms = {"q_weight": draw(24, seed=1), "k_weight": draw(24, seed=2), "eps": 1e-6} if weights else {}
        places = draw.int64(0, 15, 3, 3, 7), both[0], both[1], draw.int64(31, 0, -1, 7, 8)
        q_out = kernel(q, k, v, table, *places, interleaved=interleaved, **norms, **draw.scales)
        written += [q_out, _values(both, draw)]
    return written


def _norm(kernel: Callable[..., Any], draw: Draw) -> list[Tensor]:
    x, weight, residual = (
        draw(3, 2, 72),
        draw(72, seed=1),
        draw(3, 2, 72, seed=2),
    )
    return [kernel(x, weight, 1e-6, None)[0], *kernel(x, weight, 1e-6, residual)]


def _rotary(kernel: Callable[..., Any], draw: Draw) -> list[Tensor]:
    written = []
    table = _angles(draw)
    for interleaved in (False, True):
        qkv = draw(5, 6 * 24)  # rotary dimension 20 of 24; 4 query heads, 1 key head
        q, k = qkv[:, :96].view(5, 4, 24), qkv[:, 96:120].view(5, 1, 24)
        kernel(q, k, table, draw.int64(0, 15, 3, 3, 7), interleaved)
        written.append(qkv)
    return written


def _angles(draw: Draw) -> Tensor:
    """Cosines and sines for 16 positions and a rotary dimension of 20."""
    angles = torch.rand(16, 10, generator=torch.Generator().manual_seed(3)) * 6
    return draw.place(torch.cat([angles.cos(), angles.sin()], dim=-1))


def _sample(kernel: Callable[..., Any], draw: Draw) -> list[Tensor]:
    """Ids, and log probabilities, of rows with all filters, with none, greedy, and without any number."""
    logits = 4 * draw(6, 999)  # a power of two: exact in every dtype
    logits[4] = float("nan")
    temperature = draw.place(torch.tensor([0.7, 1.0, 0.0, 1.5, 1.0, 0.2]))
    top_k, top_p = draw.int32(7, 0, 5, 900, 3, 50), draw.place(torch.tensor([0.8, 1.0, 0.9, 0.5, 0.9, 1.0]))
    min_p = draw.place(torch.tensor([0.01, 0.0, 0.0, 0.001, 0.0, 0.1]))
    seeds, positions = draw.int64(1, 2, 3, 4, 5, -6), draw.int64(0, 1, 2, 300, 4, 5)
    written = []
    for filters in ((top_k, top_p, min_p), (None, None, None)):
        ids, logprobs = kernel(logits, temperature, *filters, seeds, positions, True)
        written += [ids, logprobs.nan_to_num(1.0)]
    return written


def _activation(kernel: Callable[..., Any], draw: Draw) -> list[Tensor]:
    return [kernel(draw(3, 2 * 37))]


def _gelu(kernel: Callable[..., Any], draw: Draw) -> list[Tensor]:
    return [kernel(4 * draw(3, 37))]


def _invariant_linear(kernel: Callable[..., Any], draw: Draw) -> list[Tensor]:
    x, weight = draw(70, 72), draw(37, 72, seed=1) * 0.1
    return [kernel(x, weight, None), kernel(x[:1], weight, draw(37, seed=2))]


def _few_rows_linear(kernel: Callable[..., Any], draw: Draw) -> list[Tensor]:
    """Alone; and with norm, gate and bias; a few rows, and more, for which Hopper has another kernel."""
    weight, norm_weight, bias = draw(74, 72, seed=1) * 0.125, draw(72, seed=3), draw(74, seed=2)
    written: list[Tensor] = []
    for alone, rows in ((1, 3), (5, 13)):
        x = draw(rows, 72)
        written.append(kernel(x[:alone], weight, None, None, None, 0.0, False, False)[0])
        written += kernel(x, weight, bias, x, norm_weight, 1e-5, True, False)  # x + x is exact
    return written


def _grouped(kernel: Callable[..., Any], draw: Draw) -> list[Tensor]:
    """Groups of many rows, none and one, in order and from anywhere to anywhere."""
    form: Form = "float32" if draw.run == torch.float32 and draw.device.type == "cpu" else "dense"
    weights = pack_experts(draw(4, 37, 72, seed=1) * 0.1, 4, form)
    offsets, scale = draw.int32(0, 17, 17, 18, 23), draw.place(torch.linspace(-1.0, 1.0, 23))
    mixed = draw.int64(*(7 * i % 23 for i in range(23)))
    x = draw(23, 72)
    return [
        kernel(x, weights, offsets, None, None, None),
        kernel(x[:9].contiguous(), weights, offsets, mixed % 9, mixed, scale),
    ]


def _prepare_decode(kernel: Callable[..., Any], draw: Draw) -> list[Tensor]:
    """Rows in any order, one of them without a block for its position."""
    tables = draw.int32(3, -1, -1, 8, 2, -1, 0, 4, 6, -1, -1, -1).view(4, 3)
    made = kernel(draw.int64(2, 0, 3, 1), draw.int64(10, 3, 0, 4), draw.int64(5, 6, 7, 8), tables, 4)
    return list(made)


def _finish_decode(kernel: Callable[..., Any], draw: Draw) -> list[Tensor]:
    """Rows in any order, one in error, and two that took no part."""
    last, positions, num_drawn = draw.int64(5, 6, 7, 8), draw.int64(10, 3, 0, 0, 4), draw.int64(1, 2, 0, 0, 5)
    places = draw.int64(2, 0, 3, 3, 1), draw.int64(90, 3, -1, -1, 4), draw.int64(11, -1, 12, 13, 14)
    kernel(*places, last, positions, num_drawn)
    return [last, positions, num_drawn]


def _find_shared_prefixes(kernel: Callable[..., Any], draw: Draw) -> list[Tensor]:
    """An octet with an entry that takes no part, and one of a single entry."""
    tables = draw.int32(
        *(10 * b + column if column == 3 else column for b in range(9) for column in range(4))
    )
    sums = draw.int32(0, 16, 29, 29, 42, 58, 72, 88, 103, 119)
    return list(kernel(tables.view(9, 4), sums, 4, 8))


def _merge_shared_prefixes(kernel: Callable[..., Any], draw: Draw) -> list[Tensor]:
    """Entries with common keys, without, and without any keys."""
    common, own = (draw(3, 5, 40, seed=seed).float() for seed in (1, 2))
    common_lse, own_lse = (draw(5, 3, seed=seed).float() for seed in (3, 4))
    own[2], own_lse[:, 2] = 0.0, float("-inf")
    out = torch.empty_like(draw(3, 5, 40))
    kernel(common, common_lse, own, own_lse, draw.int32(8, 0, 0), out)
    return [out]


CASES: dict[str, Case] = {
    "varlen_attention": _attention,
    "write_kv_cache": _write,
    "rotate_and_write_kv_cache": _rotate_and_write,
    "rms_norm": _norm,
    "apply_rotary": _rotary,
    "silu_and_mul": _activation,
    "gelu_tanh": _gelu,
    "invariant_linear": _invariant_linear,
    "few_rows_linear": _few_rows_linear,
    "grouped_linear": _grouped,
    "sample": _sample,
    "prepare_decode": _prepare_decode,
    "finish_decode": _finish_decode,
    "find_shared_prefixes": _find_shared_prefixes,
    "merge_shared_prefixes": _merge_shared_prefixes,
}
# Kernels that meet quantised caches, and how far off one step of those may bring them.
QUANTISED = {"varlen_attention": 2.0**-7, "write_kv_cache": 1e-6, "rotate_and_write_kv_cache": 2.0**-3}
CACHE_DTYPES = (torch.float8_e4m3fn, torch.int8)


def _linear_inputs() -> tuple[Tensor, Tensor, Tensor]:
    draw = Draw(torch.float32, torch.float32)
    return draw(7, 72), draw(37, 72, seed=1), draw(37, seed=2)


def linear(form: Form, device: torch.device) -> Pairs:
    """`linear` on a weight in that form, in a batch and alone with a bias, beside the exact products of the
    values the form holds; and by how much these miss the weight by more than half a step of the form.
    """
    x, weight, bias = (values.to(device) for values in _linear_inputs())
    packed = pack_weight(weight, form)
    values, x64 = packed.dense().double(), x.double()
    missed = ((values - weight).abs() - _half_step(weight, form)).clamp_min(0.0)
    return [
        (packed_linear(x, packed), x64 @ values.T),
        (packed_linear(x[:1], packed, bias), x64[:1] @ values.T + bias),
        (missed, torch.zeros_like(missed)),
    ]


def _half_step(weight: Tensor, form: Form) -> Tensor:
    if form == "int8":
        return weight.abs().amax(dim=1, keepdim=True) / 254  # a group's own largest value is at most that
    return weight.abs() * 2.0**-11 if form == "float16" else torch.zeros(())
