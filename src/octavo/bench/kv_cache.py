"""What a KV cache buys, and what the way it is kept buys on top: the measurements of `octavo bench kv-cache`.

======== ==================================================================================================
part     what is compared
======== ==================================================================================================
growth   answering with a cache, and computing everything anew for every token
fit      blocks, and one piece of memory per request that is as long as a request may get
padding  new tokens laid end to end, and a rectangle as wide as the longest request
prefix   a conversation whose earlier turns are found in the cache, and one that is read anew at every turn
dtype    a cache in the dtype of the model, and in smaller ones
======== ==================================================================================================

Every number is measured by running requests. The other side of a comparison is the same engine, too: a block
as long as a request may get is a piece reserved for it; a sequence sent again for each token is computed
anew; filler tokens up to the longest make a rectangle. Transformers stands beside it where it has the choice.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from octavo.bench.kv_cache_engine import Models, Outcome, bytes_per_token, prompt_logprobs, run
from octavo.bench.kv_cache_peer import NAME as TRANSFORMERS
from octavo.bench.kv_cache_peer import Peer
from octavo.bench.report import Row
from octavo.config import QUANTIZED_KV_CACHE_DTYPES
from octavo.engine.core import Engine
from octavo.errors import ConfigError

PARTS = ("growth", "fit", "padding", "prefix", "dtype")
NO_CACHE, PEER_NO_CACHE = "no cache", f"{TRANSFORMERS}, no cache"
ONE_PIECE, PADDED, ANEW = "one piece", "padded", "every turn anew"

_POINTS = 32  # of a curve
_WARM_UP = 8  # tokens of an answer that is not counted
_HIGHEST_ID = 10_000
_MIB = 2**20

Report = Callable[[str], None]


def _silent(line: str) -> None:
    """Where nobody asked what runs now."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is run. Lengths are in tokens. The defaults are for a model of 135 million parameters."""

    prompt_len: int = 64
    output_len: int = 128
    rounds: int = 2
    reserved_len: int = 1024
    reserved_requests: int = 8
    num_requests: int = 96
    shortest: int = 16
    longest_prompt: int = 256
    longest_answer: int = 96
    batch: int = 16
    turns: int = 8
    system_len: int = 256
    question_len: int = 24
    reply_len: int = 40
    context_len: int = 768

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}")
        if self.output_len < 2:
            raise ConfigError(f"output_len must be at least 2 to make a curve, got {self.output_len}")
        for name in ("longest_prompt", "longest_answer"):
            if getattr(self, name) < self.shortest:
                raise ConfigError(f"{name} must be at least shortest ({self.shortest})")
        if self.reserved_len & (self.reserved_len - 1):
            raise ConfigError(f"reserved_len must be a power of two, as blocks are, got {self.reserved_len}")
        if self.longest_prompt + self.longest_answer > self.reserved_len:
            raise ConfigError(
                f"reserved_len ({self.reserved_len}) must hold the longest prompt and answer, "
                f"{self.longest_prompt + self.longest_answer} tokens"
            )

    def scaled(self, factor: float) -> Sizes:
        """Lengths and numbers of requests times `factor`, at least what still makes a comparison."""
        least = {"output_len": 4, "batch": 2, "turns": 2, "num_requests": 4, "reserved_requests": 2}
        power = 1 << max(0, round(self.reserved_len * factor) - 1).bit_length()
        kept = {"rounds": self.rounds, "turns": self.turns, "reserved_len": power}
        return replace(
            self,
            **{
                name: kept.get(name, max(least.get(name, 1), round(value * factor)))
                for name, value in vars(self).items()
            },
        )


