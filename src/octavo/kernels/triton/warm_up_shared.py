"""What decode steps launch whose sequences begin alike; see `octavo.kernels.shared_prefixes`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octavo.kernels.triton import SHORT

if TYPE_CHECKING:
    from octavo.kernels.triton.warm_up import ModelShape

Job = Callable[[], object]


def parts(model: ModelShape) -> Iterator[Job]:
    """Attention of octets, and of entries to their own keys: every class of their numbers in a job."""
    for rows in (SHORT, 1):
        seen: dict[tuple[int, bool], int] = {}
        for batch in _batches(model):
            num = -(-batch // rows)
            seen.setdefault(_class(num), num)
        for num in seen.values():
            yield functools.partial(_part, model, num, rows)


def steps(model: ModelShape) -> Iterator[Job]:
    """What else such a step launches, and all of it once."""
    batches = _batches(model)
    if batches:
        yield functools.partial(_step, model, batches[0])


def _batches(model: ModelShape) -> list[int]:
    """Powers of two from an octet on, and the largest: the classes of what an engine has graphs for."""
    most = min(model.max_num_seqs, model.max_num_batched_tokens)
    if not model.shared_prefixes or model.batch_invariant or most < SHORT:
        return []
    return sorted({most, *(1 << i for i in range(SHORT.bit_length() - 1, most.bit_length()))})


def _class(num: int) -> tuple[int, bool]:
    """What decode is compiled apart for."""
    from octavo.kernels.triton.decode_plan import sequences_at_once

    at_once = sequences_at_once(num)
    return at_once, num <= at_once


def _part(model: ModelShape, num: int, rows: int) -> None:
    """A part of attention in a batch of `num` sequences of so many rows."""
    from octavo.kernels.attention import Options
    from octavo.kernels.shared_prefixes import attend_part

    q, _, _ = model.qkv(num * rows)
    k_cache, v_cache = model.caches()
    scales = model.cache_scales()
    options = Options(
        None, False, (-1, -1), 0.0, None, None, scales.get("k_scale"), scales.get("v_scale"), False
    )
    sums_q = torch.arange(num + 1, dtype=torch.int32, device=model.device) * rows
    table = torch.zeros((num, _width(model)), dtype=torch.int32, device=model.device)
    leftpad = torch.zeros_like(sums_q[:num]) if rows == 1 else None
    attend_part(
        q, k_cache, v_cache, sums_q, torch.zeros_like(sums_q), rows, model.max_model_len, options, table,
        leftpad,
    )  # fmt: skip


def _step(model: ModelShape, batch: int) -> None:
    from octavo.kernels.shared_prefixes import attend_shared, find_shared_prefixes

    q, _, _ = model.qkv(batch)
    sums: Tensor = torch.arange(batch + 1, dtype=torch.int32, device=model.device)
    table = torch.zeros((batch, _width(model)), dtype=torch.int32, device=model.device)
    shared = find_shared_prefixes(table, sums, model.block_size)
    attend_shared(
        q, *model.caches(), shared, sums, sums, model.max_model_len, block_table=table, **model.cache_scales()
    )


def _width(model: ModelShape) -> int:
    return -(-model.max_model_len // model.block_size)
