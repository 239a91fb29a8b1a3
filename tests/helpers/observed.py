"""The real scheduler and cache under the real observer, without a model."""

from __future__ import annotations

from helpers.engine import ScriptedEngine

from octavo.engine.schedule import Schedule
from octavo.engine.stats import EngineStats
from octavo.serve.observer import Observer


class Observed(ScriptedEngine):
    """A scripted engine with the totals that the real one keeps, and an observer with a fixed clock."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_prompt = self.num_hit = self.num_output = 0
        self._run, self.runner.run = self.runner.run, self._count  # type: ignore[method-assign]
        self.observer = Observer(self, clock=lambda: 12.5)  # type: ignore[arg-type]

    def stats(self) -> EngineStats:
        return EngineStats(
            num_waiting=len(self.scheduler.waiting),
            num_running=len(self.scheduler.running),
            num_free_blocks=self.cache.num_free,
            num_cached_blocks=self.cache.num_cached,
            num_owned_blocks=self.cache.num_owned,
            num_steps=len(self.plans),
            num_prompt_tokens=self.num_prompt,
            num_output_tokens=self.num_output,
            num_hit_tokens=self.num_hit,
            num_preemptions=self.scheduler.num_preemptions,
            num_evictions=self.cache.num_evictions,
        )

    def step(self) -> Schedule | None:
        plan = super().step()
        if plan is not None:
            self.observer.note_step(self.stats(), 0.25, plan.num_tokens)
        return plan

    def _count(self, plan: Schedule) -> list[int]:
        self.num_prompt += plan.num_prompt_tokens
        self.num_hit += plan.num_hit_tokens
        self.num_output += len(plan.sampled)
        return self._run(plan)


def busy_engine(num_requests: int = 1000, num_blocks: int = 50_000) -> Observed:
    """So many requests that began to decode, with prompts of 700 tokens in blocks of 16.

    Each begins with one of five prefixes of 336 tokens. As they grow they need more blocks than there are.
    """
    engine = Observed(
        num_blocks=num_blocks,
        block_size=16,
        max_num_seqs=num_requests,
        max_num_batched_tokens=1 << 20,
        max_model_len=4096,
        max_prefill_share=1.0,
    )
    engine._run = lambda plan: [1] * len(plan.sampled)  # type: ignore[method-assign]
    engine.scheduler.check = lambda: None  # type: ignore[method-assign]
    for i in range(5):
        engine.add([i] * 337, max_tokens=1)
    engine.drain()
    for i in range(num_requests):
        engine.add([i % 5] * 336 + [i % 50, i // 50] * 182, max_tokens=450 + i % 200)
    engine.step()
    return engine
