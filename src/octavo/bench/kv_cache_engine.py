"""One loaded model, and engines over it with caches of every kind: what `octavo bench kv-cache` runs on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.config import EngineConfig
from octavo.engine.build import build_engine
from octavo.engine.core import Engine
from octavo.errors import ConfigError
from octavo.kernels.cpu.threads import configure as configure_threads
from octavo.models.device import resolve_device
from octavo.models.registry import LoadedModel, load_model
from octavo.models.source import ModelSource, resolve_model
from octavo.sampling_params import SamplingParams


@dataclass
class Outcome:
    """What requests that were all sent at once came to.

    `times_s[i]`: when output token i of all of them together was read, from the start on. `ttft_s` and
    `token_ids` are in the order of the requests. Of each step: how many requests had room in the cache, how
    many tokens it held for them, and how many it had room for in their blocks.
    """

    seconds: float
    token_ids: list[list[int]]
    ttft_s: list[float]
    num_prompt_tokens: int
    times_s: list[float] = field(default_factory=list)
    num_running: list[int] = field(default_factory=list)
    num_held_tokens: list[int] = field(default_factory=list)
    num_reserved_tokens: list[int] = field(default_factory=list)

    @property
    def num_output_tokens(self) -> int:
        return sum(map(len, self.token_ids))


class Models:
    """A model whose engines share its weights. Options: those of `EngineConfig` but the cache's."""

    def __init__(self, model: str, **options: Any) -> None:
        self.options = options
        config = EngineConfig.from_options(model, **options)
        self.name = model
        self.device = resolve_device(config.device)
        dummy = config.load_format == "dummy"
        self.source: ModelSource = resolve_model(model, config.revision, files="config" if dummy else "all")
        if self.device.type == "cpu":
            configure_threads(config.num_threads)
        self.loaded: LoadedModel = load_model(
            self.source,
            dtype=config.dtype,
            device=self.device,
            load_format=config.load_format,
            quantization=config.quantization,
            seed=config.seed,
        )

    @contextlib.contextmanager
    def engine(self, *, num_tokens: int, max_model_len: int, **options: Any) -> Iterator[Engine]:
        """An engine whose cache has room for `num_tokens` tokens; no prefix cache unless asked for."""
        block_size = options.setdefault("block_size", 16)
        longest = self.loaded.config.rope.num_positions
        if max_model_len > longest:
            raise ConfigError(
                f"{self.name!r} has {longest} positions, and this takes {max_model_len}; ask for less"
            )
        options.setdefault("enable_prefix_caching", False)
        config = EngineConfig.from_options(
            self.name,
            num_blocks=-(-num_tokens // block_size),
            max_model_len=max_model_len,
            **{**self.options, **options},
        )
        engine = build_engine(config, self.loaded, None)
        try:
            yield engine
        finally:
            engine.close()


def bytes_per_token(engine: Engine) -> int:
    """What one token takes in that engine's cache, in all layers."""
    return int(engine.runner.kv_cache.spec.bytes_per_token)


def run(engine: Engine, prompts: Sequence[Sequence[int]], num_new: Sequence[int]) -> Outcome:
    """Greedy answers of exactly `num_new` tokens to prompts that are all sent at once."""
    started = time.perf_counter()
    before = engine.stats()
    requests = [
        engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True))
        for prompt, count in zip(prompts, num_new, strict=True)
    ]
    outcome = Outcome(0.0, [], [], 0)
    block_size = engine.config.block_size
    while engine.has_work:
        engine.step()
        now, stats = time.perf_counter() - started, engine.stats()
        new = stats.num_output_tokens - before.num_output_tokens - len(outcome.times_s)
        outcome.times_s += [now] * new
        running = engine.scheduler.running
        if running:
            outcome.num_running.append(len(running))
            outcome.num_held_tokens.append(sum(seq.num_computed_tokens for seq in running))
            outcome.num_reserved_tokens.append(stats.num_owned_blocks * block_size)
    outcome.seconds = time.perf_counter() - started
    outcome.num_prompt_tokens = engine.stats().num_prompt_tokens - before.num_prompt_tokens
    for request in requests:
        assert request.output is not None
        outcome.token_ids.append(list(request.output.outputs[0].token_ids))
        outcome.ttft_s.append(request.output.metrics.ttft_s or 0.0)
    return outcome


def prompt_logprobs(engine: Engine, prompt: Sequence[int]) -> list[float]:
    """The log probability of each token of a prompt after the first."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    request = engine.add_request(prompt, params)
    while engine.has_work:
        engine.step()
    assert request.output is not None
    found = request.output.prompt_logprobs
    assert found is not None
    return [
        entry[token].logprob for token, entry in zip(prompt[1:], found[1:], strict=True) if entry is not None
    ]
