"""May this machine run the compiled kernels, on which dtypes, and which register tile suits it."""

from __future__ import annotations

import functools
import importlib.util
import platform
from dataclasses import dataclass

import torch

FLOAT_BYTES = 4
# The dtypes of tensors that the kernels load and store, under the names the compiled code has for them.
DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True)
class VectorShape:
    """The register tile of one instruction set.

    ``lanes`` fp32 numbers fill one vector register. A tile holds ``max_rows`` x ``vectors`` accumulators;
    with ``vectors`` more for weights and one or two for broadcasts it must fit the register file.
    """

    name: str
    lanes: int
    vectors: int
    max_rows: int

    @property
    def panel(self) -> int:
        """Output columns of one tile, and so the width of a packed weight panel."""
        return self.lanes * self.vectors


AVX512 = VectorShape("avx512", lanes=16, vectors=3, max_rows=8)  # 24 of 32 registers accumulate
AVX2 = VectorShape("avx2", lanes=8, vectors=2, max_rows=6)  # 12 of 16
NEON = VectorShape("neon", lanes=4, vectors=4, max_rows=6)  # 24 of 32


def target_features() -> frozenset[str]:
    """LLVM names of the features that Numba compiles for (NUMBA_CPU_FEATURES included)."""
    import llvmlite.binding as llvm
    from numba.core import config

    chosen: str | None = getattr(config, "CPU_FEATURES", None)  # set at run time: unknown to mypy
    if chosen is not None:
        text = chosen
    else:
        text = llvm.get_host_cpu_features().flatten()
    return frozenset(item[1:] for item in text.split(",") if item.startswith("+"))


@functools.cache
def unfit_reason() -> str | None:
    """Why the compiled kernels cannot run here; None when they can."""
    for package in ("numba", "llvmlite"):
        try:
            found = importlib.util.find_spec(package) is not None
        except (ImportError, ValueError):
            found = False
        if not found:
            return f"{package} is not installed; `pip install numba` brings the compiled CPU kernels"
    try:
        import numba  # noqa: F401
    except Exception as error:  # a broken or incompatible install may raise anything
        return f"numba does not import: {error}"
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        missing = sorted({"avx2", "fma", "f16c"} - target_features())
        return f"the CPU lacks {', '.join(missing)}" if missing else None
    if machine in ("aarch64", "arm64"):
        return None
    return f"no vector shape is known for {machine}"


@functools.cache
def vector_shape() -> VectorShape:
    """The tile for this host. Call only where `unfit_reason()` is None."""
    if platform.machine().lower() in ("aarch64", "arm64"):
        return NEON
    return AVX512 if {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= target_features() else AVX2
