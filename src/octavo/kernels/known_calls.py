"""Calls whose like was checked before: nothing is checked again, nor worked out again.

The layers of a model, and the steps of a batch, call the same functions with arguments of the same shapes,
strides, dtypes and devices; on a slow host, checking them takes longer than the kernel runs. A function keeps
what it found out of a call under the call's *signature*, and a call of the same signature goes right there::

    call = _known.get((x, weight), eps)
    if call is None:
        ...                                    # the checks
        call = prepared(backend.select(...), x, weight, eps)
        _known.keep(call, (x, weight), eps)
    return call(x, weight, eps)

A signature has everything that a check reads but for the contents of tensors, where they begin, and whether
they require gradients. So on the CPU, where contents are checked, and where gradients are recorded, nothing
is known. What is kept holds no tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

# Calls that one function keeps: kinds of layers, times sizes of steps. The bound on keys is part of a call of
# attention, so live steps without a graph come to more in time; then all is forgotten, and learned again.
_MOST = 1024

_all: list[KnownCalls] = []

num_forgotten = 0
"""How often everything was forgotten. Who keeps a kernel elsewhere keeps it for as long as this stays."""


class KnownCalls:
    """What one function knows of its calls."""

    def __init__(self) -> None:
        self._calls: dict[tuple[Any, ...], Any] = {}
        _all.append(self)

    def get(self, tensors: tuple[Any, ...], *values: Any) -> Any:
        """What was kept for a call of this signature; None when nothing is.

        The first of `tensors` is one, others may be None or numbers; `values` are what never is a tensor.
        """
        if contents_matter(tensors[0]):
            return None
        return self._calls.get(_signature(tensors, values))

    def keep(self, what: Any, tensors: tuple[Any, ...], *values: Any) -> None:
        """`what` for later calls of this signature; unless a value is a tensor after all."""
        if contents_matter(tensors[0]) or any(isinstance(value, Tensor) for value in values):
            return
        if len(self._calls) >= _MOST:
            self._calls.clear()
        self._calls[_signature(tensors, values)] = what

    def forget(self) -> None:
        self._calls.clear()


def contents_matter(x: Tensor) -> bool:
    """Whether checks read more of the arguments than a signature has."""
    return x.is_cpu or torch.is_grad_enabled()


def _signature(tensors: tuple[Any, ...], values: tuple[Any, ...]) -> tuple[Any, ...]:
    # Values with their types, as 1 == True == 1.0 and checks tell them apart.
    layouts = [
        (x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else (type(x), x) for x in tensors
    ]
    return (*layouts, *map(type, values), *values)


def prepared_by(prepare: Callable[..., Callable[..., Any]]) -> Callable[[Kernel], Kernel]:
    """Decorates a kernel: `prepare` makes it for calls of one signature, with most of the work done."""

    def mark(kernel: Kernel) -> Kernel:
        kernel.prepare = prepare  # type: ignore[attr-defined]
        return kernel

    return mark


def prepared(kernel: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[..., Any]:
    """The kernel for calls of this signature; itself, where it has no `prepared_by`."""
    prepare = getattr(kernel, "prepare", None)
    made: Callable[..., Any] = kernel if prepare is None else prepare(*arguments, **options)
    return made


def forget() -> None:
    """Nothing is known any more: after other kernels, or other launch parameters, were chosen."""
    global num_forgotten
    num_forgotten += 1
    for known in _all:
        known.forget()
