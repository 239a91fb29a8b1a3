"""Steps over nothing: they make a device compile what live steps run, and show how much memory a step takes.

Such a step reads and writes the first block of the cache, which nobody owns yet, whatever it pretends to be.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from octavo.config import EngineConfig
from octavo.engine.batch import Batch, pack_batch
from octavo.engine.request import Request, Sequence
from octavo.models.config import ModelConfig
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.models.registry import CausalLM

SAMPLING = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_k=20, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=1.0, logprobs=1, logit_bias={0: 1.0}),  # the most memory that sampling takes
)
"""One of each kind of row that the sampler treats apart."""

Shape = tuple[list[int], list[int]]
"""New tokens and context length of each sequence of a step."""


def smallest_step() -> Shape:
    """One new token that sees itself."""
    return [1], [1]


def largest_step(config: EngineConfig) -> Shape:
    """As many tokens and sequences as a step may have, one of them as long as a sequence may be."""
    longest, left = config.max_model_len, config.max_num_batched_tokens
    assert longest is not None, "a config that build_engine resolved"
    assert left is not None, "a config that build_engine resolved"
    num_new: list[int] = []
    for num_after in reversed(range(min(config.max_num_seqs, left))):
        num_new.append(min(longest, left - num_after))
        left -= num_new[-1]
    return num_new, [*num_new[:-1], longest]


def steps_to_compile(config: EngineConfig) -> Iterator[Shape]:
    """Decoding and prompts, few and many, short and long: sizes that kernels are compiled apart for."""
    longest, budget = config.max_model_len, config.max_num_batched_tokens
    assert longest is not None, "a config that build_engine resolved"
    assert budget is not None, "a config that build_engine resolved"
    yield smallest_step()
    most = min(config.max_num_seqs, budget)
    for batch in _powers_of_two(most):
        yield [1] * batch, [longest] + [1] * (batch - 1)
    for num_tokens in _powers_of_two(min(longest * most, budget)):
        if num_tokens > longest:
            num_new = _prompts(num_tokens, longest)
            yield num_new, num_new
            continue
        yield [num_tokens], [num_tokens]
        if num_tokens < budget and most > 1:
            yield [num_tokens, 1], [num_tokens, longest]
    yield largest_step(config)


def layers_of_each_kind(config: ModelConfig) -> list[int]:
    """The first layer, and after it the first of each kind: no other launches anything that these do not."""
    experts = (False,) * config.num_layers if config.experts is None else config.experts.layers
    kinds = list(zip(config.sliding_window, experts, strict=True))
    found = {kinds[layer]: layer for layer in range(len(kinds) - 1, 0, -1)}
    return sorted({0, *found.values()})


def with_layers(model: CausalLM, layers: list[int]) -> CausalLM:
    """The model with those of its layers alone; it shares their parameters."""
    shorter = copy.copy(model)
    shorter.layers = [model.layers[layer] for layer in layers]
    return shorter


def empty_step(shape: Shape, block_size: int, device: torch.device) -> Batch:
    """A step of that shape: token 0 everywhere, every block the first one."""
    num_new, lengths = (np.array(numbers, dtype=np.int64) for numbers in shape)
    ends = np.cumsum(num_new)
    positions = np.arange(ends[-1]) + np.repeat(lengths - ends, num_new)
    num_columns = -(-int(lengths.max()) // block_size)
    return pack_batch(
        input_ids=np.zeros(ends[-1], dtype=np.int64),
        positions=positions,
        slots=positions % block_size,
        num_new=num_new,
        lengths=lengths,
        block_table=np.zeros((len(num_new), num_columns), dtype=np.int32),
        logits_rows=ends - 1,
        device=device,
    )


def sequences(num: int, params: SamplingParams) -> list[Sequence]:
    """That many sequences of one token each, for the sampler alone."""
    requests = (
        Request(f"warm-up-{i}", [0], params, seeds=[i], first_seq_id=i, arrival=i) for i in range(num)
    )
    return [request.sequences[0] for request in requests]


def _powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... and `most` itself."""
    return sorted({most, *(1 << i for i in range(most.bit_length()))})


def _prompts(num_tokens: int, longest: int) -> list[int]:
    """The lengths of as few prompts as have that many tokens together."""
    num_whole, left = divmod(num_tokens, longest)
    return [longest] * num_whole + [left] * (left > 0)
