"""From an EngineConfig to a running engine: load, size the cache, join the parts."""

from __future__ import annotations

import logging
import time

import torch

from octavo.cache.manager import KVCacheManager
from octavo.cache.sizing import (
    DEFAULT_DEVICE_MEMORY_SHARE,
    DEFAULT_MEMORY_SHARE,
    available_memory_bytes,
    describe_capacity,
    format_bytes,
    num_blocks_for_bytes,
    parse_memory,
    parse_share,
    resolve_num_blocks,
)
from octavo.cache.spec import KVCacheSpec
from octavo.cache.storage import KVCache, storage_dtype
from octavo.config import DEFAULT_MAX_NUM_BATCHED_TOKENS, EngineConfig
from octavo.engine.batch import BatchBuilder
from octavo.engine.core import Engine
from octavo.engine.graph import CudaCapture
from octavo.engine.mixed_graphs import kept_bytes
from octavo.engine.runner import ModelRunner
from octavo.engine.sampler import Sampler
from octavo.engine.scheduler import Scheduler
from octavo.engine.shared_prefixes import Sharing, parts_bytes, sharing_for
from octavo.engine.warm_up import largest_step, layers_of_each_kind, smallest_step, steps_to_compile
from octavo.errors import CapacityError, ConfigError
from octavo.kernels import backend, warm_up
from octavo.kernels.shared_prefixes import OCTET
from octavo.models.registry import LoadedModel, dtype_name
from octavo.models.shapes import kv_cache_spec
from octavo.sampling_params import eos_token_ids
from octavo.text.tokenizer import Tokenizer

logger = logging.getLogger("octavo")