def measure(
    models: Models,
    sizes: Sizes,
    parts: Sequence[str] = PARTS,
    *,
    with_peer: bool = True,
    report: Report = _silent,
) -> list[Row]:
    """Rows of a result file, each named ``part/...``; `report` is told of each measurement as it begins."""
    peer = None
    if with_peer and {"growth", "padding"} & set(parts):
        report(f"loading {TRANSFORMERS}")
        peer = Peer(models)
    makers: dict[str, Callable[[], list[Row]]] = {
        "growth": lambda: growth(models, peer, sizes, report),
        "fit": lambda: fit(models, sizes, report),
        "padding": lambda: padding(models, peer, sizes, report),
        "prefix": lambda: prefix(models, sizes, report),
        "dtype": lambda: dtype(models, sizes, report),
    }
    rows: list[Row] = []
    for number, part in enumerate(parts, start=1):
        report(f"part {number} of {len(parts)}: {part}")
        rows += makers[part]()
    return rows


def growth(models: Models, peer: Peer | None, sizes: Sizes, report: Report = _silent) -> list[Row]:
    """Time to the n-th token, with and without a cache, in turn; medians of the rounds, point by point."""
    prompt, count = _prompt(models, random.Random(1), sizes.prompt_len), sizes.output_len
    times: dict[str, list[list[float]]] = {}
    answers: dict[str, list[int]] = {}
    num_bytes: dict[str, float] = {}
    num_computed: dict[str, float] = {}

    def keep(name: str, token_ids: list[int], seconds: list[float], *, is_comparable: bool = True) -> None:
        assert len(token_ids) == len(seconds) == length
        if number:
            times.setdefault(name, []).append(seconds)
            if is_comparable:
                answers[name] = token_ids

    total_len = len(prompt) + count
    with models.engine(num_tokens=total_len + 16, max_model_len=total_len) as engine:
        for number in range(1 + sizes.rounds):
            stage = f"growth: round {number} of {sizes.rounds}" if number else "growth: warming up"
            length = count if number else min(_WARM_UP, count)
            report(f"{stage}, with the cache")
            cached = run(engine, [prompt], [length])
            keep("", cached.token_ids[0], cached.times_s)
            num_bytes[""] = cached.num_reserved_tokens[-1] * bytes_per_token(engine) / _MIB
            num_computed[""] = cached.num_prompt_tokens + length - 1
            report(f"{stage}, {NO_CACHE}")
            keep(NO_CACHE, *_without_cache(engine, prompt, length, num_computed))
            if peer is not None:
                for name, use_cache in ((TRANSFORMERS, True), (PEER_NO_CACHE, False)):
                    report(f"{stage}, {name}")
                    token_ids, seconds, held = peer.run([prompt], [length], use_cache=use_cache)
                    keep(name, token_ids[0], seconds, is_comparable=peer.has_our_weights)
                    if use_cache:
                        num_bytes[name] = held / _MIB
    curves = {name: _median_curve(rounds) for name, rounds in times.items()}
    rows = [*_curve_rows(curves, count), *_crossover_rows(curves)]
    rows += [
        _row("growth/tokens computed", num_computed, "tokens", "lower"),
        _row("growth/cache", num_bytes, "MiB", "lower"),
        Row(
            "growth/answers equal to ours with a cache",
            round(100 * statistics.mean(answer == answers[""] for answer in answers.values()), 1),
            "%",
        ),
    ]
    return rows


def _without_cache(
    engine: Engine, prompt: list[int], count: int, num_computed: dict[str, float]
) -> tuple[list[int], list[float]]:
    """A request for one token, again and again, each with all that is known so far as its prompt."""
    token_ids: list[int] = []
    seconds: list[float] = []
    elapsed, num_computed[NO_CACHE] = 0.0, 0
    for _ in range(count):
        outcome = run(engine, [prompt + token_ids], [1])
        elapsed += outcome.seconds
        seconds.append(elapsed)
        token_ids += outcome.token_ids[0]
        num_computed[NO_CACHE] += outcome.num_prompt_tokens
    return token_ids, seconds


def _median_curve(rounds: list[list[float]]) -> list[float]:
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def curve_points(count: int) -> list[int]:
    """Output lengths at which a curve is written down: the powers of two, and evenly spread ones."""
    powers = {1 << i for i in range(count.bit_length()) if 1 << i <= count}
    return sorted(powers | {max(1, round(count * i / _POINTS)) for i in range(1, _POINTS + 1)})


