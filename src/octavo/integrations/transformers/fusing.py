"""Octavo's kernels for what stands around attention: norms, gated MLPs and rotary embeddings of a model."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import ConfigError, shown
from octavo.integrations.transformers.angles import DTYPES, rotated
from octavo.integrations.transformers.fused import (
    fused_class,
    is_fused,
    is_silu,
    own_class,
    rotary_of,
)

_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_EPSILONS = ("variance_epsilon", "eps")
_HEAD_DIMS = ("head_dim", "head_size")
# What our kernel may differ by: it rounds once where a model's operators round two or three times.
_ROUNDINGS, _LEAST = 3, 4e-6
_SCALES = (1.0, 30.0, 300.0)  # some clamp what is large

logger = logging.getLogger("octavo")


@dataclass(frozen=True)
class Fused:
    """What `fuse` found in a model.

    norms, mlps, rotary: how many modules run on Octavo's kernels now. left_alone: why others do not, and how
    many of them.
    """

    norms: int = 0
    mlps: int = 0
    rotary: int = 0
    left_alone: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"{self.norms} norms, {self.mlps} gated MLPs, {self.rotary} rotary embeddings"]
        parts += [f"left alone: {count} {reason}" for reason, count in self.left_alone.items()]
        return "; ".join(parts)


def fuse(model: nn.Module) -> Fused:
    """Let Octavo's kernels do the norms, the gated MLPs' activation and the rotary embeddings of `model`.

    Works with every attention implementation, on a CPU and on a GPU. Each kind of module is first tried with
    random numbers, beside its own forward; what differs by more than rounding is left alone, as are modules
    whose forward somebody else has replaced. Weights are neither copied nor changed. Where gradients are
    wanted, in training mode, under `torch.compile`, `torch.func` and dispatch modes, modules run their own
    forward.

    What comes later is not tried: a rotary embedding whose angles have unequal halves, another forward of a
    class. Call `unfuse`, and `fuse` again.

    The modules change in place, and only in their class; `unfuse` undoes it. On a model that is fused already
    nothing changes.

    Returns:
        What was replaced, and what was left alone and why. It is logged, too, at level info.

    Raises:
        ConfigError: `model` is no `torch.nn.Module`.
    """
    _check("fuse", model)
    counts: Counter[str] = Counter()
    left_alone: Counter[str] = Counter()
    known: dict[Any, str | None] = {}
    for module in list(model.modules()):
        if is_fused(module):
            counts[_what(type(module).octavo_kind)] += 1  # type: ignore[attr-defined]
            continue
        kind = _kind(module)
        if kind is None:
            continue
        weight = next(module.parameters(), None)
        if "forward" in module.__dict__ or hasattr(type(module), "octavo_own"):
            reason: str | None = "has a forward of somebody else's"
        elif weight is None or weight.device.type == "meta" or weight.dtype not in DTYPES:
            reason = "has no weights here in float32, float16 or bfloat16"
        else:
            reason = _tried(known, model, module, kind, weight)
        if reason is None:
            own: Any = type(module)
            module.__class__ = fused_class(own, kind)
            counts[_what(kind)] += 1
        else:
            left_alone[f"{type(module).__name__} {reason}"] += 1
    found = Fused(counts["norms"], counts["mlps"], counts["rotary"], dict(left_alone))
    logger.info("octavo: %s fused: %s", type(model).__name__, found)
    return found


def unfuse(model: nn.Module) -> None:
    """Give every module that `fuse` has changed its own class back.

    Raises:
        ConfigError: `model` is no `torch.nn.Module`.
    """
    _check("unfuse", model)
    for module in model.modules():
        if is_fused(module):
            module.__class__ = own_class(module)


def _check(function: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{function}: model must be a torch.nn.Module, got {shown(model)}")


def _what(kind: str) -> str:
    return {"mlp": "mlps", "rotary": "rotary"}.get(kind, "norms")


def _kind(module: nn.Module) -> str | None:
    """What a module looks like: `mlp`, `rotary`, or for a norm the name of its epsilon."""
    children, parameters = set(module._modules), module._parameters
    if children == _MLP:
        return "mlp" if is_silu(module.act_fn) else None
    if children:
        return "rotary" if rotary_of(type(module).forward) is not None else None
    weight = parameters.get("weight")
    if (
        weight is None
        or weight.dim() != 1
        or any(x is not None for x in parameters.values() if x is not weight)
    ):
        return None
    return next((name for name in _EPSILONS if isinstance(getattr(module, name, None), float)), None)


def _tried(
    known: dict[Any, str | None], model: nn.Module, module: nn.Module, kind: str, weight: Tensor
) -> str | None:
    """Why our forward does not do for a module; None when it does. One of each sort is tried."""
    if kind == "rotary" and getattr(getattr(module, "config", None), "rope_interleave", False):
        return "turns pairs that are neighbours"  # by another function
    says = [(name, x) for name, x in vars(module).items() if isinstance(x, bool | int | float | str)]
    activation = type(getattr(module, "act_fn", None))
    sort = (type(module), kind, activation, weight.dtype, weight.device, weight.shape, *says)
    if sort not in known:
        known[sort] = _try(model, module, kind, weight)
    return known[sort]


def _try(model: nn.Module, module: nn.Module, kind: str, weight: Tensor) -> str | None:
    if fused_class(type(module), kind) is None:
        return "has a forward that cannot be given another rotary function"
    for dtype in dict.fromkeys((weight.dtype, torch.float32)):  # half precision hides an error of 1 %
        draw = _Draw(dtype, weight.device)
        angles = _angles(model, draw) if kind == "rotary" else ()
        if isinstance(angles, str):
            return angles
        try:
            with torch.no_grad():
                pairs = list(_turned(module, angles, draw) if kind == "rotary" else _run(module, kind, draw))
        except Exception as error:  # a module that is something else than it looks like
            if dtype is not weight.dtype:
                continue
            return f"does not run like one: {type(error).__name__}: {error}".splitlines()[0]
        if not all(_is_close(*pair) for pair in pairs):
            return "computes something else"
    return None


class _Draw:
    """Numbers from -1 to 1, the same in every call of `fuse`, without a word to torch's generators."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._generator = torch.Generator("cpu").manual_seed(0)
        self.dtype, self.device = dtype, device

    def __call__(self, *shape: int) -> Tensor:
        drawn = torch.rand(shape, generator=self._generator, device="cpu")
        return (2 * drawn - 1).to(self.device, self.dtype)


