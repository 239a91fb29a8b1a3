"""Calls of the public kernels, of one signature again and again, compiled for a GPU that is not there.

Prints JSON: every launch that was not the one of a call of which nothing is known; and how many there were.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from helpers.no_gpu import NoGpu
from torch import Tensor

from octavo.errors import KernelArgumentError
from octavo.kernels import (
    apply_rotary,
    backend,
    flash_attn_varlen_func,
    known_calls,
    rms_norm,
    rotate_and_write_kv_cache,
    silu_and_mul,
    write_kv_cache,
)

BF16, FP8, INT8 = torch.bfloat16, torch.float8_e4m3fn, torch.int8
Made = tuple[dict[str, Any], Callable[..., Any]]


def _new(at: int, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Zeros that begin `at` bytes after a multiple of 64."""
    count = torch.Size(shape).numel() * dtype.itemsize
    memory = torch.zeros(count + 128, dtype=torch.uint8)
    start = -memory.data_ptr() % 64 + at
    return memory[start : start + count].view(dtype).view(shape)


def _norm(at: int, residual: bool, grid: bool) -> Made:
    shape = (3, 5, 64) if grid else (5, 64)
    x = _new(at, *shape[:-1], 128)[..., :64] if grid else _new(at, *shape)
    given: dict[str, Any] = {"x": x, "weight": _new(0, 64)}
    if residual:
        given["residual"] = _new(0, *shape[:-1], 128)[..., :64] if grid else _new(0, *shape)
    return given, lambda **tensors: rms_norm(**tensors, eps=1e-6)


def _silu(at: int) -> Made:
    return {"x": _new(at, 5, 256)}, silu_and_mul


def _silu_apart(at: int) -> Made:
    return {"x": _new(at, 5, 128), "up": _new(0, 5, 256)[:, 128:]}, silu_and_mul


def _turn(at: int, is_apart: bool) -> Made:
    q, k = _new(at, 5, 6, 64).split((4, 2), dim=1)
    given = {
        "q": q, "k": k, "cos_sin_cache": _new(0, 32, 64, dtype=torch.float32), "positions": torch.arange(5),
        "q_out": _new(0, 5, 4, 64), "k_out": _new(at, 5, 2, 64),
    }  # fmt: skip

    def turn(q_out: Tensor, k_out: Tensor, **tensors: Tensor) -> tuple[Tensor, Tensor]:
        apply_rotary(**tensors, out=(q_out, k_out) if is_apart else None)
        return (q_out, k_out) if is_apart else (tensors["q"], tensors["k"])

    return given, turn


def _few_rows(at: int, norm: bool, gated: bool) -> Made:
    given: dict[str, Any] = {
        "x": _new(at, 2, 64),
        "weight": _new(at, 32, 64),
        "bias": None if norm else _new(0, 32),
    }
    given |= {"residual": _new(0, 2, 64) if norm else None, "norm_weight": _new(0, 64) if norm else None}
    kernel = backend.select("few_rows_linear", "cuda", BF16)
    return given, lambda **tensors: kernel(**tensors, eps=1e-6, is_gated=gated, at_rest=True)


def _caches(dtype: torch.dtype, scales: str, at: int) -> dict[str, Any]:
    made: dict[str, Any] = {
        "k_cache": _new(at, 8, 16, 2, 64, dtype=dtype),
        "v_cache": _new(0, 8, 16, 2, 64, dtype=dtype),
    }
    for name in ("k_scale", "v_scale"):
        if scales == "token":
            made[name] = _new(0, 8, 16, 2, dtype=torch.float32)
        elif scales == "number":
            made[name] = 0.5
    return made


def _write(at: int, dtype: torch.dtype = BF16, scales: str = "", slots: torch.dtype = torch.int64) -> Made:
    k, v = _new(at, 5, 4, 64).split(2, dim=1)
    given = {"k": k, "v": v, "slot_mapping": torch.arange(5, dtype=slots), **_caches(dtype, scales, 0)}
    return given, write_kv_cache


def _rotate(at: int, norm: bool, dtype: torch.dtype = BF16, scales: str = "") -> Made:
    q, k, v = _new(at, 5, 8, 64).split((4, 2, 2), dim=1)
    given = {
        "q": q, "k": k, "v": v, "cos_sin_cache": _new(0, 32, 64, dtype=torch.float32),
        "positions": torch.arange(5), "slot_mapping": torch.arange(5), **_caches(dtype, scales, at),
    }  # fmt: skip
    if norm:
        given |= {"q_weight": _new(0, 64), "k_weight": _new(at, 64)}
    return given, lambda **tensors: rotate_and_write_kv_cache(**tensors, eps=1e-5)


