"""From an EngineConfig to a running engine: load, size the cache, join the parts."""

from __future__ import annotations

import logging

from octavo.cache.manager import KVCacheManager
from octavo.cache.sizing import (
    available_memory_bytes,
    format_bytes,
    num_blocks_for_bytes,
    parse_memory,
    resolve_num_blocks,
)
from octavo.cache.spec import KVCacheSpec
from octavo.cache.storage import KVCache
from octavo.config import EngineConfig
from octavo.engine.batch import BatchBuilder
from octavo.engine.core import Engine
from octavo.engine.runner import ModelRunner
from octavo.engine.sampler import Sampler
from octavo.engine.scheduler import Scheduler
from octavo.errors import CapacityError, ConfigError
from octavo.models.registry import LoadedModel
from octavo.models.shapes import kv_cache_spec
from octavo.sampling_params import eos_token_ids
from octavo.text.tokenizer import Tokenizer

logger = logging.getLogger("octavo")


def build_engine(config: EngineConfig, loaded: LoadedModel, tokenizer: Tokenizer | None) -> Engine:
    """Join a loaded model, a KV cache sized for it and a scheduler.

    Raises CapacityError when not one block fits.
    """
    config = _resolve(config, loaded)
    assert config.max_model_len is not None
    spec = kv_cache_spec(loaded.config, dtype=config.kv_cache_dtype, block_size=config.block_size)
    num_blocks = resolve_num_blocks(
        spec,
        num_blocks=config.num_blocks,
        memory_bytes=None if config.kv_cache_memory is None else parse_memory(config.kv_cache_memory),
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
    )
    logger.info(
        "KV cache: %d blocks of %d tokens, %.1f MiB",
        num_blocks,
        spec.block_size,
        num_blocks * spec.bytes_per_block / 2**20,
    )
    kv_cache = _allocate(spec, num_blocks)
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
    )
    vocab_size = loaded.config.vocab_size
    runner = ModelRunner(loaded.model, kv_cache, batches, Sampler(vocab_size))
    runner.warm_up()
    eos = {*eos_token_ids(loaded.generation_config), *(tokenizer.eos_token_ids if tokenizer else ())}
    return Engine(
        config, scheduler, runner, vocab_size=vocab_size, eos_token_ids=sorted(eos), tokenizer=tokenizer
    )


def _allocate(spec: KVCacheSpec, num_blocks: int) -> KVCache:
    """The cache's tensors, refused before a system that lends more than it has can promise them."""
    needed = num_blocks * spec.bytes_per_block
    try:
        available = available_memory_bytes()
    except ConfigError:  # a system that does not tell; whoever gave the size knows it
        available = needed
    if needed > available:
        raise CapacityError(
            f"a KV cache of {num_blocks} blocks takes {format_bytes(needed)}, and "
            f"{format_bytes(available)} are available: at most {num_blocks_for_bytes(spec, available)} "
            "blocks; lower num_blocks or kv_cache_memory"
        )
    return KVCache(spec, num_blocks)


def _resolve(config: EngineConfig, loaded: LoadedModel) -> EngineConfig:
    longest = loaded.config.rope.num_positions
    max_model_len = config.max_model_len or loaded.config.max_position_embeddings
    assert max_model_len <= longest, "load_model refuses longer contexts"
    dtype = str(loaded.dtype).removeprefix("torch.")
    kv_cache_dtype = dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    return config.replace(max_model_len=max_model_len, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
