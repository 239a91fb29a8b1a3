"""Runs compiled kernels on the OpenMP threads that torch already has.

Two pools of spinning threads on the same cores slow each other down several times, so there is no second one:
on Linux torch's library brings GOMP into the process, and `GOMP_parallel` found *through torch's library*
starts the very team of threads that torch's own operators use. A team of a fixed size is cheap to
reuse (1-2 us while its threads still spin) and dear to resize, so a kernel runs either on one thread or on
all `torch.get_num_threads()`. Where the symbol is missing (macOS, Windows) a small pool of Python threads
does the same job with more overhead.

A kernel receives the address of a cell that holds the address of its parameter block, an array of int64::

    block[TASK]      the next task to take; workers add to it atomically
    block[WORKER]    the next worker number to take: which part of the scratch memory is mine
    block[2...]      the kernel's own parameters
"""

from __future__ import annotations

import array
import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

TASK = 0
WORKER = 1
FIRST_PARAMETER = 2

Parallel = Callable[[int, int, int], None]  # (kernel address, cell address, threads)


def configure(num_threads: int | None = None) -> int:
    """Set how many threads torch and the compiled kernels use, once, before the first step.

    Returns the number.

    The default is what torch chose (the cores of the process). Choose 1 when another busy process shares the
    cores: waiting for a thread that is not running costs more than a second thread brings.
    """
    if num_threads is not None and num_threads != torch.get_num_threads():
        torch.set_num_threads(num_threads)
    return torch.get_num_threads()


@functools.cache
def _gomp_parallel() -> Parallel | None:
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    function.restype = None
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    return lambda kernel, cell, threads: function(kernel, cell, threads, 0)


@functools.cache
def _python_pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="octavo-kernel")


_KERNEL_TYPE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@functools.lru_cache(maxsize=256)
def _callable(kernel: int) -> Callable[[int], None]:
    return _KERNEL_TYPE(kernel)


def _python_parallel(kernel: int, cell: int, threads: int) -> None:
    function = _callable(kernel)
    others = [_python_pool(threads).submit(function, cell) for _ in range(threads - 1)]
    function(cell)
    for other in others:
        other.result()


def pool_name() -> str:
    """Which threads `run` uses, for `octavo doctor`."""
    return "torch's OpenMP team" if _gomp_parallel() is not None else "Python threads"


def run(kernel: int, parameters: Sequence[int], *, parallel: bool) -> None:
    """Run `kernel` to its end on this thread alone, or on all of torch's threads.

    `parameters` become ``block[FIRST_PARAMETER:]``. The GIL is released meanwhile.
    """
    block = array.array("q", (0, 0, *parameters))
    cell = ctypes.c_void_p(block.buffer_info()[0])
    threads = torch.get_num_threads() if parallel else 1
    if threads == 1:
        _callable(kernel)(ctypes.addressof(cell))
    else:
        (_gomp_parallel() or _python_parallel)(kernel, ctypes.addressof(cell), threads)


class _Scratch(threading.local):
    buffer: torch.Tensor | None = None
    size = -1
    address = 0


_scratch = _Scratch()
SCRATCH_ALIGNMENT = 64


def scratch(bytes_per_worker: int) -> int:
    """Address of scratch memory for every worker of this thread's next `run`, cache-line aligned, unset."""
    size = bytes_per_worker * torch.get_num_threads()
    if _scratch.size < size:
        buffer = torch.empty(size + SCRATCH_ALIGNMENT, dtype=torch.uint8)
        address = -(-buffer.data_ptr() // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
        _scratch.buffer, _scratch.size, _scratch.address = buffer, size, address
    return _scratch.address
