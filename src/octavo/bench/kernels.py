"""Octavo's kernels on a GPU: checked, then timed from a cold cache, beside their floor and their peers."""

from __future__ import annotations

import contextlib
import fnmatch
import gc
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from octavo.bench.attention_work import AttentionInputs
from octavo.bench.kernel_cases import Case, cases
from octavo.bench.kernel_work import Memory, Work, relative_error
from octavo.bench.peers import DENSE, NotForThis, Peer, dense, usable
from octavo.bench.report import Row
from octavo.bench.roofline import Ceilings, Point, measure_ceilings
from octavo.bench.timing import GpuTime, gpu_time
from octavo.errors import ConfigError, OctavoError

PEER_TOLERANCE = 2e-2
_GROUP_MS = 20.0
_LONG_GROUP_MS = (
    60.0  # what multiplies all the time heats the GPU, which then slows down; like the matmul ceiling
)
_COLD = 2.5  # sets of inputs together, in sizes of the GPU's L2 cache
_LEAST_COLD_BYTES = 256 << 20


@dataclass
class Measured:
    """One row: a result, or why there is none."""

    case: Case
    time: GpuTime | None = None
    value: float = math.nan  # in the unit of the case
    floor: float = math.nan
    peers: dict[str, float] = field(default_factory=dict)
    peer_failures: dict[str, str] = field(default_factory=dict)
    error: float = math.nan
    failure: str = ""
    point: Point | None = None
    is_last: bool = False  # this process can do nothing more with the GPU

    @property
    def bar(self) -> float | None:
        """What the project promises for this row, in its unit."""
        if self.case.bar is None and self.case.bar_over_floor is not None:
            return self.case.bar_over_floor * self.floor
        return self.case.bar

    @property
    def meets_bar(self) -> bool:
        """Whether it does; True where nothing is promised."""
        if self.bar is None:
            return True
        return self.value <= self.bar if self.case.unit == "us" else self.value >= self.bar

    def row(self) -> Row:
        """As in a result file."""
        assert self.time is not None
        spread = (self.time.slowest_us - self.time.fastest_us) / self.time.median_us
        details: dict[str, float | str] = {
            "us": round(self.time.median_us, 3),
            "spread": round(spread, 4),
            "error": float(f"{self.error:.2e}"),
        }
        if self.bar is not None:
            details["bar"] = round(self.bar, 2)
        if not self.time.is_graph:
            details["how"] = "launched one by one"
        better = "lower" if self.case.unit == "us" else "higher"
        peers = {name: round(value, 3) for name, value in self.peers.items()}
        return Row(
            self.case.name, round(self.value, 3), self.case.unit, better, round(self.floor, 3), peers, details
        )


def chosen(patterns: Sequence[str], quick: bool) -> list[Case]:
    """The cases whose names match one of the patterns (none given: all); quick: the few that tell the most.

    Raises:
        ConfigError: a pattern matches no row.
    """
    every = list(cases())
    for pattern in patterns:
        if not any(fnmatch.fnmatch(case.name, pattern) for case in every):
            families = ", ".join(f"{family}/*" for family in dict.fromkeys(case.family for case in every))
            raise ConfigError(f"--rows: {pattern!r} matches no row; there are {families}")
    return [
        case
        for case in every
        if (not patterns and (case.quick or not quick))
        or any(fnmatch.fnmatch(case.name, pattern) for pattern in patterns)
    ]


