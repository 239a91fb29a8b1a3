"""`apply_rotary` against rotation as a complex product."""

import pytest
import torch
from torch import Tensor

from octavo.kernels import apply_rotary

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def table(max_position: int, rotary_dim: int) -> Tensor:
    frequencies = 10000.0 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = torch.arange(max_position)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def turned(x: Tensor, cos_sin: Tensor, positions: list[int], interleaved: bool) -> Tensor:
    """Each channel pair is a complex number times e^(i angle), in float64."""
    half = cos_sin.shape[1] // 2
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    out = x.double().clone()
    for t, position in enumerate(positions):
        unit = torch.complex(*cos_sin[position].double().split(half))
        z = torch.complex(x[t, :, first].double(), x[t, :, second].double()) * unit
        out[t, :, first], out[t, :, second] = z.real, z.imag
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(64, 64), (64, 16), (80, 80), (24, 20), (2, 2), (33, 6)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slices_of_a_fused_qkv_are_turned_in_place(
    implementation: str, dtype: torch.dtype, head_dim: int, rotary_dim: int, interleaved: bool
) -> None:
    rng = torch.Generator().manual_seed(0)
    qkv = torch.randn(7, 6 * head_dim, generator=rng).to(dtype)
    before = qkv.clone()
    q, k, v = (x.view(7, -1, head_dim) for x in qkv.split([3 * head_dim, 2 * head_dim, head_dim], dim=1))
    cos_sin, positions = table(40, rotary_dim), [0, 39, 3, 3, 17, 1, 2]
    expected = [turned(x.clone(), cos_sin, positions, interleaved) for x in (q, k)]
    apply_rotary(q, k, cos_sin, torch.tensor(positions), interleaved=interleaved)
    eps = torch.finfo(dtype).eps
    for ours, right in zip((q, k), expected, strict=True):
        torch.testing.assert_close(
            ours.double(), right, rtol=eps, atol=2e-7 if dtype == torch.float32 else eps / 8
        )
    assert torch.equal(v.flatten(1), before[:, 5 * head_dim :])
    assert torch.equal(
        q[:, :, rotary_dim:], before[:, : 3 * head_dim].view(7, 3, head_dim)[:, :, rotary_dim:]
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (24, 20), (33, 6)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_into_other_memory(
    implementation: str, dtype: torch.dtype, head_dim: int, rotary_dim: int, interleaved: bool
) -> None:
    """The same bits as in place, behind rotary_dim, too; q and k stay."""
    rng = torch.Generator().manual_seed(0)
    q, k = (torch.randn(7, heads, head_dim, generator=rng).to(dtype) for heads in (3, 2))
    kept = q.clone(), k.clone()
    # With other strides, and memory that nothing may be left of.
    q_out = torch.full((3, 7, head_dim + 3), torch.nan, dtype=dtype)[..., :head_dim].transpose(0, 1)
    out = q_out, torch.full((7, 4, head_dim), torch.nan, dtype=dtype)[:, 1:3]
    angles = table(40, rotary_dim), torch.tensor([0, 39, 3, 3, 17, 1, 2])
    apply_rotary(q, k, *angles, interleaved=interleaved, out=out)
    assert torch.equal(q, kept[0])
    assert torch.equal(k, kept[1])
    apply_rotary(q, k, *angles, interleaved=interleaved)
    assert torch.equal(out[0], q)
    assert torch.equal(out[1], k)


def test_position_zero_changes_nothing(implementation: str) -> None:
    q, k = torch.randn(2, 3, 8), torch.randn(2, 1, 8)
    kept = q.clone(), k.clone()
    apply_rotary(q, k, table(4, 8), torch.zeros(2, dtype=torch.int64))
    assert torch.equal(q, kept[0])
    assert torch.equal(k, kept[1])


def test_the_two_conventions_by_hand(implementation: str) -> None:
    """A quarter turn: (a, b) becomes (-b, a)."""
    quarter = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    for interleaved, right in ((False, [-3.0, -4.0, 1.0, 2.0]), (True, [-2.0, 1.0, -4.0, 3.0])):
        q = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 4)
        k = q.clone()
        apply_rotary(q, k, quarter, torch.tensor([0]), interleaved=interleaved)
        assert q.flatten().tolist() == right
        assert k.flatten().tolist() == right


def test_no_tokens(implementation: str) -> None:
    q = torch.randn(0, 3, 8)
    apply_rotary(q, torch.randn(0, 1, 8), table(4, 8), torch.zeros(0, dtype=torch.int64))
    assert q.shape == (0, 3, 8)
