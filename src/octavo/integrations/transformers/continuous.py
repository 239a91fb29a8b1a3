"""What Transformers' continuous batching has to be told about `octavo`.

It knows its own implementations by name. Three of its modules ask a function whether a name is a flash
attention, meaning: reads lengths, needs no mask, may be captured into CUDA graphs. Those modules, and no
other, get to see one that says so of `octavo`.
"""

from __future__ import annotations

import importlib
from typing import Any

from octavo.integrations.transformers.masks import say_once

NAMES = ("octavo", "paged|octavo")
_ROOM = "transformers.generation.continuous_batching"
_ASKING = ("cache", "continuous_api", "initialization")


def admit() -> None:
    """Let continuous batching take `octavo`. A second call changes nothing."""
    modules: list[Any] = [importlib.import_module(f"{_ROOM}.{name}") for name in _ASKING]
    initialization = modules[-1]
    if not all(hasattr(module, "is_flash_attention_requested") for module in modules) or not hasattr(
        initialization, "ensure_decode_fast_path_is_available"
    ):
        say_once("octavo: continuous batching of this version of Transformers is not known; it is left alone")
        return
    for module in modules:
        asked: Any = module.is_flash_attention_requested
        if not hasattr(asked, "before_octavo"):
            module.is_flash_attention_requested = _answering(asked)
    ensure: Any = initialization.ensure_decode_fast_path_is_available
    if not hasattr(ensure, "before_octavo"):
        initialization.ensure_decode_fast_path_is_available = _ensuring(ensure, initialization)


def _answering(before: Any) -> Any:
    def is_flash_attention_requested(
        config: Any = None, requested_attention_implementation: str | None = None, version: Any = None
    ) -> bool:
        name = requested_attention_implementation if config is None else config._attn_implementation
        if name in NAMES:
            return version is None
        return bool(before(config, requested_attention_implementation, version))

    is_flash_attention_requested.before_octavo = before  # type: ignore[attr-defined]
    return is_flash_attention_requested


def _ensuring(before: Any, initialization: Any) -> Any:
    def ensure_decode_fast_path_is_available(config: Any, cb_config: Any, user_requested: bool) -> None:
        if config._attn_implementation not in NAMES:
            before(config, cb_config, user_requested)
            return
        if cb_config.max_blocks_per_request == 0:
            return
        page_size = getattr(cb_config, "page_size", None) or cb_config.block_size
        reason = None
        if page_size & (page_size - 1):
            reason = f"pages of {page_size} tokens are not a power of two"
        elif _has_windows(config):
            reason = "layers with a sliding window keep their cache as a ring"
        if reason is not None:
            if user_requested:
                initialization.logger.warning(f"octavo: no block table is used in decoding: {reason}")
            cb_config.max_blocks_per_request = 0

    ensure_decode_fast_path_is_available.before_octavo = before  # type: ignore[attr-defined]
    return ensure_decode_fast_path_is_available


def _has_windows(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return any(kind != "full_attention" for kind in kinds)
    return getattr(config, "sliding_window", None) is not None
