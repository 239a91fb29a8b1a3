"""Other libraries on the inputs of a row, where they are installed.

An adapter takes the inputs and returns one call per set of them; every call writes `inputs.out`, or returns
the result in its shape. Raising `NotForThis` leaves the row's cell empty. Each adapter is written against the
interface of the version named beside it.
"""

from __future__ import annotations

import fnmatch
import functools
import importlib
import importlib.metadata
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from octavo.bench.attention_work import AttentionInputs
from octavo.bench.kernel_work import WriteInputs

Call = Callable[[], Any]


class NotForThis(Exception):
    """The library cannot run this row."""


@dataclass(frozen=True)
class Peer:
    """`families`: the rows it may run; `module`: what must import; `package`: where its version is found.

    `rows`: patterns of the names that it does run. All of them would make a run last twice as long, and a
    dense library does the same whatever the block size.
    """

    name: str
    module: str
    package: str
    families: tuple[str, ...]
    calls: Callable[[Any], list[Call]]
    rows: tuple[str, ...] = ("*",)

    def runs(self, row: str) -> bool:
        """Whether it is to run that row."""
        return row.split("/")[0] in self.families and any(fnmatch.fnmatch(row, one) for one in self.rows)

    def missing(self) -> str:
        """Why it cannot run here; empty when it can."""
        try:
            importlib.import_module(self.module)
        except Exception as error:  # a package that does not load is as good as none, whatever it raises
            return f"{type(error).__name__}: {error}".splitlines()[0]
        return ""

    def version(self) -> str:
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return "unknown"


def _bf16(inputs: AttentionInputs) -> None:
    if inputs.shape.cache != "bf16" or inputs.shape.batch_invariant:
        raise NotForThis


def _scale(inputs: AttentionInputs) -> float:
    return float(inputs.shape.heads[2] ** -0.5)


def _fa3_vllm(inputs: AttentionInputs) -> list[Call]:
    """FlashAttention 3 as vLLM 0.26 bundles it, its schedule computed beforehand for short queries."""
    from vllm.vllm_flash_attn.flash_attn_interface import (  # type: ignore[import-not-found]
        flash_attn_varlen_func,
        get_scheduler_metadata,
    )

    _bf16(inputs)
    shape = inputs.shape
    heads, kv_heads, head_dim = shape.heads
    common: dict[str, Any] = {
        "cu_seqlens_q": inputs.cu_seqlens_q,
        "max_seqlen_q": shape.q_len,
        "max_seqlen_k": inputs.max_seqlen_k,
        "softmax_scale": _scale(inputs),
        "causal": True,
        "fa_version": 3,
        "out": inputs.out,
    }
    if inputs.tables is None:
        common["cu_seqlens_k"] = inputs.cu_seqlens_k
        return [
            functools.partial(flash_attn_varlen_func, q=inputs.q[r], k=inputs.k[r], v=inputs.v[r], **common)
            for r in range(inputs.sets)
        ]
    common |= {"k": inputs.k, "v": inputs.v, "seqused_k": inputs.lens_k}
    if shape.q_len <= 8:
        common["num_splits"] = 32
        common["scheduler_metadata"] = get_scheduler_metadata(
            batch_size=shape.batch, max_seqlen_q=shape.q_len, max_seqlen_k=inputs.max_seqlen_k,
            num_heads_q=heads, num_heads_kv=kv_heads, headdim=head_dim, cache_seqlens=inputs.lens_k,
            qkv_dtype=inputs.q.dtype, cu_seqlens_q=inputs.cu_seqlens_q, page_size=shape.block_size,
            causal=True, window_size=(-1, -1), num_splits=32,
        )  # fmt: skip
    return [
        functools.partial(flash_attn_varlen_func, q=inputs.q[r], block_table=inputs.tables[r], **common)
        for r in range(inputs.sets)
    ]


