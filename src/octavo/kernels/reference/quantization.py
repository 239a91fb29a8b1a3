"""Numbers of one byte and a scale: what a quantised cache stores. `value = stored * scale`.

Two dtypes: float8_e4m3fn (448 is the largest) and int8 (-127 to 127). A scale is one for a whole tensor,
known beforehand, or one for each token and head, taken from the numbers that are written.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
SMALLEST_SCALE = 2.0**-126  # of a row that is all zero, or nearly: its inverse is finite


def is_quantised(dtype: torch.dtype) -> bool:
    """Whether numbers of that dtype come with a scale."""
    return dtype in LARGEST


def row_scales(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale of each row (..., D): its largest finite magnitude becomes the largest number of `dtype`."""
    magnitudes = rows.float().abs()
    finite = torch.where(magnitudes < float("inf"), magnitudes, 0.0)  # of a NaN, too, this makes 0
    # Times a rounded 1/448, not divided by 448: a product is the same to the bit everywhere.
    return (finite.amax(dim=-1) * (1.0 / LARGEST[dtype])).clamp_min(SMALLEST_SCALE)


def quantise(values: Tensor, scale: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Round `values / scale` to the nearest number of `dtype`, a tie to the even one.

    What is too large becomes the largest, never an infinity. A NaN stays one in float8 and is 0 in int8.
    """
    inverse = 1.0 / torch.as_tensor(scale, dtype=torch.float32, device=values.device)
    scaled = (values.float() * inverse).clamp(-LARGEST[dtype], LARGEST[dtype])
    return scaled.round().nan_to_num().to(dtype) if dtype == torch.int8 else scaled.to(dtype)


def dequantise(stored: Tensor, scale: Tensor | float, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values that `stored` stands for."""
    return (stored.float() * torch.as_tensor(scale, dtype=torch.float32, device=stored.device)).to(dtype)
