"""What a quantised cache should hold, found by looking through all numbers that it can hold."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


def numbers(dtype: torch.dtype) -> Tensor:
    """Every finite number of the dtype, rising and each once, float64; even places hold even codes."""
    if dtype == torch.int8:
        return torch.arange(-127, 128, dtype=torch.float64)
    positive = torch.arange(0x7F, dtype=torch.uint8).view(dtype).double()
    return torch.cat([-positive.flip(0), positive[1:]])


def nearest(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest number of the dtype to each value, of two equally near ones the one with the even code."""
    held = numbers(dtype)
    above = torch.searchsorted(held, values.double()).clamp(1, len(held) - 1)
    low, high = held[above - 1], held[above]
    to_low, to_high = values.double() - low, high - values.double()
    # The code of the place i is |i - zero|: the parity of the distance from zero.
    low_is_even = (above - 1 - len(held) // 2) % 2 == 0
    return torch.where((to_low < to_high) | ((to_low == to_high) & low_is_even), low, high)
