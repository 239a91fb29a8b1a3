"""Other machines, in processes of their own: AVX2 only, no Numba, an empty and a missing cache folder."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from numba.core import caching

from octavo.kernels.cpu import compiled, host

HERE = Path(__file__).parent
HASWELL = {
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "+64bit,+cmov,+cx8,+fxsr,+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,"
    "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe",
}

WITHOUT_NUMBA = """
import sys
sys.modules["numba"] = None
import torch
from octavo.errors import UnsupportedKernelConfig
from octavo.kernels import backend, flash_attn_varlen_func, linear, pack_weight, rms_norm

weight, x = torch.eye(4), torch.arange(8.0).view(2, 4)
packed = pack_weight(weight, "float32")
assert packed.form == "dense", packed.form
assert "pip install numba" in packed.note, packed.note
assert torch.equal(linear(x, packed), x)
for form in ("float16", "int8"):
    try:
        pack_weight(weight, form)
    except UnsupportedKernelConfig as error:
        assert "pip install numba" in str(error) and "Use dtype float32" in str(error), error
    else:
        raise AssertionError(form)
for status in backend.describe():
    assert status.selected == (status.implementation == "reference"), status
rms_norm(x, torch.ones(4), 1e-5)
q = torch.zeros(2, 1, 4)
flash_attn_varlen_func(q, q, q, *(torch.tensor([0, 2], dtype=torch.int32),) * 2, 2, 2)
"""

CACHE_HITS = """
import torch
from octavo.kernels.cpu import compiled, host, small_kernels
from octavo.kernels import linear, pack_weight

linear(torch.ones(1, 8), pack_weight(torch.ones(3, 8), "float32"))
compiled.compile_kernel(small_kernels._silu("float32", host.vector_shape().lanes, DIGEST))
print([kernel.cache_hits for kernel in compiled._alive])
"""


def run(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )


def test_the_avx2_kernels_pass_the_same_tests() -> None:
    files = [str(HERE / name) for name in ("test_linear.py", "test_attention_bits.py")]
    result = run(["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files], **HASWELL)
    assert result.returncode == 0, result.stdout[-3000:]


def test_haswell_features_choose_the_avx2_tile() -> None:
    code = "from octavo.kernels.cpu import host; print(host.vector_shape().name)"
    assert run(["-c", code], **HASWELL).stdout == "avx2\n"


def test_a_cpu_without_avx2_is_unfit_and_says_what_it_lacks() -> None:
    code = "from octavo.kernels.cpu import host; print(host.unfit_reason())"
    result = run(["-c", code], NUMBA_CPU_NAME="nehalem", NUMBA_CPU_FEATURES="+sse4.2")
    assert result.stdout == "the CPU lacks avx2, f16c, fma\n"


def test_without_numba_everything_runs_and_says_why_it_is_slow() -> None:
    result = run(["-W", "error", "-c", WITHOUT_NUMBA])
    assert result.returncode == 0, result.stderr


def test_kernels_come_from_the_cache_folder_until_a_source_changes(tmp_path: Path) -> None:
    def hits(digest: str) -> str:
        result = run(["-c", f"DIGEST = {digest!r}\n{CACHE_HITS}"], NUMBA_CACHE_DIR=str(tmp_path))
        assert result.returncode == 0, result.stderr
        return result.stdout

    assert hits("one") == "[0, 0]\n"
    assert hits("one") == "[1, 1]\n"
    assert hits("another") == "[1, 0]\n"


def test_without_a_writable_cache_folder_kernels_are_compiled_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from octavo.kernels.cpu import small_kernels

    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    kernel = small_kernels._silu("float32", host.vector_shape().lanes, "not cached")
    with caplog.at_level(logging.WARNING, logger=compiled.__name__):
        assert compiled.compile_kernel(kernel) != 0
    assert "set NUMBA_CACHE_DIR" in caplog.text


def test_each_variant_of_a_kernel_has_a_cache_entry_of_its_own(tmp_path: Path) -> None:
    """Numba's index of one name is written without a lock: two processes could swap each other's code."""
    program = (
        "from octavo.kernels.cpu.linear_kernel import linear_kernel\n"
        "for form in ('float32', 'float16', 'int8'): linear_kernel(form)"
    )
    for target in ({}, {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c"}):
        environment = {**os.environ, **target, "NUMBA_CACHE_DIR": str(tmp_path)}
        subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    assert len(list(tmp_path.rglob("*.nbi"))) == len(list(tmp_path.rglob("*.nbc"))) == 6
