"""Runs one scheduled step on the device: copy blocks, build the batch, model, logits, sample."""

from __future__ import annotations

import torch

from octavo.cache.storage import KVCache
from octavo.engine.batch import BatchBuilder
from octavo.engine.sampler import Sampler, SamplerOutput
from octavo.engine.schedule import Schedule
from octavo.kernels.cpu import threads
from octavo.layers.attention_metadata import AttentionMetadata
from octavo.models.registry import CausalLM

PROMPT_LOGITS_ROWS = 64
"""Prompt positions whose vocabulary-sized logits are held at once."""


class ModelRunner:
    """The model, its KV cache and the sampler. Knows nothing of policy; the schedule says what to do."""

    def __init__(self, model: CausalLM, kv_cache: KVCache, batches: BatchBuilder, sampler: Sampler) -> None:
        # torch's threads and ours would fight over the cores, so torch gets them only for its own products.
        self.torch_threads = threads.num_threads() if model.weights_form == "dense" else 1
        self.model = model
        self.kv_cache = kv_cache
        self.batches = batches
        self.sampler = sampler

    def warm_up(self) -> None:
        """Compile or load every kernel a step runs, so that no request waits for it.

        One token, written to the first block, which nobody owns yet.
        """
        zero = torch.zeros(1, dtype=torch.int64)
        lengths = torch.tensor([0, 1], dtype=torch.int32)
        metadata = AttentionMetadata(
            slot_mapping=zero,
            cu_seqlens_q=lengths,
            cu_seqlens_k=lengths,
            block_table=torch.zeros((1, 1), dtype=torch.int32),
            max_seqlen_q=1,
            max_seqlen_k=1,
        )
        with torch.inference_mode(), threads.torch_threads(self.torch_threads):
            self.model.compute_logits(self.model(zero, zero, self.kv_cache.layers, metadata))

    def execute(self, plan: Schedule) -> SamplerOutput:
        """Compute `plan` and draw one token per entry of `plan.sampled`; fills prompt log probabilities."""
        with torch.inference_mode(), threads.torch_threads(self.torch_threads):
            return self._execute(plan)

    def _execute(self, plan: Schedule) -> SamplerOutput:
        if plan.copies:
            self.kv_cache.copy_blocks(plan.copies)
        batch = self.batches.build(plan)
        hidden = self.model(batch.input_ids, batch.positions, self.kv_cache.layers, batch.metadata)
        self._collect_prompt_logprobs(plan, hidden)
        if not plan.sampled:
            return SamplerOutput(token_ids=[], logprobs=[], errors={})
        logits = self.model.compute_logits(hidden[batch.logits_rows])
        return self.sampler.sample(logits, plan.sampled)

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
                logits = self.model.compute_logits(hidden[row + first - start : row + last - start])
                collected += self.sampler.prompt_logprobs(logits, seq.token_ids[first + 1 : last + 1], k)
