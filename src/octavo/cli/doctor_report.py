"""What `octavo doctor` found, and how it is shown: on one screen, or check by check."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.text import Text

    from octavo.kernels.backend import BackendStatus

Status = Literal["ok", "note", "trouble"]

MARKS = {"ok": ("ok     ", "green"), "note": ("note   ", "yellow"), "trouble": ("FAILED ", "bold red")}
IN_USE = "kernels in use"
_BY = {"cpu": "compiled by Numba", "triton": "by Triton"}
SHOWN_IN_FULL = ("machine", IN_USE)
"""Sections whose every line stands on the one screen before the checks; `optional` follows them."""
_FOLDED = ("cpu kernels", "gpu kernels")  # nothing is checked there, and IN_USE says the same in short


@dataclass(frozen=True)
class Finding:
    """One line of the report. `trouble` makes the exit status 1; `advice` says what to do."""

    section: str
    name: str
    status: Status
    detail: str
    advice: str = ""


@dataclass
class Report:
    """Findings in the order they were made."""

    findings: list[Finding] = field(default_factory=list)

    def add(self, section: str, name: str, status: Status, detail: str, advice: str = "") -> None:
        self.findings.append(Finding(section, name, status, detail, advice))

    def add_use(self, place: str, statuses: Iterable[BackendStatus]) -> None:
        """One line of what runs the kernels of a place; those in plain torch, the slow ones, by name."""
        used: dict[str, list[str]] = {}
        for status in statuses:
            if status.selected:
                used.setdefault(status.implementation, []).append(status.kernel)
        slow = used.pop("reference", [])
        parts = [f"{len(kernels)} {_BY[room]}" for room, kernels in used.items()]
        parts += [f"{len(slow)} in plain torch ({', '.join(slow)})"] if slow else []
        self.add(IN_USE, place, "ok", ", ".join(parts))

    @property
    def has_trouble(self) -> bool:
        return any(finding.status == "trouble" for finding in self.findings)

    def sections(self) -> dict[str, list[Finding]]:
        """The findings by section, in the order in which sections were begun."""
        grouped: dict[str, list[Finding]] = {}
        for finding in self.findings:
            grouped.setdefault(finding.section, []).append(finding)
        return grouped


def show(report: Report, *, verbose: bool) -> None:
    """Prints the report: a line per finding, or else per group of checks with what is wrong in it."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for line in _every_line(report) if verbose else _one_screen(report):
        console.print(line, soft_wrap=True)
    if report.has_trouble:
        console.print(Text("something essential fails; see FAILED above", style="bold red"))
    else:
        console.print(Text("Octavo runs here", style="bold green"))
    if not verbose:
        console.print(Text("octavo doctor --verbose shows every check", style="dim"))


def _every_line(report: Report) -> Iterable[Text]:
    for section, findings in report.sections().items():
        yield _headline(section)
        for finding in findings:
            yield from _lines(finding)


def _one_screen(report: Report) -> Iterable[Text]:
    sections = report.sections()
    optional = sections.pop("optional", [])
    for section in SHOWN_IN_FULL:
        if section in sections:
            yield _headline(section)
            for finding in sections.pop(section):
                yield from _lines(finding)
    yield _headline("checks")
    for section, findings in sections.items():
        if section in _FOLDED:
            continue
        if len(findings) == 1:
            yield from _lines(findings[0])
            continue
        failed = [finding for finding in findings if finding.status == "trouble"]
        count = f"{len(failed)} of {len(findings)} failed" if failed else f"{len(findings)} checked"
        yield _marked("trouble" if failed else "ok", f"{section}: {count}")
        for finding in findings:
            if finding in failed or (finding.status == "note" and finding.advice):
                yield from _lines(finding)
    if optional:
        yield _headline("optional")
        for finding in optional:
            yield from _lines(finding)


def _headline(section: str) -> Text:
    from rich.text import Text

    return Text(section, style="bold")


def _lines(finding: Finding) -> Iterable[Text]:
    from rich.text import Text

    yield _marked(finding.status, f"{finding.name}: {finding.detail}")
    if finding.advice:
        yield Text(f"           -> {finding.advice}", style="dim")


def _marked(status: Status, text: str) -> Text:
    from rich.text import Text

    mark, style = MARKS[status]
    return Text("  ").append(mark, style=style).append(f"  {text}")
