"""What stands between the qkv projection and attention: norm of each head, rotary embedding, cache write."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from octavo.kernels import backend, checks
from octavo.kernels.argument_types import names_wrong_types
from octavo.kernels.known_calls import KnownCalls, prepared
from octavo.kernels.kv_write import check_write
from octavo.kernels.rotary import check_rotary

_known = KnownCalls()


@names_wrong_types
def rotate_and_write_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    interleaved: bool = False,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
) -> Tensor:
    """`rms_norm` of each head of q and k, `apply_rotary` to both, `write_kv_cache` of k and v: in one call.

    On a GPU that is one launch, which reads q, k and v once and rounds only what it writes; elsewhere it is
    the three calls, to the bit.

    Args:
        q: (T, num_heads, head_dim); k, v: (T, num_kv_heads, head_dim), of the dtype of q; any strides with a
            contiguous last dimension (slices of a fused qkv are fine). None of them is changed.
        cos_sin_cache, positions, interleaved: as in `apply_rotary`.
        k_cache, v_cache, slot_mapping, k_scale, v_scale: as in `write_kv_cache`. The caches, and scales per
            token and head, are written in place.
        q_weight, k_weight: (head_dim,), any float dtype: the weights of the norms. Both None = no norm.
        eps: added to the mean square in the norms.

    Returns:
        The turned q: (T, num_heads, head_dim), a new contiguous tensor of the dtype of q. Rows of tokens that
        are not written (a negative slot) are filled all the same.

    Raises:
        KernelArgumentError: a type, shape, dtype, device, stride or scale is wrong, or (on the CPU) a
            position has no row or a slot lies past the cache. On a GPU such a position makes NaN, and such a
            slot is not written.
        UnsupportedKernelConfig: a cache of another quantised dtype, an input that requires gradients.
        In both cases the caches are untouched.
    """
    name = "rotate_and_write_kv_cache"
    tensors = (q, k, v, cos_sin_cache, positions, k_cache, v_cache, slot_mapping)
    optional = (q_weight, k_weight, k_scale, v_scale)
    call = _known.get((*tensors, *optional), eps, interleaved)
    if call is None:
        call = _checked(name, *tensors, *optional, eps, interleaved)
        _known.keep(call, (*tensors, *optional), eps, interleaved)
    else:
        checks.two_caches(name, k_cache, v_cache, k_scale, v_scale)
    turned: Tensor = call(
        q,
        k,
        v,
        cos_sin_cache,
        positions,
        k_cache,
        v_cache,
        slot_mapping.long(),
        q_weight=q_weight,
        k_weight=k_weight,
        eps=eps,
        interleaved=interleaved,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    return turned


def _checked(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    k_scale: Tensor | float | None,
    v_scale: Tensor | float | None,
    eps: float,
    interleaved: bool,
) -> Callable[..., Tensor]:
    """The kernel for such a call, if it is a right one."""
    device = q.device
    check_rotary(name, q, k, cos_sin_cache, positions, interleaved)
    check_write(name, k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    head_dim = q.shape[2]
    if (q_weight is None) != (k_weight is None):
        given = "q_weight" if k_weight is None else "k_weight"
        raise checks.wrong(name, "q_weight and k_weight", "both given or both None", f"only {given}")
    if q_weight is not None and k_weight is not None:
        if not 0.0 <= eps <= checks.FLOAT32_MAX:
            raise checks.wrong(name, "eps", "0 or positive", eps)
        for argument, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
            checks.tensor(name, argument, weight, "head_dim", device)
            if weight.shape[0] != head_dim:
                expected = f"of shape ({head_dim},) like a head of q"
                raise checks.wrong(name, argument, expected, f"shape {tuple(weight.shape)}")
        if k_weight.dtype != q_weight.dtype:
            raise checks.wrong(name, "k_weight.dtype", f"{q_weight.dtype} like q_weight", k_weight.dtype)
    device_type = "cpu" if q.is_cpu else device.type
    return prepared(
        backend.select(name, device_type, q.dtype, k_cache.dtype, head_dim),
        q,
        k,
        v,
        cos_sin_cache,
        positions,
        k_cache,
        v_cache,
        slot_mapping.long(),
        q_weight=q_weight,
        k_weight=k_weight,
        eps=eps,
        interleaved=interleaved,
        k_scale=k_scale,
        v_scale=v_scale,
    )