def _fa3(inputs: AttentionInputs) -> list[Call]:
    """FlashAttention 3 of its own package (flash_attn_interface)."""
    from flash_attn_interface import (  # type: ignore[import-not-found]
        flash_attn_varlen_func,
        flash_attn_with_kvcache,
    )

    _bf16(inputs)
    shape = inputs.shape
    if inputs.tables is None:
        return [
            functools.partial(
                flash_attn_varlen_func, inputs.q[r], inputs.k[r], inputs.v[r], inputs.cu_seqlens_q,
                inputs.cu_seqlens_k, shape.q_len, inputs.max_seqlen_k, causal=True,
            )
            for r in range(inputs.sets)
        ]  # fmt: skip
    return [
        functools.partial(
            flash_attn_with_kvcache, inputs.q[r], inputs.k, inputs.v, cache_seqlens=inputs.lens_k,
            page_table=inputs.tables[r], cu_seqlens_q=inputs.cu_seqlens_q, max_seqlen_q=shape.q_len,
            causal=True,
        )
        for r in range(inputs.sets)
    ]  # fmt: skip


def _fa2(inputs: AttentionInputs) -> list[Call]:
    """FlashAttention 2 (flash_attn 2.8): packed keys, or a cache whose block size is a multiple of 256."""
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

    _bf16(inputs)
    if inputs.shape.block_size % 256:
        raise NotForThis
    packed = inputs.tables is None
    return [
        functools.partial(
            flash_attn_varlen_func, inputs.q[r], inputs.k[r] if packed else inputs.k,
            inputs.v[r] if packed else inputs.v, inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.shape.q_len,
            inputs.max_seqlen_k, causal=True, block_table=None if inputs.tables is None else inputs.tables[r],
        )
        for r in range(inputs.sets)
    ]  # fmt: skip


