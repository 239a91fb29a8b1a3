"""What kernels share in being launched: with little work of the host, and chained.

For every launch, Triton's own `kernel[grid](...)` looks up which compiled kernel the arguments need: knobs
are read, keys made of text, the launch described to hooks that nobody has set. On a slow host that took 40 us
of each of the 170 launches that a step without a CUDA graph had. `direct` leaves out what is not needed:

- which kernel: Triton's own binder, compiled into its library, says what the arguments specialise (types,
  divisibility, alignment, constants, options). Its answer is the key under which the compiled kernel was
  kept, so that the choice is Triton's, by construction. A key that is new goes through Triton's own call,
  which compiles, tells whoever watches, and launches;
- the launch: by the launcher that Triton made for that kernel, which knows its attributes (dependent launch,
  cooperative grid, clusters), on the stream that Triton would take.

Everything is Triton's own wherever somebody looks on (hooks around launches, debugging), in the interpreter,
and in a version of Triton whose launchers were not looked at.

Dependent launches
------------------
Programmatic dependent launch (NVIDIA, from compute capability 9.0) lets a kernel get on its way while the one
before it still runs: its programs start as soon as there is room for them, and then wait for the kernels
before them to end. In a chain of short kernels that hides the launches. The rule, for every kernel that is
launched with `launch_pdl`:

- all its programs wait (`gdc_wait`) before the first store, and before the first load of anything that
  another kernel writes. Kernel n + 1 then ends after kernel n, and that after n - 1, whoever signals when.
  What no kernel writes while a model runs may be loaded before: a weight at rest (`few_rows_linear.py`);
- it may signal (`gdc_launch_dependents`) at once: the kernel behind it relies on the end of this one, not on
  the signal. Only a kernel that always runs behind one certain other may rely on what that one did before it
  signalled.

A program takes about 1.2 ns to start this way on an H200, and half of that otherwise: give it enough to do.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import functools
import math
import operator
import threading
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITCallable, JITFunction

from octavo.kernels import triton as room
from octavo.kernels.triton.tuning import Parameters

KNOWN = ("3.6.", "3.7.", "3.8.", "3.9.")  # versions of Triton that launch in one and the same way
_runtime = triton.knobs.runtime


def direct(kernel: Any) -> Any:
    """Decorates a kernel that the host launches: the same call, `kernel[grid](...)`, with less work."""
    if isinstance(kernel, JITFunction) and triton.__version__.startswith(KNOWN):
        return Direct(kernel)
    return kernel


class Direct:
    """A kernel, and the compiled ones that were launched through it; see the docstring of this module."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._is_hashed = False
        self._made: dict[tuple[Any, ...], CompiledKernel] = {}

    def hashed(self) -> Any:
        """Triton's function, hashed as in any other process."""
        if not self._is_hashed:
            with _hashing:
                _hash(self.kernel)
            self._is_hashed = True
        return self.kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> CompiledKernel | None:
        if self.is_watched():
            return self.hashed()[grid](*args, **kwargs)
        active = driver.active
        device = active.get_current_device()
        bound, specialisation, options = self.kernel.device_caches[device][-1](*args, **kwargs)
        key = (device, *specialisation, *options.items())
        made = self._made.get(key)
        if made is None:
            made = self.hashed()[grid](*args, **kwargs)
            if isinstance(made, CompiledKernel):  # what is still being compiled is not
                self._made[key] = made
            return made
        made.run(
            *grid, *_ONES[len(grid) :], active.get_current_stream(device), made.function,
            made.packed_metadata, None, None, None, *bound.values(),
        )  # fmt: skip
        return made

    def is_watched(self) -> bool:
        """Whether a launch does more, or compiles otherwise, than without hooks and debugging."""
        enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
        return bool(
            getattr(enter, "calls", enter)
            or getattr(leave, "calls", leave)
            or _runtime.debug
            or self.kernel.debug
            or self.kernel.pre_run_hooks
            or getattr(_runtime, "add_stages_inspection_hook", None)
        )


_ONES = (1, 1, 1)
_hashing = threading.Lock()


def _hash(function: JITCallable) -> None:
    """Have Triton hash what a function calls, and then the function.

    Before 3.9, the constants that a called function reads are part of the hash only if that one was hashed
    before, for another kernel perhaps: what was kept on disk was found again or not as threads came along.
    """
    if function.hash is not None:
        return
    names = function.fn.__code__.co_names
    found = [function.__globals__.get(name) for name in names]
    for module in found:
        if isinstance(module, ModuleType) and module.__name__.startswith("octavo."):
            found += [getattr(module, name, None) for name in names]
    for called in found:
        if isinstance(called, JITCallable) and called is not function:
            _hash(called)
    function.cache_key  # noqa: B018 - it is worked out once, and kept


