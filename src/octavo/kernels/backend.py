"""Which implementation of a kernel runs, and why.

Each kernel has a plain torch twin in `reference/` and may have a faster one in a room of its own: `cpu/` for
the processor, `triton/` for GPUs. A room's module `octavo.kernels.<room>.<module>` exports

- the kernel, with the signature of its reference twin. Arguments come checked (`checks.py`), indices included
  where they can be read without waiting for a device;
- `supports(*facts) -> str | None`: None when it can do the job, otherwise the reason why not. The facts of
  each kernel stand in `KERNELS`. Importing the module may raise ImportError: that is a reason, too.

What holds for every implementation:

- attention: any strides with a contiguous last dimension; the block size may be any number from 1 (a
  contiguous cache comes in as one block per sequence); only blocks that hold a visible key are looked up, so
  table entries left of a window, and past the length, may be -1; memory that no visible key occupies never
  reaches a result, NaN included; a row without a visible key is 0 with LSE -inf, sinks or not; `out` and
  `lse` are filled completely; a sink is part of the LSE; `window_size` is negative for "no bound" on a side,
  and `causal` means right = 0. One thing holds in `cpu` and `reference` only: a NaN or Inf in the *value* of
  a live key does not reach the rows of its own sequence that do not see it (a matrix unit multiplies it by
  their weight 0).
- `slot_mapping` and `positions` are int64, `cu_seqlens_*` and `block_table` int32.

The environment variable OCTAVO_KERNELS forces a room: `reference`, `cpu` or `triton` (an error then takes
the place of the fallback). `auto`, or nothing, is the best one that runs on the tensors' device. `triton`
takes CPU tensors only when Triton's interpreter is on (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from octavo.errors import ConfigError, UnsupportedKernelConfig, nearest
from octavo.kernels import known_calls
from octavo.kernels import triton as triton_room

# kernel -> (module, what `supports` is told, an ordinary example of it)
KERNELS: dict[str, tuple[str, tuple[str, ...], tuple[Any, ...]]] = {
    "varlen_attention": (
        "attention",
        ("q dtype", "cache dtype", "head_dim"),
        (torch.float32, torch.float32, 64),
    ),
    "write_kv_cache": ("kv_write", ("k dtype", "cache dtype"), (torch.float32, torch.float32)),
    "rotate_and_write_kv_cache": (
        "rotate_and_write",
        ("q dtype", "cache dtype", "head_dim"),
        (torch.float32, torch.float32, 64),
    ),
    "rms_norm": ("norm", ("x dtype", "weight dtype"), (torch.float32, torch.float32)),
    "apply_rotary": ("rotary", ("q dtype",), (torch.float32,)),
    "silu_and_mul": ("activation", ("x dtype",), (torch.float32,)),
    "gelu_tanh": ("activation", ("x dtype",), (torch.float32,)),
    "invariant_linear": ("linear", ("x dtype",), (torch.float32,)),
    "few_rows_linear": ("few_rows_linear", ("x dtype",), (torch.float32,)),
    "grouped_linear": ("grouped_linear", ("x dtype",), (torch.float32,)),
    "sample": ("sampling", ("logits dtype",), (torch.float32,)),
    "prepare_decode": ("decode_rows", (), ()),
    "finish_decode": ("decode_rows", (), ()),
    "find_shared_prefixes": ("shared_prefixes", (), ()),
    "merge_shared_prefixes": ("shared_prefixes", (), ()),
}
ROOMS = ("cpu", "triton", "reference")
# Best first. A device that is not named here has the reference, which is plain torch and runs anywhere.
_ROOMS_FOR_DEVICE = {
    "cpu": ("cpu", "reference"),
    "cuda": ("triton", "reference"),  # NVIDIA, and AMD, which torch calls cuda, too
    "xpu": ("triton", "reference"),
}
_GPUS = ("cuda", "xpu")
_VARIABLE = "OCTAVO_KERNELS"

logger = logging.getLogger("octavo")

Kernel = Callable[..., Any]


class _Choice(NamedTuple):
    room: str
    function: Kernel
    passed_over: tuple[tuple[str, str], ...]  # the better rooms that could not, each with its reason


_forced: str | None = None  # by `use`; None leaves the choice to the environment
_selected: dict[tuple[Any, ...], _Choice] = {}
_warned: set[tuple[str, str]] = set()  # (kernel, reason), once in a process


@dataclass(frozen=True)
class BackendStatus:
    """One implementation of one kernel: whether it runs here, if not why, and whether it is the one used."""

    kernel: str
    implementation: str
    available: bool
    reason: str = ""
    selected: bool = False


class SelfCheck(NamedTuple):
    """What one implementation's self-check found, in one dtype or weight form.

    `problem` is the exception's type and text where it raised; its error is infinite then.
    """

    kernel: str
    implementation: str
    form: str
    worst_error: float
    ok: bool
    allowed: float  # the largest `worst_error` that is ok
    problem: str = ""


def select(kernel: str, device_type: str, *facts: Any) -> Kernel:
    """The function to call for `kernel` on that device; a dictionary look-up after the first time.

    Raises:
        ConfigError: OCTAVO_KERNELS names no room.
        UnsupportedKernelConfig: a forced room cannot do it.
    """
    key = (kernel, device_type, *facts)
    found = _selected.get(key)
    if found is None:
        found = _selected[key] = _choose(kernel, device_type, facts)
    return found.function


def implementation_of(kernel: str, device_type: str = "cpu", *facts: Any) -> str:
    """The name of the room that `select` takes, for reports; without facts, for the ordinary case."""
    facts = facts or ordinary_facts(kernel, device_type)
    select(kernel, device_type, *facts)
    return _selected[(kernel, device_type, *facts)].room


@contextmanager
def use(room: str) -> Iterator[None]:
    """Force a room (or `auto`) inside a `with` block, as OCTAVO_KERNELS does for a process. One thread."""
    global _forced
    before, _forced = _forced, _known_room(room, "backend.use")
    _selected.clear()
    known_calls.forget()
    try:
        yield
    finally:
        _forced = before
        _selected.clear()
        known_calls.forget()


def ordinary_facts(kernel: str, device_type: str) -> tuple[Any, ...]:
    """An ordinary example of what `supports` is told: float32 on the CPU, bfloat16 elsewhere."""
    facts = KERNELS[kernel][2]
    if device_type == "cpu":
        return facts
    return tuple(torch.bfloat16 if fact is torch.float32 else fact for fact in facts)


def describe(device_type: str = "cpu") -> list[BackendStatus]:
    """Every implementation of every kernel for tensors on such a device of this machine, best first.

    Where none of a kernel is `selected`, a room is forced that cannot do it: every call will raise.

    First for each kernel's ordinary case, then what else fell back in this process: a call with facts
    (dtypes, sizes) that a better room could not do.
    """
    ordinary = [
        *(status for kernel in KERNELS for status in _describe(kernel, device_type)),
        *_describe_linear(device_type),
    ]
    return ordinary + [
        BackendStatus(kernel, room, False, reason)
        for (kernel, asked_for, *facts), choice in _selected.items()
        for room, reason in choice.passed_over
        if asked_for == device_type and tuple(facts) != ordinary_facts(kernel, device_type)
    ]


def forced() -> str:
    """The room that `use` or OCTAVO_KERNELS asks for; `auto` when nobody does."""
    return _forced or _known_room(os.environ.get(_VARIABLE) or "auto", _VARIABLE)


def _rooms(device_type: str) -> tuple[str, ...]:
    """The rooms worth a word for such a device, best first."""
    rooms = _ROOMS_FOR_DEVICE.get(device_type, ("reference",))
    wanted = forced()
    return rooms if wanted in ("auto", *rooms) else (wanted, *rooms)


def _describe_linear(device_type: str) -> Iterator[BackendStatus]:
    # `pack_weight` chooses for `linear`, once per weight: packed for the compiled kernels, or torch's own.
    if device_type != "cpu":
        yield BackendStatus("linear", "reference", True, "", True)
        return
    from octavo.kernels.cpu import host

    reason = host.unfit_reason()
    yield BackendStatus("linear", "cpu", reason is None, reason or "", reason is None)
    yield BackendStatus("linear", "reference", True, "", reason is not None)


def _describe(kernel: str, device_type: str) -> Iterator[BackendStatus]:
    facts = ordinary_facts(kernel, device_type)
    try:
        selected = implementation_of(kernel, device_type)
    except UnsupportedKernelConfig:  # a room is forced that does not have it
        selected = ""
    for room in _rooms(device_type):
        function, reason = _load(room, kernel, device_type, facts)
        yield BackendStatus(kernel, room, function is not None, reason, room == selected)


def self_check(device: torch.device | str = "cpu") -> list[SelfCheck]:
    """Run each implementation available for `device` on small odd shapes, against the reference in float64.

    Every kernel in each dtype that it can do, over quantised caches, too; `linear` in each form of weights.
    `ok` means an error, as `worst_error` measures it, of at most 1e-5, or twice what rounding the result to
    16 bits makes, or a step of a quantised cache. An implementation that raises has an infinite error, and
    the exception's text as its `problem`.
    """
    from octavo.kernels import self_check as cases  # loaded only by the one command that needs it

    device = torch.device(device)
    jobs: list[Callable[[], SelfCheck]] = []
    for kernel, case in cases.CASES.items():
        for dtype, cache, bound in cases.forms(kernel):
            facts = _facts(kernel, dtype, cache)
            oracle, _ = _load("reference", kernel, "cpu", ())
            assert oracle is not None
            exact = case(oracle, cases.Draw(dtype, torch.float64, cache=cache))
            form = " in ".join(str(d).removeprefix("torch.") for d in (dtype, cache) if d is not None)
            for room in _rooms(device.type):
                function, _ = _load(room, kernel, device.type, facts)
                if function is not None:
                    draw = cases.Draw(dtype, dtype, device, cache)
                    run = functools.partial(cases.beside, exact, case, function, draw)
                    jobs.append(functools.partial(_checked, kernel, room, form, run, bound))
    for status in _describe_linear(device.type):
        if status.available:
            for weight_form in cases.FORMS[status.implementation]:
                run = functools.partial(cases.linear, weight_form, device)
                bound = cases.BOUNDS[torch.float32]
                jobs.append(
                    functools.partial(_checked, "linear", status.implementation, weight_form, run, bound)
                )
    if device.type == "cpu":
        return [job() for job in jobs]
    with ThreadPoolExecutor(8) as pool:  # what takes the time is compiling
        return list(pool.map(lambda job: job(), jobs))


def _facts(kernel: str, dtype: torch.dtype, cache: torch.dtype | None) -> tuple[Any, ...]:
    """What `supports` is told of a self-check in these dtypes."""
    _, names, ordinary = KERNELS[kernel]
    return tuple(
        fact if fact is not torch.float32 else cache if cache and name == "cache dtype" else dtype
        for name, fact in zip(names, ordinary, strict=True)
    )


def _checked(
    kernel: str,
    room: str,
    form: str,
    run: Callable[[], list[tuple[torch.Tensor, torch.Tensor]]],
    bound: float,
) -> SelfCheck:
    try:
        error = max(worst_error(ours, exact) for ours, exact in run())
    except Exception as raised:  # whatever goes wrong in there is the finding
        problem = f"{type(raised).__name__}: {raised}"
        return SelfCheck(kernel, room, form, float("inf"), False, bound, problem)
    return SelfCheck(kernel, room, form, error, error <= bound, bound)


def worst_error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference, relative to the exact value where that is above 1.

    Infinite where one of the two is not a number or infinite alone.
    """
    infinity = float("inf")
    difference = (ours.double() - exact.double()).abs() / exact.double().abs().clamp_min(1.0)
    difference = torch.where(ours == exact, 0.0, difference)
    return float(difference.nan_to_num(nan=infinity, posinf=infinity).max()) if ours.numel() else 0.0