def _attend(
    at: int, lens: tuple[int, ...], dtype: torch.dtype = BF16, scales: str = "", **options: Any
) -> Made:
    caches = _caches(dtype, scales, at)
    sums = torch.tensor([0, *lens]).cumsum(0).to(torch.int32)
    given = {
        "q": _new(at, sum(lens), 4, 64), "k": caches.pop("k_cache"), "v": caches.pop("v_cache"), **caches,
        "cu_seqlens_q": sums, "cu_seqlens_k": sums + 0,
        "block_table": torch.zeros(len(lens), 4, dtype=torch.int32),
        **{name: x for name, x in options.items() if isinstance(x, Tensor)},
    }  # fmt: skip
    options = {name: x for name, x in options.items() if not isinstance(x, Tensor)}
    bounds = {"max_seqlen_q": max(lens), "max_seqlen_k": 50, "causal": True}
    return given, lambda **tensors: flash_attn_varlen_func(**tensors, **bounds, **options)


CASES: dict[str, Callable[[int], Made]] = {
    "norm": lambda at: _norm(at, False, False),
    "norm residual": lambda at: _norm(at, True, False),
    "norm grid": lambda at: _norm(at, False, True),
    "norm residual grid": lambda at: _norm(at, True, True),
    "silu": _silu,
    "silu apart": _silu_apart,
    "turn": lambda at: _turn(at, False),
    "turn apart": lambda at: _turn(at, True),
    "few rows": lambda at: _few_rows(at, False, False),
    "few rows norm": lambda at: _few_rows(at, True, False),
    "few rows gated": lambda at: _few_rows(at, True, True),
    "write": _write,
    "write int32": lambda at: _write(at, slots=torch.int32),
    "write fp8": lambda at: _write(at, FP8, "number"),
    "write int8": lambda at: _write(at, INT8, "token"),
    "rotate": lambda at: _rotate(at, False),
    "rotate norm": lambda at: _rotate(at, True),
    "rotate int8": lambda at: _rotate(at, True, INT8, "token"),
    "decode": lambda at: _attend(at, (1, 1, 1)),
    "decode window lse": lambda at: _attend(at, (1, 2), window_size=(5, 0), return_softmax_lse=True),
    "decode sinks": lambda at: _attend(at, (1, 1), sinks=torch.zeros(4), alibi_slopes=torch.zeros(4)),
    "decode fp8": lambda at: _attend(at, (1, 1), FP8, "number"),
    "decode int8": lambda at: _attend(at, (1, 1), INT8, "token"),
    "decode invariant": lambda at: _attend(at, (1, 1), batch_invariant=True),
    "mixed": lambda at: _attend(at, (1, 30, 1)),
    "prefill": lambda at: _attend(at, (30,)),
}


def _named(arguments: tuple[Any, ...], given: dict[str, Any]) -> list[str]:
    """A launcher's arguments, of which the addresses are named: of what is given, or of something else."""
    names = {x.data_ptr(): name for name, x in given.items() if isinstance(x, Tensor)}

    def name(x: Any) -> str:
        address = x.data_ptr() if isinstance(x, Tensor) else x
        is_address = isinstance(x, Tensor) or (type(x) is int and x > 2**32)
        return names.get(address, f"another, {address % 16}") if is_address else str(x)

    return [name(x) for x in arguments]


def _is_refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except KernelArgumentError:
        return True
    return False


def main() -> dict[str, Any]:
    gpu, launches = NoGpu(90), []  # type: ignore[var-annotated]

    def launcher(source: Any, metadata: Any) -> Any:
        # Not the last of what comes before a kernel's own: launch metadata, and the two hooks.
        return lambda *arguments: launches.append(
            (metadata.name, metadata.hash, metadata.launch_pdl, *arguments[:4], *arguments[9:])
        )

    gpu._launcher = launcher  # type: ignore[method-assign]
    wrong, count, accepted = [], 0, []
    with gpu, torch.inference_mode():

        def launched(given: dict[str, Any], call: Callable[..., Any]) -> list[list[str]]:
            launches.clear()
            results.append(call(**given))  # alive, so that the next call has others
            return [_named(one, given) for one in launches]

        for name, case in CASES.items():
            results: list[Any] = []
            begins = [case(at) for at in (0, 2, 0, 8, 2, 16)]
            known = [launched(*one) for one in begins]
            for one, again in zip(begins, known, strict=True):
                known_calls.forget()
                plain = launched(*one)
                count += len(plain)
                if plain != again or not plain:
                    wrong.append([name, plain, again])
        # What was right once does not make right what only looks like it.
        given, call = _write(0)
        call(**given)
        same = {**given, "v_cache": given["k_cache"]}
        given, attend = _attend(0, (1, 1))
        attend(**given)
        bounds = {"max_seqlen_q": 1, "max_seqlen_k": 50}
        flawed = {
            "same caches": lambda: call(**same),
            "1 for True": lambda: flash_attn_varlen_func(**given, **bounds, causal=1),  # type: ignore[call-overload]
            "other dtype": lambda: attend(**{**given, "q": given["q"].double().int()}),
            "other shape": lambda: attend(**{**given, "cu_seqlens_k": given["cu_seqlens_k"][:-1]}),
        }
        accepted = [name for name, flaw in flawed.items() if not _is_refused(flaw)]
    return {"wrong": wrong, "count": count, "accepted": accepted}


if __name__ == "__main__":
    print(json.dumps(main()))
