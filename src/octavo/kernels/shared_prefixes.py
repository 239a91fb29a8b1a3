"""Decoding of sequences that begin alike: what they have in common is read once for eight of them.

Attention is a weighted mean, so that it may be taken over some of the keys at a time, and the parts joined by
their LSE. The entries of a decode step are looked at in fixed *octets*, 8i to 8i + 7. Where the block tables
of an octet begin alike, its queries attend to the keys in these blocks together, as the rows of one sequence;
each then attends to its other keys alone::

    block_table (block_size 4)      cu_seqlens_k        lens  of the octet
    7 2 5 -1                        0                      8
    7 2 9  4                          9                    8     cu_seqlens_q  0 3
    7 2 1 -1                            22                 8     cu_seqlens_k  0 8
                                           33                    block_table   7 2 5 -1

The idea is that of Juravsky et al., "Hydragen: High-Throughput LLM Inference with Shared Prefixes" (2024,
https://arxiv.org/abs/2402.05099), and of cascade inference (https://flashinfer.ai/2024/02/02/cascade-inference).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.kernels import backend, checks
from octavo.kernels.argument_types import names_wrong_types
from octavo.kernels.attention import Options, attend
from octavo.kernels.known_calls import KnownCalls
from octavo.kernels.triton import SHORT

OCTET = SHORT
LEAST_TOKENS = 256
"""Common tokens of an octet under which it is not worth to take them apart."""

_INT32 = (torch.int32,)
_known = KnownCalls()


class SharedPrefixes(NamedTuple):
    """What the B entries of a decode step have in common, in O = ceil(B / 8) octets.

    lens: (B,) int32, leading keys of each entry that its octet attends to; 0 = none.
    cu_seqlens_q, cu_seqlens_k: (O + 1,) int32, prefix sums of the octets' entries and of their common keys.
    block_table: (O, C) int32, where these are; a view of the step's.
    """

    lens: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    block_table: Tensor


def rows_at_once(head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> int:
    """For how many query rows of an octet, all heads of a KV head counted, a GPU reads the keys together."""
    if torch.float32 in (dtype, cache_dtype):
        return 16
    return 32 if head_dim > 128 else 64


@names_wrong_types
def find_shared_prefixes(
    block_table: Tensor, cu_seqlens_k: Tensor, block_size: int, least: int = LEAST_TOKENS
) -> SharedPrefixes:
    """Look for the leading blocks that all entries of an octet have in common.

    An entry without keys takes no part, but that the first row of an octet stands for it: whoever takes part
    has to agree with that row. Every entry keeps at least one key to itself.

    Args:
        block_table: (B, C) int32, rows may be strided; entries past a sequence's keys may hold anything.
        cu_seqlens_k: (B + 1,) int32, prefix sums of the numbers of keys.
        block_size: tokens of a block.      least: common tokens below which nothing is shared.

    Returns:
        New tensors, but for the view. On a GPU nothing is read by the host, and a CUDA graph can capture the
        call.

    Raises:
        KernelArgumentError: a type, shape, dtype or device is wrong.
    """
    name = "find_shared_prefixes"
    device = block_table.device
    batch = cu_seqlens_k.numel() - 1
    checks.exactly(name, "cu_seqlens_k", cu_seqlens_k, (max(batch, 0) + 1,), device, _INT32)
    checks.table(name, block_table, batch, device)
    for argument, value in (("block_size", block_size), ("least", least)):
        if value < 1:
            raise checks.wrong(name, argument, "at least 1", value)
    kernel = backend.select(name, "cpu" if block_table.is_cpu else device.type)
    lens, octets_q, octets_k = kernel(block_table, cu_seqlens_k, block_size, least)
    return SharedPrefixes(lens, octets_q, octets_k, block_table[::OCTET])


@names_wrong_types
def attend_shared(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    shared: SharedPrefixes,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_k: int,
    *,
    block_table: Tensor,
    softmax_scale: float | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
) -> Tensor:
    """`flash_attn_varlen_func` of a decode step, one query row an entry, with its `shared` prefixes.

    Args:
        q: (B, H, D).      k_cache, v_cache, block_table, softmax_scale, k_scale, v_scale: as there.
        shared: `find_shared_prefixes` of this block table and these lengths; on the CPU, too, it is trusted.
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32, the first 0, 1, 2, ... B; lengths may be 0.
        max_seqlen_k: an upper bound of the lengths.

    Returns:
        (B, H, D) in the dtype of q, new.

    Raises:
        KernelArgumentError, UnsupportedKernelConfig: as there.
    """
    tensors = (q, k_cache, v_cache, *shared, cu_seqlens_q, cu_seqlens_k, block_table, k_scale, v_scale)
    known = _known.get(tensors, max_seqlen_k, softmax_scale)
    if known is None:
        _check(q, k_cache, v_cache, shared, cu_seqlens_q, cu_seqlens_k, block_table, k_scale, v_scale)
    of_octets, of_entries, merge = known or (None, None, None)
    options = Options(softmax_scale, False, (-1, -1), 0.0, None, None, k_scale, v_scale, False)
    common, common_lse, of_octets = attend_part(
        q, k_cache, v_cache, shared.cu_seqlens_q, shared.cu_seqlens_k, OCTET, max_seqlen_k, options,
        shared.block_table, None, of_octets,
    )  # fmt: skip
    own, own_lse, of_entries = attend_part(
        q, k_cache, v_cache, cu_seqlens_q, cu_seqlens_k, 1, max_seqlen_k, options,
        block_table, shared.lens, of_entries,
    )  # fmt: skip
    merge = merge or backend.select("merge_shared_prefixes", "cpu" if q.is_cpu else q.device.type)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    merge(common, common_lse, own, own_lse, shared.lens, out)
    if known is None:
        _known.keep((of_octets, of_entries, merge), tensors, max_seqlen_k, softmax_scale)
    return out


def attend_part(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    options: Options,
    block_table: Tensor,
    leftpad: Tensor | None,
    kernel: Callable[..., None] | None = None,
) -> tuple[Tensor, Tensor, Callable[..., None]]:
    """`attend` with its result in float32 (float64 for float64 queries) and its LSE: a part to be joined."""
    exact = torch.promote_types(q.dtype, torch.float32)
    device_type = "cpu" if q.is_cpu else q.device.type
    room = backend.implementation_of("varlen_attention", device_type, q.dtype, k_cache.dtype, q.shape[-1])
    if room == "cpu":
        q = q.to(exact)  # compiled for the CPU, it writes what it reads
    out = torch.empty(q.shape, dtype=exact, device=q.device)
    out, lse, kernel = attend(
        q, k_cache, v_cache, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, options,
        block_table, out, True, leftpad, kernel,
    )  # fmt: skip
    assert lse is not None
    return out, lse, kernel


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    shared: SharedPrefixes,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    block_table: Tensor,
    k_scale: Tensor | float | None,
    v_scale: Tensor | float | None,
) -> None:
    name, device = "attend_shared", q.device
    checks.tensor(name, "q", q, "B, num_heads, head_dim")
    batch, num_heads, head_dim = q.shape
    num_octets = -(-batch // OCTET)
    checks.caches(name, "k_cache", k_cache, "v_cache", v_cache, device)
    checks.heads(name, num_heads, k_cache.shape[2], head_dim, k_cache.shape[3])
    checks.scales(name, k_scale, v_scale, k_cache)
    checks.exactly(name, "cu_seqlens_q", cu_seqlens_q, (batch + 1,), device, _INT32)
    checks.exactly(name, "cu_seqlens_k", cu_seqlens_k, (batch + 1,), device, _INT32)
    checks.table(name, block_table, batch, device)
    checks.exactly(name, "shared.lens", shared.lens, (batch,), device, _INT32)
    for argument, sums in (("q", shared.cu_seqlens_q), ("k", shared.cu_seqlens_k)):
        checks.exactly(name, f"shared.cu_seqlens_{argument}", sums, (num_octets + 1,), device, _INT32)
    checks.exactly(
        name, "shared.block_table", shared.block_table, (num_octets, block_table.shape[1]), device, _INT32
    )
