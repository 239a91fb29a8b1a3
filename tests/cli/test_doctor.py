import functools
import importlib.metadata
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from octavo.cli import doctor, doctor_gpu
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
    assert {"python", "torch", "processor", "memory", "compiled code cache"} <= named


def test_doctor_for_people(octavo):
    status, out, _ = octavo("doctor")
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


def test_a_kernel_that_answers_wrongly_fails_the_doctor(octavo, monkeypatch):
    check = backend.SelfCheck("rms_norm", "cpu", "float16", 0.5, False, 1e-3)
    monkeypatch.setattr(backend, "self_check", lambda: [check])
    status, out, _ = octavo("doctor")
    assert status == 1
    error = "worst error against the exact result 5.0e-01 of 1.0e-03 allowed"
    assert f"TROUBLE  rms_norm [cpu]: wrong in float16: {error}\n" in out
    assert "its answers are wrong on this machine; run with OCTAVO_KERNELS=reference" in out


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


TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver"


@pytest.mark.parametrize(
    ("raised", "detail", "advice"),
    [
        (
            TOO_OLD,
            "the NVIDIA driver is too old for CUDA 13.0 (it knows CUDA up to 11.4); the CPU is used",
            "update the driver, or install torch for an older CUDA",
        ),
        (
            "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
            "torch is built for CUDA 13.0, but there is no NVIDIA driver here; the CPU is used",
            "if this machine has an NVIDIA GPU, install its driver",
        ),
        (
            "No CUDA GPUs are available",
            "torch is built for CUDA 13.0 and cannot use a GPU (No CUDA GPUs are available); the CPU is used",
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
    assert (report.findings[1].status, report.findings[1].detail) == ("ok", "none; the CPU is used")
    monkeypatch.setattr(doctor.shutil, "which", lambda program: "/usr/bin/nvidia-smi")
    report = doctor.Report()
    doctor._torch(report)
    assert report.findings[1].detail == "an NVIDIA driver is here, but torch is the CPU build"


def test_a_missing_package_says_what_to_do(octavo, monkeypatch):
    installed = importlib.metadata.version

    def version(name):
        if name in ("tokenizers", "numba"):
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    status, out, _ = octavo("doctor", "--json")
    findings = {f["name"]: f for f in json.loads(out)["findings"]}
    assert status == 1
    assert findings["tokenizers"]["status"] == "trouble"
    assert findings["tokenizers"]["advice"] == "pip install tokenizers"
    assert findings["numba"]["status"] == "note"


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
    assert finding.detail == ("/kept" if folder else "it cannot be kept: no folder can be written")
    assert ("NUMBA_CACHE_DIR" in finding.advice) == (folder is None)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU as far as the doctor can see; what its checks find can be changed."""
    import torch

    from octavo.bench.roofline import Ceilings
    from octavo.kernels.triton.monitor import Made

    found = {
        "self_check": [backend.SelfCheck("rms_norm", "triton", "bfloat16", 2e-3, True, 2.0**-7)],
        "replay": 4e-3,
        "late": [],
        "unfit": None,
    }
    properties = SimpleNamespace(
        name="A GPU", total_memory=80 * 2**30, multi_processor_count=132, major=9, minor=0
    )
    statuses = [
        backend.BackendStatus("rms_norm", "triton", True, "", True),
        backend.BackendStatus("sample", "triton", False, "its module does not import"),
    ]
    real_self_check, real_describe = backend.self_check, backend.describe
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "A GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(doctor_gpu, "_hopper", lambda report, device: report.add("gpu", "prefill", "ok", ""))
    monkeypatch.setattr(
        backend,
        "self_check",
        lambda device="cpu": real_self_check() if device == "cpu" else found["self_check"],
    )
    monkeypatch.setattr(
        backend, "describe", lambda device="cpu": real_describe() if device == "cpu" else statuses
    )
    monkeypatch.setattr("octavo.kernels.triton.unfit_reason", lambda device_type: found["unfit"])
    monkeypatch.setattr("octavo.kernels.gpu_checks.replay_error", lambda device: found["replay"])
    made = [Made("_norm", "x:*bf16", True, 0.0)]
    monkeypatch.setattr("octavo.kernels.gpu_checks.late_compiles", lambda device: (made, found["late"]))
    rates = Ceilings(4.6e12, 4.2e12, 7e14, empty_kernel_us=1.1)
    monkeypatch.setattr("octavo.bench.roofline.measure_ceilings", lambda device: rates)
    return found


def gpu_findings(octavo):
    status, out, _ = octavo("doctor", "--json")
    findings = [f for f in json.loads(out)["findings"] if f["section"].startswith("gpu")]
    return status, {(f["section"].removeprefix("gpu "), f["name"]): f for f in findings}


def test_a_gpu_is_examined(octavo, gpu):
    status, findings = gpu_findings(octavo)
    assert status == 0
    assert findings["gpu", "card"]["detail"].endswith("80 GiB, 132 SMs, compute capability 9.0")
    assert findings["kernels", "rms_norm [triton]"]["detail"] == "used here"
    assert findings["kernels", "sample [triton]"]["detail"] == "not here: its module does not import"
    assert findings["self-check", "rms_norm [triton]"]["status"] == "ok"
    assert findings["gpu", "CUDA graphs"]["status"] == findings["gpu", "prefill"]["status"] == "ok"
    assert findings["gpu", "compiled late"]["detail"].startswith(
        "warm-up made 1 (1 from disk); after it 0 in a sweep"
    )
    assert findings["gpu", "launch parameters"]["detail"] == "no table for this GPU: safe defaults"
    assert findings["gpu", "measured"]["detail"].startswith(
        "read TB/s 4.6, copy TB/s 4.2, bf16 matmul TFLOP/s 700"
    )


def test_what_is_wrong_on_a_gpu_fails_the_doctor(octavo, gpu):
    from octavo.kernels.triton.monitor import Made

    gpu["self_check"] = [backend.SelfCheck("rms_norm", "triton", "bfloat16", 0.5, False, 2.0**-7)]
    gpu["replay"] = float("inf")
    gpu["late"] = [Made("_decode", "q:*bf16", False, 1.0)]
    status, findings = gpu_findings(octavo)
    assert status == 1
    assert findings["self-check", "rms_norm [triton]"]["status"] == "trouble"
    assert "OCTAVO_KERNELS=reference" in findings["self-check", "rms_norm [triton]"]["advice"]
    assert findings["gpu", "CUDA graphs"]["status"] == "trouble"
    assert findings["gpu", "compiled late"]["status"] == "note"
    assert findings["gpu", "compiled late"]["detail"].endswith("after it 1 in a sweep of batches: _decode")


def test_a_gpu_without_fit_triton_is_told_so_and_not_put_to_the_test(octavo, gpu):
    pytest.importorskip("triton")
    gpu["unfit"] = "Triton 3.5.0 is too old; 3.6 or newer is needed"
    status, findings = gpu_findings(octavo)
    assert status == 0
    assert findings["gpu", "triton"]["detail"] == gpu["unfit"]
    assert ("gpu", "CUDA graphs") not in findings


@pytest.fixture
def c_compiler(monkeypatch, tmp_path):
    """Programs by name, and a folder of Python's headers, in place of those of this machine."""
    programs = {"gcc": "/usr/bin/gcc", "clang": "/usr/bin/clang"}
    (tmp_path / "Python.h").touch()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(doctor_gpu.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(doctor_gpu.shutil, "which", programs.get)
    monkeypatch.setattr(doctor_gpu.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    return programs


def compiler_finding():
    report = doctor.Report()
    can_launch = doctor_gpu._compiler(report)
    (finding,) = report.findings
    assert finding.name == "C compiler"
    assert can_launch == (finding.status == "ok")
    return finding


def test_the_c_compiler_that_triton_would_take_is_named(c_compiler, monkeypatch, tmp_path):
    assert compiler_finding().detail == f"/usr/bin/gcc, with Python.h in {tmp_path}"
    del c_compiler["gcc"]
    assert compiler_finding().detail.startswith("/usr/bin/clang,")
    c_compiler["/opt/cc"] = "/opt/cc"
    monkeypatch.setenv("CC", "/opt/cc")
    assert compiler_finding().detail.startswith("/opt/cc,")
    monkeypatch.setenv("CC", "nocc")  # Triton then takes no other
    assert "the compiler that CC names, 'nocc'" in compiler_finding().detail


def test_without_a_c_compiler_or_headers_the_way_out_is_told(c_compiler, tmp_path):
    c_compiler.clear()
    finding = compiler_finding()
    assert finding.status == "trouble"
    assert finding.detail == "missing: gcc or clang; Triton needs them to launch its kernels"
    assert finding.advice == "Debian: apt-get install gcc python3-dev; nvcc is not needed"
    (tmp_path / "Python.h").unlink()
    assert compiler_finding().detail.startswith(f"missing: gcc or clang and Python.h in {tmp_path}; ")
    c_compiler["gcc"] = "/usr/bin/gcc"
    assert compiler_finding().detail.startswith(f"missing: Python.h in {tmp_path}; ")


def test_without_triton_no_c_compiler_is_asked_for(c_compiler, monkeypatch):
    c_compiler.clear()
    monkeypatch.setattr(doctor_gpu.importlib.util, "find_spec", lambda name: None)
    report = doctor.Report()
    assert doctor_gpu._compiler(report)
    assert report.findings == []


def test_a_gpu_without_a_c_compiler_is_told_so_first(octavo, gpu, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("CC", "/no/such/compiler")
    status, findings = gpu_findings(octavo)
    assert status == 1
    assert next(iter(findings)) == ("gpu", "C compiler")
    assert findings["gpu", "C compiler"]["status"] == "trouble"
    assert ("gpu", "CUDA graphs") not in findings  # they would raise the same
