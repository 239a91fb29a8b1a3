"""Clocks and memory of a process, and of a GPU. Imports nothing heavy."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


def seconds(function: Callable[[], Any]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def interleaved(variants: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each variant, run in turn (A B C A B C ...) so that drift meets all alike."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, function in variants.items():
            times[name].append(seconds(function))
    return {name: statistics.median(values) for name, values in times.items()}


def peak_rss_bytes() -> int:
    """Most memory this process has held so far; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def rss_bytes() -> int:
    """Memory this process holds now; 0 where /proc does not exist."""
    try:
        with open("/proc/self/statm") as statm:
            pages = int(statm.read().split()[1])
    except OSError:
        return 0
    import resource

    return pages * resource.getpagesize()


def private_bytes() -> int:
    """Memory this process holds that no file backs; 0 where /proc does not exist."""
    try:
        with open("/proc/self/smaps_rollup") as smaps:
            return next(1024 * int(line.split()[1]) for line in smaps if line.startswith("Anonymous:"))
    except OSError:
        return 0


@dataclass(frozen=True)
class GpuTime:
    """Microseconds of one call on a GPU: the median of several groups, and the fastest and slowest group."""

    median_us: float
    fastest_us: float
    slowest_us: float
    is_graph: bool  # replayed from a CUDA graph; else launched one by one, with the host in the way


def gpu_time(calls: Sequence[Callable[[], Any]], group_ms: float = 20.0, groups: int = 5) -> GpuTime:
    """Times one call of `calls`, which are the same work on different inputs.

    All of them are captured in one CUDA graph, which is replayed often enough to fill `group_ms`; that many
    times `groups`. With inputs that are together larger than the GPU's cache none is found there.
    """
    import torch

    cuda: Any = torch.cuda
    stream = cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
            call()
        stream.synchronize()
        run, is_graph = _captured(calls, stream)
        run()
        once_ms = _events_ms(run, 1)
        repeats = max(1, min(1000, int(group_ms / max(once_ms, 1e-3))))
        times = sorted(_events_ms(run, repeats) * 1e3 / len(calls) for _ in range(groups))
    torch.cuda.synchronize()
    return GpuTime(statistics.median(times), times[0], times[-1], is_graph)


def _captured(calls: Sequence[Callable[[], Any]], stream: Any) -> tuple[Callable[[], Any], bool]:
    import torch

    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
    except Exception:  # it synchronises, or allocates in a way that a graph cannot hold
        torch.cuda.synchronize()

        def one_by_one() -> None:
            for call in calls:
                call()

        return one_by_one, False
    return graph.replay, True


def _events_ms(run: Callable[[], Any], repeats: int) -> float:
    """Milliseconds of one run, by the GPU's clock."""
    import torch

    cuda: Any = torch.cuda
    before, after = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    before.record()
    for _ in range(repeats):
        run()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after)) / repeats
