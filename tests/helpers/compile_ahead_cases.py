"""Kernels compiled by other processes, for a GPU that is not there: python compile_ahead_cases.py CASE.

Prints JSON: what the case of that name found. TRITON_CACHE_DIR should be empty.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from helpers.compiled_calls import attend, decode_end, draw, few_rows, norm
from helpers.no_gpu import NoGpu

from octavo.kernels.triton import compile_ahead, warm_up
from octavo.kernels.triton.compile_ahead import Wanted, Workers, compile_all, installed, only_noting
from octavo.kernels.triton.monitor import watch

Found = dict[str, Any]
Calls = list[Callable[[], object]]

# All that is special: tuples among the constants, functions that several kernels call, a launch of its own.
SPECIAL: Calls = [norm(256, 8), draw(1), attend([2048], [2048]), few_rows(16, 64, 64), decode_end(8)]
CHEAP: Calls = [norm(64 * n, 8) for n in (2, 3, 5, 9, 17, 33, 65, 129)]


def noted(calls: Calls) -> list[Wanted]:
    found: dict[str, Wanted] = {}
    with installed(), only_noting(found):
        for call in calls:
            call()
    return list(found.values())


def launched(calls: Calls) -> list[tuple[str, bool]]:
    """What the calls need that is not in this process: kernel, and whether it was on disk."""
    with watch() as made:
        for call in calls:
            call()
    return [(one.kernel, one.from_disk) for one in made]


@contextmanager
def no_gpu() -> Iterator[None]:
    with (
        NoGpu(90),
        mock.patch.object(compile_ahead, "_most_processes", return_value=2),
        torch.inference_mode(),
    ):
        yield


def elsewhere() -> Found:
    """Everything by the workers: here nothing is taken before they have ended."""
    with no_gpu():
        wanted = noted(SPECIAL)
        workers = Workers()
        compiled = compile_all(wanted, workers, lambda _: workers._ended.wait(240))
        names = sorted(one.name for one in compiled)
        return {
            "wanted": sorted(one.name for one in wanted),
            "compiled": names,
            "launched": launched(SPECIAL),
        }


def others() -> Found:
    """Launches of another thread, and of kernels of others, while this one notes."""
    with no_gpu(), watch() as made:
        from helpers.no_gpu import _EverythingIsOnTheGpu

        def launch() -> None:
            with _EverythingIsOnTheGpu(), torch.inference_mode():
                CHEAP[0]()

        found: dict[str, Wanted] = {}
        with installed(), only_noting(found):
            CHEAP[1]()
            thread = threading.Thread(target=launch)
            thread.start()
            thread.join()
        return {"noted": len(found), "made": len(made)}


def _with(script: str, hold: Callable[[Workers], object], patience_s: float) -> Found:
    with no_gpu():
        wanted = noted(CHEAP)
        workers = Workers((sys.executable, "-c", script), patience_s)
        process = workers._process
        assert process is not None

        def here(job: Callable[[], object]) -> None:
            hold(workers)
            job()

        compiled = compile_all(wanted, workers, here)
        ended = process.returncode is not None
        return {"wanted": len(wanted), "compiled": len(compiled), "ended": ended, "launched": launched(CHEAP)}


def dies() -> Found:
    """A process that ends as soon as it has something to do."""
    script = "print('{\"ready\": true}', flush=True); input(); input()"
    return _with(script, lambda workers: workers._ended.wait(60), 60.0)


def hangs() -> Found:
    """One that takes what it gets, and never answers."""

    def until_it_has_some(workers: Workers) -> None:
        while len(workers._under_way) < 2:
            time.sleep(0.01)

    script = "import time; print('{\"ready\": true}', flush=True); time.sleep(1000)"
    return _with(script, until_it_has_some, 0.1)


def killed() -> Found:
    """Processes at work, for whoever ends this one: prints the number of their group, and stays."""
    with no_gpu():
        wanted = noted(CHEAP)
        workers = Workers()
        queue = iter(wanted * 1000)
        workers.begin(2, ("cuda", 90, 32), sorted({one.module for one in wanted}), lambda: next(queue))
        while len(workers.compiled) < 2:
            time.sleep(0.01)
        assert workers._process is not None
        print(workers._process.pid, flush=True)
        time.sleep(1000)
    return {}


class _Serial:
    """Stands in for a pool of threads: a stand-in for a GPU is one for its own thread."""

    def __init__(self, _: int) -> None: ...

    def __enter__(self) -> _Serial:
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, call: Callable[..., object], *arguments: object) -> Any:
        result = call(*arguments)
        return mock.Mock(result=lambda: result)


def whole(gpu: str = "a GPU") -> Found:
    """`warm_up` itself, of a small model. `devices`: what was current when the workers were told."""
    current: list[int] = []
    devices: list[list[int]] = []

    @contextmanager
    def device_index(index: int) -> Iterator[None]:
        current.append(index)
        yield
        current.pop()

    def compile_noted(*arguments: Any) -> set[Wanted]:
        devices.append(list(current))
        return compile_all(*arguments)

    with (
        no_gpu(),
        mock.patch.object(torch.cuda, "get_device_name", return_value=gpu),
        mock.patch.object(torch.accelerator, "device_index", device_index),
        mock.patch.object(compile_ahead, "compile_all", compile_noted),
        mock.patch.object(torch.accelerator, "synchronize"),
        mock.patch.object(warm_up, "ThreadPoolExecutor", _Serial),
        mock.patch.object(compile_ahead, "Workers", mock.Mock(wraps=Workers)) as started,
    ):
        made = warm_up.warm_up(
            2, 1, 64, torch.bfloat16, torch.bfloat16, 16, "cuda", max_num_seqs=1, max_num_batched_tokens=8,
            max_model_len=64, hidden_size=128, logprobs=False,
        )  # fmt: skip
        found = [(one.kernel, one.from_disk) for one in made]
        return {"made": sorted(found), "started": started.call_count, "devices": devices}


def another() -> Found:
    """The same on a GPU of another kind."""
    return whole("another GPU")


def crossed() -> Found:
    """Two threads that note; the one that began first ends first."""
    with no_gpu():
        from triton import knobs

        first = installed()
        first.__enter__()
        second = installed()
        thread = threading.Thread(target=second.__enter__)
        thread.start()
        thread.join(0.2)
        is_waiting = thread.is_alive()
        first.__exit__(None, None, None)
        thread.join()
        second.__exit__(None, None, None)
        return {"is_waiting": is_waiting, "is_left": knobs.runtime.jit_cache_hook is not None}


CASES = {case.__name__: case for case in (elsewhere, others, dies, hangs, killed, whole, another, crossed)}

if __name__ == "__main__":
    print(json.dumps(CASES[sys.argv[1]]()))