def _curve_rows(curves: dict[str, list[float]], count: int) -> Iterable[Row]:
    points = curve_points(count)
    for n in points:
        yield _row(f"growth/total/{n}", {name: c[n - 1] for name, c in curves.items()}, "s", "lower")
    for before, n in itertools.pairwise(points):
        per_token = {name: 1000 * (c[n - 1] - c[before - 1]) / (n - before) for name, c in curves.items()}
        yield _row(f"growth/token/{n}", per_token, "ms", "lower")


def _crossover_rows(curves: dict[str, list[float]]) -> Iterable[Row]:
    """From which output length on the cache is ahead for good, and by how much at the end."""
    pairs = {"": NO_CACHE, TRANSFORMERS: PEER_NO_CACHE}
    known = {with_cache: without for with_cache, without in pairs.items() if with_cache in curves}
    ahead = {name: float(_ahead_for_good(curves[name], curves[without])) for name, without in known.items()}
    at_end = {name: curves[without][-1] / curves[name][-1] for name, without in known.items()}
    yield _row("growth/output tokens from which the cache is ahead", ahead, "tokens", "lower")
    yield _row("growth/times faster at the end", at_end, "x", "higher")


def _ahead_for_good(cached: list[float], anew: list[float]) -> int:
    """The first length from which `cached` is faster at every length; one past the last if it never is."""
    behind = [n for n, (a, b) in enumerate(zip(cached, anew, strict=True), start=1) if a >= b]
    return behind[-1] + 1 if behind else 1


def fit(models: Models, sizes: Sizes, report: Report = _silent) -> list[Row]:
    """Requests of many lengths through one amount of memory: in blocks, and in pieces of `reserved_len`."""
    prompts, num_new = _mixed(models, sizes, sizes.num_requests)
    room = sizes.reserved_requests * sizes.reserved_len
    found: dict[str, Outcome] = {}
    for name, block_size in (("", 16), (ONE_PIECE, sizes.reserved_len)):
        report(f"fit: {name or 'blocks'}, {sizes.num_requests} requests")
        options = {"block_size": block_size, "max_num_seqs": sizes.num_requests}
        # One block more than the room: the scheduler keeps one back, for those that run to grow into.
        with models.engine(
            num_tokens=room + block_size, max_model_len=sizes.reserved_len, **options
        ) as engine:
            run(engine, prompts[:2], [2, 2])
            found[name] = run(engine, prompts, num_new)
            token_bytes = bytes_per_token(engine)
    reserved = {name: statistics.mean(o.num_reserved_tokens) for name, o in found.items()}
    held = {name: statistics.mean(o.num_held_tokens) for name, o in found.items()}
    memory: dict[str, float | str] = {"memory MiB": room * token_bytes / _MIB, "tokens of room": room}
    return [
        replace(
            _row("fit/requests at once, mean", {n: statistics.mean(o.num_running) for n, o in found.items()}),
            details=memory,
        ),
        _row("fit/requests at once, most", {n: float(max(o.num_running)) for n, o in found.items()}),
        _row("fit/reserved room that holds a token", {n: 100 * held[n] / reserved[n] for n in found}, "%"),
        _row("fit/tokens held, mean", held, "tokens"),
        _row("fit/tokens of room reserved, mean", reserved, "tokens", "lower"),
        _row("fit/output", {n: o.num_output_tokens / o.seconds for n, o in found.items()}, "tokens/s"),
        _row("fit/first token, median", {n: statistics.median(o.ttft_s) for n, o in found.items()}, "s",
             "lower"),
        _row("fit/whole run", {n: o.seconds for n, o in found.items()}, "s", "lower"),
    ]  # fmt: skip


