"""Attention calls by description: inputs on any device, the exact answer, and the error that is allowed.

The rule is FlashAttention's: from the same low-precision inputs, our worst error is at most twice that of
plain torch computing step by step in that precision, and our mean error at most one and a half times. Exact
means float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.kernels import flash_attn_varlen_func

QUANTISED = (torch.float8_e4m3fn, torch.int8)


@dataclass(frozen=True)
class Case:
    """One call of `flash_attn_varlen_func`. `block_size` 0 means packed keys; `scales` says per what."""

    lens_q: tuple[int, ...]
    lens_k: tuple[int, ...]
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    block_size: int = 16
    cache_dtype: torch.dtype | None = None
    scales: str = "none"  # none, tensor or token
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: str = "none"  # none, head or batch
    sinks: bool = False
    softmax_scale: float | None = None
    interleaved: bool = False  # K and V as views of one tensor, q as a slice of a wider one
    seed: int = 0

    def __str__(self) -> str:
        """What differs from an ordinary case, as a test id."""
        parts = [f"q{_lens(self.lens_q)}k{_lens(self.lens_k)}", f"{self.heads[0]}over{self.heads[1]}"]
        for one in fields(self)[3:]:
            value = getattr(self, one.name)
            if value != one.default:
                parts.append(f"{one.name}={value}".replace("torch.", "").replace(" ", ""))
        return "-".join(parts)


def _lens(lens: tuple[int, ...]) -> str:
    return ",".join(map(str, lens)) if len(lens) <= 4 else f"{lens[0]}..x{len(lens)}"


class Sequence(NamedTuple):
    """One sequence as attention is meant to see it: q (Q, H, D); k, v (K, KVH, D), dequantised, float64."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass
class Inputs:
    case: Case
    sequences: list[Sequence]
    arguments: dict[str, Any]  # of flash_attn_varlen_func
    slots: list[Tensor] = field(default_factory=list)  # of each sequence's keys, in token order

    def run(self, **changes: Any) -> tuple[Tensor, Tensor]:
        """(out, lse), both from poisoned memory where they can be."""
        out = torch.full_like(self.arguments["q"], math.nan)
        return flash_attn_varlen_func(**{"out": out, "return_softmax_lse": True, **self.arguments, **changes})

    def check(self, **changes: Any) -> tuple[Tensor, Tensor]:
        """Run, and hold the result to the rule."""
        out, lse = self.run(**changes)
        exact, exact_lse = attention(self, torch.float64)
        plain, _ = attention(self, self.case.dtype)
        assert_within_ratio(out, exact, plain, strict=self.case.cache_dtype not in QUANTISED)
        # For a quantised cache q may be rounded to float16; the scales of keys go into the scores exactly.
        atol = 2e-3 if self.case.cache_dtype in QUANTISED else 2e-5
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=atol)
        return out, lse


def prepare(case: Case, device: str | torch.device, poison: float = math.nan, share: int = 0) -> Inputs:
    """Draw the inputs of `case`. Blocks are shuffled, slots past the ends hold `poison`, tables have holes.

    `share`: that many leading blocks of every sequence, or all it has, are those of the first (which must be
    long enough).
    """
    rng = torch.Generator(device).manual_seed(case.seed)
    (heads, kv_heads), dim = case.heads, case.head_dim

    def draw(num: int, width: int) -> Tensor:
        return torch.randn(num, width, dim, generator=rng, device=device).to(case.dtype)

    if case.interleaved:
        fused = draw(sum(case.lens_q), heads + 2 * kv_heads)
        q = fused[:, :heads]
    else:
        q = draw(sum(case.lens_q), heads)
    keys, values = ([draw(n, kv_heads) for n in case.lens_k] for _ in range(2))
    shared = share * case.block_size
    for tokens in (keys, values):
        for b in range(1, len(tokens)):
            num = min(shared, len(tokens[b]))
            tokens[b][:num] = tokens[0][:num]
    arguments: dict[str, Any] = {
        "q": q,
        "cu_seqlens_q": prefix_sums(case.lens_q, device),
        "cu_seqlens_k": prefix_sums(case.lens_k, device),
        "max_seqlen_q": max(case.lens_q, default=0),
        "max_seqlen_k": max(case.lens_k, default=0),
        "causal": case.causal,
        "window_size": case.window,
        "softcap": case.softcap,
        "softmax_scale": case.softmax_scale,
    }
    if case.alibi != "none":
        rows = (len(case.lens_q),) if case.alibi == "batch" else ()
        arguments["alibi_slopes"] = torch.rand(*rows, heads, generator=rng, device=device)
    if case.sinks:
        arguments["sinks"] = torch.randn(heads, generator=rng, device=device) * 2
    inputs = Inputs(case, [], arguments)
    if case.block_size:
        stored = _page(inputs, keys, values, device, poison, share)
    else:
        empty = torch.empty(0, kv_heads, dim, dtype=case.dtype, device=device)
        arguments |= {"k": torch.cat([empty, *keys]), "v": torch.cat([empty, *values])}
        stored = ([k.double() for k in keys], [v.double() for v in values])
    inputs.sequences = [Sequence(q, k, v) for q, k, v in zip(q.split(case.lens_q), *stored, strict=True)]
    return inputs


