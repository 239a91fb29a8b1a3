"""Counts of an engine at one moment. No torch: the server's front process reads them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineStats:
    """Counts at one moment; tokens and events are totals since the engine started.

    `num_prompt_tokens` counts prompt tokens computed (again after a preemption), `num_hit_tokens` those that
    the prefix cache supplied, `num_output_tokens` tokens sampled.
    """

    num_waiting: int
    num_running: int
    num_free_blocks: int
    num_cached_blocks: int
    num_owned_blocks: int
    num_steps: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_hit_tokens: int
    num_preemptions: int
    num_evictions: int
