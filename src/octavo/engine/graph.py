"""Decode steps from CUDA graphs: one replay instead of hundreds of launches.

A graph holds everything of a decode step: what the rows need to know of themselves, model, logits, sampling,
and the new last token of each row. It is captured for a *bucket*, a number of rows, and a step of fewer rows
is padded: spare entries point at a row of their own that has no blocks, so that nothing is written for them.
All graphs read and write the same static tensors; the host writes to these only what changed: blocks that
rows were given, and, when other sequences run than in the step before, which rows these are::

    entry           0     1     2   | 3 (padding, bucket of 4)
    rows            5     0     2   | R              last_token_ids, block_tables: by row
    positions      17   203    64   | 0              counted on by the graph itself
    seeds, temperature, ...                          what each entry's token is drawn with

Buckets of an octet and more have one more graph, for steps whose sequences begin alike
(`shared_prefixes.py`). It is captured with filters alone: a row without any is drawn the same. Its entries
stand in an order of their own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.cache.storage import KVCache
from octavo.engine.batch import BatchBuilder
from octavo.engine.draw import Read
from octavo.engine.request import Sequence
from octavo.engine.sampler import NO_TOKEN, PendingSample, SamplerOutput
from octavo.engine.sampling_plan import kernel_row
from octavo.engine.schedule import Schedule
from octavo.engine.shared_prefixes import Sharing
from octavo.kernels import sampling
from octavo.kernels.decode_rows import finish_decode, prepare_decode
from octavo.kernels.shared_prefixes import OCTET, find_shared_prefixes
from octavo.layers.attention_metadata import AttentionMetadata
from octavo.models.registry import CausalLM
from octavo.sampling_params import SamplingParams

logger = logging.getLogger("octavo")

BAD_LOGITS: Final = (
    "the model's logits hold NaN or an infinity, or the options leave no token to choose; "
    "enforce_eager=True tells which"
)

# Both are int64 matrices of one column per entry; the second is read as 32-bit numbers, two to a column.
_ROWS, _POSITIONS, _NUM_DRAWN, _SEEDS, _TOKEN_IDS = range(5)
_NUM_INTS: Final = 5
_TEMPERATURE, _TOP_P, _MIN_P, _TOP_K = range(4)


class Form(NamedTuple):
    """What a graph is captured for."""

    bucket: int
    with_filters: bool
    shares: bool


class Capture(Protocol):
    """Makes a function that can be repeated without Python out of one that works on static tensors."""

    def __call__(
        self, step: Callable[[], Tensor], *, is_ready: bool = False
    ) -> tuple[Callable[[], object], Tensor]:
        """(what repeats the step, the tensor that holds its result each time). May run it before that, unless
        it `is_ready`: whatever it launches was launched, with these shapes."""
        ...


class CudaCapture:
    """CUDA graphs of one memory pool: they never run at the same time, so they share their temporaries.

    And of one stream, since cuBLAS keeps a workspace for each that it was ever called on.
    """

    def __init__(self, device: torch.device) -> None:
        cuda: Any = torch.cuda
        self._device = device
        self._stream = cuda.Stream(device)
        self._pool: Any = None

    def __call__(
        self, step: Callable[[], Tensor], *, is_ready: bool = False
    ) -> tuple[Callable[[], object], Tensor]:
        cuda: Any = torch.cuda
        if self._pool is None:
            # On the stream of the captures, for cuBLAS's workspace; what else that took goes back, as no
            # other stream could have it.
            stream, current = self._stream, cuda.current_stream(self._device)
            stream.wait_stream(current)
            with cuda.stream(stream):
                step()
            current.wait_stream(stream)
            cuda.synchronize(self._device)
            cuda.empty_cache()
        elif not is_ready:
            step()  # loads what a first call loads, in memory that steps without a graph take later
        graph = cuda.CUDAGraph()
        # `cuda.graph` would wait for the GPU, and give back and ask for memory, before every capture.
        with cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool)
            try:
                result = step()
            finally:
                graph.capture_end()
        self._pool = self._pool or graph.pool()
        return graph.replay, result


def bucket_sizes(most: int) -> list[int]:
    """Numbers of rows that graphs are captured for: 1, 2, 4, 8, then half-way between powers of two, too."""
    sizes = {most}
    size = 1
    while size < most:
        sizes.add(size)
        if size >= 16 and size * 3 // 2 < most:
            sizes.add(size * 3 // 2)
        size *= 2
    return sorted(sizes)


def is_plain(params: SamplingParams) -> bool:
    """Whether a token under these options is drawn by `octavo.kernels.sample` alone, from raw logits."""
    return (
        params.logprobs is None
        and params.allowed_token_ids is None
        and params.min_tokens == 0
        and not params.logit_bias
        and params.repetition_penalty == 1
        and params.presence_penalty == 0
        and params.frequency_penalty == 0
        and params.structured_output is None
    )


class DecodeGraphs:
    """Runs the decode steps whose rows are all plain; says so when a step is none.

    `last_token_ids` (num_rows + 1,) int64 is shared with the runner, which keeps it for steps of other kinds,
    too; its last entry belongs to the padding. `block_tables` (num_rows + 1, columns) int32 has them by row.
    `sharing`: when steps share what their sequences have in
    common; None = never. `must_share`: somebody asked for it, and is warned where it fails.
    """

    def __init__(
        self,
        model: CausalLM,
        kv_cache: KVCache,
        batches: BatchBuilder,
        last_token_ids: Tensor,
        *,
        vocab_size: int,
        max_model_len: int,
        capture: Capture,
        sharing: Sharing | None,
        must_share: bool,
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._batches = batches
        self._last_token_ids = last_token_ids
        self._vocab_size = vocab_size
        self._capture = capture
        self._sharing = sharing
        self._must_share = must_share
        self._device = device = last_token_ids.device
        self._num_rows = num_rows = batches.num_rows
        self._block_size = kv_cache.spec.block_size
        num_columns = batches.track_changes()
        self._longest = min(max_model_len, num_columns * self._block_size)
        self.bucket_sizes = bucket_sizes(num_rows)
        can_share = sharing is not None and sharing.can_pay(num_rows, self._longest)
        self.shared_bucket_sizes = [size for size in self.bucket_sizes if size >= OCTET] if can_share else []
        #: The replay of each form, and its result.
        self._graphs: dict[Form, tuple[Callable[[], object], Tensor]] = {}

        # Static tensors. Every part begins at a multiple of 16 bytes: Triton compiles apart for others.
        width = -(-num_rows // 4) * 4
        self._state = torch.zeros((_NUM_INTS + 2, width), dtype=torch.int64, device=device)
        self.block_tables = torch.full((num_rows + 1, num_columns), -1, dtype=torch.int32, device=device)
        self._cu_seqlens_q = torch.arange(num_rows + 1, dtype=torch.int32, device=device)

        # What the host knows: of each row, filled when a sequence first stands there, and of the last step.
        # Sequences go by their ids, since to hold them is to hold what finished requests leave behind.
        self._owners = [-1] * num_rows
        self._ints = np.zeros((2, num_rows), dtype=np.int64)  # seed, prompt length
        self._options = np.zeros((4, num_rows), dtype=np.float32)
        self._top_k = np.zeros(num_rows, dtype=np.int32)
        self._plain = np.zeros(num_rows, dtype=bool)
        self._filters = np.zeros(num_rows, dtype=bool)
        self._seq_ids: list[int] = []
        self._are_plain = False
        self._have_filters = False
        self._order: npt.NDArray[np.int64] | None = None
        self._is_placed = False

    def forget(self) -> None:
        """A step of another kind was launched: lengths have moved on without the static tensors, and a
        sequence that was preempted may have come back to another row."""
        self._is_placed = False
        self._seq_ids = []

    def prepare(self) -> bool:
        """Capture every graph, before requests come: the largest first, whose memory the others share.

        False when an ordinary one cannot be had. Then none is kept, and this is of no use any more: with a
        part of them some steps would wait for what others do not, and what they hold is memory that steps may
        need. When one of those that share cannot be had, the ordinary ones serve every step.
        """
        began = time.perf_counter()
        ordinary = [
            Form(bucket, with_filters, False)
            for bucket in reversed(self.bucket_sizes)
            for with_filters in (True, False)
        ]
        if not self._capture_all(ordinary, logging.WARNING, "steps are launched one kernel at a time"):
            return False
        # After the ordinary ones, whatever their size, so that they cost those nothing: by then the pool is
        # as large as the largest ordinary step needs.
        shared = [Form(bucket, True, True) for bucket in reversed(self.shared_bucket_sizes)]
        level = logging.WARNING if self._must_share else logging.INFO
        if not self._capture_all(shared, level, "cascade_attention has no effect"):
            self.shared_bucket_sizes = []
        seconds = time.perf_counter() - began
        logger.info("%d graphs of decode steps captured in %.1f s", len(self._graphs), seconds)
        return True

    def _capture_all(self, forms: list[Form], level: int, otherwise: str) -> bool:
        """Capture each of these, or keep none of them and log, at that level, what is `otherwise`."""
        for form in forms:
            try:
                self._graphs[form] = self._captured(form)
            except Exception as error:  # out of memory above all; steps without a graph still run
                for made in forms:
                    self._graphs.pop(made, None)
                logger.log(
                    level, "no CUDA graph for %d rows%s (%s: %s); %s",
                    form.bucket, " that share keys" if form.shares else "", type(error).__name__,
                    str(error), otherwise,  # the error's traceback holds what was made
                )  # fmt: skip
                return False
        return True

    def launch(self, plan: Schedule) -> PendingSample | None:
        """Launch a decode step of plain rows; None when `plan` is another kind. After `prepare`.

        What it leaves to collect is drawn by then, or being drawn; see `Sampler.launch`.
        """
        sequences = plan.sequences
        if plan.forking or plan.num_decode_rows != plan.num_tokens:
            return None
        if not self._is_same(sequences):
            self._look_at(sequences)
        if not self._are_plain:
            return None
        num = len(sequences)
        self._upload_changes(sequences)
        if not self._is_placed:
            self._place(sequences)
        replay, result = self._graphs[self._form(num)]
        replay()
        token_ids = result[:num]
        reading, order = Read([token_ids.clone() if token_ids.is_cpu else token_ids]), self._order
        return PendingSample(token_ids, lambda: _output(reading, order))

    # The host's side

    def _is_same(self, sequences: list[Sequence]) -> bool:
        return [seq.seq_id for seq in sequences] == self._seq_ids

    def _look_at(self, sequences: list[Sequence]) -> None:
        owners = self._owners
        for seq in sequences:
            if owners[seq.row] != seq.seq_id:
                self._fill(seq)
        rows = [seq.row for seq in sequences]
        self._seq_ids = [seq.seq_id for seq in sequences]
        self._are_plain = bool(self._plain[rows].all())
        self._have_filters = bool(self._filters[rows].any())
        self._is_placed = False

    def _fill(self, seq: Sequence) -> None:
        row = seq.row
        self._owners[row] = seq.seq_id
        self._plain[row] = is_plain(seq.params)
        options = kernel_row(seq, self._vocab_size)
        self._ints[:, row] = options.seed, seq.num_prompt_tokens
        self._options[:3, row] = options.temperature, options.top_p, options.min_p
        self._top_k[row] = options.top_k
        self._filters[row] = options.has_filters

    def _form(self, num_rows: int) -> Form:
        shares = self._order is not None
        sizes = self.shared_bucket_sizes if shares else self.bucket_sizes
        bucket = next(size for size in sizes if size >= num_rows)
        return Form(bucket, self._have_filters or shares, shares)

    def _place(self, sequences: list[Sequence]) -> None:
        """Say which rows the entries are and where these stand, in one copy."""
        num, width = len(sequences), self._state.shape[1]
        rows = np.array([seq.row for seq in sequences], dtype=np.int64)
        if self._sharing is not None and self.shared_bucket_sizes:
            self._order = self._sharing.order(self._batches.table, rows)
        if self._order is not None:
            rows, sequences = rows[self._order], [sequences[i] for i in self._order]
        positions = np.array([seq.num_computed_tokens for seq in sequences], dtype=np.int64)
        # New each time, like the buffers of `batch.py`: torch keeps it until the copy is done.
        buffer = torch.zeros(
            (_NUM_INTS + 2, width), dtype=torch.int64, device="cpu", pin_memory=self._device.type == "cuda"
        )
        ints = buffer.numpy()
        floats = ints[_NUM_INTS:].view(np.float32).reshape(4, width)
        ints[_ROWS, num:] = self._num_rows
        ints[_ROWS, :num] = rows
        ints[_POSITIONS, :num] = positions
        ints[_NUM_DRAWN, :num] = positions + 1 - self._ints[1, rows]
        ints[_SEEDS, :num] = self._ints[0, rows]
        # The last token of a prompt, or of a sequence that was preempted, was never drawn here.
        ints[_TOKEN_IDS, :num] = [-1 if seq.num_pending else seq.token_ids[-1] for seq in sequences]
        floats[:3, :num] = self._options[:3, rows]
        floats[_TOP_K].view(np.int32)[:num] = self._top_k[rows]
        self._state.copy_(buffer, non_blocking=True)
        entries, token_ids = self._state[_ROWS, :num], self._state[_TOKEN_IDS, :num]
        drawn = self._last_token_ids.index_select(0, entries)
        self._last_token_ids.index_copy_(0, entries, torch.where(token_ids < 0, drawn, token_ids))
        self._is_placed = True

    def _upload_changes(self, sequences: list[Sequence]) -> None:
        self._batches.sync_rows(sequences)
        self._batches.update(self.block_tables)

    # The device's side

    def _captured(self, form: Form) -> tuple[Callable[[], object], Tensor]:
        # Capturing may run the step: on rows of nobody.
        self._state[_ROWS] = self._num_rows
        self._state[_POSITIONS] = 0
        self._is_placed = False
        # The model's products, and torch's own kernels, are of the bucket, whatever the form. What a form has
        # to itself are kernels that warm-up launched, and torch's of one kind for all buckets.
        is_ready = form.bucket in {made.bucket for made in self._graphs} and any(
            form[1:] == made[1:] for made in self._graphs
        )
        return self._capture(lambda: self._step(form), is_ready=is_ready)

    def _step(self, form: Form) -> Tensor:
        """One decode step of the entries below the bucket, on the static tensors. Returns the drawn ids."""
        bucket, with_filters, shares = form
        rows, positions, num_drawn, seeds = self._state[:4, :bucket].unbind()
        width = self._state.shape[1]
        floats = self._state[_NUM_INTS:].view(torch.float32).view(4, width)[:, :bucket]
        top_k = self._state[_NUM_INTS:].view(torch.int32).view(4, width)[_TOP_K, :bucket]
        input_ids, slots, cu_seqlens_k, block_table = prepare_decode(
            rows, positions, self._last_token_ids, self.block_tables, self._block_size
        )
        shared = None
        if shares:
            assert self._sharing is not None
            least = self._sharing.least_tokens
            shared = find_shared_prefixes(block_table, cu_seqlens_k, self._block_size, least)
        metadata = AttentionMetadata(
            slot_mapping=slots,
            cu_seqlens_q=self._cu_seqlens_q[: bucket + 1],
            cu_seqlens_k=cu_seqlens_k,
            block_table=block_table,
            max_seqlen_q=1,
            max_seqlen_k=self._longest,
            shared=shared,
        )
        hidden = self._model(input_ids, positions, self._kv_cache.layers, metadata)
        token_ids = sampling.sample(
            self._model.compute_logits(hidden),
            temperature=floats[_TEMPERATURE],
            top_k=top_k if with_filters else None,
            top_p=floats[_TOP_P] if with_filters else None,
            min_p=floats[_MIN_P] if with_filters else None,
            seeds=seeds,
            positions=num_drawn,
        )
        finish_decode(rows, slots, token_ids, self._last_token_ids, positions, num_drawn)
        return token_ids


def _output(reading: Read, order: npt.NDArray[np.int64] | None) -> SamplerOutput:
    """What was drawn for each sequence; `order`: which of them each entry was, if not one after another."""
    (ids,) = reading.wait()
    if order is not None:
        ids = torch.empty_like(ids).index_copy_(0, torch.from_numpy(order), ids)
    token_ids: list[int] = ids.tolist()
    errors = {}
    if NO_TOKEN in token_ids:
        errors = {row: BAD_LOGITS for row, token_id in enumerate(token_ids) if token_id == NO_TOKEN}
    return SamplerOutput(token_ids, [None] * len(token_ids), errors)
