"""The mask interface: lengths and left padding instead of a matrix, wherever that says the same."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import masking_utils

from octavo.integrations.transformers import plan as plans

logger = logging.getLogger("octavo")
_said: set[str] = set()


def say_once(message: str, level: int = logging.WARNING) -> None:
    """Log a message, once in a process."""
    if message not in _said:
        _said.add(message)
        logger.log(level, message)


def octavo_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Tensor | None:
    """A plan (see `plan.py`) where the mask is causal, perhaps with a window, and padding is at the ends.

    Anything else becomes the dense mask that `sdpa` would get, and is computed by it; for packed sequences
    only once that is certain. Arguments are those of
    Transformers' `sdpa_mask`; `attention_mask` is (B, seen tokens) bool, True = not padding.

    Padding on the right needs nothing: no real token sees what comes after it. Rows of padding get some
    finite values of no meaning.
    """
    device = torch.device(device)

    def dense() -> Tensor | None:
        options["allow_is_causal_skip"] = False
        make: Any = masking_utils.sdpa_mask
        found: Tensor | None = make(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
            kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask, device=device,
            **options,
        )  # fmt: skip
        return found

    if mask_function is masking_utils.bidirectional_mask_function:
        return dense()
    is_understood, window = _causal_window(mask_function)
    if attention_mask is not None and (torch.compiler.is_compiling() or _is_capturing(device)):
        is_understood = False  # where padding is cannot be read here
    if not is_understood:
        if not torch.compiler.is_compiling():
            if _is_packed(mask_function):
                # Continuous batching of some versions (5.20) asks, too, and has lengths that say the same.
                return plans.as_deferred_mask(plans.Deferred(dense), device)
            say_once("octavo: masks other than causal and sliding ones are made dense and computed by sdpa")
        return dense()
    num_keys = q_offset + q_length - kv_offset
    padding = None
    if attention_mask is not None:
        # One copy to the host in a forward, and a wait for it; sdpa's mask waits, too.
        padding = _left_padding(attention_mask[:, kv_offset : kv_offset + kv_length].cpu().numpy())
        if padding is None:
            say_once("octavo: padding between tokens (was the prompt padded on the right?) goes to sdpa")
            return dense()
    if not padding and isinstance(num_keys, int):
        return plans.unpadded(batch_size, q_length, num_keys, kv_length, window, device)
    rows = plans.make_rows(batch_size, q_length, num_keys, device, padding or ())
    max_keys = num_keys if isinstance(num_keys, int) else kv_length
    return plans.as_mask(plans.Plan(rows, q_length, kv_length, max_keys, window, is_padded=bool(padding)))


def _left_padding(seen: NDArray[np.bool_]) -> tuple[int, ...] | None:
    """How many tokens of padding each row (B, T) begins with, all of it in a row without a token.

    () where no row begins with padding, None where some row has padding between tokens.
    """
    first = seen.argmax(1)
    if np.count_nonzero(seen) != seen.size - first.sum():  # some row has padding on its right, or no token
        totals = seen.sum(1)
        if not all(row[i : i + n].all() for row, i, n in zip(seen, first, totals, strict=True)):
            return None
        first[totals == 0] = seen.shape[1]
    return tuple(first.tolist()) if first.any() else ()


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


# What closures of these factories look like: the only way to read a window out of a mask function.
_AND_CODE = masking_utils.and_masks(masking_utils.causal_mask_function).__code__
_WINDOW_CODE = masking_utils.sliding_window_overlay(1).__code__
_PACKED_CODE = masking_utils.packed_sequence_mask_function(torch.zeros(1, 1)).__code__


def _causal_window(mask_function: Callable[..., Any]) -> tuple[bool, int | None]:
    """(True, None) for a causal mask, (True, window) for a sliding one, (False, None) for any other."""
    if mask_function is masking_utils.causal_mask_function:
        return True, None
    if torch.compiler.is_compiling():  # it does not look into closures
        return False, None
    if getattr(mask_function, "__code__", None) is _AND_CODE:
        parts = _free(mask_function, "mask_functions")
        if len(parts) == 2 and parts[1] is masking_utils.causal_mask_function:
            window = parts[0]
            if getattr(window, "__code__", None) is _WINDOW_CODE:
                return True, int(_free(window, "sliding_window"))
    return False, None


def _is_packed(mask_function: Callable[..., Any]) -> bool:
    """Whether it separates sequences that lie in one row, which their positions tell apart."""
    if getattr(mask_function, "__code__", None) is not _AND_CODE:
        return False
    return getattr(_free(mask_function, "mask_functions")[-1], "__code__", None) is _PACKED_CODE


def _free(function: Any, name: str) -> Any:
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents
