import importlib.metadata
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from octavo.cli import doctor, doctor_gpu
from octavo.errors import ConfigError
from octavo.kernels import backend


def test_doctor_checks_every_kernel_that_runs_here(octavo):
    status, out, err = octavo("doctor", "--json")
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert report["ok"] is True
    checked = {f["name"] for f in report["findings"] if f["section"] == "self-check"}
    assert {name[: name.index("]") + 1] for name in checked} == {
        f"{s.kernel} [{s.implementation}]" for s in backend.describe() if s.available
    }
    assert {"varlen_attention [cpu] bfloat16", "write_kv_cache [cpu] float16", "linear [cpu] int8"} <= checked
    named = {f["name"] for f in report["findings"]}
    assert {"python", "torch", "processor", "memory", "compiled code cache"} <= named


def test_doctor_for_people(octavo):
    status, out, _ = octavo("doctor")
    assert status == 0
    assert out.endswith("Octavo runs here\n")
    assert "worst error against the reference" in out
    assert "none that torch can use" in out


def test_a_kernel_that_answers_wrongly_fails_the_doctor(octavo, monkeypatch):
    monkeypatch.setattr(backend, "self_check", lambda: [("rms_norm", "cpu", "float16", 0.5, False)])
    status, out, _ = octavo("doctor")
    assert status == 1
    assert "TROUBLE  rms_norm [cpu] float16: worst error against the reference 5.0e-01" in out
    assert "OCTAVO_KERNELS=reference" in out


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
    assert findings["OCTAVO_KERNELS"]["detail"] == "cpu, which on the CPU cannot do sample"


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
        "self_check": [backend.SelfCheck("rms_norm", "triton", "bfloat16", 2e-3, True)],
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
    return status, {f["name"]: f for f in json.loads(out)["findings"] if f["section"].startswith("gpu")}


def test_a_gpu_is_examined(octavo, gpu):
    status, findings = gpu_findings(octavo)
    assert status == 0
    assert findings["card"]["detail"].endswith("80 GiB, 132 SMs, compute capability 9.0")
    assert findings["rms_norm [triton]"]["detail"] == "used here"
    assert findings["sample [triton]"]["detail"] == "not here: its module does not import"
    assert findings["rms_norm [triton] bfloat16"]["status"] == "ok"
    assert findings["CUDA graphs"]["status"] == findings["prefill"]["status"] == "ok"
    assert findings["compiled late"]["detail"].startswith(
        "warm-up made 1 (1 from disk); after it 0 in a sweep"
    )
    assert findings["launch parameters"]["detail"] == "no table for this GPU: safe defaults"
    assert findings["measured"]["detail"].startswith("read TB/s 4.6, copy TB/s 4.2, bf16 matmul TFLOP/s 700")


def test_what_is_wrong_on_a_gpu_fails_the_doctor(octavo, gpu):
    from octavo.kernels.triton.monitor import Made

    gpu["self_check"] = [backend.SelfCheck("rms_norm", "triton", "bfloat16", 0.5, False)]
    gpu["replay"] = float("inf")
    gpu["late"] = [Made("_decode", "q:*bf16", False, 1.0)]
    status, findings = gpu_findings(octavo)
    assert status == 1
    assert findings["rms_norm [triton] bfloat16"]["status"] == "trouble"
    assert "OCTAVO_KERNELS=reference" in findings["rms_norm [triton] bfloat16"]["advice"]
    assert findings["CUDA graphs"]["status"] == "trouble"
    assert findings["compiled late"]["status"] == "note"
    assert findings["compiled late"]["detail"].endswith("after it 1 in a sweep of batches: _decode")


def test_a_gpu_without_fit_triton_is_told_so_and_not_put_to_the_test(octavo, gpu):
    pytest.importorskip("triton")
    gpu["unfit"] = "Triton 3.5.0 is too old; 3.6 or newer is needed"
    status, findings = gpu_findings(octavo)
    assert status == 0
    assert findings["triton"]["detail"] == gpu["unfit"]
    assert "CUDA graphs" not in findings
