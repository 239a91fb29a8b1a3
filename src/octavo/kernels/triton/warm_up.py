"""Has Triton compile, before the first request, what an engine will launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from octavo.errors import shown
from octavo.kernels import checks
from octavo.kernels.triton import (
    SHORT,
    compile_ahead,
    hashing_of_triton,
    is_interpreted,
    unfit_reason,
    warm_up_products,
    warm_up_shared,
)
from octavo.kernels.triton.monitor import watch

if TYPE_CHECKING:
    from octavo.kernels.triton.monitor import Made

Job = Callable[[], object]

_SHORT_LENGTHS = (1, 2, 4, SHORT)  # decode is compiled for the powers of two of its rows
_THREADS = 12  # compile at once; the compiler lets go of Python's lock for most of its work


def warm_up(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    block_size: int,
    device: torch.device | str,
    *,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 16384,
    max_model_len: int = 40960,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    qk_norm: bool = False,
    window_sizes: Sequence[tuple[int, int]] = ((-1, -1),),
    softcap: float = 0.0,
    sinks: bool = False,
    alibi: bool = False,
    scales: str = "none",
    batch_invariant: bool = False,
    hidden_size: int | None = None,
    intermediate_size: int | None = None,
    vocab_size: int | None = None,
    logits_dtype: torch.dtype = torch.float32,
    logprobs: bool = True,
    shared_prefixes: bool = False,
    qkv_bias: bool = False,
) -> list[Made]:
    """Launch every kernel that a model of these dimensions uses, in all its variants, on tensors of its own.

    Afterwards no call compiles anything, whatever its number of tokens, batch size or lengths up to the
    bounds given here. What is compiled stays on disk (TRITON_CACHE_DIR), so the next start takes a second or
    two. Allocates about as much as a step of `max_num_batched_tokens` tokens does, and frees it.

    Args:
        num_heads, num_kv_heads, head_dim: of the attention layers (per device).
        dtype: of activations. cache_dtype: of the KV cache. block_size: of the KV cache.
        device: where. On a device that has no compiled kernels (the CPU) nothing happens.
        max_num_seqs, max_num_batched_tokens, max_model_len: the largest batch, step and length.
        rotary_dim: channels that RoPE turns; None = all of head_dim, 0 = no RoPE.
        interleaved: as in `apply_rotary`.      qk_norm: heads of q and k are normalised first.
        window_sizes: one entry for each kind of layer.      softcap: 0 = none.
        sinks, alibi: whether the layers have them.
        scales: of a quantised cache: "none", "tensor" (one float each for K and V) or "token" (per token and
            head).
        batch_invariant: as in `flash_attn_varlen_func`.
        hidden_size: for rms_norm and the layers' products; only that of q, k and v may have a bias.
        intermediate_size: for silu_and_mul and the products of the MLP.
        vocab_size, logits_dtype: for sample, with all of top_k, top_p and min_p and with none (a subset is a
            kernel of its own), and without log probabilities in float32, too. None leaves that kernel out, as
            with the two sizes above.
        logprobs: whether sample is asked for log probabilities, too.
        shared_prefixes: decode steps read common keys once, in layers without a window.
        qkv_bias: whether the products for q, k and v have a bias.

    Returns:
        What had to be compiled or loaded from disk, for the log.

    Raises:
        KernelArgumentError: there is no such device here.
        UnsupportedKernelConfig, KernelArgumentError: the kernels cannot do this; as a first step would.
    """
    device = _there_is(device)
    if device.type not in ("cuda", "xpu") or unfit_reason(device.type) is not None or is_interpreted():
        return []
    device = torch.empty(0, device=device).device  # with its index
    model = ModelShape(
        num_heads, num_kv_heads, head_dim, dtype, cache_dtype, block_size, device,
        max_num_seqs, max_num_batched_tokens, max_model_len,
        head_dim if rotary_dim is None else rotary_dim, interleaved, qk_norm, tuple(window_sizes), softcap,
        sinks, alibi, scales, batch_invariant, hidden_size, intermediate_size, vocab_size, logits_dtype,
        logprobs, shared_prefixes, qkv_bias,
    )  # fmt: skip
    hashing_of_triton().join()  # each thread would do it anew
    first_start: AbstractContextManager[compile_ahead.Workers | None] = nullcontext()
    if device.type == "cuda":
        # GPUs of several kinds may have one cache on disk.
        first_start = compile_ahead.first_start((model, torch.cuda.get_device_name(device)))
    with watch() as made, torch.inference_mode(), first_start as workers:
        elsewhere = set() if workers is None else _compile_ahead(model, workers)
        for jobs in _rounds(model):
            _run_all(jobs, device)
        torch.accelerator.synchronize(device)
    return [replace(one, from_disk=False) if (one.kernel, one.key) in elsewhere else one for one in made]


def _compile_ahead(model: ModelShape, workers: compile_ahead.Workers) -> set[tuple[str, str]]:
    """Compile what the jobs launch, and launch none of it: kernel and key of what the workers made."""
    found: dict[str, compile_ahead.Wanted] = {}
    with compile_ahead.installed():
        for jobs in _rounds(model):
            _run_all(jobs, model.device, lambda: compile_ahead.only_noting(found))

    def here(job: Job) -> None:
        with torch.accelerator.device_index(model.device.index):
            job()

    with torch.accelerator.device_index(model.device.index):  # the workers are told of the current one
        return {one.described for one in compile_ahead.compile_all(list(found.values()), workers, here)}


def _there_is(device: torch.device | str) -> torch.device:
    """The device of that name; KernelArgumentError where torch knows none, or finds no such GPU."""
    way_out = "Without a GPU nothing needs to be warmed up: pass 'cpu', or leave the call out."
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        expected = "a device as torch names it, such as 'cuda' or 'cpu'"
        raise checks.wrong("warm_up", "device", expected, shown(device), way_out) from error
    if found.type in ("cuda", "xpu"):
        gpus = torch.cuda if found.type == "cuda" else torch.xpu
        count = gpus.device_count() if gpus.is_available() else 0
        if count <= (found.index or 0):
            expected = f"one of the {count} {found.type} devices that torch finds here"
            raise checks.wrong("warm_up", "device", expected, shown(device), way_out)
    return found


@dataclass(frozen=True)
class ModelShape:
    """The arguments of `warm_up`, and tensors of these dimensions."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    block_size: int
    device: torch.device
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    rotary_dim: int
    interleaved: bool
    qk_norm: bool
    window_sizes: tuple[tuple[int, int], ...]
    softcap: float
    sinks: bool
    alibi: bool
    scales: str
    batch_invariant: bool
    hidden_size: int | None
    intermediate_size: int | None
    vocab_size: int | None
    logits_dtype: torch.dtype
    logprobs: bool = True
    shared_prefixes: bool = False
    qkv_bias: bool = False

    def token_counts(self) -> list[int]:
        """Every power of two, and the largest step."""
        return powers(self.max_num_batched_tokens)

    def batch_sizes(self) -> list[int]:
        """The smallest batch of every class that decode is compiled for."""
        from octavo.kernels.triton.decode_plan import sequences_at_once

        most = min(self.max_num_seqs, self.max_num_batched_tokens)
        sizes = sorted({size + more for size in powers(most) for more in (0, 1) if size + more <= most})
        first: dict[tuple[int, bool], int] = {}
        for size in sizes:
            at_once = sequences_at_once(size)
            first.setdefault((at_once, size <= at_once), size)
        return list(first.values())

    def longest_chunk(self) -> int:
        """As many tokens of a sequence as a step can have."""
        return min(self.max_num_batched_tokens, self.max_model_len)

    def qkv(self, num_tokens: int) -> tuple[Tensor, ...]:
        """q, k and v as the layers have them: slices of one fused projection."""
        heads = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        shape = (num_tokens, sum(heads), self.head_dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device).split_with_sizes(heads, dim=1)

    def caches(self, num_blocks: int = 2) -> tuple[Tensor, Tensor]:
        """K and V of one layer."""
        shape = (num_blocks, self.block_size, self.num_kv_heads, self.head_dim)
        k_cache, v_cache = torch.zeros((2, *shape), device=self.device).to(self.cache_dtype)
        return k_cache, v_cache

    def cache_scales(self, num_blocks: int = 2) -> dict[str, Any]:
        """The arguments k_scale and v_scale of every call that meets the caches."""
        if self.scales == "none":
            return {}
        if self.scales == "tensor":
            return {"k_scale": 1.0, "v_scale": 1.0}
        ones = torch.ones((2, num_blocks, self.block_size, self.num_kv_heads), device=self.device)
        return {"k_scale": ones[0], "v_scale": ones[1]}

    def attention_options(self, window: tuple[int, int], num_blocks: int = 2) -> dict[str, Any]:
        """What a layer gives `flash_attn_varlen_func` besides tensors and lengths."""
        zeros = torch.zeros(self.num_heads, device=self.device)
        return {
            "causal": True,
            "window_size": window,
            "softcap": self.softcap,
            "sinks": zeros if self.sinks else None,
            "alibi_slopes": zeros if self.alibi else None,
            "batch_invariant": self.batch_invariant,
            **self.cache_scales(num_blocks),
        }


