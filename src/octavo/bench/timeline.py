"""A picture of a run: tokens a second over time, and under it how full the KV cache and the engine are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from octavo.bench.drive import Moment
from octavo.bench.pictures import check_plot, new_figure, save

_MOST_BINS = 200
_SHORTEST_BIN_S = 0.05


def rates(
    moments: Sequence[Moment],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """(edges (n + 1,) in seconds, prompt tokens a second (n,), output tokens a second (n,)) of equal bins.

    A step's tokens are spread evenly over the time since the step before it, so that no bin is empty only
    because a step was longer than it.
    """
    times = np.array([0.0, *(moment.at_s for moment in moments)])
    span = times[-1]
    edges = np.linspace(0.0, span, 1 + max(1, min(_MOST_BINS, int(span / _SHORTEST_BIN_S))))
    width = edges[1]

    def rate(totals: list[int]) -> npt.NDArray[np.float64]:
        at_edges = np.interp(edges, times, np.array([0, *totals], dtype=np.float64))
        return np.asarray(np.diff(at_edges) / width)

    prompt = rate([moment.num_prompt_tokens for moment in moments])
    return edges, prompt, rate([moment.num_output_tokens for moment in moments])


def plot_timeline(moments: Sequence[Moment], path: Path, title: str) -> None:
    """Draws the moments of a run into `path` (.png, .svg or .pdf). Raises ConfigError when it cannot."""
    check_plot(path)
    edges, prompt, output = rates(moments)
    figure = new_figure(9, 5.5)
    speed, state = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    speed.stairs(prompt, edges, label="prompt", color="tab:blue", fill=True, alpha=0.35)
    speed.stairs(output, edges, label="output", color="tab:orange", linewidth=1.5)
    speed.set_ylabel("tokens/s")
    speed.set_title(title)
    speed.legend(loc="upper right")
    times = [moment.at_s for moment in moments]
    state.plot(
        times, [100 * moment.kv_share for moment in moments], color="tab:green", label="KV cache in use"
    )
    state.set_ylabel("KV cache in use, %")
    state.set_ylim(0, 105)
    state.set_xlabel("seconds")
    requests = state.twinx()
    requests.plot(times, [moment.num_running for moment in moments], color="tab:purple", label="running")
    requests.plot(times, [moment.num_waiting for moment in moments], color="tab:gray", label="waiting")
    requests.set_ylabel("requests")
    requests.set_ylim(bottom=0)
    lines = [*state.get_lines(), *requests.get_lines()]
    requests.legend(lines, [line.get_label() for line in lines], loc="upper right")
    for axes in (speed, state):
        axes.grid(alpha=0.3)
    save(figure, path)
