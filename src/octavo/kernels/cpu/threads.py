"""Runs compiled kernels on this thread and a team of workers.

A kernel is ``void kernel(block)``; its parameter block is an array of int64::

    block[TASK]      the next task to take; workers add to it atomically
    block[WORKER]    the next worker number to take: which part of the scratch memory is mine
    block[2...]      the kernel's own parameters

The team is our own, not OpenMP's, for its way of joining (`team.py`): an OpenMP region ends when *every*
thread has come, so one that the system does not run, because another program has its core, holds up each of
the hundreds of calls in a step (measured beside one busy program: one token took over ten times as long).
Here the thread that calls waits only for workers that took a task. Workers spin for a fraction of a
millisecond after a call, then sleep. torch's operators keep their own threads; while a step runs they should
have one (`torch_threads`), or the two teams fight over the cores.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from octavo.errors import ConfigError

TASK = 0
WORKER = 1
FIRST_PARAMETER = 2
MAX_THREADS_PER_CORE = 4


def configure(num_threads: int | None = None) -> int:
    """Set how many threads run a kernel in this process, the calling one included; returns the number.

    None is every core this process may use, as torch counts them. Raises ConfigError for what is no number.
    """
    global _team
    if num_threads is None:
        num_threads = _NUM_CORES
    most = MAX_THREADS_PER_CORE * (os.cpu_count() or 1)
    if isinstance(num_threads, bool) or not isinstance(num_threads, int) or not 1 <= num_threads <= most:
        raise ConfigError(f"num_threads must be an int from 1 to {most} on this machine, got {num_threads!r}")
    with _team_lock:
        if _team is None or _team.num_threads != num_threads:
            if _team is not None:
                _team.close()
            _team = _Team(num_threads)
        return _team.num_threads


def num_threads() -> int:
    """How many threads run a kernel."""
    return _current_team().num_threads


@contextmanager
def torch_threads(num_threads: int) -> Iterator[None]:
    """Give torch's own operators `num_threads` threads inside the block."""
    before = torch.get_num_threads()
    if before == num_threads:
        yield
        return
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run(kernel: int, parameters: Sequence[int], *, parallel: bool, scratch_bytes: int = 0) -> None:
    """Run `kernel` to its end on this thread alone, or on the whole team.

    `parameters` become ``block[FIRST_PARAMETER:]``. With `scratch_bytes` one more follows them: the address
    of that much memory for each worker, one after the other, cache-line aligned, unset. The GIL is released
    meanwhile.
    """
    team = _current_team()
    block = array.array("q", (0, 0, *parameters))
    if scratch_bytes:
        block.append(_scratch_address(scratch_bytes * team.num_threads))
    if parallel:
        team.run(kernel, block.buffer_info()[0])
    else:
        _callable(kernel)(block.buffer_info()[0])


SCRATCH_ALIGNMENT = 64


def _scratch_address(size: int) -> int:
    """Memory of this thread, used again by its next call."""
    size += SCRATCH_ALIGNMENT
    if _scratch.buffer is None or _scratch.buffer.numel() < size:
        _scratch.buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
    return -(-_scratch.buffer.data_ptr() // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT


class _Scratch(threading.local):
    buffer: torch.Tensor | None = None


_scratch = _Scratch()
_KERNEL_TYPE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@functools.lru_cache(maxsize=256)
def _callable(kernel: int) -> Callable[[int], None]:
    return _KERNEL_TYPE(kernel)


class _Team:
    """`num_threads - 1` workers; they start with the first parallel call."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._is_closed = False
        self._wake = threading.Event()
        self._busy = threading.Lock()
        self._workers: list[threading.Thread] = []

    def run(self, kernel: int, block: int) -> None:
        # Two Python threads may call at once: the second works alone.
        if self.num_threads == 1 or not self._busy.acquire(blocking=False):
            _callable(kernel)(block)
            return
        try:
            if not self._workers:
                self._start()
            if not self._wake.is_set():
                self._wake.set()
            self._request[1] = kernel
            self._request[2] = block
            self._lead(self._request_at)  # returns only when no worker can touch the block any more
        finally:
            self._busy.release()

    def close(self) -> None:
        """End the workers; a call still running in another thread is finished first."""
        is_mine = self._busy.acquire(timeout=5)
        try:
            self._is_closed = True
            self.num_threads = 1
            for worker in self._workers:
                while worker.is_alive():
                    self._wake.set()  # again and again: another worker may clear it on its way out
                    worker.join(timeout=0.05)
        finally:
            if is_mine:
                self._busy.release()

    def _start(self) -> None:
        from octavo.kernels.cpu import team

        cells = self._cells = (ctypes.c_int64 * (team.NUM_CELLS + 8))()
        address = -(-ctypes.addressof(cells) // 64) * 64
        self._request = (ctypes.c_int64 * 4)(address, 0, 0, _give_way())
        self._request_at = ctypes.addressof(self._request)
        self._lead = _callable(team.lead())
        loop = _callable(team.worker_loop())
        for i in range(1, self.num_threads):
            worker = threading.Thread(
                target=self._serve, args=(loop, address), name=f"octavo-kernel-{i}", daemon=True
            )
            worker.start()
            self._workers.append(worker)

    def _serve(self, loop: Callable[[int], None], cells: int) -> None:
        while not self._is_closed:
            self._wake.clear()
            loop(cells)
            if not self._is_closed:
                # A call between the last look and here is missed, which costs nothing but help.
                self._wake.wait()


def _give_way() -> int:
    """Address of the system's function that lets another thread run; any arguments are ignored."""
    if os.name == "nt":
        function = ctypes.WinDLL("kernel32").SwitchToThread  # type: ignore[attr-defined]  # only there
    else:
        function = ctypes.CDLL(None).sched_yield
    return ctypes.cast(function, ctypes.c_void_p).value or 0


_NUM_CORES = torch.get_num_threads()
_team: _Team | None = None
_team_lock = threading.Lock()


def _current_team() -> _Team:
    global _team
    if _team is None:
        with _team_lock:
            if _team is None:
                _team = _Team(_NUM_CORES)
    return _team


def _forget() -> None:
    """In a forked child there are no workers; a new team starts when it is needed."""
    global _team, _team_lock
    _team_lock = threading.Lock()
    if _team is not None:
        _team = _Team(_team.num_threads)


@atexit.register
def _close() -> None:
    if _team is not None:
        _team.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