def powers(largest: int) -> list[int]:
    """1, 2, 4, ... and `largest` itself."""
    return sorted({largest, *(1 << i for i in range(largest.bit_length()))})


def _run_all(
    jobs: list[Job], device: torch.device, within: Callable[[], AbstractContextManager[object]] = nullcontext
) -> None:
    # All threads launch on one stream, so that memory which one of them gives back is not written too early.
    def run(job: Job) -> None:
        with torch.accelerator.device_index(device.index), torch.inference_mode(), within():
            job()

    with ThreadPoolExecutor(_THREADS) as pool:
        running = [pool.submit(run, job) for job in jobs]
        try:
            for done in running:
                done.result()
        finally:  # one failed, or it was interrupted: others need not begin
            for one in running:
                one.cancel()


def _rounds(model: ModelShape) -> Iterator[list[Job]]:
    """Jobs that may run side by side, one round after the other.

    Two threads that need the same variant would both compile it. So the first round has nearly all of them,
    each in one job as far as that can be told, the slowest to compile first; the second has the calls that
    take several kernels, or another one than it seemed.
    """
    yield [
        *_sampling(model),
        *(job for window in model.window_sizes for job in _first_attention(model, window)),
        *warm_up_shared.parts(model),
        functools.partial(_write, model),
        functools.partial(_small, model),
        *warm_up_products.jobs(model),
    ]
    yield [
        *(job for window in model.window_sizes for job in _all_attention(model, window)),
        *warm_up_shared.steps(model),
    ]


