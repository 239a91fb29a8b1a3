"""The requests a benchmark sends. No torch: a workload is token ids and output lengths."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from octavo.errors import ConfigError

#: Token ids are drawn from 0 to this, inclusive.
MAX_TOKEN_ID = 10_000

#: A thousand times the default workload is 256,000 requests of up to two million tokens.
MAX_SCALE = 1_000


@dataclass(frozen=True)
class WorkloadShape:
    """Sizes of a workload. Bounds are inclusive and in tokens; `prefix_len` is for shared prefixes only."""

    num_seqs: int = 256
    min_input: int = 100
    max_input: int = 1024
    min_output: int = 100
    max_output: int = 1024
    num_prefixes: int = 4
    prefix_len: int = 512

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        for side in ("input", "output"):
            low, high = getattr(self, f"min_{side}"), getattr(self, f"max_{side}")
            if low > high:
                raise ConfigError(f"min_{side} must not be above max_{side}, got {low} and {high}")

    def scaled(self, factor: float) -> WorkloadShape:
        """Everything but the number of prefixes times `factor`, at least 1."""
        if not 0 < factor <= MAX_SCALE:
            raise ConfigError(f"scale must be above 0 and at most {MAX_SCALE}, got {factor}")
        return replace(
            self,
            **{
                name: max(1, round(value * factor))
                for name, value in vars(self).items()
                if name != "num_prefixes"
            },
        )


@dataclass(frozen=True)
class Workload:
    """Prompts and how many tokens each is to be answered with, in the order they are submitted."""

    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def num_input_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)

    @property
    def max_model_len(self) -> int:
        """The shortest model length that serves every request."""
        return max(
            len(prompt) + output_len
            for prompt, output_len in zip(self.prompts, self.output_lens, strict=True)
        )


def random_workload(shape: WorkloadShape, seed: int = 0) -> Workload:
    """Random ids and lengths, nothing shared.

    Draws in the order of nano-vllm's bench.py (each prompt's length, then its ids; output lengths
    after all prompts), so that the default shape and seed 0 are that benchmark token for token.
    """
    rng = random.Random(seed)
    prompts = [
        [rng.randint(0, MAX_TOKEN_ID) for _ in range(rng.randint(shape.min_input, shape.max_input))]
        for _ in range(shape.num_seqs)
    ]
    return Workload(prompts, [rng.randint(shape.min_output, shape.max_output) for _ in prompts])


def shared_prefix_workload(shape: WorkloadShape, seed: int = 0) -> Workload:
    """`num_prefixes` prefixes of `prefix_len` ids, taken in turn, each request with its own random rest.

    The input bounds apply to the rest, so prompts are `prefix_len` tokens longer than in `random_workload`.
    """
    rng = random.Random(seed)
    prefixes = [
        [rng.randint(0, MAX_TOKEN_ID) for _ in range(shape.prefix_len)] for _ in range(shape.num_prefixes)
    ]
    rest = random_workload(shape, seed + 1)
    prompts = [prefixes[i % len(prefixes)] + prompt for i, prompt in enumerate(rest.prompts)]
    return Workload(prompts, rest.output_lens)


WORKLOADS = {"random": random_workload, "shared-prefix": shared_prefix_workload}
