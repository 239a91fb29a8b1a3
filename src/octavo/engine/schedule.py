"""What one step will do, decided before any tensor is touched. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.engine.request import Sequence


@dataclass(slots=True)
class Schedule:
    """The work of one step.

    Row i computes `num_new_tokens[i]` tokens of `sequences[i]`, those from its `num_computed_tokens` on.
    Decode rows come first, prompt chunks after them.

    Sample j draws one token for `sampled[j]` from the logits of the last token of row `sampled_rows[j]`.
    Usually that is the row's own sequence; the last chunk of an n > 1 prompt is drawn from n times, and its
    sequence stands in `forking`.

    `copies` are (source, destination) block ids to copy before anything is written.
    """

    sequences: list[Sequence] = field(default_factory=list)
    num_new_tokens: list[int] = field(default_factory=list)
    sampled: list[Sequence] = field(default_factory=list)
    sampled_rows: list[int] = field(default_factory=list)
    forking: list[Sequence] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    num_tokens: int = 0
    num_decode_rows: int = 0
    num_hit_tokens: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of prompts among `num_tokens`; to be asked before the scheduler advances."""
        return sum(
            min(num_new, max(0, seq.num_prompt_tokens - seq.num_computed_tokens))
            for seq, num_new in zip(self.sequences, self.num_new_tokens, strict=True)
        )
