"""The next token of every row, chosen where the logits are."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from octavo.kernels import backend, checks
from octavo.kernels.argument_types import names_wrong_types

_FLOAT32 = (torch.float32,)
_INT32 = (torch.int32,)
_INT64 = (torch.int64,)
_LOGITS = (torch.float32, torch.float16, torch.bfloat16)


@overload
def sample(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor | None = ...,
    top_p: Tensor | None = ...,
    min_p: Tensor | None = ...,
    seeds: Tensor,
    positions: Tensor,
    return_logprobs: Literal[False] = False,
) -> Tensor: ...
@overload
def sample(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor | None = ...,
    top_p: Tensor | None = ...,
    min_p: Tensor | None = ...,
    seeds: Tensor,
    positions: Tensor,
    return_logprobs: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@names_wrong_types
def sample(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    seeds: Tensor,
    positions: Tensor,
    return_logprobs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Choose one token per row: the highest logit, or a draw from the filtered distribution.

    A token's probability is ``exp((logit - highest) / temperature)``, up to a factor. Three filters keep a
    run of the tokens in order of logit, of equal logits the lower id first: ``min_p`` those at least min_p
    times as probable as the most probable one, then ``top_k`` exactly k of them, then ``top_p`` the shortest
    run whose share of what is left reaches top_p. The token is the first one, in order of id, at which the
    running sum of the kept probabilities exceeds ``uniform(seed, position)`` times their total; uniform is
    splitmix64, see `octavo.kernels.reference.sampling`. A token without probability is never drawn.

    A row's token depends on its own logits and options alone, to the last bit, and never on the batch. On a
    GPU nothing is read by the host, and a CUDA graph can capture the call.

    Args:
        logits: (R, V) float32, float16 or bfloat16, any row stride; -inf is allowed. Not changed.
        temperature: (R,) float32; 0 takes the highest logit, of equal ones the lowest id.
        top_k: (R,) int32; 0, negative or V and more keep all.
        top_p: (R,) float32, above 0; 1 and more keep all.
        min_p: (R,) float32 from 0, which keeps all, to 1.
        seeds, positions: (R,) int64: the random stream of a row, and how many tokens it has drawn.
        return_logprobs: also return the log probability of each chosen token under ``softmax(logits)``,
            untouched by temperature and filters.

    Returns:
        ids (R,) int64, or (ids, logprobs (R,) float32). A row that holds NaN or +inf, or nothing but -inf,
        has the id -1 and the log probability NaN.

    Raises:
        KernelArgumentError: a type, shape, dtype, device or stride is wrong.
    """
    name = "sample"
    device = logits.device
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise checks.wrong(name, "logits", "of shape (R, V), V above 0", f"shape {tuple(logits.shape)}")
    if logits.dtype not in _LOGITS:
        raise checks.wrong(name, "logits.dtype", "float32, float16 or bfloat16", logits.dtype)
    checks.floats(name, "logits", logits, device)
    checks.flag(name, "return_logprobs", return_logprobs)
    rows = (logits.shape[0],)
    for argument, values, dtypes in (
        ("temperature", temperature, _FLOAT32),
        ("top_k", top_k, _INT32),
        ("top_p", top_p, _FLOAT32),
        ("min_p", min_p, _FLOAT32),
        ("seeds", seeds, _INT64),
        ("positions", positions, _INT64),
    ):
        if values is not None:
            checks.exactly(name, argument, values, rows, device, dtypes)
    kernel = backend.select(name, "cpu" if logits.is_cpu else device.type, logits.dtype)
    ids, logprobs = kernel(logits, temperature, top_k, top_p, min_p, seeds, positions, return_logprobs)
    return (ids, logprobs) if return_logprobs else ids
