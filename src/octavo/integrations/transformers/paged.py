"""Attention in continuous batching, over Transformers' paged cache.

Sequences are laid end to end in a batch of one, and come in one of two ways:

- *varlen*, whenever some sequence has more than one new token: keys and values are put into the cache, and a
  packed copy of each sequence's old and new ones is attended. The newest Transformers does the first part
  before it calls here; older ones hand over the cache, whose `update` has had two signatures.
- *block table*, when every sequence has one new token: K and V are written into their pages and read there.
  Lengths then come *without* the new token's own slot being filled, and entries of -1 are not allocated.
  Padded rows of a CUDA graph have a length of 0 and are neither written nor attended.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.errors import UnsupportedKernelConfig
from octavo.integrations.transformers.stock import needs_gradients
from octavo.kernels import flash_attn_varlen_func, write_kv_cache
from octavo.kernels.checks import MAX_HEAD_DIM
from octavo.kernels.triton import SHORT


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    *,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    is_causal: bool | None = None,
    cu_seq_lens_k: Any = None,
    max_length_q: int | None = None,
    max_length_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: Any = None,
    block_table: Tensor | None = None,
    k_cache: Tensor | None = None,
    v_cache: Tensor | None = None,
    cache: Any = None,
    read_index: Any = None,
    write_index: Any = None,
    **_: Any,
) -> Tensor:
    """query (1, H, T, D), key and value (1, KVH, T or what `update` returned, D); returns (1, T, H, D).

    Raises:
        UnsupportedKernelConfig: gradients are needed, no kernel has these head dimensions, or keys and values
            are of two dtypes, as autocast leaves them.
    """
    if needs_gradients(query, key, value, sinks):
        raise UnsupportedKernelConfig(
            "attn_implementation='octavo' computes no gradients over packed sequences. Wrap the call in "
            "torch.no_grad(), or pass an attention mask instead of cu_seq_lens_q."
        )
    head_dim = query.shape[3]
    if value.shape[3] != head_dim or head_dim > MAX_HEAD_DIM:
        raise UnsupportedKernelConfig(
            f"attn_implementation='octavo': {type(module).__name__} has head dimensions of {head_dim} in "
            f"queries and {value.shape[3]} in values, expected equal ones of at most {MAX_HEAD_DIM}. Use "
            "attn_implementation='sdpa' for continuous batching of this model."
        )
    if key.dtype != value.dtype:
        raise UnsupportedKernelConfig(
            f"attn_implementation='octavo': {type(module).__name__} has keys of {key.dtype} and values of "
            f"{value.dtype}, expected one dtype over packed sequences. Load the model in the dtype that is "
            "wanted, without torch.autocast, or use attn_implementation='sdpa'."
        )
    layer: int = getattr(module, "layer_idx", 0)
    longest_q: Any = max_seqlen_q if max_length_q is None else max_length_q
    longest_k: Any = max_seqlen_k if max_length_k is None else max_length_k
    options: dict[str, Any] = {
        "softmax_scale": scaling, "causal": is_causal is not False,
        "window_size": (-1, -1) if sliding_window is None else (sliding_window - 1, -1),
        "softcap": softcap or 0.0, "sinks": None if sinks is None else sinks.detach(),
    }  # fmt: skip
    k_lens = _Keys(cu_seq_lens_k, longest_k, block_table, k_cache, v_cache)
    if cache is not None:  # the newest versions have updated it already
        key, value, k_lens = _update(
            cache, layer, key, value, k_lens, sliding_window, read_index, write_index
        )
    cu_seqlens_k, longest_k, block_table, k_cache, v_cache = k_lens
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if cu_seqlens_q.dtype != torch.int32:
        cu_seqlens_q, cu_seqlens_k = cu_seqlens_q.int(), cu_seqlens_k.int()
    if block_table is not None and k_cache is not None and v_cache is not None:
        slots = _slots(block_table, cu_seqlens_k, k_cache.shape[1], layer)
        write_kv_cache(k, v, k_cache, v_cache, slots)
        longest_k = block_table.shape[1] * k_cache.shape[1]
        out: Tensor = flash_attn_varlen_func(
            q, k_cache, v_cache, cu_seqlens_q, cu_seqlens_k, 1, longest_k, block_table=block_table, **options
        )
        return out[None]
    if cu_seqlens_q.shape[0] == 2 and q.shape[0] > SHORT:
        # Rows of a graph may be padded, and a lone sequence that is short is then the other kernel's.
        cu_seqlens_q = torch.cat([cu_seqlens_q, cu_seqlens_q[1:]])
        cu_seqlens_k = torch.cat([cu_seqlens_k, cu_seqlens_k[1:]])
    lens = cu_seqlens_q, cu_seqlens_k, longest_q, longest_k
    out = flash_attn_varlen_func(q.contiguous(), k.contiguous(), v.contiguous(), *lens, **options)
    return out[None]


attend_apart: Any = torch.compiler.disable(attend)  # type: ignore[no-untyped-call]


class _Keys(NamedTuple):
    """What is known of the keys: of this layer, or, before an update, of each kind of layer."""

    cu_seqlens: Any
    longest: Any
    block_table: Any
    k_cache: Tensor | None
    v_cache: Tensor | None


def _update(
    cache: Any,
    layer: int,
    key: Tensor,
    value: Tensor,
    keys: _Keys,
    sliding_window: int | None,
    read_index: Any,
    write_index: Any,
) -> tuple[Tensor, Tensor, _Keys]:
    """Have the cache take key and value, unless there is a block table; what is to be attended then."""
    kind_of_cache: Any = type(cache)
    if not _takes_indices(kind_of_cache):
        found = {
            "cu_seq_lens_k": keys.cu_seqlens, "max_length_k": keys.longest, "block_table": keys.block_table,
            "read_index": read_index, "write_index": write_index,
        }  # fmt: skip
        key, value = cache.update(key, value, layer, found)
        of_layer = found["cu_seq_lens_k"], found["max_length_k"], found["block_table"]
        return key, value, _Keys(*of_layer, found.get("k_cache"), found.get("v_cache"))
    if isinstance(keys.cu_seqlens, dict):
        kind = "sliding_attention" if sliding_window is not None else "full_attention"
        keys = keys._replace(cu_seqlens=keys.cu_seqlens[kind], longest=keys.longest[kind])
    if keys.block_table is None:
        key, value = (
            x.transpose(0, 1)[None] for x in cache.update(key, value, layer, read_index, write_index)
        )
        return key, value, keys
    group, place = cache.layer_index_to_group_indices[layer]
    shape = (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
    caches = cache.key_cache[place].view(shape), cache.value_cache[place].view(shape)
    return key, value, _Keys(keys.cu_seqlens, keys.longest, keys.block_table[group], *caches)


@functools.cache
def _takes_indices(cache: Any) -> bool:
    """Whether that class's `update` takes the indices one by one (5.17), not in a dictionary to change."""
    return "read_index" in inspect.signature(cache.update).parameters


class _Step(NamedTuple):
    cu_seqlens_k: Tensor
    layer: int
    slots: Tensor


# By where a block table lies: Transformers has one buffer for each, and makes new views in every step.
_steps: dict[int, _Step] = {}


def _slots(block_table: Tensor, cu_seqlens_k: Tensor, block_size: int, layer: int) -> Tensor:
    """(B,) int64, where each sequence's new token goes, -1 for padded rows. Once in a step.

    The layer that computed them computes them again when it comes round: the same views may be a second
    forward, or the capture of a graph, which has to hold this computation, too.
    """
    place = block_table.data_ptr()
    step = _steps.get(place)
    if step is None or step.cu_seqlens_k is not cu_seqlens_k or step.layer == layer:
        if len(_steps) > 16:
            _steps.clear()
        position = cu_seqlens_k.diff().long() - 1
        within = position.clamp(min=0)
        block = block_table.gather(1, (within // block_size)[:, None])[:, 0].long()
        is_there = (position >= 0) & (block >= 0)
        slots = torch.where(is_there, block * block_size + within % block_size, -1)
        step = _steps[place] = _Step(cu_seqlens_k, layer, slots)
    return step.slots
