"""What this GPU can do at best, measured; the least time a piece of work needs; and the picture of both.

A floor is the longest of three times: the bytes that must move at the rate of a kernel that only moves bytes,
the floating-point operations at the rate of a large matrix product, and an empty kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from octavo.bench.pictures import check_plot, new_figure, save
from octavo.bench.timing import gpu_time

_BUFFER_BYTES = 4 << 30
_MATMUL = 8192
_MATMUL_MS = 60.0  # as long as kernels that multiply are timed: a GPU gets slower in longer runs


@dataclass(frozen=True)
class Ceilings:
    """Rates of one GPU, measured. `copy` counts what is read and what is written."""

    read_bytes_per_s: float
    copy_bytes_per_s: float
    matmul_flops_per_s: float  # bfloat16
    empty_kernel_us: float

    def floor_us(self, bytes_moved: float, flops: float, copies: bool) -> float:
        """The least time that this much work can take."""
        rate = self.copy_bytes_per_s if copies else self.read_bytes_per_s
        seconds = max(bytes_moved / rate, flops / self.matmul_flops_per_s)
        return max(self.empty_kernel_us, seconds * 1e6)

    def as_dict(self) -> dict[str, float]:
        """For a result file: TB/s, TFLOP/s, us."""
        return {
            "read TB/s": round(self.read_bytes_per_s / 1e12, 3),
            "copy TB/s": round(self.copy_bytes_per_s / 1e12, 3),
            "bf16 matmul TFLOP/s": round(self.matmul_flops_per_s / 1e12, 1),
            "empty kernel us": round(self.empty_kernel_us, 2),
        }


def measure_ceilings(device: torch.device) -> Ceilings:
    """Takes about two seconds and 8 GiB (less where the GPU has less)."""
    free, _ = torch.cuda.mem_get_info(device)
    count = min(_BUFFER_BYTES, free // 8) // 4 // (1 << 20) * (1 << 20)
    source = torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    copied = gpu_time([lambda: torch.bitwise_xor(source, 5, out=target)])
    left = torch.randn(_MATMUL, _MATMUL, dtype=torch.bfloat16, device=device)
    product = torch.empty_like(left)
    multiplied = gpu_time([lambda: torch.mm(left, left, out=product)], group_ms=_MATMUL_MS)
    one = torch.zeros(1, device=device)
    empty = gpu_time([lambda: one.add_(1.0)] * 64)
    return Ceilings(
        read_bytes_per_s=_read_rate(source),
        copy_bytes_per_s=8.0 * count / copied.median_us * 1e6,
        matmul_flops_per_s=2.0 * _MATMUL**3 / multiplied.median_us * 1e6,
        empty_kernel_us=empty.median_us,
    )


def _read_rate(source: torch.Tensor) -> float:
    """Of the fastest of a few ways to do nothing but read."""
    ways = [lambda: torch.sum(source.view(torch.float32))]
    try:
        from octavo.bench import ceiling_kernels
    except ImportError:
        pass
    else:
        for block, steps, warps in ((4096, 16, 8), (4096, 64, 8), (8192, 16, 8), (2048, 32, 4)):
            grid = (source.numel() // (block * steps),)
            sums = torch.empty(grid, dtype=torch.int32, device=source.device)
            ways.append(
                lambda grid=grid, sums=sums, block=block, steps=steps, warps=warps: ceiling_kernels.read[
                    grid
                ](  # type: ignore[misc]
                    source, sums, STEPS=steps, BLOCK=block, num_warps=warps
                )
            )
    best = min(gpu_time([way], groups=3).median_us for way in ways)
    return 4.0 * source.numel() / best * 1e6


@dataclass(frozen=True)
class Point:
    """One measured row in the picture."""

    name: str
    flops_per_byte: float
    flops_per_s: float


def plot(points: Sequence[Point], ceilings: Ceilings, title: str, path: Path) -> None:
    """Operations a second over operations per byte, both logarithmic, under the roof of this GPU.

    Raises:
        ConfigError: as from `check_plot`.
    """
    check_plot(path)
    figure = new_figure(8, 5)
    axes = figure.subplots()
    left = min((p.flops_per_byte for p in points), default=0.1) / 2
    right = max((p.flops_per_byte for p in points), default=1000.0) * 2
    ridge = ceilings.matmul_flops_per_s / ceilings.read_bytes_per_s
    xs = sorted({left, min(max(ridge, left), right), right})
    roof = [min(x * ceilings.read_bytes_per_s, ceilings.matmul_flops_per_s) / 1e12 for x in xs]
    axes.plot(xs, roof, color="black", label="measured ceilings")
    for family in dict.fromkeys(p.name.split("/")[0] for p in points):
        chosen = [p for p in points if p.name.startswith(f"{family}/")]
        axes.scatter(
            [p.flops_per_byte for p in chosen], [p.flops_per_s / 1e12 for p in chosen], s=14, label=family
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations per byte that must move")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(title)
    axes.grid(True, which="both", alpha=0.2)
    axes.legend()
    save(figure, path)
