"""What the entries of a decode step have in common, octet by octet; and one attention of two parts."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.triton import SHORT


def find_shared_prefixes(
    block_table: Tensor, cu_seqlens_k: Tensor, block_size: int, least: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(lens, cu_seqlens_q, cu_seqlens_k), as `octavo.kernels.shared_prefixes` explains them."""
    lens_k = cu_seqlens_k.diff()
    batch = len(lens_k)
    lens = torch.zeros_like(lens_k)
    ends_q, ends_k = [0], [0]
    for start in range(0, batch, SHORT):
        octet = slice(start, min(start + SHORT, batch))
        takes_part = lens_k[octet] > 0
        num_common = 0
        if takes_part.sum() > 1:
            tables = block_table[octet][takes_part]
            most = (int(lens_k[octet][takes_part].min()) - 1) // block_size
            agrees = (tables[:, :most] == block_table[start, :most]).all(dim=0)
            num_common = int(agrees.int().cumprod(0).sum()) * block_size
        if num_common < least:
            num_common = 0
        lens[octet] = num_common * takes_part
        ends_q.append(octet.stop)
        ends_k.append(ends_k[-1] + num_common)
    device = block_table.device
    sums_q, sums_k = (torch.tensor(ends, dtype=torch.int32, device=device) for ends in (ends_q, ends_k))
    return lens, sums_q, sums_k


def merge_shared_prefixes(
    common: Tensor, common_lse: Tensor, own: Tensor, own_lse: Tensor, lens: Tensor, out: Tensor
) -> None:
    """Fill `out` (B, H, D): attention to the common keys, where an entry has any, and to its own, joined.

    `common` and `own` (B, H, D), their LSEs (H, B). What `common` holds for an entry of `lens` 0 is not read.
    """
    shares = (lens > 0)[:, None]
    lses = torch.stack([torch.where(shares, common_lse.T, float("-inf")), own_lse.T])
    # A row without keys is 0 with LSE -inf in both.
    weights = torch.softmax(lses, dim=0).nan_to_num(0.0)[..., None]
    common = torch.where(shares[..., None], common, 0.0)
    out.copy_(weights[0] * common + weights[1] * own)
