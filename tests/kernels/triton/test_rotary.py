"""The Triton rotary embedding in the interpreter, against the reference."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels import apply_rotary, backend

pytestmark = pytest.mark.usefixtures("triton_room")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(16, 16), (16, 4), (24, 20), (80, 80), (33, 6), (2, 2), (8, 0)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_slices_of_a_fused_qkv_are_turned_in_place(
    dtype: torch.dtype, head_dim: int, rotary_dim: int, interleaved: bool
) -> None:
    """And nothing else of it: not the channels behind rotary_dim, not the values, not the neighbours."""
    rng = torch.Generator().manual_seed(0)
    qkv = torch.randn(7, 7, head_dim, generator=rng).to(dtype)
    angles = torch.rand(40, rotary_dim // 2, generator=rng) * 6
    cos_sin, positions = torch.cat([angles.cos(), angles.sin()], 1), torch.tensor([0, 39, 3, 3, 17, 1, 2])
    turned = []
    for room in ("triton", "reference"):
        fused = qkv.clone()
        with backend.use(room):
            apply_rotary(fused[:, :3], fused[:, 3:5], cos_sin, positions, interleaved=interleaved)
        turned.append(fused)
    torch.testing.assert_close(*turned, rtol=1e-6 if dtype == torch.float32 else 2e-3, atol=1e-6)
    assert torch.equal(turned[0][:, 5:], qkv[:, 5:])
    assert torch.equal(turned[0][..., rotary_dim:], qkv[..., rotary_dim:])


def test_queries_alone_and_no_tokens() -> None:
    """`flash_attn_with_kvcache` turns queries and keys by different positions: one call has no keys."""
    q, cos_sin = torch.randn(3, 2, 8), torch.cat([torch.zeros(4, 4), torch.ones(4, 4)], 1)  # by 90 degrees
    kept = q.clone()
    apply_rotary(q, q[:, :0], cos_sin, torch.tensor([1, 2, 3]))
    torch.testing.assert_close(q, torch.cat([-kept[..., 4:], kept[..., :4]], dim=-1))
    apply_rotary(q[:0], q[:0], cos_sin, torch.empty(0, dtype=torch.int64))