def _run(module: nn.Module, kind: str, draw: _Draw) -> Iterator[tuple[Any, Any]]:
    """What our forward and its own make of a norm or MLP like it."""
    own: Any = type(module)
    probe, x = (_mlp if kind == "mlp" else _norm)(module, draw)
    probe.training = False
    yield fused_class(own, kind).forward(probe, x), own.forward(probe, x)


def _norm(module: nn.Module, draw: _Draw) -> tuple[nn.Module, Tensor]:
    """One like it with random weights, and rows: some where epsilon counts, some where few numbers do."""
    probe, weight = _shallow(module), 30 * draw(*next(module.parameters()).shape)
    probe._parameters["weight"] = nn.Parameter(weight)
    rows = [scale * draw(3, len(weight)) for scale in (1e-3, *_SCALES)]
    return probe, torch.stack([*rows, 300 * draw(3, len(weight)) ** 9])


def _mlp(module: nn.Module, draw: _Draw) -> tuple[nn.Module, Tensor]:
    """One like it with small layers in the place of its own, and none behind: a product may round more."""
    probe = _shallow(module)
    for name in ("gate_proj", "up_proj"):
        layer = nn.Linear(16, 48, device="meta")
        layer.weight, layer.bias = nn.Parameter(draw(48, 16)), nn.Parameter(draw(48))
        probe._modules[name] = layer
    probe._modules["down_proj"] = nn.Identity()
    probe._modules["act_fn"] = _shallow(module.get_submodule("act_fn"))
    scales = _SCALES[:2] if draw.dtype == torch.float16 else _SCALES  # without what it cannot hold
    return probe, torch.stack([scale * draw(3, 16) for scale in scales])


def _shallow(module: nn.Module) -> nn.Module:
    """The same module without its hooks, and with dictionaries of its own."""
    probe = type(module).__new__(type(module))
    nn.Module.__init__(probe)
    hooks = {name for name in probe.__dict__ if "hook" in name}
    probe.__dict__.update({name: x for name, x in module.__dict__.items() if name not in hooks})
    for name in ("_parameters", "_buffers", "_modules"):
        probe.__dict__[name] = dict(module.__dict__[name])
    return probe


def _turned(
    module: nn.Module, angles: Sequence[tuple[Tensor, Tensor]], draw: _Draw
) -> Iterator[tuple[Any, Any]]:
    theirs: Any = rotary_of(type(module).forward)
    known = [getattr(module, name) for name in _HEAD_DIMS if hasattr(module, name)]

    def heads(head_dim: int) -> tuple[Tensor, Tensor]:
        return draw(2, 5, 4, head_dim).transpose(1, 2), draw(2, 5, 2, head_dim).transpose(1, 2)

    for cos, sin in angles:
        q, k = heads(*(known or [cos.shape[-1]])[:1])
        try:
            want = theirs(q, k, cos, sin)
        except RuntimeError:  # it gets the part of a head that is turned
            q, k = heads(cos.shape[-1])
            want = theirs(q, k, cos, sin)
        ours = rotated(q, k, cos, sin)
        if ours is None:
            raise ValueError(f"heads of {q.shape[-1]}, {cos.shape[-1]} angles of {cos.dtype}")
        yield from zip(ours, want, strict=True)


def _angles(model: nn.Module, draw: _Draw) -> list[tuple[Tensor, Tensor]] | str:
    """Cosines and sines (1, 5, D), like what is drawn, of every kind that the model has; or why not."""
    found = []
    for rotary in model.modules():
        if not any(name.endswith("inv_freq") for name in rotary._buffers):
            continue
        own: Any = copy.deepcopy(rotary)  # some remember the longest position
        x = torch.zeros((1, 5, 8), dtype=draw.dtype, device=draw.device)
        positions = torch.tensor([[0, 1, 2, 7, 100]], device=draw.device)
        kinds = {name.removesuffix("inv_freq").strip("_") for name in own._buffers if "original" not in name}
        try:
            with torch.no_grad():
                for kind in sorted(kinds):
                    cos, sin = own.forward(x, positions, kind) if kind else own.forward(x, positions)
                    halves = [y.chunk(2, dim=-1) for y in (cos, sin)]
                    if cos.dim() != 3 or not all(torch.equal(*pair) for pair in halves):
                        return "has angles of another form"
                    found.append((cos, sin))
        except Exception as error:
            return f"has angles of another form: {type(error).__name__}: {error}".splitlines()[0]
    return found or "has angles from elsewhere"


def _is_close(ours: Any, theirs: Any) -> bool:
    """Whether they are the same but for rounding."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    least = max(_ROUNDINGS * torch.finfo(theirs.dtype).eps, _LEAST)
    ours, theirs = ours.double(), theirs.double()
    allowed = least * (theirs.abs() + theirs.square().mean(-1, keepdim=True).sqrt())
    return bool(((ours - theirs).abs() <= allowed).all())
