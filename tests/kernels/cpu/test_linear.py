"""Packed linear: values against float64, and the same bits for a row whatever its company."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octavo.errors import KernelArgumentError
from octavo.kernels import embedding, linear, pack_weight
from octavo.kernels.cpu import host
from octavo.kernels.linear import GROUP, Form

PACKED: tuple[Form, ...] = ("float32", "float16", "int8")
PANEL = host.vector_shape().panel
MAX_ROWS = host.vector_shape().max_rows


def matrices(rows: int, columns: int, depth: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, depth, generator=rng),
        torch.randn(columns, depth, generator=rng),
        torch.randn(columns, generator=rng),
    )


@pytest.mark.parametrize("form", PACKED)
@pytest.mark.parametrize(
    ("rows", "columns", "depth"),
    [
        pytest.param(1, 1, 1, id="one number"),
        pytest.param(3, PANEL - 1, 7, id="less than a panel, less than a group"),
        pytest.param(MAX_ROWS + 1, PANEL, GROUP, id="one row more than a tile"),
        pytest.param(5, 2 * PANEL + 1, GROUP + 1, id="one column and one k more"),
        pytest.param(2, 3 * PANEL - 5, 512, id="one k block"),
        pytest.param(31, 70, 1100, id="three k blocks, rows converted per tile"),
        pytest.param(32, 70, 1100, id="three k blocks, k block converted once"),
        pytest.param(130, 577, 333, id="many rows, parallel"),
    ],
)
def test_values_are_within_float32_rounding_of_float64(
    form: Form, rows: int, columns: int, depth: int
) -> None:
    x, weight, bias = matrices(rows, columns, depth)
    packed = pack_weight(weight, form)
    stored = packed.dense().double()
    exact = x.double() @ stored.T
    # The textbook bound for any order of summation, with the sum of magnitudes as its scale.
    bound = (x.double().abs() @ stored.abs().T + bias.double().abs()) * torch.finfo(torch.float32).eps * 4
    assert ((linear(x, packed) - exact).abs() <= bound).all()
    assert ((linear(x, packed, bias) - (exact + bias.double())).abs() <= bound).all()


@pytest.mark.parametrize("form", PACKED)
def test_a_row_has_the_same_bits_alone_and_in_every_batch(form: Form) -> None:
    x, weight, bias = matrices(70, 3 * PANEL + 3, 1100)
    packed = pack_weight(weight, form)
    alone = torch.cat([linear(x[i : i + 1], packed, bias) for i in range(70)])
    for rows in (2, 3, MAX_ROWS, MAX_ROWS + 1, 16, 31, 32, 33, 70):
        for start in (0, 70 - rows):
            together = linear(x[start : start + rows], packed, bias)
            assert torch.equal(together, alone[start : start + rows])


@pytest.mark.parametrize("form", PACKED)
def test_one_two_and_three_threads_give_the_same_bits(form: Form, set_threads: Callable[[int], int]) -> None:
    x, weight, _ = matrices(33, 700, 600)
    packed = pack_weight(weight, form)
    set_threads(1)
    one = linear(x, packed)
    for num_threads in (2, 3):
        set_threads(num_threads)
        assert torch.equal(one, linear(x, packed))


def test_dense_gives_back_exactly_what_each_form_stores() -> None:
    _, weight, _ = matrices(1, 2 * PANEL + 5, 3 * GROUP + 9)
    assert torch.equal(pack_weight(weight, "float32").dense(), weight)
    assert torch.equal(pack_weight(weight, "float16").dense(), weight.half().float())
    assert torch.equal(pack_weight(weight.bfloat16(), "float32").dense(), weight.bfloat16().float())
    assert torch.equal(pack_weight(weight, "dense").dense(), weight)


def test_int8_is_at_most_half_a_step_off_in_its_own_group() -> None:
    _, weight, _ = matrices(1, PANEL + 5, 2 * GROUP + 9)
    weight[3, GROUP : 2 * GROUP] *= 1000.0  # a loud group must not spoil its neighbours
    error = (pack_weight(weight, "int8").dense() - weight).abs()
    for first in range(0, weight.shape[1], GROUP):
        group = slice(first, first + GROUP)
        step = weight[:, group].abs().amax(dim=1, keepdim=True) / 127
        assert (error[:, group] <= step * 0.5001).all()


def test_int8_keeps_a_group_of_zeros() -> None:
    weight = torch.zeros(2, GROUP)
    weight[0, 5] = -254.0
    packed = pack_weight(weight, "int8")
    assert torch.equal(packed.dense(), weight)
    assert linear(torch.ones(1, GROUP), packed).tolist() == [[-254.0, 0.0]]


@pytest.mark.parametrize("form", [*PACKED, "dense"])
def test_embedding_reads_rows_of_the_same_storage(form: Form) -> None:
    _, weight, _ = matrices(1, 2 * PANEL + 5, GROUP + 9)
    packed = pack_weight(weight, form)
    ids = torch.tensor([0, PANEL - 1, PANEL, 2 * PANEL + 4, 0])
    assert torch.equal(embedding(ids, packed), packed.dense()[ids])
    assert torch.equal(embedding(ids.int(), packed), packed.dense()[ids])
    assert embedding(ids[:0], packed).shape == (0, GROUP + 9)


@pytest.mark.parametrize("wrong_id", [-1, 2 * PANEL + 5, 3 * PANEL - 1])
def test_embedding_refuses_an_id_out_of_range_even_inside_the_padding(wrong_id: int) -> None:
    _, weight, _ = matrices(1, 2 * PANEL + 5, 8)
    with pytest.raises(KernelArgumentError, match=f"every id must be from 0 to {2 * PANEL + 4}, got"):
        embedding(torch.tensor([0, wrong_id]), pack_weight(weight, "float32"))


def test_bytes_are_counted_with_padding_and_scales() -> None:
    weight = torch.zeros(PANEL + 1, GROUP)
    assert pack_weight(weight, "float32").nbytes == 2 * PANEL * GROUP * 4
    assert pack_weight(weight, "float16").nbytes == 2 * PANEL * GROUP * 2
    assert pack_weight(weight, "int8").nbytes == 2 * PANEL * (GROUP + 4)


def test_no_rows_and_no_depth() -> None:
    _, weight, bias = matrices(1, 5, 7)
    assert linear(torch.empty(0, 7), pack_weight(weight, "float32")).shape == (0, 5)
    nothing = pack_weight(torch.empty(5, 0), "float32")
    assert torch.equal(linear(torch.empty(2, 0), nothing, bias), bias.expand(2, 5))
    assert torch.equal(linear(torch.empty(2, 0), nothing), torch.zeros(2, 5))


def test_a_nan_stays_in_its_row_and_padding_is_not_computed_with_it() -> None:
    x, weight, _ = matrices(9, PANEL + 3, 40)
    x[4, 7] = float("nan")
    result = linear(x, pack_weight(weight, "float32"))
    assert result.isnan().all(dim=1).tolist() == [i == 4 for i in range(9)]
    assert result.isnan().any(dim=1).tolist() == [i == 4 for i in range(9)]


@pytest.mark.parametrize(
    ("weight", "form", "message"),
    [
        pytest.param(torch.zeros(3), "float32", "weight must be a float tensor of shape", id="vector"),
        pytest.param(torch.zeros(3, 2).int(), "int8", "weight must be a float tensor", id="integers"),
        pytest.param(torch.zeros(3, 2), "flaot16", r"form must be .*did you mean 'float16'\?", id="typo"),
        pytest.param(torch.full((3, 2), 1e5), "float16", "at most 65504 for form 'float16'", id="overflow"),
    ],
)
def test_pack_weight_refuses(weight: Tensor, form: Form, message: str) -> None:
    with pytest.raises(KernelArgumentError, match=message):
        pack_weight(weight, form)


def test_linear_refuses_what_the_kernel_would_misread() -> None:
    x, weight, bias = matrices(4, 5, 8)
    packed = pack_weight(weight, "float32")
    for wrong in (x[:, :7], x.half(), x.T.contiguous().T, x[0]):
        with pytest.raises(KernelArgumentError, match=r"x must be contiguous float32 of shape \(T, 8\)"):
            linear(wrong, packed)
    for wrong in (bias[:4], bias.half(), bias.repeat_interleave(2)[::2]):
        with pytest.raises(KernelArgumentError, match=r"bias must be contiguous float32 of shape \(5,\)"):
            linear(x, packed, wrong)
