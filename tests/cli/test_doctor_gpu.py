"""`octavo doctor` on a GPU that is only played: what it says of what the checks find."""

import json
import sys
from types import SimpleNamespace

import pytest

from octavo.cli import doctor, doctor_gpu
from octavo.kernels import backend


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


def test_a_gpu_on_one_screen(octavo, gpu):
    status, out, _ = octavo("doctor")
    assert status == 0
    assert "  ok       gpu 0: A GPU, 80 GiB\n" in out
    assert "  ok       on the GPU: 1 by Triton\n" in out
    assert "  note     launch parameters: no table for this GPU: safe defaults\n" in out
    assert "           -> octavo bench tune makes one, in some minutes\n" in out
    assert "its module does not import" not in out
    assert len(out.splitlines()) <= 28


def test_a_gpu_without_triton_is_told_what_device_cuda_then_means(octavo, gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    status, out, _ = octavo("doctor")
    assert status == 0
    assert "  note     triton: does not import (" in out
    advice = "pip install triton; without it --device cuda runs plain torch, many times slower"
    assert f"           -> {advice}\n" in out


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
