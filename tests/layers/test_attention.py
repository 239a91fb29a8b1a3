"""The attention layer and the gated MLP against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from octavo.cache.storage import LayerCache
from octavo.kernels.linear import Form, pack_weight
from octavo.layers.attention import Attention
from octavo.layers.attention_metadata import AttentionMetadata
from octavo.layers.linear import Linear
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import RMSNorm
from octavo.layers.rope_config import RopeConfig
from octavo.layers.rotary import rope_table

HIDDEN, HEADS, KV_HEADS, DIM, TOKENS = 24, 4, 2, 8, 11


def linear(rows: int, columns: int, generator: torch.Generator, bias: bool = False) -> tuple[Linear, Any]:
    weight = torch.randn(rows, columns, generator=generator) / columns**0.5
    offset = torch.randn(rows, generator=generator) if bias else None
    return Linear(pack_weight(weight, "float32"), offset), lambda x: functional.linear(x, weight, offset)


def turned(x: torch.Tensor, table: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """x (T, H, D) with the first rotary_dim features of each head rotated by its token's index."""
    cos, sin = table[: x.shape[0], None].chunk(2, dim=-1)
    a, b = x[..., : rotary_dim // 2], x[..., rotary_dim // 2 : rotary_dim]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., rotary_dim:]], dim=-1)


@pytest.mark.parametrize("rotary_dim", [8, 4])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 50])
def test_attention_equals_plain_torch(rotary_dim: int, has_norm: bool, window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    qkv, plain_qkv = linear((HEADS + 2 * KV_HEADS) * DIM, HIDDEN, generator, bias=True)
    output, plain_output = linear(HIDDEN, HEADS * DIM, generator)
    rope = RopeConfig(rotary_dim=rotary_dim, max_position_embeddings=32, original_max_position_embeddings=32)
    table = rope_table(rope)
    gains = [1 + 0.3 * torch.randn(DIM, generator=generator) for _ in range(2)]
    norms = [RMSNorm(gain, 1e-6) if has_norm else None for gain in gains]
    layer = Attention(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        qkv=qkv,
        output=output,
        rope_table=table,
        q_norm=norms[0],
        k_norm=norms[1],
        sliding_window=window,
    )
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    untouched = x.clone()
    blocks, block_size = [3, 0, 5], 4
    cache = torch.full((6, block_size, KV_HEADS, DIM), torch.nan)
    caches = LayerCache(cache, cache.clone())
    pieces = []
    for first, last in ((0, 6), (6, 7), (7, TOKENS)):
        positions = torch.arange(first, last)
        meta = AttentionMetadata(
            slot_mapping=torch.tensor(
                [blocks[p // block_size] * block_size + p % block_size for p in positions]
            ),
            cu_seqlens_q=torch.tensor([0, last - first], dtype=torch.int32),
            cu_seqlens_k=torch.tensor([0, last], dtype=torch.int32),
            block_table=torch.tensor([blocks], dtype=torch.int32),
            max_seqlen_q=last - first,
            max_seqlen_k=last,
        )
        pieces.append(layer(x[first:last], positions, caches, meta))
    assert torch.equal(x, untouched)

    q, k, v = plain_qkv(x).view(TOKENS, -1, DIM).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    if has_norm:
        q, k = (
            functional.rms_norm(part, (DIM,), gain, 1e-6) for part, gain in zip((q, k), gains, strict=True)
        )
    q, k = (turned(part, table, rotary_dim) for part in (q, k))
    distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    visible = (distance >= 0) & (distance < (window or TOKENS))
    attended = functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=visible, enable_gqa=True
    )
    expected = plain_output(attended.transpose(0, 1).reshape(TOKENS, -1))
    torch.testing.assert_close(torch.cat(pieces), expected, rtol=0, atol=1e-5)


def test_a_negative_slot_is_not_written() -> None:
    generator = torch.Generator().manual_seed(0)
    qkv, _ = linear((HEADS + 2 * KV_HEADS) * DIM, HIDDEN, generator)
    output, _ = linear(HIDDEN, HEADS * DIM, generator)
    rope = RopeConfig(rotary_dim=DIM, max_position_embeddings=32, original_max_position_embeddings=32)
    layer = Attention(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        qkv=qkv,
        output=output,
        rope_table=rope_table(rope),
    )
    cache = torch.zeros(2, 4, KV_HEADS, DIM)
    caches = LayerCache(cache, cache.clone())
    meta = AttentionMetadata(
        slot_mapping=torch.tensor([1, -1]),
        cu_seqlens_q=torch.tensor([0, 2], dtype=torch.int32),
        cu_seqlens_k=torch.tensor([0, 2], dtype=torch.int32),
        block_table=torch.tensor([[0]], dtype=torch.int32),
        max_seqlen_q=2,
        max_seqlen_k=2,
    )
    layer(torch.randn(2, HIDDEN, generator=generator), torch.arange(2), caches, meta)
    for tensor in (caches.k, caches.v):
        assert tensor.flatten(0, 1).abs().sum((1, 2)).nonzero().flatten().tolist() == [1]


def test_gated_mlp_equals_plain_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    gate_up, plain_gate_up = linear(2 * 40, HIDDEN, generator, bias=True)
    down, plain_down = linear(HIDDEN, 40, generator)
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    gate, up = plain_gate_up(x).chunk(2, dim=-1)
    expected = plain_down(functional.silu(gate) * up)
    torch.testing.assert_close(GatedMLP(gate_up, down)(x), expected, rtol=0, atol=1e-5)


def test_norm_with_the_residual_added_first() -> None:
    x, residual = torch.randn(2, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0))
    norm = RMSNorm(torch.linspace(0.5, 1.5, HIDDEN), 1e-5)
    normed, total = norm.add(x, residual)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed, functional.rms_norm(x + residual, (HIDDEN,), norm.weight, 1e-5))
    torch.testing.assert_close(norm(x), functional.rms_norm(x, (HIDDEN,), norm.weight, 1e-5))


@pytest.mark.parametrize("form", ["dense", "invariant"])
def test_invariant_weights_ask_for_invariant_attention(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def attend(q: torch.Tensor, *_: Any, batch_invariant: bool, **__: Any) -> torch.Tensor:
        asked.append(batch_invariant)
        return q

    monkeypatch.setattr("octavo.layers.attention.flash_attn_varlen_func", attend)
    layer = Attention(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        qkv=Linear(pack_weight(torch.zeros((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), form)),
        output=Linear(pack_weight(torch.zeros(HIDDEN, HEADS * DIM), form)),
        rope_table=None,
    )
    int32 = torch.tensor([0, 1], dtype=torch.int32)
    meta = AttentionMetadata(torch.tensor([-1]), int32, int32, torch.zeros(1, 1, dtype=torch.int32), 1, 1)
    cache = torch.zeros(1, 4, KV_HEADS, DIM)
    layer(torch.zeros(1, HIDDEN), torch.zeros(1, dtype=torch.int64), LayerCache(cache, cache.clone()), meta)
    assert asked == [form == "invariant"]