@dataclass
class Bench:
    """What all rows of one run share. `open` makes one for a GPU."""

    memory: Memory
    ceilings: Ceilings
    peers: list[Peer]
    missing_peers: dict[str, str]

    @classmethod
    def open(cls, device: torch.device, peer_names: Sequence[str] | None) -> Bench:
        """Measures the ceilings and finds the peers named (None: all that are installed)."""
        cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
        memory = Memory(device, max(_LEAST_COLD_BYTES, int(_COLD * cache)))
        return cls(memory, measure_ceilings(device), *usable(peer_names))

    def compile(self, every: Iterable[Case]) -> None:
        """Launch each case once, several at a time: compiling is what takes the time in a first run.

        What fails here fails again, and is told, when it is measured.
        """

        def launch(case: Case) -> None:
            with (
                contextlib.suppress(Exception),
                torch.cuda.device(self.memory.device),
                torch.inference_mode(),
            ):
                case.build(self.memory.hot()).calls[0]()

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(launch, [case for case in every if case.small]))
        torch.cuda.synchronize(self.memory.device)

    def run(self, every: Iterable[Case]) -> Iterator[Measured]:
        """Measures one case after another; a case that cannot run is a `failure`, never an exception."""
        for case in every:
            try:
                measured = self._measure(case)
            except Exception as error:
                measured = Measured(case, failure=_told(error))
                if isinstance(error, torch.OutOfMemoryError):
                    self.memory.release()
                    gc.collect()
                measured.is_last = _is_dead(error)
            yield measured
            if measured.is_last:
                return

    def _measure(self, case: Case) -> Measured:
        with torch.inference_mode():
            work = case.build(self.memory)
            measured = Measured(case, error=work.error())
            if not measured.error <= work.tolerance:
                measured.failure = (
                    f"wrong by {measured.error:.1e} against the reference ({work.tolerance:.0e} allowed)"
                )
                return measured
            group_ms = _LONG_GROUP_MS if case.unit == "TFLOP/s" else _GROUP_MS
            measured.time = gpu_time(work.calls, group_ms=group_ms)
            floor_us = self.ceilings.floor_us(work.bytes_moved, work.flops, work.copies)
            measured.value = _in_unit(case, work, measured.time.median_us)
            measured.floor = _in_unit(case, work, floor_us)
            if work.flops:
                measured.point = Point(
                    case.name, work.flops / work.bytes_moved, work.flops / measured.time.median_us * 1e6
                )
            for peer in self.peers:
                if peer.runs(case.name) and not measured.is_last:
                    self._measure_peer(peer, work, measured, group_ms)
        return measured

    def _measure_peer(self, peer: Peer, work: Work, measured: Measured, group_ms: float) -> None:
        try:
            calls = peer.calls(work.inputs)
            error = _peer_error(peer, work, calls)
            if not error <= PEER_TOLERANCE:
                measured.peer_failures[peer.name] = f"wrong by {error:.1e}"
                return
            measured.peers[peer.name] = _in_unit(
                measured.case, work, gpu_time(calls, group_ms=group_ms).median_us
            )
        except NotForThis:
            pass
        except Exception as error:
            measured.peer_failures[peer.name] = _told(error)
            measured.is_last = _is_dead(error)


def _in_unit(case: Case, work: Work, us: float) -> float:
    return us if case.unit == "us" else work.flops / us / 1e6


def _told(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, OctavoError) else f"{type(error).__name__}: {text}"


def _is_dead(error: Exception) -> bool:
    """After an illegal access every further call of this process fails."""
    return "illegal memory access" in str(error) or "unspecified launch failure" in str(error)


def _peer_error(peer: Peer, work: Work, calls: list[Callable[[], Any]]) -> float:
    """What the peer makes of the first set, checked where it means the same; 0 for draws, which differ."""
    inputs = work.inputs
    if not isinstance(inputs, AttentionInputs):
        calls[0]()
        return 0.0
    if peer.name in DENSE:
        return _dense_error(inputs, calls[0]())
    inputs.out.fill_(math.nan)
    result = calls[0]()
    index, exact = inputs.sampled()
    ours = inputs.out
    if isinstance(result, torch.Tensor) and result.numel() == ours.numel():
        ours = result.view_as(ours)
    return relative_error(ours[index], exact)


def _dense_error(inputs: AttentionInputs, result: torch.Tensor) -> float:
    """The last row of the last sequence, which sees every key."""
    q, k, v = (x[0, -1].float() for x in dense(inputs))
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
    weights = torch.softmax(q[:, -1:] @ k.transpose(1, 2) * q.shape[-1] ** -0.5, dim=-1)
    return relative_error(result[-1, :, -1], (weights @ v)[:, 0])
