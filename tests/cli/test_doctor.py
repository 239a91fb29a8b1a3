import importlib.metadata
import json
from pathlib import Path

import pytest

from octavo.cli import doctor
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
