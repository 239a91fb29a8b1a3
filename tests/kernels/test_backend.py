"""Which implementation runs, why, and what it costs to ask."""

import subprocess
import sys

import pytest
import torch

from octavo.errors import ConfigError, UnsupportedKernelConfig
from octavo.kernels import backend, pack_weight, silu_and_mul
from octavo.kernels.linear import Form, PackedWeight


def fake_room(monkeypatch: pytest.MonkeyPatch, module: object) -> None:
    """Stand `module` in for every module of the cpu room."""
    real = backend.importlib.import_module

    def import_module(name: str) -> object:
        if not name.startswith("octavo.kernels.cpu."):
            return real(name)
        if isinstance(module, ImportError):
            raise module
        return module

    monkeypatch.setattr(backend.importlib, "import_module", import_module)


class Refusing:
    @staticmethod
    def supports(*facts: object) -> str | None:
        return "only odd Tuesdays"


class Working:
    @staticmethod
    def supports(*facts: object) -> str | None:
        return None

    @staticmethod
    def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
        return torch.full((x.shape[0], x.shape[1] // 2), 42.0)

    @staticmethod
    def _broken(*arguments: object, **options: object) -> None:
        raise RuntimeError("illegal instruction")

    varlen_attention = write_kv_cache = rms_norm = apply_rotary = _broken


def test_the_compiled_kernels_run_here_and_are_chosen() -> None:
    """Numba is a dependency: on the machines that run these tests nothing falls back."""
    with backend.use("auto"):
        assert {kernel: backend.implementation_of(kernel) for kernel in backend.KERNELS} == dict.fromkeys(
            backend.KERNELS, "cpu"
        )


def test_a_room_that_does_not_import_falls_back_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_room(monkeypatch, ImportError("No module named 'numba'"))
    with backend.use("auto"):
        x = torch.ones(1, 2)
        assert silu_and_mul(x).item() == pytest.approx(0.731059, abs=1e-6)
        cpu, triton, reference = backend.describe()[:3]
    assert cpu == backend.BackendStatus(
        "varlen_attention", "cpu", False, "its module does not import (No module named 'numba')", False
    )
    assert triton == backend.BackendStatus(
        "varlen_attention", "triton", False, "this version of Octavo has no Triton kernels", False
    )
    assert reference == backend.BackendStatus("varlen_attention", "reference", True, "", True)


def test_a_room_that_refuses_gives_its_reason_with_the_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_room(monkeypatch, Refusing)
    with backend.use("auto"):
        assert backend.implementation_of("silu_and_mul", "cpu", torch.float16) == "reference"
        reasons = {status.reason for status in backend.describe() if status.kernel == "silu_and_mul"}
    assert {"only odd Tuesdays", "only odd Tuesdays (x dtype torch.float16)"} <= reasons
    with (
        backend.use("cpu"),
        pytest.raises(UnsupportedKernelConfig, match=r"silu_and_mul: the 'cpu' kernels are forced.*Tuesdays"),
    ):
        silu_and_mul(torch.ones(1, 2))


def test_the_choice_is_made_once_per_kind_of_call(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_room(monkeypatch, Working)
    with backend.use("auto"):
        assert silu_and_mul(torch.ones(1, 2)).item() == 42.0
        monkeypatch.setattr(backend, "_choose", None)  # not asked again
        assert silu_and_mul(torch.ones(5, 4)).shape == (5, 2)
        with pytest.raises(TypeError):
            silu_and_mul(torch.ones(1, 2, dtype=torch.float16))


def test_a_fallback_for_an_unusual_call_is_recorded() -> None:
    with backend.use("auto"):
        before = backend.describe()
        assert silu_and_mul(torch.ones(1, 2, dtype=torch.float64)).dtype == torch.float64
        assert backend.describe() == [
            *before,
            backend.BackendStatus(
                "silu_and_mul", "cpu", False, "no compiled kernel for torch.float64 (x dtype torch.float64)"
            ),
        ]


def test_use_restores_what_was_before() -> None:
    with backend.use("reference"):
        with backend.use("cpu"):
            assert backend.implementation_of("silu_and_mul") == backend.forced() == "cpu"
        assert backend.implementation_of("silu_and_mul") == "reference"
    with pytest.raises(ConfigError, match=r"unknown kernel room 'refrence'.*did you mean 'reference'"):
        backend.use("refrence").__enter__()


@pytest.mark.parametrize(
    ("value", "room"), [("", "cpu"), ("auto", "cpu"), ("cpu", "cpu"), ("reference", "reference")]
)
def test_the_environment_variable(monkeypatch: pytest.MonkeyPatch, value: str, room: str) -> None:
    monkeypatch.setattr(backend, "_selected", {})
    monkeypatch.setenv("OCTAVO_KERNELS", value)
    assert backend.implementation_of("rms_norm") == room


@pytest.mark.parametrize(
    ("value", "hint"), [("triton", ""), ("Reference", r" \(did you mean 'reference'\?\)")]
)
def test_an_unknown_value_of_the_environment_variable(
    monkeypatch: pytest.MonkeyPatch, value: str, hint: str
) -> None:
    monkeypatch.setattr(backend, "_selected", {})
    monkeypatch.setenv("OCTAVO_KERNELS", value)
    known = "expected one of auto, reference, cpu"
    message = f"^OCTAVO_KERNELS: unknown kernel room '{value}', {known}{hint}$"
    with pytest.raises(ConfigError, match=message):
        silu_and_mul(torch.ones(1, 2))
    with backend.use("reference"):
        assert silu_and_mul(torch.zeros(1, 2)).item() == 0.0


def test_other_devices_have_the_reference() -> None:
    assert backend.implementation_of("rms_norm", "meta", torch.float32, torch.float32) == "reference"


def test_self_check_passes_for_everything_that_is_available() -> None:
    checks = backend.self_check()
    found = [(check.kernel, check.implementation, check.form) for check in checks]
    dtypes = ("float32", "float16", "bfloat16")
    assert found == [
        *(
            (kernel, room, dtype)
            for kernel in backend.KERNELS
            for room in ("cpu", "reference")
            for dtype in dtypes
        ),
        *(("linear", "cpu", form) for form in ("float32", "float16", "int8")),
        ("linear", "reference", "dense"),
    ]
    bounds = {"float16": 2**-10, "bfloat16": 2**-7}
    for check in checks:
        assert check.ok
        assert check.worst_error <= (1e-5 if check.kernel == "linear" else bounds.get(check.form, 1e-5)), (
            check
        )


def test_self_check_finds_a_wrong_kernel_and_one_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_room(monkeypatch, Working)  # a silu that is wrong, and nothing else in the module
    checks = [check for check in backend.self_check() if check.implementation == "cpu"]
    assert {check.kernel for check in checks if check.ok} == {"linear"}
    found = {(check.kernel, check.form): check for check in checks}
    for dtype in ("float32", "float16", "bfloat16"):
        assert 10 < found["silu_and_mul", dtype].worst_error < 60
        assert found["rms_norm", dtype].worst_error == float("inf")


@pytest.mark.parametrize("form", ["float32", "float16", "int8"])
def test_self_check_finds_weights_packed_wrongly(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    def pack(weight: torch.Tensor, wanted: Form) -> PackedWeight:
        return pack_weight(weight * 1.02, wanted)

    monkeypatch.setattr("octavo.kernels.self_check.pack_weight", pack)
    found = {check.form: check for check in backend.self_check() if check.kernel == "linear"}
    assert not found[form].ok


def test_worst_error_is_relative_above_one_and_infinite_for_nan_and_lone_infinities() -> None:
    inf, nan = float("inf"), float("nan")
    one = torch.tensor([1.0, inf])
    assert backend.worst_error(one, one) == 0.0
    assert backend.worst_error(torch.tensor([1.5, inf]), one) == 0.5
    assert backend.worst_error(torch.tensor([0.25, 6.0]), torch.tensor([0.0, 4.0])) == 0.5
    assert backend.worst_error(torch.tensor([1.0, nan]), one) == inf
    assert backend.worst_error(torch.tensor([1.0, 5.0]), one) == inf


def test_importing_the_kernels_loads_nothing_of_the_engine_and_no_numba() -> None:
    script = "import octavo.kernels, sys; print('\\n'.join(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    ).stdout.split()
    rooms = {name.split(".")[1] for name in loaded if name.startswith("octavo.")}
    assert rooms == {"errors", "kernels"}
    assert {"torch", "octavo.kernels.checks"} <= set(loaded)
    assert {"transformers", "numba", "llvmlite", "octavo.kernels.self_check"}.isdisjoint(loaded)