def _vllm_triton(inputs: AttentionInputs) -> list[Call]:
    """`unified_attention` of vLLM 0.26, with the split of its own backend."""
    from vllm.v1.attention.ops.triton_unified_attention import (  # type: ignore[import-not-found]
        unified_attention,
    )

    _bf16(inputs)
    if inputs.tables is None:
        raise NotForThis
    shape = inputs.shape
    heads, kv_heads, head_dim = shape.heads
    threshold, segments = max(1, 128 // kv_heads), 16
    device = inputs.q.device
    partial = torch.empty(
        threshold, heads, segments, _power_of_two(head_dim), dtype=torch.float32, device=device
    )
    maxima = torch.empty(threshold, heads, segments, dtype=torch.float32, device=device)
    descale = torch.ones(1, device=device).expand(shape.batch, kv_heads)
    return [
        functools.partial(
            unified_attention, q=inputs.q[r], k=inputs.k, v=inputs.v, out=inputs.out,
            cu_seqlens_q=inputs.cu_seqlens_q, max_seqlen_q=shape.q_len, seqused_k=inputs.lens_k,
            max_seqlen_k=inputs.max_seqlen_k, softmax_scale=_scale(inputs), causal=True, window_size=(-1, -1),
            block_table=inputs.tables[r], softcap=0, q_descale=None, k_descale=descale, v_descale=descale,
            seq_threshold_3D=threshold,
            num_par_softmax_segments=segments, softmax_segm_output=partial, softmax_segm_max=maxima,
            softmax_segm_expsum=torch.empty_like(maxima),
        )
        for r in range(inputs.sets)
    ]  # fmt: skip


def _flashinfer(inputs: AttentionInputs) -> list[Call]:
    """FlashInfer 0.6: its decode wrapper with tensor cores for one query, its prefill wrapper for more."""
    import flashinfer  # type: ignore[import-not-found]

    _bf16(inputs)
    if inputs.tables is None:
        raise NotForThis
    shape = inputs.shape
    heads, kv_heads, head_dim = shape.heads
    device = inputs.q.device
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    blocks = [math.ceil(length / shape.block_size) for length in shape.lens_k]
    starts = torch.tensor([0, *blocks], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    last = torch.tensor([(length - 1) % shape.block_size + 1 for length in shape.lens_k], dtype=torch.int32)
    used = torch.arange(inputs.tables.shape[2], device=device) < torch.tensor(blocks, device=device)[:, None]
    indices = [table[used].contiguous() for table in inputs.tables]
    dtypes = {"q_data_type": inputs.q.dtype, "kv_data_type": inputs.k.dtype}
    if shape.q_len == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(starts, indices[0].clone(), last, heads, kv_heads, head_dim, shape.block_size, **dtypes)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="auto")
        wrapper.plan(
            inputs.cu_seqlens_q, starts.to(device), indices[0].clone(), last.to(device), heads, kv_heads,
            head_dim, shape.block_size, causal=True, **dtypes,
        )  # fmt: skip

    def call(r: int) -> None:
        # The plan depends on the lengths alone, which all sets share; the blocks differ.
        wrapper._paged_kv_indices_buf = indices[r]
        wrapper.run(inputs.q[r], (inputs.k, inputs.v), out=inputs.out)

    return [functools.partial(call, r) for r in range(inputs.sets)]


def dense(inputs: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
    """(sets, B, heads, S, D) of the same sizes, without blocks, for libraries without a paged cache."""
    _bf16(inputs)
    shape = inputs.shape
    heads, kv_heads, head_dim = shape.heads
    if len(set(shape.lens_k)) > 1:
        raise NotForThis
    keys = (inputs.sets, shape.batch, kv_heads, shape.lens_k[0], head_dim)
    count = math.prod(keys)
    k, v = (x.reshape(-1)[:count].view(keys) for x in (inputs.k, inputs.v))
    return inputs.q.view(inputs.sets, shape.batch, heads, shape.q_len, head_dim), k, v


def _sdpa(inputs: AttentionInputs, backend: str) -> list[Call]:
    """torch's scaled_dot_product_attention, one of its backends."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    chosen = getattr(SDPBackend, backend)  # an enumeration of torch's own, which has no look-up by name
    q, k, v = dense(inputs)
    q_len, length = inputs.shape.q_len, inputs.shape.lens_k[0]
    mask: dict[str, Any] = {}
    if q_len > 1:
        mask = {"is_causal": True} if q_len == length else {"attn_mask": causal_lower_right(q_len, length)}

    def call(r: int) -> Tensor:
        with sdpa_kernel([chosen]):
            return functional.scaled_dot_product_attention(q[r], k[r], v[r], enable_gqa=True, **mask)

    return [functools.partial(call, r) for r in range(inputs.sets)]


@functools.cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _flex(inputs: AttentionInputs) -> list[Call]:
    """torch's FlexAttention, compiled, which takes seconds for each shape."""
    from torch.nn.attention.flex_attention import create_block_mask

    shape = inputs.shape
    q, k, v = dense(inputs)
    options: dict[str, Any] = {"enable_gqa": True}
    if shape.q_len > 1:
        options["block_mask"] = create_block_mask(
            lambda b, h, i, j: i >= j, None, None, shape.q_len, shape.lens_k[0], device=str(q.device)
        )

    def call(r: int) -> Tensor:
        with torch.no_grad():
            result: Tensor = _compiled_flex()(q[r], k[r], v[r], **options)
            return result

    return [functools.partial(call, r) for r in range(inputs.sets)]


def _vllm_write(inputs: WriteInputs) -> list[Call]:
    """vLLM 0.26's CUDA kernel."""
    from vllm import _custom_ops  # type: ignore[import-not-found]

    return _write_calls(inputs, _custom_ops.reshape_and_cache_flash)


def _vllm_triton_write(inputs: WriteInputs) -> list[Call]:
    """vLLM 0.26's Triton kernel."""
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import (  # type: ignore[import-not-found]
        triton_reshape_and_cache_flash,
    )

    return _write_calls(inputs, triton_reshape_and_cache_flash)


def _write_calls(inputs: WriteInputs, write: Callable[..., Any]) -> list[Call]:
    if inputs.k_cache.dtype != torch.bfloat16:
        raise NotForThis
    one = torch.ones(1, device=inputs.k_cache.device)

    def call(r: int) -> None:
        _, k, v = inputs.split(r)
        write(k, v, inputs.k_cache, inputs.v_cache, inputs.slots[r], "auto", one, one)

    return [functools.partial(call, r) for r in range(len(inputs.slots))]


def _torch_sample(inputs: dict[str, Any]) -> list[Call]:
    """Plain torch, as engines without a kernel do it: sort, cut, draw by exponential noise."""
    logits: Tensor = inputs["logits"]
    how = inputs["how"]

    def call(r: int) -> Tensor:
        if how == "greedy":
            return logits[r].argmax(-1)
        scores = logits[r] / 0.8
        if how == "temperature":
            probabilities = scores.softmax(-1)
            return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1)
        ordered, order = scores.sort(dim=-1, descending=True)
        ordered[:, 50:] = -math.inf
        probabilities = ordered.softmax(-1)
        probabilities = probabilities.masked_fill(probabilities.cumsum(-1) - probabilities > 0.9, 0.0)
        drawn = (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1, keepdim=True)
        return order.gather(1, drawn)

    return [functools.partial(call, r) for r in range(len(logits))]


def _flashinfer_sample(inputs: dict[str, Any]) -> list[Call]:
    """FlashInfer 0.6."""
    import flashinfer

    if inputs["how"] != "top_k+top_p":
        raise NotForThis
    logits = inputs["logits"]
    return [
        functools.partial(flashinfer.sampling.top_k_top_p_sampling_from_logits, scores, 50, 0.9)
        for scores in logits
    ]


def _torch_norm(inputs: dict[str, Any]) -> list[Call]:
    if inputs["residual"] is not None:
        raise NotForThis
    x, weight = inputs["x"], inputs["weight"]
    return [functools.partial(functional.rms_norm, one, (one.shape[-1],), weight, 1e-6) for one in x]


_ATTENTION = ("decode", "prefill")
_BLOCKS_OF_16 = ("*/16/bf16",)
_SOME = (
    "decode/1x8192/16-8-128/16/bf16",
    "decode/32x8192/16-8-128/16/bf16",
    "decode/256x1024/16-8-128/16/bf16",
    "decode/256xragged2048/16-8-128/16/bf16",
    "prefill/1x8192/32-8-128/16/bf16",
    "prefill/16x1024/32-8-128/16/bf16",
)
_FEW = ("decode/32x8192/16-8-128/16/bf16", "prefill/1x8192/32-8-128/16/bf16")
_VLLM_FA = "vllm.vllm_flash_attn.flash_attn_interface"
_VLLM_TRITON = "vllm.v1.attention.ops.triton_unified_attention"
PEERS: Sequence[Peer] = (
    Peer("fa3", "flash_attn_interface", "flash-attn-3", _ATTENTION, _fa3),
    Peer("fa3", _VLLM_FA, "vllm", _ATTENTION, _fa3_vllm),
    Peer("fa2", "flash_attn", "flash-attn", _ATTENTION, _fa2),
    Peer("vllm_triton", _VLLM_TRITON, "vllm", _ATTENTION, _vllm_triton, _SOME),
    Peer("flashinfer", "flashinfer", "flashinfer-python", _ATTENTION, _flashinfer),
    Peer(
        "cudnn",
        "torch",
        "torch",
        _ATTENTION,
        functools.partial(_sdpa, backend="CUDNN_ATTENTION"),
        _BLOCKS_OF_16,
    ),
    Peer(
        "sdpa",
        "torch",
        "torch",
        _ATTENTION,
        functools.partial(_sdpa, backend="FLASH_ATTENTION"),
        _BLOCKS_OF_16,
    ),
    Peer("flex", "torch", "torch", _ATTENTION, _flex, _FEW),
    Peer("vllm", "vllm._custom_ops", "vllm", ("kv_write",), _vllm_write),
    Peer("vllm_triton", _VLLM_TRITON, "vllm", ("kv_write",), _vllm_triton_write),
    Peer("flashinfer", "flashinfer", "flashinfer-python", ("sample",), _flashinfer_sample),
    Peer("torch", "torch", "torch", ("sample",), _torch_sample),
    Peer("torch", "torch", "torch", ("rms_norm",), _torch_norm),
)
DENSE = frozenset({"cudnn", "sdpa", "flex"})  # read the same bytes in another order: their result is another


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def usable(names: Sequence[str] | None) -> tuple[list[Peer], dict[str, str]]:
    """The peers that are installed (of those named; None = any), and why the others are not used.

    Where two packages carry the same library, the first that is installed stands for it.
    """
    found: list[Peer] = []
    missing: dict[str, str] = {}
    for peer in PEERS:
        if names is not None and peer.name not in names:
            continue
        if any(other.name == peer.name and set(other.families) & set(peer.families) for other in found):
            continue
        reason = peer.missing()
        if reason:
            missing.setdefault(peer.name, reason)
        else:
            found.append(peer)
    return found, {name: why for name, why in missing.items() if all(p.name != name for p in found)}