def padding(models: Models, peer: Peer | None, sizes: Sizes, report: Report = _silent) -> list[Row]:
    """A batch of many lengths: its tokens end to end, and filled up to the longest."""
    prompts, num_new = _mixed(models, sizes, sizes.batch)
    widest, longest = max(map(len, prompts)), max(num_new)
    filled = [[0] * (widest - len(prompt)) + prompt for prompt in prompts]
    num_prompt, num_all = sum(map(len, prompts)), sum(map(len, prompts)) + sum(num_new)
    read: dict[str, float] = {}
    answered: dict[str, float] = {}

    def rates(
        what: str, who: Engine | Peer, batch: list[list[int]], counts: list[int]
    ) -> tuple[float, float]:
        """Tokens a second of reading the prompts, and of all; reading once more warms up for both."""
        report(f"padding: {what}, reading the prompts")
        ones = [1] * len(batch)
        _seconds(who, batch, ones)
        reading = statistics.median(_seconds(who, batch, ones) for _ in range(sizes.rounds))
        report(f"padding: {what}, prompts and answers")
        answering = statistics.median(_seconds(who, batch, counts) for _ in range(sizes.rounds))
        return num_prompt / reading, num_all / answering

    total = sizes.batch * (widest + longest + 16)
    options = {"max_num_seqs": sizes.batch, "max_num_batched_tokens": max(2048, sizes.batch * widest)}
    with models.engine(num_tokens=total, max_model_len=widest + longest, **options) as engine:
        for name, batch, counts in (("", prompts, num_new), (PADDED, filled, [longest] * sizes.batch)):
            read[name], answered[name] = rates(name or "end to end", engine, batch, counts)
    if peer is not None:
        read[TRANSFORMERS], answered[TRANSFORMERS] = rates(TRANSFORMERS, peer, prompts, num_new)
    rectangle = 100 * num_all / (sizes.batch * (widest + longest))
    lengths: dict[str, float | str] = {
        "prompts": " ".join(str(len(prompt)) for prompt in prompts),
        "answers": " ".join(map(str, num_new)),
    }
    return [
        replace(
            _row("padding/computed tokens that were asked for", {"": 100.0, PADDED: rectangle}, "%"),
            details=lengths,
        ),
        _row("padding/reading the prompts", read, "tokens/s"),
        _row("padding/prompts and answers", answered, "tokens/s"),
    ]


def prefix(models: Models, sizes: Sizes, report: Report = _silent) -> list[Row]:
    """A conversation: every turn sends all that was said so far, and a question more."""
    rng = random.Random(3)
    questions = [_prompt(models, rng, sizes.question_len) for _ in range(sizes.turns)]
    system = _prompt(models, rng, sizes.system_len)
    longest = sizes.system_len + sizes.turns * (sizes.question_len + sizes.reply_len)
    first: dict[str, list[float]] = {}
    computed: dict[str, float] = {}
    sent = 0
    for name, is_cached in (("", True), (ANEW, False)):
        with models.engine(
            num_tokens=longest + 32, max_model_len=longest, enable_prefix_caching=is_cached
        ) as engine:
            run(engine, [questions[0][:2]], [2])
            rounds: list[list[float]] = []
            for number in range(1, sizes.rounds + 1):
                report(f"prefix: round {number} of {sizes.rounds}, {name or 'earlier turns found'}")
                engine.cache.reset_prefix_cache()
                said, times, computed[name], sent = list(system), [], 0, 0
                for question in questions:
                    said += question
                    turn = run(engine, [said], [sizes.reply_len])
                    times.append(turn.ttft_s[0])
                    computed[name] += turn.num_prompt_tokens
                    sent += len(said)
                    said += turn.token_ids[0]
                rounds.append(times)
            first[name] = _median_curve(rounds)
    rows = [
        _row(f"prefix/first token of turn {turn + 1}", {n: 1000 * t[turn] for n, t in first.items()}, "ms",
             "lower")
        for turn in range(sizes.turns)
    ]  # fmt: skip
    rows.append(_row("prefix/prompt tokens computed", computed, "tokens", "lower"))
    rows.append(Row("prefix/prompt tokens sent", sent, "tokens", "lower"))
    return rows


