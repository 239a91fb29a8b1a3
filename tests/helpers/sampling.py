"""Sequences to hand to the sampler, without an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from typing import Any

import torch

from octavo.engine.request import Request, Sequence
from octavo.engine.sampler import Sampler, SamplerOutput
from octavo.sampling_params import SamplingParams


def sequence(
    *, prompt: Seq[int] = (0,), output: Seq[int] = (), seed: int = 0, eos: Seq[int] = (), **options: Any
) -> Sequence:
    """One sequence with `output` already generated and `seed` resolved."""
    params = SamplingParams(**{"max_tokens": None, **options})
    request = Request("r", list(prompt), params, seeds=[seed], first_seq_id=0, arrival=0, eos_token_ids=eos)
    request.sequences[0].token_ids.extend(output)
    return request.sequences[0]


def sample(logits: torch.Tensor, sequences: Seq[Sequence]) -> SamplerOutput:
    """One call of a fresh sampler."""
    return Sampler(logits.shape[1]).sample(logits, list(sequences))


def choose(logits: Seq[float], **options: Any) -> int:
    """The token the sampler takes for one row of logits."""
    output = Sampler(len(logits)).sample(torch.tensor([logits]), [sequence(**options)])
    assert output.errors == {}
    return output.token_ids[0]


def tally(logits: Seq[float], num_draws: int = 4000, **options: Any) -> Counter[int]:
    """How often each token is drawn from the same logits under seeds 0, 1, 2, ..."""
    rows = torch.tensor(logits).expand(num_draws, -1)
    output = Sampler(len(logits)).sample(rows, [sequence(seed=seed, **options) for seed in range(num_draws)])
    assert output.errors == {}
    return Counter(output.token_ids)
