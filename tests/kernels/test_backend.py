"""Which implementation runs, why, and what it costs to ask."""

import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from octavo.errors import ConfigError, UnsupportedKernelConfig
from octavo.kernels import backend, pack_weight, silu_and_mul
from octavo.kernels import triton as triton_room
from octavo.kernels.linear import Form, PackedWeight
from octavo.kernels.triton import attention as triton_attention

COMPILED_FOR_CPU = (
    *("varlen_attention", "write_kv_cache", "rms_norm", "apply_rotary"),
    *("silu_and_mul", "gelu_tanh"),
)


def fake_room(monkeypatch: pytest.MonkeyPatch, module: object, room: str = "cpu") -> None:
    """Stand `module` in for every module of a room."""
    real = backend.importlib.import_module

    def import_module(name: str) -> object:
        if not name.startswith(f"octavo.kernels.{room}."):
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
    def silu_and_mul(x: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        return torch.full((x.shape[0], x.shape[1] // 2), 42.0)

    @staticmethod
    def _broken(*arguments: object, **options: object) -> None:
        raise RuntimeError("illegal instruction")

    varlen_attention = write_kv_cache = rotate_and_write_kv_cache = _broken
    rms_norm = apply_rotary = sample = gelu_tanh = prepare_decode = finish_decode = _broken
    find_shared_prefixes = merge_shared_prefixes = _broken
    few_rows_linear = grouped_linear = invariant_linear = _broken


def test_the_compiled_kernels_run_here_and_are_chosen() -> None:
    """Numba is a dependency: on the machines that run these tests nothing falls back."""
    with backend.use("auto"):
        assert {kernel: backend.implementation_of(kernel) for kernel in COMPILED_FOR_CPU} == dict.fromkeys(
            COMPILED_FOR_CPU, "cpu"
        )
        assert backend.implementation_of("grouped_linear") == "cpu"  # in float32 alone, as its weights are


@pytest.fixture
def no_gpu_rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without Triton, so that what is said of it does not depend on how the tests are run."""
    monkeypatch.setattr(triton_room, "unfit_reason", lambda device_type: "no Triton here")


def test_a_room_that_does_not_import_falls_back_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_room(monkeypatch, ImportError("No module named 'numba'"))
    with backend.use("auto"):
        x = torch.ones(1, 2)
        assert silu_and_mul(x).item() == pytest.approx(0.731059, abs=1e-6)
        cpu, reference = backend.describe()[:2]
    assert cpu == backend.BackendStatus(
        "varlen_attention", "cpu", False, "its module does not import (No module named 'numba')", False
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
    with pytest.raises(ConfigError, match=r"unknown kernels 'refrence'.*did you mean 'reference'"):
        backend.use("refrence").__enter__()


@pytest.mark.parametrize(
    ("value", "room"), [("", "cpu"), ("auto", "cpu"), ("cpu", "cpu"), ("reference", "reference")]
)
def test_the_environment_variable(monkeypatch: pytest.MonkeyPatch, value: str, room: str) -> None:
    monkeypatch.setattr(backend, "_selected", {})
    monkeypatch.setenv("OCTAVO_KERNELS", value)
    assert backend.implementation_of("rms_norm") == room


@pytest.mark.parametrize(("value", "hint"), [("xyz", ""), ("Reference", r" \(did you mean 'reference'\?\)")])
def test_an_unknown_value_of_the_environment_variable(
    monkeypatch: pytest.MonkeyPatch, value: str, hint: str
) -> None:
    monkeypatch.setattr(backend, "_selected", {})
    monkeypatch.setenv("OCTAVO_KERNELS", value)
    known = "expected one of auto, cpu, triton, reference"
    message = f"^OCTAVO_KERNELS: unknown kernels '{value}', {known}{hint}$"
    with pytest.raises(ConfigError, match=message):
        silu_and_mul(torch.ones(1, 2))
    with backend.use("reference"):
        assert silu_and_mul(torch.zeros(1, 2)).item() == 0.0


def test_other_devices_have_the_reference() -> None:
    assert backend.implementation_of("rms_norm", "meta", torch.float32, torch.float32) == "reference"


@pytest.mark.parametrize("device_type", ["cuda", "xpu"])
def test_a_gpu_has_the_triton_kernels(monkeypatch: pytest.MonkeyPatch, device_type: str) -> None:
    monkeypatch.setattr(triton_room, "unfit_reason", lambda device_type: None)
    fake_room(monkeypatch, Working, "triton")
    with backend.use("auto"):
        assert backend.implementation_of("silu_and_mul", device_type) == "triton"
        rooms = [s.implementation for s in backend.describe(device_type) if s.kernel == "rms_norm"]
    assert rooms == ["triton", "reference"]


def test_the_ordinary_case_on_a_gpu_is_a_model_in_bfloat16() -> None:
    assert backend.ordinary_facts("sample", "cpu") == (torch.float32,)
    for kernel in ("sample", "few_rows_linear"):
        assert backend.ordinary_facts(kernel, "cuda") == (torch.bfloat16,)


@pytest.mark.parametrize("device_type", ["cuda", "xpu"])
@pytest.mark.usefixtures("no_gpu_rooms")
def test_a_gpu_without_triton_has_the_reference_and_the_reason_is_kept(device_type: str) -> None:
    with backend.use("auto"):
        assert backend.implementation_of("rms_norm", device_type) == "reference"
        statuses = [s for s in backend.describe(device_type) if s.kernel == "rms_norm"]
    assert statuses == [
        backend.BackendStatus("rms_norm", "triton", False, "no Triton here", False),
        backend.BackendStatus("rms_norm", "reference", True, "", True),
    ]


def test_forced_triton_on_cpu_tensors_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(triton_room, "is_interpreted", lambda: False)
    monkeypatch.setattr(triton_room, "_compiles_for_cpu", lambda: False)
    message = r"silu_and_mul: the 'triton' kernels are forced .*only with TRITON_INTERPRET=1\. Unset"
    with backend.use("triton"), pytest.raises(UnsupportedKernelConfig, match=message):
        silu_and_mul(torch.ones(1, 2))
    monkeypatch.setattr(triton_room, "is_interpreted", lambda: True)
    fake_room(monkeypatch, Working, "triton")
    with backend.use("triton"):
        assert silu_and_mul(torch.ones(1, 2)).item() == 42.0
    with backend.use("auto"):
        assert backend.implementation_of("silu_and_mul") == "cpu"  # the interpreter is never chosen


@pytest.mark.parametrize(
    ("version", "reason"),
    [("3.5.1", "Triton 3.5.1 is too old; 3.6 or newer is needed"), ("3.6.0", None), ("3.10.0+git1", None)],
)
def test_which_triton_is_new_enough(
    monkeypatch: pytest.MonkeyPatch, version: str, reason: str | None
) -> None:
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__=version))
    assert triton_room._installation_reason.__wrapped__() == reason


def test_a_gpu_too_old_for_the_kernels_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    reason = "Tesla T4 has compute capability 7.5; 8.0 or newer is needed"
    assert triton_room._capability_reason.__wrapped__() == reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    assert triton_room._capability_reason.__wrapped__() is None


def test_a_kernel_that_a_room_lacks_is_told_from_one_that_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backend.KERNELS, "silu_and_mul", ("no_such_module", ("x dtype",), (torch.float32,)))
    statuses = [s for s in _reasons("silu_and_mul") if s[0] == "cpu"]
    assert statuses == [("cpu", "there is no cpu kernel for it")]


def _reasons(kernel: str) -> list[tuple[str, str]]:
    return [(room, backend._load(room, kernel, "cpu", (torch.float32,))[1]) for room in ("cpu", "reference")]


def test_self_check_passes_for_everything_that_is_available() -> None:
    checks = backend.self_check()
    found = {(check.kernel, check.implementation, check.form) for check in checks}
    assert len(found) == len(checks)
    rooms = {(s.kernel, s.implementation) for s in backend.describe() if s.available}
    assert {(kernel, room) for kernel, room, _ in found} == rooms
    for dtype in ("float32", "float16", "bfloat16"):
        assert {(k, r, dtype) for k in COMPILED_FOR_CPU for r in ("cpu", "reference")} <= found
    assert {(r, form) for k, r, form in found if k == "linear"} == {
        *(("cpu", form) for form in ("float32", "float16", "int8")),
        ("reference", "dense"),
    }
    assert {"bfloat16 in float8_e4m3fn", "bfloat16 in int8"} <= {check.form for check in checks}
    bounds = {"float16": 2**-10, "bfloat16": 2**-7}
    for check in checks:
        assert check.ok, check
        assert check.worst_error <= check.allowed
        assert check.problem == ""
        if " in " not in check.form:
            bound = 1e-5 if check.kernel == "linear" else bounds.get(check.form, 1e-5)
            assert check.allowed == bound, check


def test_self_check_finds_a_wrong_kernel_and_one_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_room(monkeypatch, Working)  # a silu that is wrong, and nothing else in the module
    checks = [check for check in backend.self_check() if check.implementation == "cpu"]
    assert {check.kernel for check in checks if check.ok} == {"linear"}
    found = {(check.kernel, check.form): check for check in checks}
    for dtype in ("float32", "float16", "bfloat16"):
        assert 10 < found["silu_and_mul", dtype].worst_error < 60
        assert found["silu_and_mul", dtype].problem == ""
        assert found["rms_norm", dtype].worst_error == float("inf")
        assert found["rms_norm", dtype].problem == "RuntimeError: illegal instruction"


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


class OnGpu:
    """What a launch looks at in a tensor of GPU 1."""

    is_cuda, is_xpu = True, False

    @staticmethod
    def get_device() -> int:
        return 1


@pytest.mark.parametrize(("current", "made_current"), [(0, [1]), (1, [])])
def test_a_kernel_is_launched_on_the_device_of_its_tensors(
    monkeypatch: pytest.MonkeyPatch, current: int, made_current: list[int]
) -> None:
    """Triton launches on the current device, which need not be it."""
    now = [current]

    @contextmanager
    def device(index: int) -> Iterator[None]:
        now.append(index)
        yield
        now.pop()

    class Room(Working):
        @staticmethod
        def silu_and_mul(x: object) -> int:  # type: ignore[override]
            return now[-1]

    monkeypatch.setattr(torch.cuda, "current_device", lambda: now[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(triton_room, "unfit_reason", lambda device_type: None)
    fake_room(monkeypatch, Room, "triton")
    with backend.use("auto"):
        assert backend.select("silu_and_mul", "cuda", torch.bfloat16)(OnGpu()) == 1
    assert now == [current]
    with triton_room.on_device_of(OnGpu()):  # type: ignore[arg-type]
        assert now == [current, *made_current]
    with triton_room.on_device_of(torch.empty(1)):
        assert now == [current]


def test_prepared_attention_over_prompts_is_launched_on_the_device_of_its_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inside, launched = [False], []

    @contextmanager
    def on_device_of(x: torch.Tensor) -> Iterator[None]:
        inside[0] = True
        yield
        inside[0] = False

    monkeypatch.setattr(triton_room, "on_device_of", on_device_of)
    monkeypatch.setattr(triton_attention, "_attend_long", lambda *_, **__: launched.append(inside[0]))
    q, seqlens = torch.zeros(40, 2, 16), torch.tensor([0, 40], dtype=torch.int32)
    options = {"softmax_scale": 1.0, "causal": True, "window_size": (-1, -1), "softcap": 0.0}
    nothing = dict.fromkeys(("alibi_slopes", "sinks", "block_table", "lse", "k_scale", "v_scale", "leftpad"))
    rest = {**options, **nothing, "out": q, "batch_invariant": False}
    call = triton_attention.prepare(q, q, q, seqlens, seqlens, 40, 40, **rest)
    call(q, q, q, seqlens, seqlens, 40, 40, **rest)
    assert launched == [True]


@pytest.mark.usefixtures("no_gpu_rooms")
def test_plain_torch_on_a_gpu_is_warned_of_once_unless_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backend, "_warned", set())
    with backend.use("reference"):
        backend.select("rms_norm", "cuda", torch.float32, torch.float32)
    assert not caplog.records
    with backend.use("auto"):
        backend.select("rms_norm", "cuda", torch.float32, torch.float32)
        backend.select("rms_norm", "cuda", torch.float16, torch.float16)
        backend.select("rms_norm", "meta", torch.float16, torch.float16)
    (record,) = caplog.records
    assert record.name == "octavo"
    for part in ("rms_norm", "plain torch", "no Triton here", "octavo doctor", "OCTAVO_KERNELS=reference"):
        assert part in record.getMessage()
