"""The pictures of `octavo bench kv-cache`, drawn from the rows of its result file."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from octavo.bench.pictures import new_figure, save

Rows = Sequence[dict[str, Any]]

OURS, GREY, BAD = "#1f5fa8", "#9aa3ad", "#c8553d"
_COLORS = {"": OURS, "no cache": BAD, "Transformers": "#5b8c5a", "Transformers, no cache": "#d9a441"}
_LABELS = {"": "with the cache", "no cache": "without", "Transformers": "Transformers, use_cache=True",
           "Transformers, no cache": "Transformers, use_cache=False"}  # fmt: skip


def draw(rows: Rows, folder: Path, hardware: str) -> list[Path]:
    """One picture for each part that has rows, ``kv-cache-<part>.png`` in `folder`; which they are."""
    drawn = []
    for part, picture in PICTURES.items():
        mine = [row for row in rows if row["name"].startswith(f"{part}/")]
        if mine:
            path = folder / f"kv-cache-{part}.png"
            figure = picture(mine)
            figure.supxlabel(_short(hardware), x=0.995, ha="right", fontsize=6, color=GREY)
            save(figure, path)
            drawn.append(path)
    return drawn


def _short(hardware: str) -> str:
    """The GPU, or the processor without the list of what it can do."""
    gpu, _, _ = hardware.partition(";")
    return ", ".join(part for part in gpu.split(", ") if "+" not in part)


def _curve(rows: Rows, kind: str) -> dict[str, tuple[list[int], list[float]]]:
    """For each side of the comparison its lengths and values; ours is under the empty name."""
    curves: dict[str, tuple[list[int], list[float]]] = {}
    for row in rows:
        if match := re.fullmatch(rf"{kind}(\d+)", row["name"]):
            for name, value in {"": row["value"], **row["peers"]}.items():
                at, values = curves.setdefault(name, ([], []))
                at.append(int(match[1]))
                values.append(value)
    return curves


def _value(rows: Rows, name: str) -> dict[str, float]:
    """Our value, under the empty name, and those beside it."""
    row = next(row for row in rows if row["name"] == name)
    return {"": row["value"], **row["peers"]}


def _plain(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0)


def _width(name: str) -> float:
    return 2.0 if name in ("", "no cache") else 1.2


def _growth(rows: Rows) -> Any:
    figure = new_figure(9.5, 3.9)
    left, right = figure.subplots(1, 2)
    for name, (at, values) in _curve(rows, "growth/token/").items():
        left.plot(at, values, color=_COLORS[name], label=_LABELS[name], lw=_width(name))
    total = _curve(rows, "growth/total/")
    for name, (at, values) in total.items():
        right.plot(at, values, color=_COLORS[name], lw=_width(name))
    at, ours = total[""]
    anew = total["no cache"][1]
    right.fill_between(at, ours, anew, color=BAD, alpha=0.12, lw=0)
    right.annotate(
        f"{anew[-1] / ours[-1]:.1f} times as long",
        (at[-1], 0.7 * ours[-1] + 0.3 * anew[-1]), ha="right", va="center", xytext=(-6, 0),
        textcoords="offset points", color=BAD, fontsize=9,
    )  # fmt: skip
    _plain(left, "Time for the next token", "tokens answered so far", "milliseconds")
    _plain(right, "Time for the whole answer", "tokens answered", "seconds")
    for axes in (left, right):
        axes.set_ylim(bottom=0)
    left.legend(frameon=False, fontsize=8)
    return figure


def _fit(rows: Rows) -> Any:
    figure = new_figure(9.5, 2.9)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    details = next(row["details"] for row in rows if "details" in row)
    room = float(details["tokens of room"])
    held, reserved = _value(rows, "fit/tokens held, mean"), _value(rows, "fit/tokens of room reserved, mean")
    names = {"": "blocks of 16", "one piece": "one piece\nper request"}
    for y, name in enumerate(reversed(names)):
        widths = (held[name], reserved[name] - held[name], room - reserved[name])
        start = 0.0
        for width, color in zip(widths, (OURS, BAD, "#e8ebee"), strict=True):
            left.barh(y, width, left=start, color=color, height=0.6)
            start += width
        left.text(held[name] / 2, y, f"{100 * held[name] / room:.0f} %", color="white", ha="center",
                  va="center", fontsize=9)  # fmt: skip
    left.set_yticks(range(len(names)), list(reversed(names.values())))
    for color, label in ((OURS, "holds a token"), (BAD, "reserved, empty"), ("#e8ebee", "free")):
        left.barh(0, 0, color=color, label=label)
    left.legend(frameon=False, fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.22))
    memory = float(details["memory MiB"])
    _plain(left, f"Where {memory:,.0f} MiB of cache go, on average", "tokens of room", "")
    at_once = _value(rows, "fit/requests at once, mean")
    for y, name in enumerate(reversed(names)):
        right.barh(y, at_once[name], color=OURS if name == "" else GREY, height=0.6)
        right.text(at_once[name], y, f" {at_once[name]:.1f}", va="center", fontsize=9)
    right.set_yticks(range(len(names)), ["", ""])
    _plain(right, "Requests answered at the same time", "", "")
    right.set_xlim(0, 1.15 * max(at_once.values()))
    return figure


def _padding(rows: Rows) -> Any:
    figure = new_figure(9.5, 3.1)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    details = next(row["details"] for row in rows if "details" in row)
    prompts, answers = ([int(n) for n in str(details[key]).split()] for key in ("prompts", "answers"))
    widest, longest = max(prompts), max(answers)
    for y, (prompt, answer) in enumerate(sorted(zip(prompts, answers, strict=True))):
        left.barh(y, widest + longest, left=-widest, color="#f3d9d2", height=0.8)
        left.barh(y, prompt, left=-prompt, color=OURS, height=0.8)
        left.barh(y, answer, color="#6fa3dc", height=0.8)
    left.set_yticks([])
    left.xaxis.set_major_formatter(lambda value, _: f"{abs(value):.0f}")
    share = _value(rows, "padding/computed tokens that were asked for")["padded"]
    title = f"A rectangle of which {share:.0f} % was asked for"
    _plain(left, title, "tokens of the prompt (left of 0) and of the answer", "requests")
    speeds = _value(rows, "padding/prompts and answers")
    labels = {"": "end to end", "padded": "filled up", "Transformers": "Transformers,\nfilled up"}
    shown = [name for name in labels if name in speeds]
    for y, name in enumerate(reversed(shown)):
        right.barh(y, speeds[name], color=OURS if name == "" else GREY, height=0.6)
        right.text(speeds[name], y, f" {speeds[name]:,.0f}", va="center", fontsize=9)
    right.set_yticks(range(len(shown)), [labels[name] for name in reversed(shown)])
    _plain(right, "Tokens asked for, per second", "", "")
    right.set_xlim(0, 1.2 * max(speeds.values()))
    return figure


def _prefix(rows: Rows) -> Any:
    figure = new_figure(6.2, 3.3)
    axes = figure.subplots()
    curves = _curve(rows, "prefix/first token of turn ")
    labels = {"": "earlier turns found in the cache", "every turn anew": "every turn read anew"}
    for name, (at, values) in curves.items():
        axes.plot(at, values, "o-", color=OURS if name == "" else BAD, label=labels[name], lw=2)
    axes.set_ylim(bottom=0)
    axes.set_xticks(curves[""][0])
    axes.legend(frameon=False, fontsize=8)
    _plain(axes, "A conversation: time to the first word of each reply", "turn", "milliseconds")
    axes.margins(x=0.03)
    return figure


PICTURES: dict[str, Callable[[Rows], Any]] = {
    "growth": _growth,
    "fit": _fit,
    "padding": _padding,
    "prefix": _prefix,
}