def _sampling(model: ModelShape) -> Iterator[Job]:
    if model.vocab_size is None:
        return
    for with_filters in (True, False):
        for dtype in dict.fromkeys((model.logits_dtype, torch.float32)):  # a copy that options have changed
            yield functools.partial(_sample, model, dtype, with_filters=with_filters, return_logprobs=False)
        if model.logprobs:
            yield functools.partial(
                _sample, model, model.logits_dtype, with_filters=with_filters, return_logprobs=True
            )


def _first_attention(model: ModelShape, window: tuple[int, int]) -> Iterator[Job]:
    longest = model.longest_chunk()
    attend = functools.partial(_attend, model, window)
    if longest > SHORT:
        # Few rows over few keys and many over many take kernels of their own, and so do few over many, whose
        # keys are divided.
        yield functools.partial(_each, attend, [([SHORT + 1], SHORT + 1), ([longest], longest)])
        yield functools.partial(attend, [SHORT + 1], model.max_model_len)
    for batch in model.batch_sizes():
        most = min(longest, model.max_num_batched_tokens - batch + 1)
        for length in sorted({min(length, most) for length in _SHORT_LENGTHS}):
            yield functools.partial(attend, [length, *[1] * (batch - 1)], model.max_model_len)


def _all_attention(model: ModelShape, window: tuple[int, int]) -> Iterator[Job]:
    """Prompts of all lengths, alone and beside as many sequences that decode as are compiled apart."""
    longest = model.longest_chunk()
    attend = functools.partial(_attend, model, window)
    for batch in model.batch_sizes():
        most = min(longest, model.max_num_batched_tokens - batch + 1)
        calls = [
            ([length, *[1] * (batch - 1)], bound_k)
            for length in sorted({SHORT + 1, *powers(longest), most})
            if SHORT < length <= most
            for bound_k in (length, model.max_model_len)
        ]
        yield functools.partial(_each, attend, calls)


