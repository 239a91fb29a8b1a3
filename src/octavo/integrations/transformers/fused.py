"""What `fuse` makes of a module: the same module, of a subclass whose `forward` has Octavo's kernels in it.

A module gets another class, not another attribute: so it is copied, pickled and replicated like any module,
its hooks run, and nothing refers back to it. The subclass has the name of the class it is of.

Every such forward is the module's own one where a kernel would not do: gradients are wanted, it is in
training mode, somebody looks on (`torch.compile`, `torch.func`, a dispatch mode), or tensors came that are
not what the kernel is for.
"""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Module
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from transformers.activations import SiLUActivation

from octavo.integrations.transformers.angles import ASKING, DTYPES, Rotate
from octavo.integrations.transformers.quick import rms_norm, silu_and_mul
from octavo.integrations.transformers.stock import needs_gradients

ROTATE = "apply_rotary_pos_emb"
_SILU = (SiLUActivation, torch.nn.SiLU)
_MLP = ("gate_proj", "up_proj", "down_proj")


def is_fused(module: Module) -> bool:
    """Whether `fuse` was here, and nobody after it."""
    return "octavo_own" in type(module).__dict__


def own_class(module: Module) -> type[Any]:
    """The class that a fused module had before."""
    found: type[Any] = type(module).octavo_own  # type: ignore[attr-defined]
    return found


def is_watched() -> bool:
    """Whether somebody looks on who has to see the module's own operators."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )


def fused_class(own: Any, kind: str) -> Any:
    """The subclass of `own`: of kind `mlp`, `rotary`, or for a norm the name of its epsilon.

    None where the forward of a class cannot be given another rotary function.
    """
    of = own.forward
    theirs = rotary_of(of) if kind == "rotary" else None
    made_of = kind, of, theirs  # somebody may put others there
    for known in own.__subclasses__():
        if known.__dict__.get("octavo_made_of") == made_of:
            return known
    if kind == "rotary":
        forward = None if theirs is None else _attention(of, theirs)
        if forward is None:
            return None
    else:
        forward = _mlp(of) if kind == "mlp" else _norm(of, kind)

    def __reduce_ex__(self: Module, protocol: Any) -> Any:
        return (_remade, (own, kind), *own.__reduce_ex__(self, protocol)[2:])

    body = {
        "forward": functools.wraps(of)(forward), "octavo_own": own, "octavo_kind": kind,
        "octavo_made_of": made_of,
        "__reduce_ex__": __reduce_ex__,
        "__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__,
    }  # fmt: skip
    return type(own.__name__, (own,), body)


def _remade(own: Any, kind: str) -> Any:
    """A fused module of no content: how copies and pickles begin."""
    made = fused_class(own, kind)
    return made.__new__(made)


def _norm(own: Callable[..., Any], epsilon: str) -> Callable[..., Any]:
    def forward(self: Module, *args: Any, **kwargs: Any) -> Any:
        x, weight = args[0] if len(args) == 1 and not kwargs else None, self._parameters.get("weight")
        if (
            type(x) is not Tensor
            or type(weight) is not torch.nn.Parameter
            or x.dtype != weight.dtype
            or x.dtype not in DTYPES
            or x.device != weight.device
            or self.training
            or is_watched()
            or needs_gradients(x, weight)
        ):
            return own(self, *args, **kwargs)
        found = rms_norm(x, weight, getattr(self, epsilon))
        return own(self, x) if found is None else found

    return forward


def _mlp(own: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Module, *args: Any, **kwargs: Any) -> Any:
        x, modules = args[0] if len(args) == 1 and not kwargs else None, self._modules
        if type(x) is not Tensor or self.training or is_watched():  # some drop numbers in training
            return own(self, *args, **kwargs)
        if not _is_unwatched_silu(modules["act_fn"]):
            return own(self, *args, **kwargs)
        if torch.is_grad_enabled() and needs_gradients(x, *self.parameters()):
            return own(self, *args, **kwargs)
        gate_proj, up_proj, down_proj = (modules[name] for name in _MLP)
        gate, up = gate_proj(x), up_proj(x)  # type: ignore[misc]
        if not _are_alike(gate, up) or needs_gradients(gate, up):  # a hook may have put that in
            return down_proj(modules["act_fn"](gate) * up)  # type: ignore[misc]
        width = gate.shape[-1]
        inner = silu_and_mul(gate.view(-1, width), up.view(-1, width))
        return down_proj(inner.view(gate.shape))  # type: ignore[misc]

    return forward


def _are_alike(gate: Any, up: Any) -> bool:
    return (
        type(gate) is type(up) is Tensor
        and gate.shape == up.shape
        and gate.dtype == up.dtype
        and gate.dtype in DTYPES
        and gate.is_contiguous()
        and up.is_contiguous()
    )


def is_silu(activation: Any) -> bool:
    """Whether it is the activation that our kernel has."""
    return type(activation) in _SILU and "forward" not in activation.__dict__


def _is_unwatched_silu(activation: Any) -> bool:
    return is_silu(activation) and not (
        activation._forward_hooks
        or activation._forward_pre_hooks
        or _global_forward_hooks
        or _global_forward_pre_hooks
    )


def _attention(own: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any] | None:
    changed = with_global(own, ROTATE, Rotate(theirs))
    if changed is None:
        return None

    def forward(self: Module, *args: Any, **kwargs: Any) -> Any:
        if self.training or is_watched():
            return own(self, *args, **kwargs)
        ASKING.layer = id(self)
        return changed(self, *args, **kwargs)

    return forward


def rotary_of(forward: Callable[..., Any]) -> Callable[..., Any] | None:
    """The model's function that turns queries and keys, if this forward calls it by its usual name."""
    inner = forward
    while hasattr(inner, "__wrapped__"):
        inner = inner.__wrapped__
    if not isinstance(inner, FunctionType) or ROTATE not in inner.__code__.co_names:
        return None
    found: Callable[..., Any] | None = inner.__globals__.get(ROTATE)
    return found


class _Globals(dict[str, Any]):
    """A function's globals, whatever they are at the time, but for one name."""

    def __init__(self, own: dict[str, Any], name: str, value: Any) -> None:
        super().__init__({"__builtins__": own.get("__builtins__", builtins), name: value})
        self._own = own

    def __missing__(self, name: str) -> Any:
        return self._own[name]


def with_global(function: Any, name: str, value: Any) -> Any:
    """The same function, and the same decorators around it, but with another value for a global name.

    None for a decorator that does not hold what it decorates in a variable of its own.
    """
    if not isinstance(function, FunctionType):
        return None
    inner, closure = getattr(function, "__wrapped__", None), function.__closure__
    variables = function.__globals__
    if inner is None:
        variables = _Globals(variables, name, value)
    else:
        changed = with_global(inner, name, value)
        holds = [cell.cell_contents is inner for cell in closure or ()]
        if changed is None or closure is None or holds.count(True) != 1:
            return None
        closure = tuple(CellType(changed) if h else c for h, c in zip(holds, closure, strict=True))
    made = FunctionType(function.__code__, variables, function.__name__, function.__defaults__, closure)
    made.__dict__.update(function.__dict__)
    made.__kwdefaults__, made.__qualname__ = function.__kwdefaults__, function.__qualname__
    made.__module__ = function.__module__
    if inner is not None:
        made.__wrapped__ = changed  # type: ignore[attr-defined]
    return made
