"""The polynomials against float64, over all of their range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import pytest
from numba import types

from octavo.kernels.cpu import ir
from octavo.kernels.cpu import math as vector_math

LANES = 8
Array = np.ndarray[Any, np.dtype[np.float32]]


def over(function: Any) -> Callable[[Array], Array]:
    load, store = ir.load, ir.store

    @numba.njit(types.void(types.intp, types.intp, types.intp))
    def run(source: int, target: int, count: int) -> None:
        for i in range(0, count, LANES):
            store(target + 4 * i, function(load(source + 4 * i, "float32", LANES)), "float32")

    def apply(x: Array) -> Array:
        assert len(x) % LANES == 0
        result = np.empty_like(x)
        run(x.ctypes.data, result.ctypes.data, len(x))
        return result

    return apply


@pytest.fixture(scope="module")
def exp() -> Callable[[Array], Array]:
    return over(vector_math.exp)


@pytest.fixture(scope="module")
def tanh() -> Callable[[Array], Array]:
    return over(vector_math.tanh)


def worst_ulp(got: Array, x: Array, exact: Any) -> float:
    truth = exact(x.astype(np.float64))
    return float(np.max(np.abs(got - truth) / np.spacing(np.abs(truth).astype(np.float32))))


def test_exp_is_within_two_ulp(exp: Callable[[Array], Array]) -> None:
    x = np.linspace(-87.3, 88.0, 1 << 20, dtype=np.float32)
    assert worst_ulp(exp(x), x, np.exp) <= 2.0


def test_exp_at_the_edges(exp: Callable[[Array], Array]) -> None:
    x = np.array([-np.inf, -1e30, -87.4, 0.0, -0.0, 1e30, np.inf, np.nan], dtype=np.float32)
    got = exp(x)
    assert got[:5].tolist() == [0.0, 0.0, 0.0, 1.0, 1.0]
    assert got[5] == got[6] == exp(np.full(8, 88.0, dtype=np.float32))[0]
    assert np.isnan(got[7])


def test_tanh_is_within_four_ulp(tanh: Callable[[Array], Array]) -> None:
    x = np.concatenate([np.linspace(-12, 12, 1 << 20), np.geomspace(1e-30, 1, 1 << 16)]).astype(np.float32)
    assert worst_ulp(tanh(x), x, np.tanh) <= 4.0


def test_tanh_at_the_edges(tanh: Callable[[Array], Array]) -> None:
    x = np.array([-np.inf, np.inf, 0.0, -0.0, 1e30, -1e30, np.nan, 0.5], dtype=np.float32)
    got = tanh(x)
    assert got[:6].tolist() == [-1.0, 1.0, 0.0, 0.0, 1.0, -1.0]
    assert np.isnan(got[6])
