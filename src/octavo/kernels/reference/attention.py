"""Attention, one sequence at a time: gather its visible keys, score, mask, softmax, weigh."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.reference.quantization import dequantise, is_quantised


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    block_table: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    leftpad: Tensor | None = None,
    batch_invariant: bool = False,
) -> None:
    """Fill `out` (Tq, H, D) and `lse` (H, Tq); `octavo.kernels.attention` says what they mean.

    `leftpad` (B,): that many leading keys of each sequence are seen by no row. `batch_invariant` is always
    False: torch adds in an order of its own, so the public functions refuse it.
    """
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[1] // k.shape[-2]
    left, right = window_size
    if causal:
        right = 0
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    paddings = [0] * (len(starts_q) - 1) if leftpad is None else leftpad.tolist()

    for b in range(len(starts_q) - 1):
        rows = slice(starts_q[b], starts_q[b + 1])
        num_rows, num_keys = starts_q[b + 1] - starts_q[b], starts_k[b + 1] - starts_k[b]
        if num_rows == 0:
            continue
        # Bottom-right alignment: the last row stands on the last key. Row i stands on key `i + diagonal`.
        diagonal = num_keys - num_rows
        first = max(paddings[b], diagonal - left) if left >= 0 else paddings[b]
        last = min(num_keys, num_keys + right) if right >= 0 else num_keys
        keys = torch.arange(first, max(first, last), device=q.device)
        if block_table is None:
            keys_b, values_b = k[starts_k[b] + keys], v[starts_k[b] + keys]
        else:
            block_size = k.shape[1]
            places = block_table[b, keys // block_size].long(), keys % block_size
            keys_b, values_b = _stored(k, places, k_scale), _stored(v, places, v_scale)

        q_b = q[rows].to(compute).transpose(0, 1)  # (H, rows, D)
        k_b = keys_b.to(compute).repeat_interleave(group, dim=1).transpose(0, 1)  # (H, keys, D)
        v_b = values_b.to(compute).repeat_interleave(group, dim=1).transpose(0, 1)

        scores = (q_b @ k_b.transpose(1, 2)) * softmax_scale
        if softcap > 0.0:
            scores = softcap * torch.tanh(scores / softcap)
        distance = (
            torch.arange(num_rows, device=q.device)[:, None] + diagonal - keys
        )  # > 0: the key is behind
        if alibi_slopes is not None:
            slopes = alibi_slopes[b] if alibi_slopes.dim() == 2 else alibi_slopes
            scores = scores - slopes.to(compute)[:, None, None] * distance.abs()
        visible = torch.ones_like(distance, dtype=torch.bool)
        if left >= 0:
            visible &= distance <= left
        if right >= 0:
            visible &= distance >= -right
        scores = scores.masked_fill(~visible, float("-inf"))

        logits = scores
        if sinks is not None:  # one more key, of score `sink` and value 0
            sink = sinks.to(compute)[:, None, None].expand(-1, num_rows, 1)
            logits = torch.cat([scores, sink], dim=-1)
        # A row without keys is 0/0 in the softmax; masking makes it 0.
        weights = torch.softmax(logits, dim=-1)[:, :, : len(keys)].masked_fill(~visible, 0.0)
        out[rows] = _weigh(weights, v_b, visible).transpose(0, 1).to(out.dtype)
        if lse is not None:
            total = torch.logsumexp(logits, dim=-1)  # (H, rows)
            lse[:, rows] = total.masked_fill(~visible.any(dim=-1), float("-inf")).to(lse.dtype)


def _stored(cache: Tensor, places: tuple[Tensor, Tensor], scale: Tensor | float | None) -> Tensor:
    """Keys or values (N, KVH, D) at those blocks and offsets; `scale`: one, or one per token and head."""
    rows = cache[places]
    if not is_quantised(cache.dtype):
        return rows
    if isinstance(scale, Tensor) and scale.dim() == 3:
        scale = scale[places][:, :, None]
    return dequantise(rows, 1.0 if scale is None else scale)


def _weigh(weights: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """`weights @ values`, but a key that a row does not see cannot reach it, not even as 0 x NaN."""
    if torch.isfinite(values).all():
        return weights @ values
    rows = [weights[:, i : i + 1, seen] @ values[:, seen] for i, seen in enumerate(visible)]
    return torch.cat(rows, dim=1)
