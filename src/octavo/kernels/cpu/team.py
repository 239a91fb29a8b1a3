"""The compiled halves of the thread team: a worker's loop, and the leader's part of a call.

They meet in a few int64 cells, apart from each other by a cache line::

    GENERATION   odd while a call is open to workers; every call adds 2
    KERNEL BLOCK what is being called; read only between entering and leaving
    ACTIVE       workers inside the call

A worker that sees an open generation adds itself to ACTIVE and looks again: only if the same call is still
open does it take part. The leader works too, closes the call when no task is left, and waits until ACTIVE
is 0. So it waits for workers that are inside, never for one that has not come: on a machine whose cores are
busy with something else, a worker that the system does not run costs nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba.extending
from llvmlite import ir
from numba import types

from octavo.kernels.cpu.compiled import compile_kernel, source_digest
from octavo.kernels.cpu.ir import I64, call_llvm, load_i64, pointer, store_i64

intrinsic: Any = numba.extending.intrinsic

GENERATION, KERNEL, BLOCK, ACTIVE = 0, 8, 9, 16
NUM_CELLS = 24
WORKER_SPINS = 20_000  # looks at GENERATION before a worker goes to sleep: some 0.5 ms
LEADER_SPINS = 2_000  # looks at ACTIVE before the leader lets the system run somebody else


@functools.cache
def worker_loop() -> int:
    """Address of ``void loop(cells)``: takes part in calls; returns when there were none for a while."""
    return compile_kernel(_worker_loop(WORKER_SPINS, source_digest()))


@functools.cache
def lead() -> int:
    """Address of ``void lead(request)``: `request` is (address of the cells, kernel, block, address of a
    function that lets the system run somebody else). Returns when the work is done and every worker has left.
    """
    return compile_kernel(_lead(LEADER_SPINS, source_digest()))


def _worker_loop(spins: int, digest: str) -> Callable[[int], None]:
    def worker(cells: int) -> None:
        digest  # noqa: B018  # part of the cache key
        seen = atomic_add(cells, GENERATION, 0)
        idle = 0
        while idle < spins:
            now = atomic_load(cells, GENERATION)
            if now == seen:
                idle += 1
                pause()
                continue
            seen = now
            idle = 0
            if now % 2 == 1:
                atomic_add(cells, ACTIVE, 1)
                if atomic_load(cells, GENERATION) == now:
                    call(load_i64(cells, KERNEL), load_i64(cells, BLOCK))
                atomic_add(cells, ACTIVE, -1)

    return worker


def _lead(spins: int, digest: str) -> Callable[[int], None]:
    def leader(request: int) -> None:
        digest  # noqa: B018  # part of the cache key
        cells = load_i64(request, 0)
        kernel = load_i64(request, 1)
        block = load_i64(request, 2)
        give_way = load_i64(request, 3)
        store_i64(cells, KERNEL, kernel)
        store_i64(cells, BLOCK, block)
        atomic_add(cells, GENERATION, 1)
        call(kernel, block)
        atomic_add(cells, GENERATION, 1)
        looks = 0
        while atomic_load(cells, ACTIVE) != 0:
            looks += 1
            if looks < spins:
                pause()
            else:  # a worker inside lost its core: let it have ours
                call(give_way, 0)

    return leader


@intrinsic
def atomic_load(typing_context, address, index):  # type: ignore[no-untyped-def]
    """The int64 at ``address + 8 * index``, in one order for all threads."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        at = builder.add(arguments[0], builder.mul(arguments[1], I64(8)))
        return builder.load_atomic(pointer(builder, at, I64), "seq_cst", 8)

    return types.intp(types.intp, types.intp), codegen


@intrinsic
def atomic_add(typing_context, address, index, value):  # type: ignore[no-untyped-def]
    """Add to the int64 at ``address + 8 * index``, in one order for all threads; returns what it was."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        at = builder.add(arguments[0], builder.mul(arguments[1], I64(8)))
        return builder.atomic_rmw("add", pointer(builder, at, I64), arguments[2], "seq_cst")

    return types.intp(types.intp, types.intp, types.intp), codegen


@intrinsic
def call(typing_context, kernel, block):  # type: ignore[no-untyped-def]
    """Call ``void kernel(block)`` by its address."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        kind = ir.FunctionType(ir.VoidType(), [I64])
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), [arguments[1]])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), codegen


@intrinsic
def pause(typing_context):  # type: ignore[no-untyped-def]
    """Tell the core that this is a spin loop, where there is an instruction for it."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        triple = builder.module.triple
        if triple.startswith(("x86_64", "i386", "i686")):
            call_llvm(builder, "llvm.x86.sse2.pause", ir.VoidType(), ())
        elif triple.startswith(("aarch64", "arm64")):
            call_llvm(builder, "llvm.aarch64.hint", ir.VoidType(), (ir.Constant(ir.IntType(32), 1),))
        return context.get_dummy_value()

    return types.void(), codegen
