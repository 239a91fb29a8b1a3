"""The masks of grammars, laid over the logits of a batch."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.engine.grammar import fill_masks
from octavo.engine.request import Sequence

BITS = torch.tensor([1 << i for i in range(8)], dtype=torch.uint8, device="cpu")


class GrammarMasks:
    """Masks for the sequences of one batch that have a grammar; `rows` are theirs.

    On a GPU the masks are worked out while it computes the logits, and go there in one copy from pinned
    memory that nothing waits for.
    """

    def __init__(self, sequences: list[Sequence], vocab_size: int, device: torch.device) -> None:
        having = [(row, seq, seq.grammar) for row, seq in enumerate(sequences) if seq.grammar is not None]
        self.rows = [row for row, _, _ in having]
        self._sequences = [seq for _, seq, _ in having]
        self._grammars = [grammar for _, _, grammar in having]
        self._vocab_size = vocab_size
        self._device = device
        self._row_ids: Tensor | None = None
        self._bits: Tensor | None = None

    def apply(self, logits: Tensor) -> dict[int, str]:
        """Set the logits of tokens that no grammar allows to -inf, in place.

        Args:
            logits: (R, vocab_size) float32.

        Returns why rows cannot go on, by row; those are left as they are.
        """
        shape = (len(self.rows), self._grammars[0].num_mask_words)
        masks = torch.empty(shape, dtype=torch.int32, device="cpu", pin_memory=self._device.type == "cuda")
        words: npt.NDArray[np.int32] = masks.numpy()
        fill_masks(self._grammars, words)
        errors: dict[int, str] = {}
        for place, (row, seq, grammar) in enumerate(
            zip(self.rows, self._sequences, self._grammars, strict=True)
        ):
            if (error := grammar.error) is not None:
                errors[row] = f"the options ask for too much: structured_output: {error}"
                words[place] = -1
            elif seq.num_tokens - seq.num_prompt_tokens < seq.params.min_tokens:
                _hold(words[place], seq.stop_ids)
        if self._device.type == "cpu":
            self._cover_row_by_row(logits, words)
        else:
            self._cover_together(logits, masks)
        return errors

    def _cover_row_by_row(self, logits: Tensor, masks: npt.NDArray[np.int32]) -> None:
        """For a CPU: a row at a time stays in its caches."""
        for place, row in enumerate(self.rows):
            logits[row].masked_fill_(forbidden_tokens(masks[place], self._vocab_size), -math.inf)

    def _cover_together(self, logits: Tensor, masks: Tensor) -> None:
        """For a GPU: a few kernels, whatever the number of rows."""
        if self._row_ids is None or self._bits is None:
            self._row_ids = self._uploaded(torch.tensor(self.rows, device="cpu"))
            self._bits = self._uploaded(BITS)
        packed = masks.to(self._device, non_blocking=True)
        forbidden = forbidden_in_rows(packed, self._bits, self._vocab_size)
        if len(self.rows) == len(logits):
            logits.masked_fill_(forbidden, -math.inf)
        else:
            logits[self._row_ids] = logits[self._row_ids].masked_fill_(forbidden, -math.inf)

    def _uploaded(self, values: Tensor) -> Tensor:
        """On the device; from pinned memory, so that nothing waits."""
        if self._device.type == "cuda":
            values = values.pin_memory()
        return values.to(self._device, non_blocking=True)


def forbidden_tokens(mask: npt.NDArray[np.int32], vocab_size: int) -> Tensor:
    """(vocab_size,) bool on the CPU: which tokens the mask of one row leaves out."""
    bits = np.unpackbits(~mask.view(np.uint8), count=vocab_size, bitorder="little")
    return torch.from_numpy(bits).view(torch.bool)


def forbidden_in_rows(masks: Tensor, bits: Tensor, vocab_size: int) -> Tensor:
    """(n, vocab_size) bool: the same for n masks at once, on their device; `bits` are `BITS` there."""
    packed = masks.view(torch.uint8)[:, :, None]
    return (packed & bits == 0).flatten(1)[:, :vocab_size]


def _hold(mask: npt.NDArray[np.int32], stop_ids: frozenset[int]) -> None:
    """Leave out the tokens that end a sequence, unless the grammar allows nothing else."""
    kept = mask.copy()
    bits = kept.view(np.uint8)
    for token_id in stop_ids:
        if token_id < 8 * len(bits):
            bits[token_id >> 3] &= ~np.uint8(1 << (token_id & 7))
    if kept.any():
        mask[:] = kept
