"""Arguments of the wrong type are named by the annotation they do not fit, before anything is written."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from helpers.kernel_calls import CALLS, EMPTY, write_arguments

from octavo.errors import KernelArgumentError
from octavo.kernels import (
    apply_rotary,
    embedding,
    linear,
    pack_weight,
    rms_norm,
    silu_and_mul,
    write_kv_cache,
)
from octavo.kernels.argument_types import names_wrong_types

ONES = torch.ones(2, 8)

WRONG: list[tuple[str, str, str, list[Any]]] = [
    ("write", "k", "Tensor", [[1.0], None]),
    ("write", "slot_mapping", "Tensor", [[0, 5, 15], None]),
    ("packed", "q", "Tensor", [[1.0], None]),
    ("packed", "cu_seqlens_q", "Tensor", [[0, 2, 3], None]),
    ("packed", "cu_seqlens_k", "Tensor", [[0, 2, 7], None]),
    ("packed", "max_seqlen_q", "int", ["3", None]),
    ("packed", "softmax_scale", "float | None", ["x"]),
    ("packed", "softcap", "float", ["x", None]),
    ("packed", "window_size", "tuple[int, int]", [5, None, ("a", "b"), (1.5, 0)]),
    ("packed", "alibi_slopes", "Tensor | None", [0.5]),
    ("paged", "block_table", "Tensor | None", [[[2, -1], [1, 3]]]),
    ("append", "cache_seqlens", "Tensor | int | None", ["x", [2, 5]]),
    ("append", "softmax_scale", "float | None", ["x"]),
    ("append", "window_size", "tuple[int, int]", [5, (1.5, 0)]),
]


@pytest.mark.parametrize(
    ("call", "argument", "kind", "value"),
    [(call, argument, kind, value) for call, argument, kind, values in WRONG for value in values],
    ids=str,
)
def test_caches_and_attention(call: str, argument: str, kind: str, value: Any) -> None:
    function, build = CALLS[call]
    arguments = build() | {argument: value}
    message = f"{argument} must be a value of type {kind}, got {value!r} ({type(value).__name__})."
    with pytest.raises(KernelArgumentError, match=re.escape(f"{function.__name__}: {message}")):
        function(**arguments)
    for name in ("k_cache", "v_cache", "out"):
        if name in arguments:
            assert (arguments[name] == EMPTY).all()


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (rms_norm, ([1.0], ONES, 1e-6), "x must be a value of type Tensor, got [1.0] (list)"),
        (rms_norm, (ONES, ONES[0], "x"), "eps must be a value of type float, got 'x' (str)"),
        (silu_and_mul, (None,), "x must be a value of type Tensor, got None (NoneType)"),
        (
            apply_rotary,
            (ONES[None], ONES[None], ONES, [0]),
            "positions must be a value of type Tensor, got [0]",
        ),
        (linear, (None, pack_weight(ONES, "dense")), "x must be a value of type Tensor, got None"),
        (linear, (ONES, ONES), "w must be a value of type PackedWeight, got tensor("),
        (embedding, ([0], pack_weight(ONES, "dense")), "ids must be a value of type Tensor, got [0]"),
    ],
)
def test_the_other_kernels(function: Any, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(KernelArgumentError, match=re.escape(f"{function.__name__}: {message}")):
        function(*arguments)


def test_a_call_that_python_itself_refuses_is_left_to_python() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'slot_mapping'"):
        write_kv_cache(*list(write_arguments().values())[:4])


def test_a_fault_of_ours_stays_what_it_is() -> None:
    @names_wrong_types
    def faulty(x: int) -> int:
        return x.nowhere  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match="nowhere"):
        faulty(1)