def _known_room(room: str, where: str) -> str:
    known = ("auto", *ROOMS)
    if room not in known:
        raise ConfigError(
            f"{where}: unknown kernels {room!r}, expected one of {', '.join(known)}{nearest(room, known)}"
        )
    return room


def _choose(kernel: str, device_type: str, facts: tuple[Any, ...]) -> _Choice:
    wanted = forced()
    rooms = _ROOMS_FOR_DEVICE.get(device_type, ("reference",)) if wanted == "auto" else (wanted,)
    passed_over: list[tuple[str, str]] = []
    for room in rooms:
        function, reason = _load(room, kernel, device_type, facts)
        if function is not None:
            if device_type in _GPUS:
                _warn(kernel, passed_over)
            return _Choice(room, function, tuple(passed_over))
        passed_over.append((room, reason))
    raise UnsupportedKernelConfig(
        f"{kernel}: the {wanted!r} kernels are forced and cannot run this: {passed_over[-1][1]}. "
        f"Unset {_VARIABLE} to fall back to the reference."
    )


def _warn(kernel: str, passed_over: list[tuple[str, str]]) -> None:
    """Say once for each reason that a kernel runs in plain torch on a GPU, which nobody asked for."""
    for room, reason in passed_over:
        if (kernel, reason) not in _warned:
            _warned.add((kernel, reason))
            logger.warning(
                "%s runs on the GPU in plain torch, slowly: the %s kernels cannot do it: %s. `octavo doctor` "
                "shows what runs here; %s=reference asks for plain torch, and silences this.",
                kernel, room, reason, _VARIABLE,
            )  # fmt: skip


def _load(room: str, kernel: str, device_type: str, facts: tuple[Any, ...]) -> tuple[Kernel | None, str]:
    module_name, names, _ = KERNELS[kernel]
    if room == "triton" and (reason := triton_room.unfit_reason(device_type)) is not None:
        return None, reason
    path = f"octavo.kernels.{room}.{module_name}"
    try:
        module = importlib.import_module(path)
    except ImportError as error:
        if error.name == path:
            return None, f"there is no {room} kernel for it"
        return None, f"its module does not import ({error})"
    if room != "reference":
        reason = module.supports(*facts)
        if reason is not None and facts == ordinary_facts(kernel, device_type):
            return None, reason
        if reason is not None:
            told = ", ".join(f"{name} {fact}" for name, fact in zip(names, facts, strict=True))
            return None, f"{reason} ({told})"
    function: Kernel = getattr(module, kernel)
    return triton_room.on_its_device(function) if room == "triton" else function, ""
