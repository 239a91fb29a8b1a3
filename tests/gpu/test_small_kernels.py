"""Cache writes, norms, rotation and the activation on the GPU, against torch and the reference room."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.kernels import assert_within_budget
from torch import Tensor
from torch.nn import functional

from octavo.kernels import (
    apply_rotary,
    backend,
    rms_norm,
    rotate_and_write_kv_cache,
    silu_and_mul,
    write_kv_cache,
)
from octavo.kernels.triton.monitor import forbid_compiles

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FP8, INT8 = torch.float8_e4m3fn, torch.int8


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def slots_for(num_tokens: int, num_slots: int) -> Tensor:
    """Different slots in no order; every fifth token is padding, one slot lies past the cache."""
    slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(1))[:num_tokens]
    slots[::5] = -1
    if num_tokens > 7:
        slots[7] = num_slots  # past the cache
    return slots.cuda()


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8).cpu()


@pytest.mark.parametrize(
    ("num_tokens", "heads", "head_dim", "block_size"),
    [(1, 8, 128, 16), (0, 2, 64, 16), (37, 3, 64, 16), (300, 8, 128, 64), (2000, 2, 80, 1), (9, 1, 33, 16),
     (4096, 8, 128, 16)],
)  # fmt: skip
@pytest.mark.parametrize(
    ("cache_dtype", "scales"),
    [
        *((dtype, "none") for dtype in (*DTYPES, FP8)),
        *itertools.product((FP8, INT8), ("float", "one", "token")),
    ],
    ids=str,
)
def test_write(
    cache_dtype: torch.dtype, scales: str, num_tokens: int, heads: int, head_dim: int, block_size: int
) -> None:
    """K and V are slices of a fused projection, the caches views of one tensor; the rest of it stays."""
    fused = draw(num_tokens, 5 * heads, head_dim)
    k, v = fused[:, 2 * heads : 3 * heads], fused[:, 4 * heads :]
    num_blocks = num_tokens // block_size + 20
    room = torch.full((num_blocks, 2, block_size, heads, head_dim), 3.0, device="cuda").to(cache_dtype)
    slots = slots_for(num_tokens, num_blocks * block_size)
    options = {
        "none": {},
        "float": {"k_scale": 0.02, "v_scale": 0.03},
        "one": {"k_scale": torch.tensor(0.02, device="cuda"), "v_scale": torch.tensor([0.03], device="cuda")},
        "token": {name: torch.full((num_blocks, block_size, heads), 9.0, device="cuda")
                  for name in ("k_scale", "v_scale")},
    }[scales]  # fmt: skip
    expected, expected_options = (
        room.cpu(),
        {name: value.cpu() if isinstance(value, Tensor) else value for name, value in options.items()},
    )
    write_kv_cache(k, v, room[:, 0], room[:, 1], slots, **options)
    inside = slots.cpu().where(slots.cpu() < num_blocks * block_size, -1)
    with backend.use("reference"):
        caches = (expected[:, 0], expected[:, 1])
        write_kv_cache(k.cpu(), v.cpu(), *caches, inside, **expected_options)
    assert torch.equal(bits(room), bits(expected))
    for name, value in options.items():
        if isinstance(value, Tensor):
            assert torch.equal(value.cpu(), expected_options[name])
    if cache_dtype in DTYPES:
        kept = inside >= 0
        place = (inside[kept] // block_size, inside[kept] % block_size)
        assert torch.equal(room.cpu()[:, 0][place], k.cpu()[kept].to(cache_dtype))


def rotary_table(max_position: int, rotary_dim: int) -> Tensor:
    angles = torch.arange(max_position)[:, None] * 10000.0 ** -(
        torch.arange(0, rotary_dim, 2) / max(1, rotary_dim)
    )
    return torch.cat([angles.cos(), angles.sin()], dim=-1).cuda()


def turn(x: Tensor, table: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Channel pairs as complex numbers times e^(i angle); x (T, H, D) float64."""
    half = table.shape[1] // 2
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    cos, sin = (part[:, None].to(x.dtype) for part in table[positions].split(half, dim=1))
    out = x.clone()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(64, 64), (128, 128), (128, 64), (80, 32), (96, 96), (33, 6)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 400])
