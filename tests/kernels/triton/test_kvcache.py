"""`flash_attn_with_kvcache` on its way through the Triton room: the plan against the reference's."""

import pytest
import torch
from torch import Tensor

from octavo.kernels import apply_rotary
from octavo.kernels.reference import kvcache as reference
from octavo.kernels.reference.kvcache import Angles, Plan
from octavo.kernels.triton import kv_write, kvcache

pytestmark = pytest.mark.usefixtures("triton_room")
BLOCK_SIZE = 4


def both(lens: Tensor | int, table: Tensor | None, *sizes: object) -> tuple[Plan, Plan]:
    batch = 3 if isinstance(lens, int) else len(lens)
    seqlen_q, num_new, cos, sin, follow = sizes
    arguments = (lens, table, batch, seqlen_q, num_new, BLOCK_SIZE, torch.device("cpu"), cos, sin, follow)
    return kvcache.plan_kvcache(*arguments), reference.plan_kvcache(*arguments)


def turned(angles: Angles | None, num_tokens: int) -> Tensor:
    """What the angles do, whichever way their table is laid out."""
    assert angles is not None
    x = torch.ones(num_tokens, 1, 2 * angles.table.shape[1] // 2)
    apply_rotary(x, x[:, :0], *angles)
    return x


@pytest.mark.parametrize("paged", [True, False], ids=["paged", "contiguous"])
@pytest.mark.parametrize(
    "lens", [torch.tensor([5, 0, 13], dtype=torch.int32), 6], ids=["each", "one for all"]
)
@pytest.mark.parametrize(("seqlen_q", "num_new"), [(1, 0), (1, 1), (2, 3), (50, 50)])
def test_the_plan_is_the_references(lens: Tensor | int, seqlen_q: int, num_new: int, paged: bool) -> None:
    table = torch.arange(3 * 16).flip(0).view(3, 16).int() if paged else None
    if not paged:  # the capacity is one block
        num_new = min(num_new, BLOCK_SIZE)
        room_left = BLOCK_SIZE - num_new
        lens = min(lens, room_left) if isinstance(lens, int) else lens.clamp(max=room_left)
    ours, right = both(lens, table, seqlen_q, num_new, None, None, False)
    for name in ("cu_seqlens_q", "cu_seqlens_k", "table", "slots"):
        torch.testing.assert_close(getattr(ours, name), getattr(right, name), rtol=0, atol=0)
    assert ours.q_angles is ours.k_angles is None


@pytest.mark.parametrize("follow", [True, False])
@pytest.mark.parametrize(("seqlen_q", "num_new"), [(1, 1), (3, 3), (2, 4), (150, 3)])
def test_the_angles_are_the_references(seqlen_q: int, num_new: int, follow: bool) -> None:
    lens, table = torch.tensor([5, 0, 13], dtype=torch.int32), torch.arange(3 * 50).view(3, 50).int()
    cos, sin = (
        torch.rand(400, 6)[::2, :3],
        torch.rand(200, 3),
    )  # strided rows, a width that is no power of two
    ours, right = both(lens, table, seqlen_q, num_new, cos, sin, follow)
    for name, num_tokens in (("q_angles", 3 * seqlen_q), ("k_angles", 3 * num_new)):
        torch.testing.assert_close(
            turned(getattr(ours, name), num_tokens),
            turned(getattr(right, name), num_tokens),
            rtol=0,
            atol=1e-6,
        )
    # Where q and k are turned alike, one launch turns both and writes k.
    assert (ours.q_angles is ours.k_angles) == (seqlen_q == num_new and (follow or seqlen_q == 1))


def test_more_sequences_than_one_vector_holds() -> None:
    rng = torch.Generator().manual_seed(0)
    lens = torch.randint(0, 30, (300,), dtype=torch.int32, generator=rng)
    table = torch.randperm(300 * 8, generator=rng).view(300, 8).int()
    ours, right = both(lens, table, 1, 1, None, None, True)
    assert torch.equal(ours.cu_seqlens_k, right.cu_seqlens_k)
    assert torch.equal(ours.cu_seqlens_q, right.cu_seqlens_q)
    assert torch.equal(ours.slots, right.slots)


@pytest.mark.parametrize(
    ("table", "slots"),
    [([[0, 1], [2, 3]], [7, -1, 8 + 3, 8 + 4]), (None, [-1, -1, 4 + 3, -1])],
    ids=["paged", "contiguous"],
)
def test_tokens_past_the_capacity_are_not_written(table: list[list[int]] | None, slots: list[int]) -> None:
    """A GPU cannot refuse lengths; another sequence's first key is not to be lost for it."""
    lens = torch.tensor([7, 3], dtype=torch.int32)
    entries = None if table is None else torch.tensor(table, dtype=torch.int32)
    arguments = (lens, entries, 2, 1, 2, BLOCK_SIZE, torch.device("cpu"), None, None, True)
    plan = kvcache.plan_kvcache(*arguments)
    assert plan.slots.tolist() == slots
    assert plan.cu_seqlens_k.tolist() == ([0, 8, 13] if table else [0, 4, 8])


def test_a_full_cache_keeps_its_keys() -> None:
    caches = torch.arange(2 * 4 * 4 * 16, dtype=torch.float32).view(2, 4, 4, 1, 16)
    before = caches.clone()
    plan = kvcache.plan_kvcache(
        torch.tensor([8, 3], dtype=torch.int32), torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
        2, 1, 1, 4, torch.device("cpu"), None, None, True,
    )  # fmt: skip
    new = torch.full((2, 1, 16), -1.0)
    kv_write.write_kv_cache(new, new, caches[0], caches[1], plan.slots)
    changed = (caches != before).any(-1).nonzero().tolist()
    assert changed == [[0, 2, 3, 0], [1, 2, 3, 0]]
