"""Compiles many kernels at once, in other processes, where next to none is on disk.

Triton's front end is Python, which one thread at a time runs: for the kernels of a model that is half a
minute on a slow host, however many processors there are. So `compile_all` has other processes compile into
Triton's cache on disk (`compile_worker.py`) what launches told that they need, and compiles meanwhile itself.
Whatever becomes of those processes, launches compile what is not there by then, as ever.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.kernels.triton.compile_worker import kernel_of, preload
from octavo.kernels.triton.monitor import describe

_MOST = 16  # processes; each takes a tenth of a gigabyte
_LEAST = 2  # fewer do not pay for their start, which is that of Python and torch
_EACH = 4  # specialisations, at least, for a process
_THREADS = 3  # of our own; more than that wait for Python's lock
_PATIENCE_S = 60.0  # with a process that compiles; one kernel takes a second or two
_MARK = "octavo_warm_up"  # in the folder of a start that was left well

_MAIN = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from {module} import main; main()"

logger = logging.getLogger("octavo")


@dataclass(frozen=True)
class Wanted:
    """A specialisation of a kernel that is to be compiled.

    Attributes:
        module, name: where the kernel is.
        described: `kernel` and `key`, as `monitor.Made` has them.
        data: what Triton's `preload` takes.
    """

    module: str
    name: str
    described: tuple[str, str]
    data: str


_of_this_thread = threading.local()
_hooked = threading.Lock()


@contextmanager
def only_noting(found: dict[str, Wanted]) -> Iterator[None]:
    """In this block and thread, our kernels that are not yet in this process are noted, and not launched.

    `installed` has to be around it.
    """
    _of_this_thread.found = found
    try:
        yield
    finally:
        del _of_this_thread.found


@contextmanager
def installed() -> Iterator[None]:
    """What `only_noting` needs: a hook of Triton's, which is one for all threads, and so for one block at a
    time.
    """
    from triton import knobs

    def hook(**what: Any) -> Any:
        found = getattr(_of_this_thread, "found", None)
        function = what["fn"]
        if found is None or not function.module.startswith("octavo."):
            return others(**what) if others is not None else None
        data = what["compile"]["specialization_data"]
        found[data] = Wanted(function.module, function.jit_function.__name__, describe(what), data)
        return True

    with _hooked:
        others, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, hook
        try:
            yield
        finally:
            knobs.runtime.jit_cache_hook = others


@contextmanager
def first_start(shape: object) -> Iterator[Workers | None]:
    """Processes that compile, where no such block was left well before: for that shape, of this code, with
    this cache. Else, and where they would be of no use, None.
    """
    mark = _mark_of(shape) if _most_processes() else None
    if mark is None or mark.get_file(_MARK) is not None:
        yield None
        return
    workers = Workers()
    try:
        yield workers
    finally:
        workers.close()
    with contextlib.suppress(OSError):
        mark.put(b"", _MARK)


def _mark_of(shape: object) -> Any:
    """The place in Triton's cache for what is known of this start; None when nothing there would be found."""
    import triton
    from triton.runtime.cache import get_cache_manager

    from octavo.kernels.triton.launch import KNOWN

    if not triton.__version__.startswith(KNOWN):
        return None
    compilation = triton.knobs.compilation
    if compilation.always_compile or compilation.override or compilation.dump_ir:
        return None
    room = Path(__file__).parent
    files = sorted((*room.glob("*.py"), *room.glob("tuned/*.json")))
    state = (triton.__version__, shape, [(str(file), file.stat().st_mtime_ns) for file in files])
    try:
        return get_cache_manager(hashlib.sha256(repr(state).encode()).hexdigest())
    except OSError:  # it cannot be written
        return None


def _most_processes() -> int:
    """As many as this machine has room for; 0 where fewer would not pay."""
    if not sys.executable or getattr(sys, "frozen", False) or sys.platform != "linux":
        return 0
    num = min(len(os.sched_getaffinity(0)) - 1, _MOST)
    return num if num >= _LEAST else 0