def _each(call: Callable[..., object], arguments: list[tuple[Any, ...]]) -> None:
    for some in arguments:
        call(*some)


def _attend(model: ModelShape, window: tuple[int, int], lens_q: list[int], bound_k: int) -> None:
    """Causal attention of new sequences, with the bounds of longer ones: grids follow the bounds."""
    from octavo.kernels import flash_attn_varlen_func

    q, _, _ = model.qkv(sum(lens_q))
    k_cache, v_cache = model.caches()
    sums = torch.tensor([0, *lens_q], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(model.device)
    longest = max(lens_q)
    bound_k = max(bound_k, longest)
    width = -(-max(model.max_model_len, bound_k) // model.block_size)
    table = torch.zeros((len(lens_q), width), dtype=torch.int32, device=model.device)
    flash_attn_varlen_func(
        q,
        k_cache,
        v_cache,
        sums,
        sums,
        longest,
        bound_k,
        block_table=table,
        **model.attention_options(window),
    )


def _write(model: ModelShape) -> None:
    from octavo.kernels import rotate_and_write_kv_cache, write_kv_cache

    k_cache, v_cache = model.caches()
    weight = torch.ones(model.head_dim, dtype=model.dtype, device=model.device)
    weights: dict[str, Any] = {"q_weight": weight, "k_weight": weight, "eps": 1e-6} if model.qk_norm else {}
    table = torch.zeros((max(model.max_model_len, 1), model.rotary_dim), device=model.device)
    for num_tokens in model.token_counts():
        q, k, v = model.qkv(num_tokens)
        places = torch.zeros(num_tokens, dtype=torch.int64, device=model.device)
        nowhere = torch.full_like(places, -1)
        scales = model.cache_scales()
        write_kv_cache(k, v, k_cache, v_cache, nowhere, **scales)
        if model.rotary_dim:
            how = {"interleaved": model.interleaved, **weights, **scales}
            rotate_and_write_kv_cache(q, k, v, table, places, k_cache, v_cache, nowhere, **how)


def _small(model: ModelShape) -> None:
    from octavo.kernels import rms_norm, silu_and_mul

    for num_tokens in model.token_counts():
        if model.hidden_size is not None:
            x = torch.zeros((num_tokens, model.hidden_size), dtype=model.dtype, device=model.device)
            weight = torch.ones(model.hidden_size, dtype=model.dtype, device=model.device)
            rms_norm(x, weight, 1e-6)
            rms_norm(x, weight, 1e-6, residual=x)
        if model.intermediate_size is not None:
            silu_and_mul(
                torch.zeros((num_tokens, 2 * model.intermediate_size), dtype=model.dtype, device=model.device)
            )


def _sample(
    model: ModelShape, logits_dtype: torch.dtype, *, with_filters: bool, return_logprobs: bool
) -> None:
    from octavo.kernels import sample

    assert model.vocab_size is not None
    for rows in sorted({1, model.max_num_seqs}):
        logits = torch.zeros((rows, model.vocab_size), dtype=logits_dtype, device=model.device)
        ones = torch.ones(rows, device=model.device)
        zeros = torch.zeros(rows, dtype=torch.int64, device=model.device)
        top_k = torch.full((rows,), 20, dtype=torch.int32, device=model.device)
        filters = {"top_k": top_k, "top_p": 0.5 * ones, "min_p": 0.1 * ones}
        options: dict[str, Any] = filters if with_filters else dict.fromkeys(filters)
        options["return_logprobs"] = return_logprobs
        sample(logits, temperature=ones, seeds=zeros, positions=zeros, **options)
