"""What `octavo bench serve` asks for and when: lengths, prompts, arrival times, traces. No torch."""

from __future__ import annotations

import csv
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from octavo.bench.workloads import MAX_TOKEN_ID
from octavo.errors import ConfigError, shown

TRACE_BLOCK = 512
"""Tokens that one of a trace's `hash_ids` stands for, as in the traces of Mooncake (Qin et al. 2025)."""

WORDS = """
the of and to in is that it was for on are as with his they at be this from have or by one had not
but what all were when we there can an your which their said if do will each about how up out them
then she many some so these would other into has more her two like him see time could no make than
first been its who now people my made over did down only way find use may water long little very
after words called just where most know
""".split()  # noqa: SIM905 - a list would take a screen
"""Short English words: one token each in most vocabularies."""


@dataclass(frozen=True)
class Call:
    """One request: when it is due (seconds after the start; None in a closed loop), and what it asks.

    `drop_after`: the client hangs up after so many pieces of text; None reads to the end. A piece may hold
    several tokens, and an answer of fewer pieces is read to its end.
    """

    at_s: float | None
    prompt: str | list[int]
    output_len: int
    drop_after: int | None = None


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens, at least 1 and at most `largest`."""

    spec: str
    draw: Callable[[random.Random], int]

    @classmethod
    def parse(cls, name: str, spec: str) -> Lengths:
        """``128``, ``uniform:LOW:HIGH``, ``normal:MEAN:STD[:MAX]``, ``lognormal:MEDIAN:SIGMA[:MAX]`` or
        ``exponential:MEAN[:MAX]``; ConfigError names `name` when it is none of them.
        """
        kind, *rest = spec.split(":")
        try:
            numbers = [float(part) for part in rest] if rest else [float(kind)]
        except ValueError:
            numbers = []
        known = {"uniform": (2, 2), "normal": (2, 3), "lognormal": (2, 3), "exponential": (1, 2)}
        fewest, most = (1, 1) if not rest else known.get(kind, (1, 0))
        is_possible = fewest <= len(numbers) <= most and all(0 <= x < 1e9 for x in numbers)
        first, second = (*numbers, 0.0)[:2] if numbers else (0.0, 0.0)
        if not is_possible or first < 1 or (kind == "uniform" and not first <= second):
            raise ConfigError(
                f"{name} must be a number of tokens, uniform:LOW:HIGH, normal:MEAN:STD[:MAX], "
                f"lognormal:MEDIAN:SIGMA[:MAX] or exponential:MEAN[:MAX], from 1 up; got {shown(spec)}"
            )
        if not rest:
            return cls(spec, lambda rng: round(first))
        if kind == "uniform":
            return cls(spec, lambda rng: rng.randint(math.ceil(first), math.floor(second)))
        largest = numbers[-1] if len(numbers) == most else math.inf
        sample: dict[str, Callable[[random.Random], float]] = {
            "normal": lambda rng: rng.gauss(first, second),
            "lognormal": lambda rng: first * math.exp(rng.gauss(0.0, second)),
            "exponential": lambda rng: rng.expovariate(1 / first),
        }
        return cls(spec, lambda rng: max(1, round(min(sample[kind](rng), largest))))


@dataclass(frozen=True)
class Arrivals:
    """When calls are due. A `rate` (calls a second; inf: all at once) makes an open loop, no rate a closed
    one.

    Gaps are gamma distributed with shape `burstiness`: 1 is Poisson, below is burstier, above more even.
    """

    rate: float | None = None
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        if self.rate is not None and not self.rate > 0:
            raise ConfigError(f"rate must be above 0 calls a second (or inf), got {self.rate}")
        if not 0 < self.burstiness < math.inf:
            raise ConfigError(f"burstiness must be above 0 (1 is Poisson), got {self.burstiness}")

    def times(self, rng: random.Random) -> Iterator[float | None]:
        if self.rate is None:
            yield from itertools.repeat(None)
        elif math.isinf(self.rate):
            yield from itertools.repeat(0.0)
        else:
            now = 0.0
            while True:
                now += rng.gammavariate(self.burstiness, 1 / (self.rate * self.burstiness))
                yield now


@dataclass(frozen=True)
class Mix:
    """What calls are made of. `as_text`: prompts of words rather than of token ids.

    With `num_prefixes`, each prompt begins with one of so many beginnings of `prefix_len` tokens, which come
    on top of `input_lens`. `drop_share` of the calls hang up in mid-answer.
    """

    input_lens: Lengths
    output_lens: Lengths
    arrivals: Arrivals
    as_text: bool = True
    num_prefixes: int = 0
    prefix_len: int = 0
    drop_share: float = 0.0
    max_token_id: int = MAX_TOKEN_ID

    def __post_init__(self) -> None:
        if (self.num_prefixes > 0) != (self.prefix_len > 0) or min(self.num_prefixes, self.prefix_len) < 0:
            raise ConfigError(
                "num_prefixes and prefix_len go together and count from 1; got "
                f"{self.num_prefixes} and {self.prefix_len}"
            )
        if not 0 <= self.drop_share <= 1:
            raise ConfigError(f"drop_share must be from 0 to 1, got {self.drop_share}")
        if self.max_token_id < 1:
            raise ConfigError(f"max_token_id must be at least 1, got {self.max_token_id}")

    def calls(self, seed: int) -> Iterator[Call]:
        """Calls without end; the same for the same seed. Times, lengths and prompts are drawn independently,
        so that a run at another rate asks the same things.
        """
        times = self.arrivals.times(random.Random(f"times {seed}"))
        rng = random.Random(f"calls {seed}")
        prefixes = [self._tokens(rng, self.prefix_len) for _ in range(self.num_prefixes)]
        for at_s in times:
            tokens = self._tokens(rng, self.input_lens.draw(rng))
            if prefixes:
                tokens = rng.choice(prefixes) + tokens
            output_len = self.output_lens.draw(rng)
            drop_after = rng.randint(1, max(1, output_len - 1)) if rng.random() < self.drop_share else None
            yield Call(
                at_s, " ".join(tokens) if self.as_text else list(map(int, tokens)), output_len, drop_after
            )

    def _tokens(self, rng: random.Random, length: int) -> list[str]:
        if self.as_text:
            return rng.choices(WORDS, k=length)
        return [str(rng.randint(0, self.max_token_id)) for _ in range(length)]


def read_trace(path: Path, *, speed: float = 1.0, as_text: bool = True, seed: int = 0) -> list[Call]:
    """The calls of a trace file, due as they were then, `speed` times faster.

    ``.jsonl``: a line has `timestamp` (ms) or `arrival_s`; `prompt` (a string or token ids) or
    `input_length`; `output_length`; and it may have `hash_ids`, each standing for 512 tokens that calls with
    that id share (the form of Mooncake's traces). ``.csv``: TIMESTAMP, ContextTokens, GeneratedTokens (the
    form of Azure's). ConfigError names the line that is neither.
    """
    if not 0 < speed < math.inf:
        raise ConfigError(f"trace_speed must be above 0, got {speed}")
    try:
        with path.open(encoding="utf-8", newline="") as file:
            entries: Iterator[dict[str, Any]]
            if path.suffix == ".csv":
                entries = iter(csv.DictReader(file))
            else:
                entries = (json.loads(line) for line in file if line.strip())
            calls = []
            for number in itertools.count(1):
                try:
                    entry = next(entries, None)
                    if entry is None:
                        break
                    calls.append(_call_of(entry, as_text, seed * 1_000_003 + number))
                except (ValueError, KeyError, TypeError) as error:
                    raise ConfigError(
                        f"trace: entry {number} is no call ({type(error).__name__}: {error}): {path}; a "
                        ".jsonl line has timestamp (ms) or arrival_s, input_length or prompt, and "
                        "output_length; a .csv has TIMESTAMP, ContextTokens, GeneratedTokens"
                    ) from error
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"trace: {str(path)!r} cannot be read: {why}") from error
    if not calls:
        raise ConfigError(f"trace: {str(path)!r} holds no call")
    calls.sort(key=lambda call: call.at_s or 0.0)
    first_s = calls[0].at_s or 0.0
    return [Call(((call.at_s or 0.0) - first_s) / speed, call.prompt, call.output_len) for call in calls]


def _call_of(entry: dict[str, Any], as_text: bool, seed: int) -> Call:
    if "TIMESTAMP" in entry:
        at_s = datetime.fromisoformat(entry["TIMESTAMP"][:26]).timestamp()
        length, output_len = int(entry["ContextTokens"]), int(entry["GeneratedTokens"])
    else:
        at_s = float(entry["arrival_s"]) if "arrival_s" in entry else float(entry["timestamp"]) / 1000
        output_len = int(entry["output_length"])
        length = int(entry["input_length"]) if "prompt" not in entry else 1
    if length < 1 or output_len < 1 or not math.isfinite(at_s):
        raise ValueError("lengths count from 1 and times are finite")
    prompt = entry.get("prompt")
    if prompt is not None:
        is_ids = isinstance(prompt, list) and all(type(item) is int for item in prompt)
        if not prompt or not (isinstance(prompt, str) or is_ids):
            raise ValueError("prompt must be a string or a list of token ids")
        return Call(at_s, prompt, output_len)
    tokens: list[int] = []
    for hash_id in entry.get("hash_ids", ()):
        block = random.Random(f"block {hash_id}")
        tokens += [block.randint(0, MAX_TOKEN_ID) for _ in range(min(TRACE_BLOCK, length - len(tokens)))]
    rng = random.Random(seed)
    tokens += [rng.randint(0, MAX_TOKEN_ID) for _ in range(length - len(tokens))]
    return Call(at_s, " ".join(WORDS[i % len(WORDS)] for i in tokens) if as_text else tokens, output_len)