class Workers:
    """Processes that compile, from `begin` to `close`. They import what they need from the start on."""

    def __init__(self, command: Sequence[str] | None = None, patience_s: float = _PATIENCE_S) -> None:
        self.compiled: set[Wanted] = set()
        self._patience_s = patience_s
        self._last_s = time.monotonic()  # of an answer
        self._under_way: dict[int, Wanted] = {}
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[str] | None = None
        main = _MAIN.format(module="octavo.kernels.triton.compile_worker")
        path = json.dumps([os.path.abspath(at) for at in sys.path])
        try:
            self._process = subprocess.Popen(
                # -P: or a json.py in the current folder would be the first that it imports.
                command or (sys.executable, "-P", "-c", main, path),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,  # so that it can be ended with all its processes
            )
        except OSError as error:  # no memory, or too many processes or files
            logger.debug("kernels are compiled in this process alone: %s", error)

    def begin(
        self, num: int, target: tuple[Any, ...], modules: list[str], take: Callable[[], Wanted | None]
    ) -> None:
        """Have `num` processes compile what `take` gives, until it gives None."""
        if self._process is None:
            return
        self._last_s = time.monotonic()
        told = {"num": num, "target": target, "modules": modules}
        self._thread = threading.Thread(target=self._feed, args=(self._process, told, num, take), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until what they have in hand is compiled, or one takes too long."""
        while self._under_way and not self._ended.wait(0.05):
            if time.monotonic() - self._last_s > self._patience_s:
                logger.debug("processes that compile have not answered for %g s", self._patience_s)
                return

    def close(self) -> None:
        """End them all, whatever they do."""
        process, self._process = self._process, None
        if process is None:
            return
        # Its number is that of its group, and of nothing else until it was waited for.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if self._thread is not None:
            self._thread.join()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()

    def _feed(
        self,
        process: subprocess.Popen[str],
        told: dict[str, Any],
        num: int,
        take: Callable[[], Wanted | None],
    ) -> None:
        try:
            self._send(process, told)
            assert process.stdout is not None
            index = 0
            for line in process.stdout:
                answer = json.loads(line)
                self._last_s = time.monotonic()
                if "index" in answer:
                    wanted = self._under_way.pop(answer["index"])
                    if answer["error"] is None:
                        self.compiled.add(wanted)
                    else:
                        logger.debug("%s was not compiled ahead: %s", wanted.name, answer["error"])
                while len(self._under_way) < num and (next_one := take()) is not None:
                    index += 1
                    self._under_way[index] = next_one
                    where = {"module": next_one.module, "name": next_one.name}
                    self._send(process, {"index": index, **where, "data": next_one.data})
                if not self._under_way:
                    break
        except (OSError, ValueError, KeyError) as error:  # it has gone, or says what it should not
            logger.debug("processes that compile have gone: %s: %s", type(error).__name__, error)
        finally:
            self._ended.set()

    @staticmethod
    def _send(process: subprocess.Popen[str], message: dict[str, Any]) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()


def compile_all(
    wanted: Sequence[Wanted], workers: Workers, here: Callable[[Callable[[], object]], object]
) -> set[Wanted]:
    """Compile these, the first ones first. Returns those that the workers did, who have ended by then.

    here: calls what it is given, in one of our threads, with the right device current.
    """
    from triton.runtime import driver

    began = time.monotonic()
    queue = collections.deque(wanted)

    def take() -> Wanted | None:
        try:
            return queue.popleft()
        except IndexError:
            return None

    def compile_here() -> None:
        while (one := take()) is not None:
            try:
                preload(kernel_of(one.module, one.name), one.data)
            except Exception as error:  # whoever launches it will say more
                logger.debug("%s was not compiled ahead: %s: %s", one.name, type(error).__name__, error)

    try:
        if num := min(_most_processes(), len(wanted) // _EACH):
            target = driver.active.get_current_target()
            modules = sorted({one.module for one in wanted})
            workers.begin(num, (target.backend, target.arch, target.warp_size), modules, take)
        with ThreadPoolExecutor(_THREADS) as pool:
            try:
                for done in [pool.submit(here, compile_here) for _ in range(_THREADS)]:
                    done.result()
            finally:
                queue.clear()
        workers.wait()
    finally:
        workers.close()
    logger.info(
        "%d kernels compiled ahead, %d of them by other processes, in %.1f s",
        len(wanted), len(workers.compiled), time.monotonic() - began,
    )  # fmt: skip
    return workers.compiled
