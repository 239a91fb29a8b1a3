"""An engine over a scripted model, and what it must answer."""

from __future__ import annotations

from collections.abc import Callable

from helpers.engine import VOCAB_SIZE, ScriptedRunner, next_token
from helpers.text import letters_tokenizer

from octavo.cache.manager import KVCacheManager
from octavo.config import EngineConfig
from octavo.engine.core import Engine
from octavo.engine.request import Request
from octavo.engine.sampler import NO_TOKEN, SamplerOutput
from octavo.engine.schedule import Schedule
from octavo.engine.scheduler import Scheduler
from octavo.outputs import Logprob
from octavo.sampling_params import SamplingParams


class Delayed:
    """A step of a device: it is done long before the host asks, but the host knows nothing until then."""

    def __init__(self, runner: FakeRunner, output: SamplerOutput, trouble: str | None) -> None:
        self.runner = runner
        self.output = output
        self.trouble = trouble

    def collect(self) -> SamplerOutput:
        under_way = self.runner.under_way
        del under_way[: under_way.index(self) + 1]  # those before it were given up, or this fails
        if self.trouble == "late raise":
            raise ZeroDivisionError("late boom")
        if self.trouble == "late interrupt":
            raise KeyboardInterrupt
        return self.output


class FakeRunner:
    """The scripted model behind the runner's interface. `poison` maps a prompt's first token to a trouble.

    `most_under_way` is how many steps were ever launched and not collected.
    """

    def __init__(self, cache: KVCacheManager, poison: dict[int, str]) -> None:
        self.scripted = ScriptedRunner(cache)
        self.poison = poison
        self.during_step: Callable[[], object] = lambda: None
        self.under_way: list[Delayed] = []
        self.most_under_way = 0

    def launch(self, plan: Schedule) -> Delayed:
        troubles = [self.poison.get(seq.token_ids[0]) for seq in plan.sequences]
        self.during_step()
        if "raise" in troubles:
            raise ZeroDivisionError("boom")
        if "interrupt" in troubles:
            raise KeyboardInterrupt
        for seq in plan.sequences:
            assert not (seq.needs_last_token and seq.num_pending), f"{seq} runs without its last token"
        token_ids = self.scripted.run(plan)
        errors = {j: "logits are NaN" for j, row in enumerate(plan.sampled_rows) if troubles[row] == "nan"}
        logprobs = [
            {token: Logprob(-1.0, 2), (token + 1) % VOCAB_SIZE: Logprob(-0.5, 1)}
            if seq.params.logprobs
            else None
            for seq, token in zip(plan.sampled, token_ids, strict=True)
        ]
        for j in errors:
            token_ids[j] = NO_TOKEN
        late = next((trouble for trouble in troubles if trouble and trouble.startswith("late")), None)
        step = Delayed(self, SamplerOutput(token_ids, logprobs, errors), late)
        self.under_way.append(step)
        self.most_under_way = max(self.most_under_way, len(self.under_way))
        return step

    def close(self) -> None:
        pass


def make_engine(
    *,
    trace: str | None = None,
    poison: dict[int, str] | None = None,
    overlap: bool = False,
    run_ahead: int = 3,
    hash_fn: Callable[..., int] | None = None,
    **limits: int,
) -> Engine:
    limits = {
        "num_blocks": 64,
        "block_size": 4,
        "max_num_seqs": 8,
        "budget": 32,
        "max_model_len": 200,
    } | limits
    cache = KVCacheManager(limits["num_blocks"], limits["block_size"], hash_fn=hash_fn)
    scheduler = Scheduler(
        cache,
        max_num_seqs=limits["max_num_seqs"],
        max_num_batched_tokens=limits["budget"],
        max_model_len=limits["max_model_len"],
    )
    ticks = iter(range(10**6))
    return Engine(
        EngineConfig(model="scripted", trace=trace, overlap=overlap, run_ahead=run_ahead),
        scheduler,
        FakeRunner(cache, poison or {}),  # type: ignore[arg-type]  # the runner's interface without a model
        vocab_size=VOCAB_SIZE,
        eos_token_ids=[VOCAB_SIZE - 1],
        tokenizer=letters_tokenizer(VOCAB_SIZE),
        clock=lambda: float(next(ticks)),
    )


def drain(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
        engine.scheduler.check()


def answer(prompt: list[int], num_tokens: int, seed: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, seed))
    return tokens[len(prompt) :]


def letters(token_ids: list[int]) -> str:
    return letters_tokenizer(VOCAB_SIZE).decode(token_ids)


def run(engine: Engine, prompt: list[int], params: SamplingParams, **kwargs: object) -> Request:
    request = engine.add_request(prompt, params, **kwargs)  # type: ignore[arg-type]  # passed through
    drain(engine)
    return request
