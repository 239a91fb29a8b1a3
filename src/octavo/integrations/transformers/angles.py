"""Rotary embedding of queries and keys in one launch, with the angles of a forward made ready once."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo.integrations.transformers.quick import keep
from octavo.integrations.transformers.stock import needs_gradients
from octavo.kernels import backend, known_calls
from octavo.kernels.known_calls import prepared
from octavo.kernels.rotary import check_rotary

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_Seen = tuple[tuple[int, ...], tuple[int, ...]]

# What was worked out for tensors laid out in one way: the steps of a request have the same again and again.
_calls: dict[tuple[Any, ...], _Call | None] = {}
_UNKNOWN: Any = object()

# By the id of the cosines, while they live. An attribute of theirs would travel where they are saved.
_kept: dict[int, Angles] = {}

ASKING = threading.local()
"""`layer`: the id of the module whose queries and keys are turned now."""


class Rotate:
    """Takes the place of a model's `apply_rotary_pos_emb`, which it calls where the kernel does not do."""

    def __init__(self, own: Callable[..., Any]) -> None:
        self.own = own

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        """q (B, H, T, D) and k (B, KVH, T, D) turned by cos and sin (B or 1, T, D), whose halves are equal.

        New tensors, by token in memory, like those of q and k.
        """
        turned = rotated(q, k, cos, sin) if unsqueeze_dim == 1 else None
        if turned is not None:
            return turned
        found: tuple[Tensor, Tensor] = self.own(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return found


class Angles:
    """Cosines and sines as the kernel takes them: made in a forward's first layer, kept for the others."""

    def __init__(self, cos: Tensor, sin: Tensor, state: tuple[Any, ...]) -> None:
        half = cos.shape[-1] // 2
        self.table = torch.cat((cos[..., :half], sin[..., :half]), -1).float().flatten(0, -2)
        self.cos = weakref.ref(cos, functools.partial(_drop, _kept, id(cos)))
        self.sin = sin
        self.state = state
        self.layers: set[int | None] = set()
        self._positions: dict[int, Tensor] = {}

    def positions(self, batch: int) -> Tensor:
        """(B * T,) int64: each token's row in the table."""
        found = self._positions.get(batch)
        if found is None:
            rows = torch.arange(self.table.shape[0], device=self.table.device)
            found = self._positions[batch] = rows.repeat(batch // (len(self.sin) or 1))
        return found


def _drop(kept: dict[int, Angles], key: int, _: object) -> None:
    kept.pop(key, None)


def _angles_of(cos: Tensor, sin: Tensor) -> Angles:
    """Those kept, where they are still right.

    Writing into a tensor changes its version, but that of an inference tensor, and a graph that was captured
    writes without a word. There, a layer that asks again is in another forward, for which they are made anew.
    """
    is_capturing, layer = _is_capturing(cos), getattr(ASKING, "layer", None)
    is_tracked = not (is_capturing or cos.is_inference() or sin.is_inference())
    state = (is_capturing, cos._version, sin._version) if is_tracked else (is_capturing,)
    kept = _kept.get(id(cos))
    if (
        kept is None
        or kept.cos() is not cos
        or kept.sin is not sin
        or kept.state != state
        or (layer in kept.layers and not is_tracked)
    ):
        kept = _kept[id(cos)] = Angles(cos, sin, state)
    kept.layers.add(layer)
    return kept


def _is_capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor] | None:
    """As `Rotate` does; None where the kernel does not do."""
    if not (type(q) is type(k) is type(cos) is type(sin) is Tensor) or needs_gradients(q, k, cos, sin):
        return None
    like = (
        q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device,
        cos.shape, cos.dtype, cos.device, sin.shape, sin.dtype, known_calls.num_forgotten,
    )  # fmt: skip
    call = _calls.get(like, _UNKNOWN)
    if call is _UNKNOWN and not _is_fit(q, k, cos, sin):
        call = keep(_calls, like, None)
    if call is None:
        return None
    angles = _angles_of(cos, sin)
    table, positions = angles.table, angles.positions(q.shape[0])
    if call is _UNKNOWN:
        call = keep(_calls, like, _Call(q, k, table, positions))
    turned: tuple[Tensor, Tensor] = call(q, k, table, positions)
    return turned


def _is_fit(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether that is what the kernel is for: whole heads, by token in memory, of one dtype and device."""
    if not (q.dim() == k.dim() == 4 and cos.dim() == 3 and cos.shape == sin.shape):
        return False
    batch, _, num_tokens, head_dim = q.shape
    return (
        (k.shape[0], *k.shape[2:]) == (batch, num_tokens, head_dim)
        and cos.shape[1:] == (num_tokens, head_dim)
        and cos.shape[0] in (1, batch)
        and head_dim % 2 == 0
        and q.numel() > 0
        and q.dtype == k.dtype == cos.dtype == sin.dtype
        and q.dtype in DTYPES
        and q.device == k.device == cos.device == sin.device
        and _tokens(q) is not None
        and _tokens(k) is not None
    )


def _tokens(x: Tensor) -> _Seen | None:
    """Shape and strides of x (B, H, T, D) as (B * T, H, D); None where its tokens are not evenly apart."""
    batch, heads, num_tokens, head_dim = x.shape
    along, head, token, dim = x.stride()
    if dim != 1 or (batch > 1 and num_tokens > 1 and along != num_tokens * token):
        return None
    return (batch * num_tokens, heads, head_dim), (token if num_tokens > 1 else along, head, 1)


class _Call:
    """The kernel for tensors laid out like these. It keeps none of them."""

    def __init__(self, q: Tensor, k: Tensor, table: Tensor, positions: Tensor) -> None:
        self._q, self._k = (x for x in (_tokens(q), _tokens(k)) if x is not None)
        self._new_q, self._new_k = ((x.shape, _by_token(x)) for x in (q, k))
        self._like: dict[str, Any] = {"dtype": q.dtype, "device": q.device}
        tokens = q.as_strided(*self._q), k.as_strided(*self._k)
        check_rotary("apply_rotary", *tokens, table, positions, False)
        out = tuple(x.new_empty(x.shape) for x in tokens)
        kernel = backend.select("apply_rotary", "cpu" if q.is_cpu else q.device.type, q.dtype)
        self._kernel = prepared(kernel, *tokens, table, positions, False, out)
        # One that was prepared looks at nothing of its tensors but where they begin.
        self._by_address = self._kernel is not kernel

    def __call__(self, q: Tensor, k: Tensor, table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.empty_strided(*self._new_q, **self._like), torch.empty_strided(*self._new_k, **self._like)
        if self._by_address:
            self._kernel(q, k, table, positions, False, out)
        else:
            q, k = q.as_strided(*self._q), k.as_strided(*self._k)
            by_token = out[0].transpose(1, 2).flatten(0, 1), out[1].transpose(1, 2).flatten(0, 1)
            self._kernel(q, k, table, positions, False, by_token)
        return out


def _by_token(x: Tensor) -> tuple[int, int, int, int]:
    """Strides of (B, H, T, D) that lies as (B, T, H, D)."""
    _, heads, num_tokens, head_dim = x.shape
    return num_tokens * heads * head_dim, head_dim, heads * head_dim, 1
