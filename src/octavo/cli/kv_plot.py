"""The picture of `octavo kv --plot`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from octavo.cache.sizing import format_bytes, size_requests
from octavo.cache.spec import KVCacheSpec
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def write_plot(path: Path, title: str, spec: KVCacheSpec, *, longest: int, memory_bytes: int | None) -> None:
    """Memory of a request over its length, up to `longest` tokens, and with a budget in bytes how many such
    requests fit it.

    ConfigError without matplotlib, and where no file can be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(11 if memory_bytes else 6, 4.2), layout="constrained")
    panels = figure.subplots(1, 2 if memory_bytes else 1, squeeze=False)[0]
    lengths = sorted({max(1, longest * i // 200) for i in range(1, 201)})
    sizes = [size_requests(spec, n, max_len=longest, memory_bytes=memory_bytes) for n in lengths]
    _plot_lines(
        panels[0],
        lengths,
        {
            "in blocks": [size.request_bytes / 2**30 for size in sizes],
            "in one piece": [size.contiguous_bytes / 2**30 for size in sizes],
            "with windows": [size.windowed_request_bytes / 2**30 for size in sizes],
        },
        spec,
    )
    panels[0].set_ylabel("GiB per request")
    if memory_bytes is not None:
        _plot_lines(
            panels[1],
            lengths,
            {
                "in blocks": [size.requests_fit or 0 for size in sizes],
                "in one piece": [size.contiguous_requests_fit or 0 for size in sizes],
                "with windows": [size.windowed_requests_fit or 0 for size in sizes],
            },
            spec,
        )
        panels[1].set_ylabel(f"requests in {format_bytes(memory_bytes)}")
        panels[1].set_yscale("symlog", linthresh=1)
    figure.suptitle(title, fontsize=10)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"--plot: cannot write {str(path)!r}: {error.strerror}") from error


def _plot_lines(axes: Axes, lengths: list[int], lines: dict[str, list[float]], spec: KVCacheSpec) -> None:
    for name, values in lines.items():
        if name != "with windows" or spec.windows is not None:
            axes.plot(lengths, values, label=name)
    axes.set_xlabel("tokens of a request")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
