"""How `octavo doctor` reports a self-check: a line per kernel and implementation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from octavo.cli.doctor_report import Report
    from octavo.kernels.backend import SelfCheck

Place = Literal["machine", "GPU"]

WRONG = "its answers are wrong on this {}; run with OCTAVO_KERNELS=reference and report this"

_LONGEST = 400  # characters of an exception's text; a compiler's can be pages


def add_findings(report: Report, section: str, checks: Iterable[SelfCheck], place: Place) -> None:
    """One finding per kernel and implementation; only forms that fail are named."""
    grouped: dict[str, list[SelfCheck]] = {}
    for check in checks:
        grouped.setdefault(f"{check.kernel} [{check.implementation}]", []).append(check)
    for name, forms in grouped.items():
        failed = [check for check in forms if not check.ok]
        if failed:
            report.add(section, name, "trouble", _failures(failed), _advice(failed, place))
        else:
            report.add(section, name, "ok", _success(forms))


def in_short(text: str) -> str:
    """An exception's text on one line: its beginning and its end where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 2 :]}"


def _advice(failed: list[SelfCheck], place: Place) -> str:
    if all(check.problem for check in failed):
        return f"it does not run on this {place}; OCTAVO_KERNELS=reference runs without it"
    return WRONG.format(place)


def _success(forms: list[SelfCheck]) -> str:
    worst = _worst(forms)
    where = forms[0].form if len(forms) == 1 else f"all {len(forms)} forms of data"
    if worst.worst_error == 0.0:
        return f"exact in {where}"
    return f"right up to rounding in {where}: {_error(worst)}"


def _failures(failed: list[SelfCheck]) -> str:
    """The forms that are wrong, then those that raised, together where they raised the same."""
    parts: list[str] = []
    wrong = [check for check in failed if not check.problem]
    if wrong:
        parts.append(f"wrong in {', '.join(check.form for check in wrong)}: {_error(_worst(wrong))}")
    raised: dict[str, list[str]] = {}
    for check in failed:
        if check.problem:
            raised.setdefault(in_short(check.problem), []).append(check.form)
    parts += [f"fails in {', '.join(forms)}: {problem}" for problem, forms in raised.items()]
    return "; ".join(parts)


def _worst(checks: list[SelfCheck]) -> SelfCheck:
    return max(checks, key=lambda check: check.worst_error / check.allowed)


def _error(check: SelfCheck) -> str:
    return f"worst error against the exact result {check.worst_error:.1e} of {check.allowed:.1e} allowed"
