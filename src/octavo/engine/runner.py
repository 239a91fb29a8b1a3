"""Runs one scheduled step on the device: copy blocks, build the batch, model, logits, sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from octavo.cache.storage import KVCache
from octavo.engine.batch import BatchBuilder
from octavo.engine.device_profile import DeviceProfile
from octavo.engine.graph import Capture, DecodeGraphs
from octavo.engine.mixed_graphs import MixedGraphs
from octavo.engine.profile import Span, StepProfile, no_span
from octavo.engine.sampler import NOTHING_DRAWN, Sampler, SamplerOutput
from octavo.engine.schedule import Schedule
from octavo.engine.shared_prefixes import Sharing
from octavo.engine.warm_up import SAMPLING, Shape, empty_step, sequences, with_layers
from octavo.kernels.cpu import threads
from octavo.models.registry import CausalLM

PROMPT_LOGITS_ROWS = 64
"""Prompt positions whose vocabulary-sized logits are held at once."""


class PendingStep(Protocol):
    """A step that was launched."""

    def collect(self) -> SamplerOutput:
        """Wait for the step and read what it drew; to be called once."""
        ...


class ModelRunner:
    """The model, its KV cache and the sampler. Knows nothing of policy; the schedule says what to do."""

    def __init__(self, model: CausalLM, kv_cache: KVCache, batches: BatchBuilder, sampler: Sampler) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.batches = batches
        self.sampler = sampler
        self.device = kv_cache.device
        # Of each row, so that the next step can be launched before the host has read them; one more for those
        # that only fill up a step.
        self._last_token_ids = torch.zeros(batches.num_rows + 1, dtype=torch.int64, device=self.device)
        self._graphs: DecodeGraphs | None = None
        self._mixed: MixedGraphs | None = None
        self._span: Span = no_span
        self._device_profile: DeviceProfile | None = None
        self._torch_threads = None
        if self.device.type == "cpu":
            # torch's threads and ours would fight over the cores: torch gets them only for its own products.
            self._torch_threads = threads.num_threads() if model.weights_form == "dense" else 1

    def warm_up(self, shapes: Iterable[Shape], layers: list[int] | None = None) -> None:
        """Compile or load every kernel that steps like these run, so that no request waits for it.

        They write to the first block: nobody may own it yet. `layers`: run those alone.
        """
        model, caches = self.model, self.kv_cache.layers
        if layers is not None:
            model, caches = with_layers(model, layers), [caches[layer] for layer in layers]
        sampled: set[int] = set()
        with self._running():
            for shape in shapes:
                batch = empty_step(shape, self.kv_cache.spec.block_size, self.device)
                hidden = model(batch.input_ids, batch.positions, caches, batch.metadata)
                logits = model.compute_logits(hidden[batch.logits_rows])
                # Sampling compiles nothing on a CPU, and nothing new for as many rows.
                if self.device.type == "cuda" and len(logits) not in sampled:
                    sampled.add(len(logits))
                    for params in SAMPLING:
                        self.sampler.sample(logits, sequences(len(logits), params))
            # What takes the drawn tokens to the next step.
            row = torch.zeros(1, dtype=torch.int64, device=self.device)
            last = self._last_token_ids.index_select(0, row)
            self._last_token_ids.index_copy_(0, row, last.clamp_min(0))

    def use_graphs(
        self,
        max_model_len: int,
        capture: Capture,
        sharing: Sharing | None = None,
        *,
        must_share: bool = False,
    ) -> None:
        """Run decode steps from graphs that `capture` makes, all of them now; from none where it cannot make
        each of them, and then nothing is left of those it made. Those for `sharing` may fail by themselves:
        a warning says so if they `must_share`, else a line of the log.
        """
        graphs = DecodeGraphs(
            self.model,
            self.kv_cache,
            self.batches,
            self._last_token_ids,
            vocab_size=self.sampler.vocab_size,
            max_model_len=max_model_len,
            capture=capture,
            sharing=sharing,
            must_share=must_share,
        )
        with self._running():
            if graphs.prepare():
                self._graphs = graphs
                return
        del graphs, capture  # with their static tensors and their pool
        self._give_memory_back()

    def use_mixed_graphs(self, max_model_len: int, most_tokens: int, capture: Capture) -> None:
        """After `use_graphs`, where it made some: have the model in other steps of few tokens replayed, too.

        most_tokens: of the engine's largest step. From none where not all can be made, as there.
        """
        if self._graphs is None:
            return
        mixed = MixedGraphs(
            self.model,
            self.kv_cache,
            self.batches,
            self._graphs.block_tables,
            max_model_len=max_model_len,
            most_tokens=most_tokens,
            capture=capture,
        )
        with self._running():
            if mixed.prepare():
                self._mixed = mixed
                return
        del mixed  # what they took of the pool stays there: other graphs use that
        self._give_memory_back()

    def profile(self, profile: StepProfile) -> None:
        """From now on tell `profile` where a launch spends its time and, on a GPU, how long each step ran."""
        self._span = profile.span
        if self.device.type == "cuda":
            cuda: Any = torch.cuda
            with cuda.device(self.device):
                self._device_profile = DeviceProfile(profile, lambda: cuda.Event(enable_timing=True))

    def close(self) -> None:
        """Let go of model and cache; a GPU's memory goes back to the system. Nothing can run afterwards."""
        del self.model, self.kv_cache, self.sampler, self._graphs, self._mixed, self._last_token_ids
        self._give_memory_back()

    def _give_memory_back(self) -> None:
        """What torch keeps of a GPU for later, of whatever stream, goes back to the system."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def launch(self, plan: Schedule) -> PendingStep:
        """Have `plan` computed and one token drawn per entry of `plan.sampled`; fills prompt log
        probabilities.

        A GPU is still at it when this returns, unless there are prompt log probabilities to read. The next
        step may be launched before this one is collected.
        """
        with self._running():
            if self._device_profile is not None:
                return self._device_profile.around(lambda: self._launch(plan))
            return self._launch(plan)

    @contextmanager
    def _running(self) -> Iterator[None]:
        with torch.inference_mode():
            if self._torch_threads is None:
                with torch.cuda.device(self.device):
                    yield
            else:
                with threads.torch_threads(self._torch_threads):
                    yield

    def _launch(self, plan: Schedule) -> PendingStep:
        if plan.copies:
            self.kv_cache.copy_blocks(plan.copies)
        if self._graphs is not None:
            with self._span("graph"):
                drawn = self._graphs.launch(plan)
            if drawn is not None:
                return drawn
            self._graphs.forget()
        mixed = self._mixed if self._mixed is not None and self._mixed.suits(plan) else None
        with self._span("build and upload"):
            batch = (mixed or self.batches).build(plan)
            if len(batch.unknown):
                known_by_now = self._last_token_ids.index_select(0, batch.unknown_rows)
                batch.input_ids.index_copy_(0, batch.unknown, known_by_now)
        with self._span("model"):
            if mixed is not None:
                hidden = mixed.replay(batch)
            else:
                hidden = self.model(batch.input_ids, batch.positions, self.kv_cache.layers, batch.metadata)
        self._collect_prompt_logprobs(plan, hidden)
        if not plan.sampled:
            return NOTHING_DRAWN
        with self._span("logits and sampling"):
            logits = self.model.compute_logits(hidden[batch.logits_rows])
            drawn = self.sampler.launch(logits, plan.sampled)
            if len(batch.sampled_rows):
                # A row in error has no token, and may be computed on before that is known.
                self._last_token_ids.index_copy_(0, batch.sampled_rows, drawn.token_ids.clamp_min(0))
        return drawn

    def _collect_prompt_logprobs(self, plan: Schedule, hidden: torch.Tensor) -> None:
        first_row = 0
        for seq, num_new in zip(plan.sequences, plan.num_new_tokens, strict=True):
            row, first_row = first_row, first_row + num_new
            k = seq.params.prompt_logprobs
            if k is None or seq.index != 0:
                continue
            request = seq.request
            if request.prompt_logprobs is None:
                request.prompt_logprobs = [None]  # nothing stands before the first token
            collected = request.prompt_logprobs
            # The logits at position p are about token p + 1.
            start = seq.num_computed_tokens
            end = min(start + num_new, seq.num_prompt_tokens - 1)
            for first in range(max(start, len(collected) - 1), end, PROMPT_LOGITS_ROWS):
                last = min(first + PROMPT_LOGITS_ROWS, end)
                # Of their own: amid a step, rows may begin elsewhere than kernels were compiled for.
                rows = hidden[row + first - start : row + last - start].clone()
                logits = self.model.compute_logits(rows)
                collected += self.sampler.prompt_logprobs(logits, seq.token_ids[first + 1 : last + 1], k)
