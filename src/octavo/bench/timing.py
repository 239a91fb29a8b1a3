"""Clocks and memory of a process. Imports nothing heavy."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
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
