"""Pictures of results, drawn without a screen. matplotlib is an extra, imported when it is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo.errors import ConfigError

_FORMATS = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """ConfigError when the name ends in no format that is drawn here."""
    if path.suffix.lower() not in _FORMATS:
        raise ConfigError(f"--plot: {str(path)!r} must end in one of {', '.join(_FORMATS)}")


def new_figure(width: float, height: float) -> Any:
    """A matplotlib Figure of that size in inches. Raises ConfigError when matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'octavo[plot]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: Path) -> None:
    """Raises ConfigError when the file cannot be written."""
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"--plot: {str(path)!r} cannot be written: {error.strerror}") from error