def test_rotary(
    num_tokens: int, dtype: torch.dtype, head_dim: int, rotary_dim: int, interleaved: bool
) -> None:
    fused = draw(num_tokens, 6 * head_dim, dtype=dtype)
    before = fused.clone()
    q, k, _ = (
        x.view(num_tokens, -1, head_dim) for x in fused.split([3 * head_dim, 2 * head_dim, head_dim], 1)
    )
    table, positions = rotary_table(500, rotary_dim), torch.randint(500, (num_tokens,), device="cuda")
    expected = [turn(x.double(), table, positions, interleaved) for x in (q, k)]
    plain = [turn(x, table, positions, interleaved) for x in (q, k)]
    apply_rotary(q, k, table, positions, interleaved=interleaved)
    for ours, exact, low in zip((q, k), expected, plain, strict=True):
        assert_within_budget(ours, exact, low)
    assert torch.equal(fused[:, 5 * head_dim :], before[:, 5 * head_dim :])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize(
    ("heads", "head_dim", "rotary_dim"),
    [((16, 8), 128, 128), ((9, 3), 64, 64), ((4, 1), 80, 32), ((32, 8), 256, 64)],
)
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 700])
def test_rotate_and_write(
    num_tokens: int,
    cache_dtype: torch.dtype | None,
    heads: tuple[int, int],
    head_dim: int,
    rotary_dim: int,
    norm: bool,
    interleaved: bool,
) -> None:
    dtype, (num_heads, kv_heads) = torch.bfloat16, heads
    fused = draw(num_tokens, num_heads + 2 * kv_heads, head_dim)
    before = fused.clone()
    q, k, v = fused.split([num_heads, kv_heads, kv_heads], dim=1)
    table, positions = rotary_table(500, rotary_dim), torch.randint(500, (num_tokens,), device="cuda")
    num_blocks = num_tokens // 16 + 8
    caches = [torch.full((num_blocks, 16, kv_heads, head_dim), 2.0, device="cuda").to(cache_dtype or dtype)
              for _ in range(2)]  # fmt: skip
    slots = slots_for(num_tokens, num_blocks * 16)
    options = {}
    if norm:
        options = {"q_weight": draw(head_dim, seed=3), "k_weight": draw(head_dim, seed=4), "eps": 1e-6}
    scales = [torch.full((num_blocks, 16, kv_heads), 1.0, device="cuda") for _ in range(2)]
    if cache_dtype is not None:
        options |= {"k_scale": scales[0], "v_scale": scales[1]}
    out = rotate_and_write_kv_cache(
        q, k, v, table, positions, *caches, slots, interleaved=interleaved, **options
    )
    assert out.is_contiguous()
    assert torch.equal(fused, before)

    def right(x: Tensor, weight: Tensor | None, compute: torch.dtype) -> Tensor:
        x = x.to(compute)
        if weight is not None:
            x = functional.rms_norm(x, (head_dim,), weight.to(compute), 1e-6)
        return turn(x, table, positions, interleaved)

    weights = (options.get("q_weight"), options.get("k_weight"))
    assert_within_budget(out, right(q, weights[0], torch.float64), right(q, weights[0], dtype))
    kept = (slots >= 0) & (slots < num_blocks * 16)
    place = (slots[kept] // 16, slots[kept] % 16)
    k_right = right(k, weights[1], torch.float64)[kept]
    if cache_dtype is None:
        if int(kept.sum()):
            assert_within_budget(caches[0][place], k_right, right(k, weights[1], dtype)[kept])
        assert torch.equal(caches[1][place], v[kept])
        untouched = torch.ones(num_blocks * 16, dtype=torch.bool, device="cuda")
        untouched[slots[kept]] = False
        assert (caches[0].flatten(0, 1)[untouched] == 2.0).all()
        return
    for cache, scale, exact in zip(caches, scales, (k_right, v[kept].double()), strict=True):
        stored = cache[place].double() * scale[place].double()[..., None]
        half_step = exact.abs() * 2**-4 + scale[place].double()[..., None] * 2**-10
        assert ((stored - exact).abs() <= half_step * 1.01).all()


@pytest.mark.parametrize(
    "shape", [(5, 576), (1, 1), (3, 9, 64), (7, 33), (0, 64), (1000, 2048), (2, 8192)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, residual, weight = (
        draw(*shape, dtype=dtype),
        draw(*shape, dtype=dtype, seed=1),
        draw(shape[-1], dtype=dtype),
    )
    out, total = rms_norm(x, weight, 1e-6, residual=residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(out, rms_norm(total, weight, 1e-6))
    exact = functional.rms_norm(total.double(), shape[-1:], weight.double(), 1e-6)
    assert_within_budget(out, exact, functional.rms_norm(total, shape[-1:], weight, 1e-6))
    if len(shape) == 2 and shape[0]:
        assert torch.equal(rms_norm(total[-1:], weight, 1e-6), out[-1:])


@pytest.mark.parametrize("shape", [(1, 2), (7, 66), (300, 3072), (2, 19456), (0, 8)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_and_mul(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = torch.cat([draw(*shape, dtype=dtype), draw(*shape, dtype=dtype, seed=1)], dim=1)[:, : shape[1]]
    x[:1, :1] = -100.0
    gate, up = x.chunk(2, dim=1)
    exact = functional.silu(gate.double()) * up.double()
    assert_within_budget(silu_and_mul(x), exact, functional.silu(gate) * up)


def test_a_captured_step_of_small_kernels_follows_its_inputs_and_compiles_nothing() -> None:
    fused = draw(64, 32, 128)
    q, k, v = fused.split([16, 8, 8], dim=1)
    table, positions = rotary_table(500, 128), torch.arange(64, device="cuda")
    caches = [torch.zeros(20, 16, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    slots, weight, x = slots_for(64, 320), draw(128, seed=2), draw(64, 2048)
    norm_weight = draw(2048, seed=3)

    def step() -> tuple[Tensor, ...]:
        turned = rotate_and_write_kv_cache(
            q, k, v, table, positions, *caches, slots, q_weight=weight, k_weight=weight, eps=1e-6
        )
        return turned, *rms_norm(x, norm_weight, 1e-6, residual=x), silu_and_mul(x)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), forbid_compiles():
        results = step()
    for seed in (5, 6):
        fused.copy_(draw(64, 32, 128, seed=seed))
        x.copy_(draw(64, 2048, seed=seed))
        positions.copy_(torch.randint(500, (64,)))
        slots.copy_(torch.randperm(320)[:64])
        for cache in caches:
            cache.zero_()
        graph.replay()
        replayed, written = [one.clone() for one in results], [cache.clone() for cache in caches]
        for ours, right in zip((*replayed, *written), (*step(), *caches), strict=True):
            assert torch.equal(ours, right)
        assert torch.equal(caches[1].flatten(0, 1)[slots], v)


def test_a_position_without_a_row_makes_nan_and_reads_nothing() -> None:
    q, k = draw(2, 2, 64), draw(2, 2, 64)
    apply_rotary(q, k, rotary_table(8, 64), torch.tensor([3, 8], device="cuda"))
    assert torch.isfinite(q[0]).all()
    assert torch.isnan(q[1]).all()
