"""What `octavo doctor` finds out about a GPU: the card, its kernels, their answers, its best rates."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from octavo.cli.doctor_self_check import WRONG, add_findings
from octavo.kernels import backend
from octavo.kernels import triton as triton_room
from octavo.kernels.triton import tuning

if TYPE_CHECKING:
    from octavo.cli.doctor_report import Report

_REPLAY_BOUND = 2.0**-7  # of bfloat16 results


def examine(report: Report) -> None:
    """Add all findings; only called where torch has a CUDA (or ROCm) device."""
    device = torch.device("cuda", torch.cuda.current_device())
    can_launch = _compiler(report)
    _card(report, device)
    _kernels(report)
    add_findings(report, "gpu self-check", backend.self_check(device), "GPU")
    if can_launch and triton_room.unfit_reason("cuda") is None:
        if torch.cuda.get_device_capability(device) == (9, 0):
            _hopper(report, device)
        _graphs(report, device)
        _compiles(report, device)
    _rates(report, device)


def _compiler(report: Report) -> bool:
    """Whether Triton can build, in C, what launches its kernels: it does so at the first launch.

    Looks where Triton looks. Without Triton nothing has to be built, and nothing is said.
    """
    if importlib.util.find_spec("triton") is None:
        return True
    wanted = os.environ.get("CC")
    compiler = shutil.which(wanted) if wanted is not None else shutil.which("gcc") or shutil.which("clang")
    # Debian's own scheme names a folder under /usr/local, where no header ever is.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    headers = Path(sysconfig.get_paths(scheme=scheme)["include"])
    missing = []
    if compiler is None:
        missing.append("gcc or clang" if wanted is None else f"the compiler that CC names, {wanted!r}")
    if not (headers / "Python.h").is_file():
        missing.append(f"Python.h in {headers}")
    if not missing:
        report.add("gpu", "C compiler", "ok", f"{compiler}, with Python.h in {headers}")
        return True
    detail = f"missing: {' and '.join(missing)}; Triton needs them to launch its kernels"
    advice = "Debian: apt-get install gcc python3-dev; nvcc is not needed"
    report.add("gpu", "C compiler", "trouble", detail, advice)
    return False


def _card(report: Report, device: torch.device) -> None:
    from octavo.bench.report import gpu_name

    properties = torch.cuda.get_device_properties(device)
    detail = (
        f"{gpu_name()}, {properties.total_memory / 2**30:.0f} GiB, {properties.multi_processor_count} SMs"
    )
    report.add("gpu", "card", "ok", f"{detail}, compute capability {properties.major}.{properties.minor}")
    try:
        import triton
    except ImportError as error:
        advice = "pip install triton; without it --device cuda runs plain torch, many times slower"
        report.add("gpu", "triton", "note", f"does not import ({error})", advice)
    else:
        reason = triton_room.unfit_reason("cuda")
        report.add("gpu", "triton", "note" if reason else "ok", reason or triton.__version__)
    path = tuning.table_path(device)
    if path is not None and path.exists():
        count = sum(map(len, tuning.table(device).values()))
        report.add("gpu", "launch parameters", "ok", f"{count} tuned for this GPU ({path.name})")
    else:
        detail = "no table for this GPU: safe defaults"
        report.add("gpu", "launch parameters", "note", detail, "octavo bench tune makes one, in some minutes")


def _kernels(report: Report) -> None:
    statuses = backend.describe("cuda")
    report.add_use("on the GPU", statuses)
    for status in statuses:
        name = f"{status.kernel} [{status.implementation}]"
        if status.available:
            report.add("gpu kernels", name, "ok", "used here" if status.selected else "runs here")
        else:
            report.add("gpu kernels", name, "note", f"not here: {status.reason}")


def _hopper(report: Report, device: torch.device) -> None:
    """Which prefill kernel an ordinary model runs: that of this architecture, or the one for every GPU."""
    x = torch.zeros((16, 8, 128), dtype=torch.bfloat16, device=device)
    try:
        from octavo.kernels.triton import prefill_hopper
    except (ImportError, AttributeError) as error:  # Gluon's names move with every release of Triton
        reason: str | None = f"it does not import ({error})"
    else:
        reason = prefill_hopper.supports_hopper(x, x, x, None, x, softmax_scale=1.0)
    if reason is None:
        report.add("gpu", "prefill", "ok", "the kernel for Hopper")
    else:
        report.add("gpu", "prefill", "note", f"the kernel for every GPU; the one for Hopper: {reason}")


def _graphs(report: Report, device: torch.device) -> None:
    from octavo.kernels.gpu_checks import replay_error

    error = replay_error(device)
    good = error <= _REPLAY_BOUND
    detail = f"a captured step replayed with other lengths, worst error {error:.1e}"
    report.add("gpu", "CUDA graphs", "ok" if good else "trouble", detail, "" if good else WRONG.format("GPU"))


def _compiles(report: Report, device: torch.device) -> None:
    from octavo.kernels.gpu_checks import late_compiles

    made, late = late_compiles(device)
    from_disk = sum(one.from_disk for one in made)
    detail = f"warm-up made {len(made)} ({from_disk} from disk); after it {len(late)} in a sweep of batches"
    if late:
        names = ", ".join(dict.fromkeys(one.kernel for one in late))
        advice = "requests will wait for the compiler now and then; report this"
        report.add("gpu", "compiled late", "note", f"{detail}: {names}", advice)
    else:
        report.add("gpu", "compiled late", "ok", detail)


def _rates(report: Report, device: torch.device) -> None:
    from octavo.bench.roofline import measure_ceilings

    ceilings = measure_ceilings(device)
    detail = ", ".join(f"{name} {value:g}" for name, value in ceilings.as_dict().items())
    report.add("gpu", "measured", "ok", detail)
