"""The kernel for 5 to 32 rows without a Hopper: its arithmetic, interpreted, and what it is asked to do.

tests/kernels/triton/test_compiled.py looks at its instructions, tests/gpu at its results on a GPU.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers.gluon_stand_in import interpreted
from torch import Tensor

from octavo.errors import KernelArgumentError
from octavo.kernels import (
    backend,
    few_rows,
    linear,
    linear_onto,
    norm_linear,
    pack_weight,
    rms_norm,
    silu_and_mul,
)
from octavo.kernels.reference.few_rows_linear import few_rows_linear as reference
from octavo.kernels.triton import rows_linear

ROWS = [5, 8, 13, 16, 17, 32]
PLAIN, FRONT, NORM, BEHIND = "plain", "residual and norm", "norm", "residual behind"
# Width, depth, BLOCK_N, BLOCK_K, AHEAD, warps: whole blocks and what is left of one, all ahead or not.
SHAPES = [
    (37, 72, 16, 256, 1, 4),
    (32, 1024, 16, 512, 2, 8),
    (50, 520, 32, 128, 2, 4),
    (16, 96, 16, 64, 3, 2),
]
GRID = [
    pytest.param(rows, shape, kind, bool((i + j) % 2), bool((i + j + k) % 2), id=f"{rows}-{shape}-{kind}")
    for i, rows in enumerate(ROWS)
    for j, shape in enumerate(SHAPES)
    for k, kind in enumerate((PLAIN, FRONT, NORM, BEHIND))
    if (i + j + k) % 2 or rows == 13
]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    return SimpleNamespace(launch=interpreted(rows_linear, tmp_path_factory.mktemp("source")).rows_linear)


def run(
    kernel: SimpleNamespace,
    shape: tuple[int, ...],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    gated: bool,
) -> tuple[Tensor, Tensor | None]:
    width, depth, block_n, block_k, ahead, warps = shape
    rows = x.shape[0]
    in_front = residual is not None and norm_weight is not None
    # Memory behind the last row and column must stay as it is.
    memory = torch.full((rows * width + 100,), torch.nan)
    summed = torch.full_like(x, torch.nan)
    kernel.launch[(-(-width // block_n),)](
        x, weight, bias, residual, norm_weight, memory, summed if in_front else None, width, rows, 1e-5,
        DEPTH=depth, ROWS=rows_linear.rows_class(rows), HAS_BIAS=bias is not None,
        HAS_NORM=norm_weight is not None, IS_GATED=gated,
        RESIDUAL=0 if residual is None else 1 if in_front else 2, AT_REST=True,
        IS_WHOLE=width % block_n == 0, BLOCK_N=block_n, BLOCK_K=block_k, AHEAD=ahead, PDL=0, num_warps=warps,
    )  # fmt: skip
    assert memory[rows * width :].isnan().all()
    return memory[: rows * width].view(rows, width), summed if in_front else None


@pytest.mark.parametrize(("rows", "shape", "kind", "gated", "with_bias"), GRID)
def test_equals_the_reference(
    kernel: SimpleNamespace, rows: int, shape: tuple[int, ...], kind: str, gated: bool, with_bias: bool
) -> None:
    width, depth = shape[:2]
    gated = gated and kind != BEHIND
    x = draw(rows, depth)
    weight = draw(width * (1 + gated), depth, seed=1) / depth**0.5
    bias = draw(weight.shape[0], seed=2) if with_bias else None
    norm_weight = 1 + draw(depth, seed=3) if kind in (FRONT, NORM) else None
    residual = draw(rows, depth if kind == FRONT else width, seed=4) if kind in (FRONT, BEHIND) else None
    found, summed = run(kernel, shape, x, weight, bias, residual, norm_weight, gated)
    expected, new_residual = reference(x, weight, bias, residual, norm_weight, 1e-5, gated, True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (summed is None) == (new_residual is None)
    if summed is not None and new_residual is not None:
        assert torch.equal(summed, new_residual)


@pytest.mark.parametrize("kind", [PLAIN, FRONT])
def test_rows_do_not_meet(kernel: SimpleNamespace, kind: str) -> None:
    shape = SHAPES[0]
    x, weight, norm = draw(13, shape[1]), draw(shape[0], shape[1], seed=1), torch.ones(shape[1])
    ill = x.clone()
    ill[[0, 4, 12]] = torch.nan
    rest = [i for i in range(13) if i not in (0, 4, 12)]
    residual, norm_weight = (x, norm) if kind == FRONT else (None, None)
    well, _ = run(kernel, shape, x, weight, None, residual, norm_weight, False)
    sick, _ = run(kernel, shape, ill, weight, None, residual, norm_weight, False)
    assert torch.equal(sick[rest], well[rest])
    assert sick[[0, 4, 12]].isnan().all()
    # As many rows as there is room for, or fewer: the same bits.
    fewer, _ = run(
        kernel, shape, x[:9], weight, None, None if residual is None else x[:9], norm_weight, False
    )
    assert torch.equal(fewer, well[:9])


def test_classes_of_rows() -> None:
    assert [rows_linear.rows_class(n) for n in (5, 8, 9, 16, 17, 32)] == [8, 8, 16, 16, 32, 32]


@pytest.mark.parametrize(
    ("width", "depth", "most"),
    [
        (2 * 3072, 1024, 32),
        (2048, 4096, 32),
        (2049, 4096, 8),
        (2 * 12288, 4096, 8),
        (32768, 64, 32),
        (32769, 64, 0),
        (64, 16385, 0),
        (0, 64, 0),
    ],
)
def test_up_to_how_many_rows_it_is_asked(width: int, depth: int, most: int) -> None:
    assert few_rows.most_rows(width, depth) == most


@pytest.mark.parametrize(
    ("rows", "shape", "expected"),
    [
        (4, (1024, 1024), False),
        (5, (1024, 1024), True),
        (32, (1024, 1024), True),
        (33, (1024, 1024), False),
        (8, (6144, 4096), True),
        (9, (6144, 4096), False),
    ],
)
def test_other_calls_are_left_to_the_library(
    monkeypatch: pytest.MonkeyPatch, rows: int, shape: tuple[int, int], expected: bool
) -> None:
    def ask(dtype: torch.dtype) -> bool:
        return few_rows.is_for_many_rows(rows, shape, torch.device("cuda", 0), dtype, has_norm=True)

    few_rows._does_many_rows.cache_clear()
    monkeypatch.setattr(rows_linear, "_unfit_device", lambda device: None)
    found = ask(torch.bfloat16), ask(torch.float16)
    few_rows._does_many_rows.cache_clear()
    assert found == (expected, False)


@pytest.mark.parametrize(
    ("rows", "width", "depth", "gated", "expected"),
    [
        (5, 4096, 1024, False, (32, 256, 4, 8)),
        (8, 1024, 2048, False, (16, 512, 4, 16)),
        (8, 3072, 1024, True, (32, 256, 2, 8)),
        (8, 1024, 3072, False, (16, 512, 4, 16)),
        (16, 4096, 1024, False, (32, 256, 2, 8)),
        (9, 1024, 2048, False, (16, 256, 8, 8)),
        (16, 1024, 3072, False, (16, 512, 4, 16)),
        (17, 1024, 2048, False, (16, 1024, 3, 16)),
        (32, 576, 1536, False, (16, 512, 4, 16)),
        (32, 4096, 1024, False, (32, 256, 2, 8)),
        (32, 3072, 1024, True, (32, 256, 2, 8)),
        (8, 6144, 4096, False, (32, 256, 4, 8)),
        (8, 4096, 4096, False, (32, 512, 3, 8)),
        (8, 12288, 4096, True, (32, 256, 3, 8)),
        (8, 4096, 12288, False, (32, 512, 3, 8)),
    ],
)
def test_launch_parameters_of_layers(
    rows: int, width: int, depth: int, gated: bool, expected: tuple[int, ...]
) -> None:
    """As they were measured best in the layers of Qwen3-0.6B and Qwen3-8B, or next to it."""
    x = torch.empty(rows, depth, dtype=torch.bfloat16, device="meta")
    _, found = rows_linear.launch_class(x, width, gated)
    names = ("BLOCK_N", "BLOCK_K", "AHEAD", "num_warps")
    assert tuple(found[name] for name in names) == expected


@pytest.mark.parametrize(
    ("dtype", "depth", "has_norm", "reason"),
    [
        (torch.bfloat16, 1024, True, None),
        (torch.bfloat16, 72, False, None),
        (torch.float16, 1024, False, None),
        (torch.float16, 1024, True, "norm in float16"),
        (torch.float32, 1024, False, "float32"),
        (torch.bfloat16, 1001, False, "not aligned"),
    ],
)
def test_what_it_refuses(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, depth: int, has_norm: bool, reason: str | None
) -> None:
    device = torch.device("cuda", 0)
    assert rows_linear.unfit_reason(device, dtype, depth, has_norm=has_norm) == "Gluon is not interpreted"
    monkeypatch.setattr(rows_linear, "_unfit_device", lambda device: None)
    found = rows_linear.unfit_reason(device, dtype, depth, has_norm=has_norm)
    assert (found is None) if reason is None else (found is not None and reason in found)


# --- The public functions where that kernel is not


@pytest.mark.parametrize("gated", [False, True])
def test_no_residual_is_none_at_all(gated: bool) -> None:
    x, weight, norm = draw(7, 48), pack_weight(draw(20, 48, seed=1), "dense"), 1 + draw(48, seed=2)
    with backend.use("reference"):
        found, stream = norm_linear(x, None, norm, 1e-5, weight, gated=gated)
        product = linear(rms_norm(x, norm, 1e-5), weight)
        assert torch.equal(found, silu_and_mul(product) if gated else product)
    assert stream is x


def test_what_is_left_to_add_is_handed_on() -> None:
    x, residual, weight = draw(7, 48), draw(7, 20, seed=1), pack_weight(draw(20, 48, seed=2), "dense")
    bias = draw(20, seed=3)
    with backend.use("reference"):
        out, rest = linear_onto(x, residual, weight, bias)
        assert torch.equal(out, linear(x, weight, bias))
        assert rest is residual
        assert linear_onto(x, None, weight)[1] is None


@pytest.mark.parametrize("shape", [(48,), (7, 48), (2, 3, 48)])
def test_a_residual_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    x, weight = torch.ones(shape), pack_weight(draw(20, 48), "dense")
    onto = (*shape[:-1], 20)
    with backend.use("reference"):
        assert linear_onto(x, torch.ones(onto), weight)[0].shape == onto
        for wrong in ((1, *onto), (*shape[:-1], 1), (20,) if len(shape) > 1 else (1, 20)):
            with pytest.raises(KernelArgumentError, match="linear_onto: residual must be of shape") as caught:
                linear_onto(x, torch.ones(wrong), weight)
            assert f"{onto}, got shape {wrong}" in str(caught.value)
