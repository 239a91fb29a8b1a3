"""The model's part of small steps that are no plain decode steps, from CUDA graphs.

Launched one by one, the kernels of such a step take the host longer than the GPU. So prompts, chunks beside
decoding rows, and rows that are drawn with more than the sampling kernel has, replay a graph of the model,
from token ids to hidden states; logits and sampling follow as they do without one. A graph is captured for a
*bucket*, a number of tokens, and for as many sequences as can have them. A step of less is padded::

    sequence              0         1         2           | 3          4 (spare)
    new tokens            1         1         4           | 2          0
    keys                  203       64        4           | 0          0
    input_ids             a         b         c  d  e  f  | 0  0
    slot_mapping          .         .         .  .  .  .  | -1 -1

What is left of the tokens is one more sequence, which has no keys: its rows of attention are 0, and nothing
is written for it. All graphs read the same static memory, which takes a step in one copy; block tables are
taken by row from those that decode graphs keep there.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.cache.storage import KVCache
from octavo.engine.batch import Batch, BatchBuilder, HostBatch, prefix_sums, upload
from octavo.engine.graph import Capture
from octavo.engine.schedule import Schedule
from octavo.layers.attention_metadata import AttentionMetadata
from octavo.models.registry import CausalLM

logger = logging.getLogger("octavo")

MOST_TOKENS: Final = 1024
"""Of a step from a graph: a GPU takes as long for more as the host takes to launch them."""

LONGEST_CONTEXT: Final = 16384
"""Of a prompt in such a step, in tokens: for longer ones a launch by itself divides their keys better."""

# Few below 64: up to there all take what the weights take to be read.
_BUCKETS: Final = (16, 64, 128, 192, 256, 384, 512, 768)
_NOTHING: Final = HostBatch(*[np.zeros(0, dtype=np.int64)] * 10)


def token_buckets(most_tokens: int) -> list[int]:
    """Numbers of tokens that graphs are captured for, where no step has more than `most_tokens`."""
    most_tokens = min(most_tokens, MOST_TOKENS)
    return [*(size for size in _BUCKETS if size < most_tokens), most_tokens]


def kept_bytes(most_tokens: int, bytes_per_token: int, num_rows: int, num_columns: int) -> int:
    """What the graphs hold beside what a step takes: each its result, hidden states of that size, and all of
    them block tables, in the order of rows and in that of a step."""
    return sum(token_buckets(most_tokens)) * bytes_per_token + 2 * (num_rows + 1) * num_columns * 4


class MixedGraphs:
    """Stands in for `BatchBuilder.build` and the model in steps that it suits.

    block_tables: (num_rows + 1, columns) int32, what `batches` keeps up to date; the last row is of nobody.
    max_model_len: the longest sequence.      most_tokens: of a step.
    """

    def __init__(
        self,
        model: CausalLM,
        kv_cache: KVCache,
        batches: BatchBuilder,
        block_tables: Tensor,
        *,
        max_model_len: int,
        most_tokens: int,
        capture: Capture,
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._batches = batches
        self._block_tables = block_tables
        self._capture = capture
        self._device = block_tables.device
        num_rows, num_columns = batches.num_rows, block_tables.shape[1]
        self._longest = min(max_model_len, num_columns * kv_cache.spec.block_size)
        self.buckets = token_buckets(most_tokens)
        #: The replay of each bucket, and its result.
        self._graphs: dict[int, tuple[Callable[[], object], Tensor]] = {}
        # Ids, positions, slots; rows and two prefix sums; four vectors for samples; each rounded up by one.
        size = 3 * (self.buckets[-1] + 1) + 2 * (num_rows + 3) + 2 + 4 * (num_rows + 1)
        self._static = torch.zeros(size, dtype=torch.int64, device=self._device)
        shape = (num_rows + 1, num_columns)
        self._tables = torch.full(shape, -1, dtype=torch.int32, device=self._device)

    def prepare(self) -> bool:
        """Capture every graph, before requests come: the largest first, whose memory the others share.

        False when one cannot be had: this is of no use then, and is to be let go of.
        """
        began = time.perf_counter()
        for bucket in reversed(self.buckets):
            try:
                batch = self._placed(_NOTHING, bucket)
                step = functools.partial(
                    self._model, batch.input_ids, batch.positions, self._kv_cache.layers, batch.metadata
                )
                self._graphs[bucket] = self._capture(step)
            except Exception as error:  # out of memory above all; steps without a graph still run
                logger.warning(
                    "no CUDA graph for a step of %d tokens (%s: %s); steps that are no plain decode steps "
                    "are launched one kernel at a time", bucket, type(error).__name__, str(error),
                )  # fmt: skip
                return False
        seconds = time.perf_counter() - began
        logger.info("%d graphs of other steps captured in %.1f s", len(self._graphs), seconds)
        return True

    def suits(self, plan: Schedule) -> bool:
        """Whether there is a graph for this step."""
        if plan.num_tokens > self.buckets[-1]:
            return False
        return all(
            num_new == 1 or seq.num_computed_tokens + num_new <= LONGEST_CONTEXT
            for seq, num_new in zip(plan.sequences, plan.num_new_tokens, strict=True)
        )

    def build(self, plan: Schedule) -> Batch:
        """The tensors of a step that this suits, in static memory: good until the next call.

        Nothing waits for a GPU.
        """
        host = self._batches.on_host(plan)
        self._batches.update(self._block_tables)
        return self._placed(host, next(size for size in self.buckets if size >= len(host.input_ids)))

    def replay(self, batch: Batch) -> Tensor:
        """Hidden states of what `build` made last, (its bucket, hidden), until the next replay of any graph.

        Those of the padding are of no use.
        """
        replay, result = self._graphs[len(batch.input_ids)]
        replay()
        return result

    def _placed(self, host: HostBatch, bucket: int) -> Batch:
        num_rows = self._batches.num_rows
        num_sequences = min(num_rows + 1, bucket)  # one of them for the padding, if there is some
        num_new = _padded(host.num_new, num_sequences, 0)
        if num_spare := bucket - len(host.input_ids):
            num_new[len(host.num_new)] = num_spare
        lengths = _padded(host.lengths, num_sequences, 0)
        parts = upload(
            [
                # As far as a graph reads, of the same sizes in each step of a bucket: in the same places.
                _padded(host.input_ids, bucket, 0),
                _padded(host.positions, bucket, 0),
                _padded(host.slots, bucket, -1),
                _padded(host.rows, num_sequences, num_rows),
                prefix_sums(num_new).astype(np.int32),
                prefix_sums(lengths).astype(np.int32),
                host.logits_rows,
                host.sampled_rows,
                host.unknown,
                host.unknown_rows,
            ],
            self._device,
            self._static,
        )
        tables = self._tables[:num_sequences]
        torch.index_select(self._block_tables, 0, parts[3], out=tables)
        return Batch(
            input_ids=parts[0],
            positions=parts[1],
            metadata=AttentionMetadata(
                slot_mapping=parts[2],
                cu_seqlens_q=parts[4],
                cu_seqlens_k=parts[5],
                block_table=tables,
                max_seqlen_q=bucket,
                max_seqlen_k=self._longest,
            ),
            logits_rows=parts[6],
            sampled_rows=parts[7],
            unknown=parts[8],
            unknown_rows=parts[9],
        )


def _padded(numbers: npt.NDArray[np.int64], size: int, value: int) -> npt.NDArray[np.int64]:
    padded = np.full(size, value, dtype=np.int64)
    padded[: len(numbers)] = numbers
    return padded