class Prepared:
    """A launch of which nothing but where its tensors begin changes from call to call.

    Args:
        kernel: what `direct` made; any other is launched as ever.
        grid: of the launch.
        arguments: all of the kernel's, options included. The tensors among them say what those will be like
            with which the launch is called, in this order: of the same dtypes, on the same device. They are
            not kept. Everything else is as it is here.

    What the tensors specialise is then a matter of their addresses alone, modulo 16: these are the key, of
    the compiled kernels that `Direct` found. The launcher is given addresses instead of tensors, which spares
    it to ask each for its own, and to look it up in the driver.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
        tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
        first = next(iter(tensors.values()))
        self._kernel = kernel
        self._grid = grid
        self._names = tuple(tensors)
        self._rest = {name: x for name, x in arguments.items() if name not in tensors}
        self._index = first.device.index or 0
        self._is_direct = (
            isinstance(kernel, Direct) and first.device.type != "xpu" and torch.version.hip is None
        )
        self._only = torch.cuda.device_count() < 2
        self._made: dict[tuple[int, ...], tuple[Any, ...]] = {}
        if self._is_direct:
            # As the launcher wants them: in the order of the kernel's parameters, ours being addresses first.
            given = (*tensors, *self._rest)
            parameters = [parameter.name for parameter in kernel.kernel.params]
            self._fixed = tuple(self._rest.values())
            self._in_order = operator.itemgetter(*(given.index(name) for name in parameters))
            self._launched_on = (*grid, *_ONES[len(grid) :])

    def __call__(self, *tensors: Tensor) -> None:
        if not self._is_direct:
            self._launch(tensors)
            return
        addresses = [x.data_ptr() for x in tensors]
        key = tuple([address & 15 for address in addresses])
        made = self._made.get(key)
        active = driver.active
        is_watched = self._kernel.is_watched()
        if made is None or is_watched or not (self._only or self._is_current(active)):
            made_now = self._launch(tensors)
            # While somebody looks on it may be another, such as one with Triton's checks in it.
            if isinstance(made_now, CompiledKernel) and not is_watched:
                self._made[key] = (made_now.run, made_now.function, made_now.packed_metadata)
            return
        run, function, metadata = made
        run(
            *self._launched_on, active.get_current_stream(self._index), function, metadata, None, None, None,
            *self._in_order((*addresses, *self._fixed)),
        )  # fmt: skip

    def _launch(self, tensors: tuple[Tensor, ...]) -> Any:
        with room.on_device_of(tensors[0]):
            given = dict(zip(self._names, tensors, strict=True))
            return self._kernel[self._grid](**given, **self._rest)

    def _is_current(self, active: Any) -> bool:
        return bool(active.get_current_device() == self._index)


@triton.jit
def begin(PDL: tl.constexpr):
    """First of all in a kernel: lets the next kernel get on its way, and waits for those before."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def part(index, stride, ALIGN: tl.constexpr):
    """index * stride, 64-bit, which the compiler is told is a multiple of ALIGN.

    It is told of each part of an address: of their sum it would forget where a part turns out to be 0.
    """
    return tl.multiple_of(index.to(tl.int64) * stride, ALIGN)


@triton.jit
def grid(rows, stride_row, columns, stride_column, ALIGN: tl.constexpr):
    """rows * stride_row + columns * stride_column, (rows, columns, 1)."""
    return part(rows, stride_row, ALIGN)[:, None, None] + part(columns, stride_column, ALIGN)[None, :, None]


def alignment(*tensors: Tensor) -> int:
    """A power of two, at most 16, that divides every stride but the last of all of them, in elements.

    The compiler is told of it; an integer argument tells only whether 16 divides it (120 it does not).
    """
    return math.gcd(16, *(stride for x in tensors for stride in x.stride()[:-1]))


def block_for(size: int) -> int:
    """The smallest power of two that is no smaller; 1 for nothing. (Triton's own takes a microsecond.)"""
    return 1 << max(size - 1, 0).bit_length()


def options(parameters: Parameters, device: torch.device) -> dict[str, int]:
    """Launch parameters, whose PDL is 1 or 0, as a kernel is called with them on that device."""
    if parameters["PDL"] and _launches_dependents(device):
        return {**parameters, "launch_pdl": True}
    return {**parameters, "PDL": 0}


@functools.cache
def _launches_dependents(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and not room.is_interpreted()
        and torch.cuda.get_device_capability(device) >= (9, 0)
    )
