"""What a run of `octavo bench serve` comes to: percentiles, goodput, errors by kind; as text, rows and
picture.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from octavo.bench.report import Row
from octavo.bench.serve import Answer, Load
from octavo.errors import ConfigError, nearest

MEASURES = ("ttft", "itl", "tpot", "e2e")


@dataclass(frozen=True)
class Spread:
    """How values lie. Percentiles are interpolated linearly between the two nearest values."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """None where there are no values."""
        known = np.array([value for value in values if value is not None])
        if not len(known):
            return None
        p50, p90, p95, p99 = np.percentile(known, (50, 90, 95, 99)).tolist()
        return cls(len(known), float(known.mean()), p50, p90, p95, p99, float(known.max()))


@dataclass(frozen=True)
class Slo:
    """Bounds in seconds that a good answer keeps; `itl` is for each single gap."""

    ttft: float | None = None
    itl: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, specs: Sequence[str]) -> Slo | None:
        """From ``ttft:500`` and the like, in milliseconds; None when there are none."""
        bounds: dict[str, float] = {}
        for spec in specs:
            name, _, number = spec.partition(":")
            if name not in MEASURES:
                raise ConfigError(
                    f"goodput must be one of {', '.join(MEASURES)} with a bound in milliseconds, such as "
                    f"ttft:500; got {spec!r}{nearest(name, MEASURES)}"
                )
            try:
                bounds[name] = float(number) / 1000
            except ValueError:
                bounds[name] = -1.0
            if not 0 < bounds[name] < math.inf:
                raise ConfigError(
                    f"goodput {name} needs a bound above 0 ms, such as {name}:500; got {spec!r}"
                )
        return cls(**bounds) if bounds else None

    def is_met(self, answer: Answer) -> bool:
        """Whether the answer came, and within every bound. A missing first token keeps no bound on it."""

        def holds(value: float | None, bound: float | None, if_missing: bool) -> bool:
            return bound is None or (if_missing if value is None else value <= bound)

        return (
            answer.is_ok
            and holds(answer.ttft_s, self.ttft, False)
            and holds(max(answer.gaps_s, default=None), self.itl, True)
            and holds(answer.tpot_s, self.tpot, True)
            and holds(answer.e2e_s, self.e2e, False)
        )

    def __str__(self) -> str:
        bounds = [(name, getattr(self, name)) for name in MEASURES]
        return ", ".join(f"{name} {1000 * bound:g} ms" for name, bound in bounds if bound is not None)


@dataclass(frozen=True)
class Summary:
    """A run in numbers.

    TTFT and ITL are of all answers that began well, TPOT and E2E of those that also ended (a client that hung
    up on purpose has neither). Output tokens include those that came before a client hung up.
    """

    num_calls: int
    num_ok: int
    num_dropped: int
    errors: dict[str, tuple[int, str]]  # kind -> how many, and one of them in full
    elapsed_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float | None
    cached_share: float | None
    tokens_per_piece: float | None
    num_uncounted: int  # answers whose tokens the server did not count; their pieces were
    num_other_length: int  # answers with fewer or more tokens than asked for
    ttft: Spread | None
    itl: Spread | None
    tpot: Spread | None
    e2e: Spread | None
    send_lag: Spread | None
    delivery: Spread | None
    slo: Slo | None
    num_good: int
    cpu_share: float
    cpu_per_piece_s: float | None
    num_connections: int
    is_cut: bool

    @property
    def num_failed(self) -> int:
        return sum(count for count, _ in self.errors.values())

    @property
    def answers_per_s(self) -> float:
        return self.num_ok / self.elapsed_s


def summarise(load: Load, slo: Slo | None = None) -> Summary:
    """The numbers of a run."""
    answers = load.answers
    ok = [answer for answer in answers if answer.is_ok]
    begun = [answer for answer in answers if not answer.error]
    kinds = Counter(answer.error for answer in answers if answer.error)
    examples = {answer.error: answer.detail for answer in reversed(answers) if answer.error}
    prompt_tokens = [a.num_prompt_tokens for a in ok if a.num_prompt_tokens is not None]
    cached_tokens = [a.num_cached_tokens for a in ok if a.num_cached_tokens is not None]
    counted = [a for a in ok if a.num_output_tokens is not None and a.text_s]
    num_pieces = sum(len(answer.text_s) for answer in answers)
    return Summary(
        num_calls=len(answers),
        num_ok=len(ok),
        num_dropped=sum(answer.is_dropped for answer in answers),
        errors={kind: (count, examples[kind]) for kind, count in kinds.most_common()},
        elapsed_s=load.elapsed_s,
        output_tokens_per_s=sum(answer.num_tokens for answer in begun) / load.elapsed_s,
        prompt_tokens_per_s=sum(prompt_tokens) / load.elapsed_s if prompt_tokens else None,
        cached_share=sum(cached_tokens) / max(1, sum(prompt_tokens)) if cached_tokens else None,
        tokens_per_piece=(
            sum(a.num_tokens for a in counted) / sum(len(a.text_s) for a in counted) if counted else None
        ),
        num_uncounted=sum(answer.num_output_tokens is None for answer in ok),
        num_other_length=sum(answer.num_output_tokens not in (None, answer.asked_tokens) for answer in ok),
        ttft=Spread.of(answer.ttft_s for answer in begun),
        itl=Spread.of(gap for answer in begun for gap in answer.gaps_s),
        tpot=Spread.of(answer.tpot_s for answer in ok),
        e2e=Spread.of(answer.e2e_s for answer in ok),
        send_lag=Spread.of(answer.sent_s - answer.due_s for answer in answers if answer.sent_s),
        delivery=Spread.of(delay for answer in answers for delay in answer.stamps_s),
        slo=slo,
        num_good=sum(slo.is_met(answer) for answer in answers) if slo else len(ok),
        cpu_share=load.cpu_s / load.elapsed_s,
        cpu_per_piece_s=load.cpu_s / num_pieces if num_pieces else None,
        num_connections=load.num_connections,
        is_cut=load.is_cut,
    )


def as_text(summary: Summary) -> str:
    """The summary for a terminal."""
    s = summary
    lines = [
        f"{s.num_calls} calls in {s.elapsed_s:.2f} s: {s.num_ok} answered, "
        f"{s.num_dropped} dropped by the client as planned, {s.num_failed} failed"
    ]
    prompts = ""
    if s.prompt_tokens_per_s is not None:
        prompts = f", {s.prompt_tokens_per_s:.1f} prompt tokens/s"
        prompts += f" ({100 * s.cached_share:.1f} % cached)" if s.cached_share is not None else ""
    lines.append(f"{s.answers_per_s:.2f} answers/s, {s.output_tokens_per_s:.1f} output tokens/s{prompts}")
    spreads = (("TTFT", s.ttft), ("ITL", s.itl), ("TPOT", s.tpot), ("E2E", s.e2e))
    names = ("mean", "p50", "p90", "p95", "p99", "max")
    lines.append(f"{'ms':>6}" + "".join(f"{name:>11}" for name in names))
    for name, spread in spreads:
        if spread is not None:
            lines.append(f"{name:>6}" + "".join(f"{1000 * getattr(spread, n):>11.2f}" for n in names))
    if s.slo is not None:
        share = 100 * s.num_good / max(1, s.num_calls - s.num_dropped)
        lines.append(f"goodput {s.num_good / s.elapsed_s:.2f} answers/s: {share:.1f} % kept {s.slo}")
    for kind, (count, example) in s.errors.items():
        lines.append(
            f"failed: {count} x {kind}" + (f", such as: {' '.join(example.split())}" if example else "")
        )
    lines += _remarks(s)
    return "\n".join(lines)


def _remarks(s: Summary) -> list[str]:
    """What a reader must know to trust the numbers."""
    lines = ["note: interrupted; calls that were open then are left out"] if s.is_cut else []
    if s.num_uncounted:
        lines.append(
            f"note: the server did not count the tokens of {s.num_uncounted} answers; pieces of text stand in"
        )
    if s.tokens_per_piece is not None and s.tokens_per_piece > 1.01:
        lines.append(f"note: a piece held {s.tokens_per_piece:.2f} tokens on average; ITL is between pieces")
    if s.num_other_length:
        lines.append(
            f"note: {s.num_other_length} answers were shorter or longer than asked for; their lengths differ "
            "from the workload's"
        )
    lag = f"sent {1000 * s.send_lag.p99:.2f} ms late (p99), " if s.send_lag else ""
    lines.append(f"generator: {lag}{100 * s.cpu_share:.0f} % of a core, {s.num_connections} connections")
    if s.cpu_share > 0.8:
        lines.append(
            "warning: the generator had little time left; its own delays are in these numbers; send less, "
            "or run several"
        )
    if s.delivery is not None and s.cpu_per_piece_s is not None:
        d = s.delivery
        lines.append(
            f"a piece was heard of {1000 * d.p50:.2f} ms (p50), {1000 * d.p99:.2f} ms (p99) after it was "
            f"written; {1e6 * s.cpu_per_piece_s:.1f} us of a core each"
        )
    return lines


def as_rows(summary: Summary) -> list[Row]:
    """The summary as rows of a result file."""
    s = summary
    rows = [
        Row("answers", round(s.answers_per_s, 3), "1/s"),
        Row("output tokens", round(s.output_tokens_per_s, 2), "tokens/s"),
    ]
    if s.prompt_tokens_per_s is not None:
        rows.append(Row("prompt tokens", round(s.prompt_tokens_per_s, 2), "tokens/s"))
    if s.cached_share is not None:
        rows.append(Row("prompt tokens from the cache", round(100 * s.cached_share, 2), "%"))
    for name, spread in (
        ("TTFT", s.ttft),
        ("ITL", s.itl),
        ("TPOT", s.tpot),
        ("E2E", s.e2e),
        ("sent late by", s.send_lag),
        ("heard of after", s.delivery),
    ):
        if spread is None:
            continue
        details: dict[str, float | str] = {
            key: round(1000 * value, 4) if key != "count" else value
            for key, value in dataclasses.asdict(spread).items()
        }
        for percentile in ("p50", "p99"):
            value = 1000 * getattr(spread, percentile)
            rows.append(Row(f"{name}, {percentile}", round(value, 4), "ms", better="lower", details=details))
    if s.slo is not None:
        share = round(100 * s.num_good / max(1, s.num_calls - s.num_dropped), 2)
        rows.append(
            Row(
                "goodput",
                round(s.num_good / s.elapsed_s, 3),
                "1/s",
                details={"bounds": str(s.slo), "share of answers, %": share},
            )
        )
    rows += [
        Row("calls", s.num_calls, "calls"),
        Row("dropped as planned", s.num_dropped, "calls", better="lower"),
        Row(
            "failed",
            s.num_failed,
            "calls",
            better="lower",
            details={kind: count for kind, (count, _) in s.errors.items()},
        ),
        Row("tokens counted by pieces", s.num_uncounted, "answers", better="lower"),
        Row("answers of another length", s.num_other_length, "answers", better="lower"),
        Row("generator's share of a core", round(100 * s.cpu_share, 2), "%", better="lower"),
    ]
    if s.cpu_per_piece_s is not None:
        rows.append(Row("generator's time a piece", round(1e6 * s.cpu_per_piece_s, 2), "us", better="lower"))
    return rows


def write_answers(path: Path, answers: Sequence[Answer]) -> None:
    """One JSON line per call, in the order they were due; times in seconds after the run's start."""
    try:
        with path.open("w", encoding="utf-8") as file:
            for answer in sorted(answers, key=lambda one: one.due_s):
                fields = {
                    "due_s": answer.due_s,
                    "sent_s": answer.sent_s,
                    "end_s": answer.end_s,
                    "text_s": answer.text_s.tolist(),
                    "asked_tokens": answer.asked_tokens,
                    "num_prompt_tokens": answer.num_prompt_tokens,
                    "num_output_tokens": answer.num_output_tokens,
                    "num_cached_tokens": answer.num_cached_tokens,
                    "finish_reason": answer.finish_reason,
                    "is_dropped": answer.is_dropped,
                    "error": answer.error,
                    "detail": answer.detail,
                }
                file.write(json.dumps(fields) + "\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def draw(path: Path, load: Load, title: str) -> None:
    """A picture: what share of answers was how fast, and how the run went.

    ConfigError when matplotlib is missing or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib; pip install 'octavo[plot]'") from None
    figure = Figure(figsize=(11, 7), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(2, 2)
    begun = [answer for answer in load.answers if not answer.error]
    for axis, name, values in (
        (axes[0, 0], "time to first token", [a.ttft_s for a in begun]),
        (axes[0, 1], "between tokens", [gap for a in begun for gap in a.gaps_s]),
        (axes[1, 0], "whole answer", [a.e2e_s for a in begun if a.is_ok]),
    ):
        known = np.sort([1000 * value for value in values if value is not None])
        if len(known):
            axis.plot(known, np.linspace(0, 100, len(known)), drawstyle="steps-post")
            for share in (50, 99):
                value = np.percentile(known, share)
                axis.axvline(value, color="grey", linewidth=0.8, linestyle=":")
                axis.annotate(f"p{share} {value:.1f}", (value, 3), rotation=90, fontsize=8, ha="right")
            if known[0] > 0 and known[-1] > 20 * known[0]:
                axis.set_xscale("log")
        axis.set(xlabel=f"{name}, ms", ylabel="% of values at most", ylim=(0, 100))
        axis.grid(alpha=0.3)
    edges = np.linspace(0, load.elapsed_s, 81)
    times = np.array([time for answer in load.answers for time in answer.text_s])
    rates = np.histogram(times, edges)[0] / edges[1]
    due = np.sort([answer.due_s for answer in load.answers])
    ends = np.sort([answer.end_s for answer in load.answers])
    is_open = np.searchsorted(due, edges, "right") - np.searchsorted(ends, edges, "right")
    axis = axes[1, 1]
    axis.step(edges[:-1], rates, where="post")
    axis.set(xlabel="seconds", ylabel="pieces a second", ylim=(0, None))
    other = axis.twinx()
    other.plot(edges, is_open, color="tab:orange")
    other.set(ylabel="open calls (orange)", ylim=(0, None))
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot: {str(path)!r} cannot be written: {error}") from error