def build_engine(config: EngineConfig, loaded: LoadedModel, tokenizer: Tokenizer | None) -> Engine:
    """Join a loaded model, a KV cache sized for it and a scheduler.

    Raises CapacityError when not one block fits, or a step has no room beside it.
    """
    may_shrink = config.max_num_batched_tokens is None
    config = _resolve(config, loaded)
    assert config.max_model_len is not None
    spec = kv_cache_spec(loaded.config, dtype=config.kv_cache_dtype, block_size=config.block_size)
    is_compiled = _is_compiled(loaded, spec)
    config, num_blocks = _fitting(config, loaded, spec, may_shrink)
    assert config.max_model_len is not None
    assert config.max_num_batched_tokens is not None
    began = time.perf_counter()
    kv_cache = _allocate(spec, num_blocks, loaded.device)
    logger.info(
        "KV cache in %.1f s: %d blocks in %s; %s; %d tokens a step",
        time.perf_counter() - began,
        num_blocks,
        format_bytes(num_blocks * spec.bytes_per_block),
        describe_capacity(num_blocks, spec.block_size, config.max_model_len, config.max_num_seqs),
        config.max_num_batched_tokens,
    )
    cache = KVCacheManager(
        num_blocks,
        config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        model_id=loaded.model_id,
    )
    scheduler = Scheduler(
        cache,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        max_prefill_share=config.max_prefill_share,
    )
    batches = BatchBuilder(
        cache.block_table,
        num_rows=scheduler.max_num_rows,
        max_blocks_per_row=min(num_blocks, -(-config.max_model_len // config.block_size)),
        block_size=config.block_size,
        device=loaded.device,
        overlap=bool(config.overlap),
    )
    vocab_size = loaded.config.vocab_size
    runner = ModelRunner(loaded.model, kv_cache, batches, Sampler(vocab_size))
    began = time.perf_counter()
    runner.warm_up([smallest_step()])
    if is_compiled:
        runner.warm_up(steps_to_compile(config), layers_of_each_kind(loaded.config))
    logger.info("first steps in %.1f s", time.perf_counter() - began)
    longest = min(config.max_model_len, num_blocks * config.block_size)
    sharing, why_not = _sharing(config, loaded, spec, longest)
    must_share = bool(config.cascade_attention)
    if must_share and sharing is None:
        logger.warning("cascade_attention has no effect: %s", why_not)
    if _has_graphs(config, loaded, spec):
        capture = CudaCapture(loaded.device)
        runner.use_graphs(config.max_model_len, capture, sharing, must_share=must_share)
        if _has_mixed_graphs(config, loaded, spec):
            runner.use_mixed_graphs(config.max_model_len, config.max_num_batched_tokens, capture)
    eos = {*eos_token_ids(loaded.generation_config), *(tokenizer.eos_token_ids if tokenizer else ())}
    return Engine(
        config, scheduler, runner, vocab_size=vocab_size, eos_token_ids=sorted(eos), tokenizer=tokenizer
    )


def _is_compiled(loaded: LoadedModel, spec: KVCacheSpec) -> bool:
    """Whether this model's kernels are compiled for a GPU: by Triton, and not plain torch."""
    facts = (loaded.dtype, storage_dtype(spec), spec.head_dim)
    room = backend.implementation_of("varlen_attention", loaded.device.type, *facts)
    return loaded.device.type != "cpu" and room == "triton"


def _has_graphs(config: EngineConfig, loaded: LoadedModel, spec: KVCacheSpec) -> bool:
    """Whether decode steps come from graphs; plain torch reads lengths on the host, which none can hold."""
    return config.uses_graphs and _is_compiled(loaded, spec)


def _has_mixed_graphs(config: EngineConfig, loaded: LoadedModel, spec: KVCacheSpec) -> bool:
    """Whether the model in other steps does. Not where bits depend on a row's own sequence alone, for then
    attention would hold partials as if every sequence were as long as may be."""
    return _has_graphs(config, loaded, spec) and not config.deterministic


def _sharing(
    config: EngineConfig, loaded: LoadedModel, spec: KVCacheSpec, longest: int
) -> tuple[Sharing | None, str]:
    """When decode steps read common keys once for several sequences of up to `longest` tokens; None = never,
    and why."""
    if config.cascade_attention is False or config.deterministic:
        return None, "it is off"
    num_rows = _num_rows(config)
    if not _has_graphs(config, loaded, spec):
        return None, "decode steps come from no CUDA graphs, as this model's kernels are not compiled"
    sharing = sharing_for(spec, loaded.model.weights_form, loaded.config.num_heads, loaded.dtype)
    if sharing is None:
        return None, "every layer of the model attends to a window"
    if num_rows < OCTET:
        return None, f"keys are read once for {OCTET} sequences, and no more than {num_rows} run at once"
    if not sharing.can_pay(num_rows, longest):
        return None, (
            f"{num_rows} sequences of {longest} tokens have too few keys for it to be worth its launches"
        )
    return sharing, ""


def _num_rows(config: EngineConfig) -> int:
    """The most sequences that a step decodes."""
    assert config.max_num_batched_tokens is not None
    return min(config.max_num_seqs, config.max_num_batched_tokens)


def _fitting(
    config: EngineConfig, loaded: LoadedModel, spec: KVCacheSpec, may_shrink: bool
) -> tuple[EngineConfig, int]:
    """The config, with smaller steps where those are left open and too large for the memory, and the blocks
    of the cache. Compiles what such steps launch.
    """
    while True:
        budget = config.max_num_batched_tokens
        assert budget is not None
        try:
            if _is_compiled(loaded, spec):
                _compile_kernels(config, loaded, spec)
            return config, _num_blocks(config, loaded, spec)
        except (torch.OutOfMemoryError, CapacityError) as error:
            if not may_shrink or budget <= DEFAULT_MAX_NUM_BATCHED_TOKENS:
                raise
            logger.info("steps of %d tokens do not fit (%s); trying %d", budget, error, budget // 2)
            config = config.replace(max_num_batched_tokens=budget // 2)


def _compile_kernels(config: EngineConfig, loaded: LoadedModel, spec: KVCacheSpec) -> None:
    """Compile for a GPU what any step of this engine launches, several kernels at once."""
    model = loaded.config
    assert config.max_model_len is not None
    assert config.max_num_batched_tokens is not None
    began = time.perf_counter()
    sharing, _ = _sharing(config, loaded, spec, config.max_model_len)
    windows = {(-1, -1) if window is None else (window - 1, 0) for window in model.sliding_window}
    made = warm_up(
        model.num_heads,
        model.num_kv_heads,
        model.head_dim,
        loaded.dtype,
        storage_dtype(spec),
        spec.block_size,
        loaded.device,
        # The padding of a step from a graph may be one more.
        max_num_seqs=config.max_num_seqs + _has_mixed_graphs(config, loaded, spec),
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        rotary_dim=model.rope.rotary_dim,
        qk_norm=model.qk_norm,
        window_sizes=sorted(windows),
        scales="token" if spec.has_token_scales else "none",
        batch_invariant=config.deterministic,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        vocab_size=model.vocab_size,
        logits_dtype=loaded.dtype,
        logprobs=False,  # those the sampler gives come from torch
        shared_prefixes=sharing is not None,
        qkv_bias=model.attention_bias,
    )
    if made:
        num_compiled = sum(not one.from_disk for one in made)
        seconds = time.perf_counter() - began
        logger.info("%d kernels ready, %d compiled, in %.1f s", len(made), num_compiled, seconds)


def _num_blocks(config: EngineConfig, loaded: LoadedModel, spec: KVCacheSpec) -> int:
    assert config.max_model_len is not None
    free_bytes, share = None, DEFAULT_MEMORY_SHARE
    if loaded.device.type == "cuda":
        share = DEFAULT_DEVICE_MEMORY_SHARE
        if config.num_blocks is None and config.kv_cache_memory is None:
            began = time.perf_counter()
            step_bytes = _largest_step_bytes(config, loaded, spec)
            seconds = time.perf_counter() - began
            if _has_graphs(config, loaded, spec):
                step_bytes *= 2  # the graphs keep what a decode step takes to themselves
                sharing, _ = _sharing(config, loaded, spec, config.max_model_len)
                if _has_mixed_graphs(config, loaded, spec):
                    assert config.max_num_batched_tokens is not None, "a config that build_engine resolved"
                    width = loaded.config.hidden_size * loaded.dtype.itemsize
                    columns = -(-config.max_model_len // config.block_size)
                    rows = _num_rows(config)
                    step_bytes += kept_bytes(config.max_num_batched_tokens, width, rows, columns)
                if sharing is not None:
                    step_bytes += parts_bytes(_num_rows(config), loaded.config.num_heads, spec.head_dim)
            if config.overlap:  # steps under way keep their logits, and perhaps a copy that options changed
                step_bytes += config.run_ahead * config.max_num_seqs * loaded.config.vocab_size * (4 + 4)
            free_bytes = _free_bytes(loaded.device) - step_bytes
            if config.gpu_memory is not None:
                total = torch.cuda.get_device_properties(loaded.device).total_memory
                allowed = parse_share(config.gpu_memory, total) - torch.cuda.memory_reserved(loaded.device)
                free_bytes, share = min(free_bytes, allowed - step_bytes), 1.0
            logger.info(
                "the largest step takes %.1f MiB beside the cache, measured in %.1f s",
                step_bytes / 2**20,
                seconds,
            )
    return resolve_num_blocks(
        spec,
        num_blocks=config.num_blocks,
        memory_bytes=None if config.kv_cache_memory is None else parse_memory(config.kv_cache_memory),
        free_bytes=free_bytes,
        share=share,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
    )


def _largest_step_bytes(config: EngineConfig, loaded: LoadedModel, spec: KVCacheSpec) -> int:
    """What the largest step takes of a GPU's memory beside weights and cache, by running it."""
    device = loaded.device
    batches = BatchBuilder(
        lambda seq_id: [], num_rows=0, max_blocks_per_row=0, block_size=spec.block_size, device=device
    )
    runner = ModelRunner(loaded.model, KVCache(spec, 1, device), batches, Sampler(loaded.config.vocab_size))
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        runner.warm_up([largest_step(config)])
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"{device} has too little memory left for a step of max_num_batched_tokens="
            f"{config.max_num_batched_tokens} tokens and max_num_seqs={config.max_num_seqs} requests; "
            "lower these"
        ) from error
    return torch.cuda.max_memory_allocated(device) - before


def _free_bytes(device: torch.device) -> int:
    """Bytes a KV cache may still take on that device."""
    if device.type == "cpu":
        return available_memory_bytes()
    torch.cuda.empty_cache()  # what torch holds back for later counts as taken
    return torch.cuda.mem_get_info(device)[0]


def _allocate(spec: KVCacheSpec, num_blocks: int, device: torch.device) -> KVCache:
    """The cache's tensors, refused before a system that lends more than it has can promise them."""
    needed = num_blocks * spec.bytes_per_block
    try:
        available = _free_bytes(device)
    except ConfigError:  # a system that does not tell; whoever gave the size knows it
        available = needed
    if needed > available:
        raise CapacityError(
            f"a KV cache of {num_blocks} blocks takes {format_bytes(needed)}, and "
            f"{format_bytes(available)} are available: at most {num_blocks_for_bytes(spec, available)} "
            "blocks; lower num_blocks or kv_cache_memory"
        )
    return KVCache(spec, num_blocks, device)


def _resolve(config: EngineConfig, loaded: LoadedModel) -> EngineConfig:
    longest = loaded.config.rope.num_positions
    max_model_len = config.max_model_len or loaded.config.max_position_embeddings
    assert max_model_len <= longest, "load_model refuses longer contexts"
    dtype = dtype_name(loaded.dtype)
    kv_cache_dtype = dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    config = config.on_device(loaded.device.type)
    return config.replace(max_model_len=max_model_len, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