def prefix_sums(lens: tuple[int, ...] | list[int], device: str | torch.device) -> Tensor:
    return torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


def _page(
    inputs: Inputs,
    keys: list[Tensor],
    values: list[Tensor],
    device: str | torch.device,
    poison: float,
    share: int,
) -> tuple[list[Tensor], list[Tensor]]:
    case, size = inputs.case, inputs.case.block_size
    counts = [math.ceil(n / size) for n in case.lens_k]
    num_blocks = sum(counts) + 3
    free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(case.seed)).tolist()
    table = torch.full((len(counts), max(counts, default=0) + 1), -1, dtype=torch.int32)
    for b, count in enumerate(counts):
        common = table[0, : min(share, count)].tolist() if b else []
        table[b, :count] = torch.tensor(common + [free.pop() for _ in range(count - len(common))])
        order = torch.arange(case.lens_k[b])
        inputs.slots.append((table[b, order // size].long() * size + order % size).to(device))
    inputs.arguments["block_table"] = table.to(device)
    both = torch.empty(num_blocks, 2, size, case.heads[1], case.head_dim, device=device)
    caches = both.unbind(1) if case.interleaved else [x.contiguous() for x in both.unbind(1)]
    dequantised = []
    for name, cache, tokens in (("k", caches[0], keys), ("v", caches[1], values)):
        dequantised.append(_fill(inputs, name, cache, tokens, poison))
    return dequantised[0], dequantised[1]


def _fill(inputs: Inputs, name: str, cache: Tensor, tokens: list[Tensor], poison: float) -> list[Tensor]:
    """Put one cache, and its scale, into the arguments; the tokens as they read back, in float64."""
    case, dtype = inputs.case, inputs.case.cache_dtype or inputs.case.dtype
    cache.fill_(poison)
    if dtype not in QUANTISED:
        for slots, x in zip(inputs.slots, tokens, strict=True):
            cache[slots // case.block_size, slots % case.block_size] = x.float()
        if case.interleaved:  # the strides of a view, in the cache's own dtype
            inputs.arguments[name] = torch.stack([cache, cache], dim=1).to(dtype)[:, 0]
        else:
            inputs.arguments[name] = cache.to(dtype)
        return [x.to(dtype).double() for x in tokens]
    top = 448.0 if dtype == torch.float8_e4m3fn else 127.0
    scales = torch.full(cache.shape[:3], math.nan, device=cache.device)
    dequantised = []
    for slots, x in zip(inputs.slots, tokens, strict=True):
        place = (slots // case.block_size, slots % case.block_size)
        scale = x.float().abs().amax(-1).clamp_min(1e-6) / top  # (K, KVH)
        if case.scales != "token":
            scale = torch.full_like(scale, 1.0 if case.scales == "none" else 6.0 / top)
        steps = (x.float() / scale[..., None]).clamp(-top, top)
        steps = steps.to(dtype).float() if dtype == torch.float8_e4m3fn else steps.round()
        cache[place], scales[place] = steps, scale
        dequantised.append(steps.double() * scale.double()[..., None])
    if dtype == torch.int8:
        cache.nan_to_num_(nan=127.0, posinf=127.0, neginf=-128.0)
    stored = cache.to(dtype)
    inputs.arguments[name] = torch.stack([stored, stored], dim=1)[:, 0] if case.interleaved else stored
    if case.scales == "token":
        inputs.arguments[f"{name}_scale"] = scales
    elif case.scales == "tensor":
        inputs.arguments[f"{name}_scale"] = 6.0 / top
    return dequantised


def attention(inputs: Inputs, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The formula, one sequence at a time, every step in `dtype`: out (Tq, H, D) and lse (H, Tq)."""
    case, arguments = inputs.case, inputs.arguments
    scale = case.head_dim**-0.5 if case.softmax_scale is None else case.softmax_scale
    slopes, sinks = arguments.get("alibi_slopes"), arguments.get("sinks")
    outs = [torch.empty(0, case.heads[0], case.head_dim, dtype=dtype, device=arguments["q"].device)]
    lses = [torch.empty(case.heads[0], 0, dtype=dtype, device=arguments["q"].device)]
    for b, sequence in enumerate(inputs.sequences):
        own = slopes[b] if slopes is not None and slopes.dim() == 2 else slopes
        out, lse = attend_one(sequence, dtype, scale, case.causal, case.window, case.softcap, own, sinks)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, dim=1)


def attend_one(
    sequence: Sequence,
    dtype: torch.dtype,
    scale: float,
    causal: bool,
    window: tuple[int, int],
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    first_key: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attention of one sequence in plain torch; `first_key`: the keys before it are not visible."""
    q, k, v = (x.to(dtype).transpose(0, 1) for x in sequence)  # (H, Q, D), (KVH, K, D)
    group, (num_heads, num_rows, _), num_keys = q.shape[0] // k.shape[0], q.shape, k.shape[1]
    k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
    behind = _behind(num_rows, num_keys, q.device)
    scores = q @ (k * scale).transpose(1, 2)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        scores = scores - slopes.to(dtype)[:, None, None] * behind.abs().to(dtype)
    seen = visible_keys(num_rows, num_keys, causal, window, q.device)
    seen &= torch.arange(num_keys, device=q.device) >= first_key
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:  # one more key, of score `sink` and value 0
        scores = torch.cat([scores, sinks.to(dtype)[:, None, None].expand(-1, num_rows, 1)], dim=-1)
        v = torch.cat(
            [v, torch.zeros_like(v[:, :1]) if num_keys else v.new_zeros(num_heads, 1, v.shape[2])], 1
        )
    nothing = ~seen.any(-1)
    weights = torch.softmax(scores, dim=-1).masked_fill(nothing[:, None], 0.0)
    out = (weights @ v).transpose(0, 1)
    lse = torch.logsumexp(scores, dim=-1).masked_fill(nothing, -math.inf)
    return out, lse


def visible_keys(
    num_rows: int, num_keys: int, causal: bool, window: tuple[int, int], device: torch.device
) -> Tensor:
    """The mask (rows, keys) of one sequence, aligned at the bottom right."""
    behind = _behind(num_rows, num_keys, device)
    left, right = window[0], 0 if causal else window[1]
    seen = torch.ones_like(behind, dtype=torch.bool)
    if left >= 0:
        seen &= behind <= left
    if right >= 0:
        seen &= behind >= -right
    return seen


def _behind(num_rows: int, num_keys: int, device: torch.device) -> Tensor:
    """How far each key lies behind each row's own (rows, keys)."""
    rows = torch.arange(num_rows, device=device)[:, None] + num_keys - num_rows
    return rows - torch.arange(num_keys, device=device)


def assert_within_ratio(
    ours: Tensor, exact: Tensor, plain: Tensor, worst: float = 2.0, mean: float = 1.5, strict: bool = True
) -> None:
    """At most `worst` times plain torch's error at the worst point and `mean` times on average.

    The floors are what rounding the exact result costs. `strict` False, for quantised caches: 4 and 3 times.
    """
    assert ours.shape == exact.shape
    assert torch.isfinite(ours).all(), f"{int((~torch.isfinite(ours)).sum())} values are not finite"
    if not ours.numel():
        return
    if not strict:
        worst, mean = 2 * worst, 2 * mean
    floor = 2 * ((exact.to(ours.dtype) + 0.3 - 0.3).double() - exact).abs().max().item()
    floor = max(floor, 8 * torch.finfo(torch.float32).eps)  # plain float32 is now and then lucky
    error, allowed = (ours.double() - exact).abs(), (plain.double() - exact).abs()
    rounding = (exact.to(ours.dtype).double() - exact).abs().mean().item()
    rounding = max(rounding, torch.finfo(torch.float32).eps)
    found = f"worst {error.max():.3g} at {_where(error)}, mean {error.mean():.3g}; "
    found += f"plain torch {allowed.max():.3g} and {allowed.mean():.3g}"
    assert error.max() <= worst * allowed.max() + floor, found
    assert error.mean() <= mean * allowed.mean() + rounding / 4, found
    if exact.norm() > 0:
        relative = (ours.double() - exact).norm() / exact.norm()
        bound = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 5e-6}[ours.dtype]
        assert relative <= bound * (1 if strict else 2), f"relative error {relative:.3g}; {found}"


def _where(error: Tensor) -> tuple[int, ...]:
    flat = int(error.argmax())
    place: list[int] = []
    for size in reversed(error.shape):
        place.insert(0, flat % size)
        flat //= size
    return tuple(place)
