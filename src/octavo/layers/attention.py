"""Causal self-attention over the paged cache: turn and scatter the new keys and values first, then attend."""

from __future__ import annotations

from typing import Any

import torch

from octavo.cache.storage import LayerCache
from octavo.kernels import flash_attn_varlen_func, rotate_and_write_kv_cache, write_kv_cache
from octavo.kernels.shared_prefixes import attend_shared
from octavo.layers.attention_metadata import AttentionMetadata
from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm


class Attention:
    """One layer's attention, for H query heads, KVH key and value heads (KVH divides H) of D features.

    `qkv` is the fused projection (rows: all q heads, all k heads, all v heads); `rope_table` is
    (positions, rotary_dim) float32, shared by all layers; None where nothing is turned. `q_norm` and `k_norm`
    act on each head before rope (Qwen3). `sliding_window` is the number of keys a token sees,
    itself included; None = all. Weights in the ``invariant`` form ask for the same of the attention.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qkv: Linear,
        output: Linear,
        rope_table: torch.Tensor | None,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        sliding_window: int | None = None,
    ) -> None:
        self.head_dim = head_dim
        self.heads = [num_heads, num_kv_heads, num_kv_heads]
        self.num_heads_in_all = num_heads + 2 * num_kv_heads
        self.width = num_heads * head_dim
        self.scale = head_dim**-0.5
        # Our window counts the token itself, FlashAttention's left window the keys before it.
        self.window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        self.batch_invariant = qkv.weight.form == "invariant"
        self.can_share = sliding_window is None and not self.batch_invariant
        self.qkv = qkv
        self.output = output
        self.rope_table = rope_table
        self.norms: dict[str, Any] = {}
        if q_norm is not None and k_norm is not None:
            self.norms = {"q_weight": q_norm.weight, "k_weight": k_norm.weight, "eps": q_norm.eps}

    def __call__(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: LayerCache,
        meta: AttentionMetadata,
    ) -> torch.Tensor:
        """x (T, hidden), positions (T,) int64 -> (T, hidden). Writes the T new tokens into the cache's slots.

        `kv_cache` is this layer's.
        """
        return self.attend(self.qkv(x), positions, kv_cache, meta)

    def attend(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: LayerCache,
        meta: AttentionMetadata,
    ) -> torch.Tensor:
        """The rest of it, from what the projection `qkv` made, (T, heads in all * D)."""
        num_tokens = qkv.shape[0]
        qkv = qkv.view(num_tokens, self.num_heads_in_all, self.head_dim)
        q, k, v = qkv.split_with_sizes(self.heads, dim=1)
        k_cache, v_cache, k_scale, v_scale = kv_cache
        if self.rope_table is None:
            write_kv_cache(k, v, k_cache, v_cache, meta.slot_mapping, k_scale=k_scale, v_scale=v_scale)
        else:
            q = rotate_and_write_kv_cache(
                q,
                k,
                v,
                self.rope_table,
                positions,
                k_cache,
                v_cache,
                meta.slot_mapping,
                k_scale=k_scale,
                v_scale=v_scale,
                **self.norms,
            )
        if meta.shared is not None and self.can_share:
            attended = attend_shared(
                q,
                k_cache,
                v_cache,
                meta.shared,
                meta.cu_seqlens_q,
                meta.cu_seqlens_k,
                meta.max_seqlen_k,
                block_table=meta.block_table,
                softmax_scale=self.scale,
                k_scale=k_scale,
                v_scale=v_scale,
            )
        else:
            attended = flash_attn_varlen_func(
                q,
                k_cache,
                v_cache,
                meta.cu_seqlens_q,
                meta.cu_seqlens_k,
                meta.max_seqlen_q,
                meta.max_seqlen_k,
                softmax_scale=self.scale,
                causal=True,
                window_size=self.window,
                block_table=meta.block_table,
                k_scale=k_scale,
                v_scale=v_scale,
                batch_invariant=self.batch_invariant,
            )
        return self.output(attended.view(num_tokens, self.width))