def dtype(models: Models, sizes: Sizes, report: Report = _silent) -> list[Row]:
    """The cache in smaller dtypes: room, speed over long contexts, and what becomes of the answers."""
    full = str(models.loaded.dtype).removeprefix("torch.")
    smaller = QUANTIZED_KV_CACHE_DTYPES if models.device.type == "cuda" else ("float16",)
    rng = random.Random(4)
    prompts = [_prompt(models, rng, sizes.context_len) for _ in range(max(2, sizes.batch // 2))]
    count = sizes.longest_answer
    kib: dict[str, float] = {}
    speed: dict[str, float] = {}
    logprobs: dict[str, list[float]] = {}
    answers: dict[str, list[int]] = {}
    longest = sizes.context_len + count
    for name in (full, *(name for name in smaller if name != full)):
        report(f"dtype: {name}")
        with models.engine(
            num_tokens=len(prompts) * (longest + 16), max_model_len=longest, kv_cache_dtype=name
        ) as engine:
            kib[name] = bytes_per_token(engine) / 1024
            logprobs[name] = prompt_logprobs(engine, prompts[0])
            outcome = run(engine, prompts, [count] * len(prompts))
            answers[name] = outcome.token_ids[0]
            # From the token after the last first one on, everybody decodes.
            tail = outcome.times_s[len(prompts) :]
            decoding = [run(engine, prompts, [count] * len(prompts)) for _ in range(sizes.rounds - 1)]
            tails = [tail, *(other.times_s[len(prompts) :] for other in decoding)]
            speed[name] = statistics.median((len(t) - 1) / (t[-1] - t[0]) for t in tails)
    rows = []
    for name in kib:
        peers = {} if name == full else {full: kib[full]}
        rows.append(Row(f"dtype/a token in {name}", round(kib[name], 3), "KiB", "lower", peers=peers))
        rows.append(Row(f"dtype/tokens in a GiB of {name}", 2**20 // kib[name], "tokens"))
        peers = {} if name == full else {full: round(speed[full], 2)}
        rows.append(Row(f"dtype/decoding from {name}", round(speed[name], 2), "tokens/s", peers=peers))
        if name != full:
            gaps = [abs(a - b) for a, b in zip(logprobs[name], logprobs[full], strict=True)]
            same = _num_equal(answers[name], answers[full])
            change, equal = f"dtype/change of a log probability, {name}", f"dtype/equal answer, {name}"
            rows.append(Row(change, _round(statistics.mean(gaps)), "nats", "lower"))
            rows.append(Row(equal, round(100 * same / count, 1), "%"))
    return rows


def _num_equal(first: list[int], second: list[int]) -> int:
    """Tokens before the first that differs."""
    return next((i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b), len(first))


def _mixed(models: Models, sizes: Sizes, count: int) -> tuple[list[list[int]], list[int]]:
    """Prompts and answer lengths of chance: most short, few long, as people's are."""
    rng = random.Random(2)

    def length(longest: int) -> int:
        share = rng.betavariate(1.0, 2.5)
        return sizes.shortest + round((longest - sizes.shortest) * share)

    prompts = [_prompt(models, rng, length(sizes.longest_prompt)) for _ in range(count)]
    return prompts, [length(sizes.longest_answer) for _ in range(count)]


def _prompt(models: Models, rng: random.Random, length: int) -> list[int]:
    highest = min(_HIGHEST_ID, models.loaded.config.vocab_size)
    return [rng.randrange(highest) for _ in range(length)]


def _seconds(who: Engine | Peer, prompts: Sequence[Sequence[int]], num_new: Sequence[int]) -> float:
    """How long these answers take."""
    return who.run(prompts, num_new)[1][-1] if isinstance(who, Peer) else run(who, prompts, num_new).seconds


def _row(name: str, values: dict[str, float], unit: str = "", better: str = "higher") -> Row:
    """Ours is the value under the empty name; the others are what it is compared with."""
    rounded = {key: _round(value) for key, value in values.items()}
    return Row(name, rounded.pop(""), unit, better, peers=rounded)


def _round(value: float) -> float:
    """Four significant digits, so that a file of results can be read."""
    return float(f"{value:.4g}")
