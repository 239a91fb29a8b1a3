"""A process that compiles for another one and keeps it in Triton's cache on disk; see `compile_ahead.py`.

It needs no GPU. Told by lines of JSON on its standard input: first for what GPU, which modules the kernels
are of, and how many to compile at once, then one specialisation after the other. It says "ready", and of each
specialisation when it is on disk. It ends, and all its processes with it, when the input does.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import signal
import sys
import threading
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import IO, Any

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve whoever started this process, as the first one of a session."""
    assert os.getpgrp() == os.getpid(), "its whole group ends with it"
    gc.disable()  # what is imported stays, and what is compiled is little
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # compilers print
    os.dup2(nowhere, 2)
    try:
        _serve(sys.stdin, answers)
    finally:
        os.killpg(0, signal.SIGKILL)  # and whatever is being compiled


def _serve(requests: IO[str], answers: IO[str]) -> None:
    from triton.runtime.cache import triton_key

    hashing = threading.Thread(target=triton_key)  # beside the import of torch
    hashing.start()
    importlib.import_module("octavo.kernels")
    told = json.loads(requests.readline())
    for module in told["modules"]:
        importlib.import_module(module)
    pretend(told["target"])
    hashing.join()  # a process is forked that has one thread
    parent = os.getpid()
    pool = ProcessPoolExecutor(told["num"], get_context("fork"), _end_with, (parent,))
    pool.submit(os.getpid).result()  # they are there
    answers.write('{"ready": true}\n')
    for line in requests:
        request = json.loads(line)
        done = pool.submit(compile_one, request["module"], request["name"], request["data"])
        done.add_done_callback(functools.partial(_tell, answers, request["index"]))


def _tell(answers: IO[str], index: int, done: Future[None]) -> None:
    error = done.exception()
    answers.write(json.dumps({"index": index, "error": None if error is None else repr(error)}) + "\n")


def _end_with(parent: int) -> None:
    """End when the process does that this one was forked from."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def pretend(target: tuple[Any, ...]) -> None:
    """Have Triton compile for that backend, architecture and warp size, whatever there is."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Target:
        def get_current_device(self) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget(*target)

    driver.set_active(Target())


def compile_one(module: str, name: str, data: str) -> None:
    """Compile that specialisation of a kernel, unless it is on disk, and what launches it."""
    import triton

    compiled = preload(kernel_of(module, name), data)
    if triton.__version__.startswith("3.6.") and compiled.metadata.target.backend == "cuda":
        # What a C compiler makes, for each signature; later versions have one for all. It loads the driver's
        # library, but asks nothing of it.
        from triton.backends.nvidia.driver import CudaLauncher

        with contextlib.suppress(Exception):  # whoever launches it will say more
            CudaLauncher(compiled.src, compiled.metadata)


def kernel_of(module: str, name: str) -> Any:
    """Triton's function of that name."""
    from octavo.kernels.triton.launch import Direct

    found = getattr(importlib.import_module(module), name)
    return found.hashed() if isinstance(found, Direct) else found


def preload(kernel: Any, data: str) -> Any:
    """Triton's `kernel.preload(data)`, which before 3.9 takes tuples among the constants for lists."""
    return type(kernel).preload(_WithTuples(kernel), data)


class _WithTuples:
    """A kernel, as far as `preload` uses it."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._fn_name, self.device_caches = kernel._fn_name, kernel.device_caches

    def _do_compile(
        self, key: str, signature: Any, device: int, constants: dict[Any, Any], *others: Any, **more: Any
    ) -> Any:
        constants = {at: tuple(one) if isinstance(one, list) else one for at, one in constants.items()}
        return self._kernel._do_compile(key, signature, device, constants, *others, **more)
