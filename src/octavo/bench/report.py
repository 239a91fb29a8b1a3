"""Result files, and the tables of README and docs that are generated from them.

A result file is ``bench/results/<hardware>/<name>.json``::

    {"command": str, "commit": str, "date": str, "hardware": str, "versions": {str: str},
     "rows": [{"name": str, "value": number, "unit": str, "better": "higher" | "lower",
               "floor": number | null, "peers": {str: number}, "ratio": {str: number}}]}

A file of GPU kernels also has ``"ceilings": {str: number}``, the measured rates of that GPU, and ``"failed":
{row name: reason}``. Its floors are bounds that follow from them, not promises, and a row has ``"details"``:
its spread, its error, the project's bar. Any file may have ``"failed"``, and any row ``"details"``.

`ratio` is how many times better Octavo is than that peer, in the direction of `better`. A document asks
for a table with ``<!-- results: <hardware>/<name> [row name | pattern] -->`` and ``<!-- /results -->``
around it; ``python -m octavo.bench.report`` fills in what stands between, ``--check`` only compares.
``results?:`` asks for a table that may not have been measured yet.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from octavo.errors import OctavoError

PACKAGES = ("octavo", "torch", "triton", "numpy", "numba", "tokenizers", "transformers")
FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "bf16")


class ResultFileError(OctavoError, ValueError):
    """A result file lacks a key, holds a value of the wrong kind, or cannot be read or written."""


@dataclass(frozen=True)
class Row:
    """One measured value.

    `floor` is what the project promises at the least (or at the most, for `lower`); in a file with ceilings
    it is the best that this hardware can do. `details`: more of the row, None where there is nothing more.
    """

    name: str
    value: float
    unit: str
    better: str = "higher"
    floor: float | None = None
    peers: dict[str, float] = field(default_factory=dict)
    details: Mapping[str, float | str | Sequence[float]] | None = None

    @property
    def ratio(self) -> dict[str, float]:
        """Per peer, how many times better this value is; above 1 means Octavo is ahead."""
        if self.better == "higher":
            return {peer: round(self.value / value, 3) for peer, value in self.peers.items()}
        return {peer: round(value / self.value, 3) for peer, value in self.peers.items()}


def write_result(
    path: Path,
    rows: list[Row],
    *,
    command: str,
    extra_versions: dict[str, str] | None = None,
    gpu: str = "",
    ceilings: dict[str, float] | None = None,
    failed: dict[str, str] | None = None,
    append: bool = False,
) -> None:
    """Writes a result file with today's date, this commit, this machine and the versions in use.

    `extra_versions` names peers that live in an environment of their own; `gpu` what ran, where that was no
    CPU; `failed` what could not be measured, and why: a row, or `row, peer`. With `append`, what is in the
    file stays: its rows but for those of the same names, its failures but for those of these rows, its
    command, to which this one is joined.

    Raises:
        ResultFileError: the file cannot be written; or appended to (`check_append` says so beforehand), being
            of another commit, machine or version, of code that no commit has, or no result file.
    """
    result = _heading(gpu, extra_versions)
    result["command"] = command
    if ceilings is not None:
        result["ceilings"] = ceilings
    if ceilings is not None or failed is not None:
        result["failed"] = failed or {}
    result["rows"] = [_as_dict(row) for row in rows]
    if append and path.is_file():
        result = _joined(read_result(path), result, str(path))
    validate(result, str(path))
    keys = ("command", "commit", "date", "hardware", "versions", "ceilings", "failed", "rows")
    result = {key: result[key] for key in keys if key in result}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ResultFileError(f"{path} cannot be written: {error.strerror}") from error


def check_append(path: Path, gpu: str | None = None, extra_versions: dict[str, str] | None = None) -> None:
    """Raises `ResultFileError` where `write_result` cannot append to that file, before a thing is measured.

    `gpu` None: which one will run is not known yet; nor are versions that are not given. A file that is not
    there can be appended to, from a commit: not even the rows of one command could be joined otherwise.
    """
    now = _heading(gpu or "", extra_versions)
    _check_is_committed(now, str(path))
    if path.is_file():
        before = read_result(path)
        if gpu is None:
            now["hardware"] = "".join(before["hardware"].rpartition("; ")[:2]) + now["hardware"]
        _check_joins(before, now, str(path))


def _heading(gpu: str, extra_versions: dict[str, str] | None) -> dict[str, Any]:
    return {
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "hardware": f"{gpu}; {hardware()}" if gpu else hardware(),
        "versions": {**versions(), **(extra_versions or {})},
    }


def _joined(before: dict[str, Any], now: dict[str, Any], where: str) -> dict[str, Any]:
    """Both as one result."""
    _check_joins(before, now, where)
    failed = now.get("failed", {})
    named = {row["name"] for row in now["rows"]} | failed.keys()
    peers = {peer for row in [*before["rows"], *now["rows"]] for peer in row["peers"]}

    def is_anew(what: str) -> bool:
        row, _, peer = what.rpartition(", ")  # a row's own name may have a comma in it, too
        return what in named or (row in named and peer in peers)

    kept = {what: why for what, why in before.get("failed", {}).items() if not is_anew(what)}
    there = [row for row in before["rows"] if row["name"] not in failed]
    rows = {row["name"]: row for row in [*there, *now["rows"]]}
    commands = dict.fromkeys([*before["command"].split("; "), now["command"]])
    joined = now | {
        "command": "; ".join(commands),
        "versions": before["versions"] | now["versions"],
        "rows": list(rows.values()),
    }
    return joined | ({"failed": kept | failed} if "failed" in before or "failed" in now else {})


def _check_is_committed(now: dict[str, Any], where: str) -> None:
    """Two states of code that no commit has are called the same."""
    if now["commit"] == "unknown" or now["commit"].endswith("+changes"):
        raise ResultFileError(
            f"{where} cannot be appended to: the code here is {now['commit']!r}, which may be any. Commit it "
            "first, or write without appending."
        )


def _check_joins(before: dict[str, Any], now: dict[str, Any], where: str) -> None:
    _check_is_committed(now, where)
    pairs = {key: (before.get(key), now.get(key)) for key in ("commit", "hardware")}
    if "ceilings" in before or "ceilings" in now:
        pairs["ceilings"] = before.get("ceilings"), now.get("ceilings")
    for package in before["versions"].keys() & now["versions"].keys():
        pairs[package] = before["versions"][package], now["versions"][package]
    differing = [f"{what} {there!r}, here {here!r}" for what, (there, here) in pairs.items() if there != here]
    if differing:
        raise ResultFileError(
            f"{where} cannot be appended to: it is of {'; '.join(differing)}. Write to another file, or "
            "write this one anew, without appending."
        )


def _as_dict(row: Row) -> dict[str, Any]:
    content = {**asdict(row), "ratio": row.ratio}
    if row.details is None:
        del content["details"]
    return content


def read_result(path: Path) -> dict[str, Any]:
    """The content of a result file; `ResultFileError` when it is not one."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResultFileError(f"{path} is no readable result file: {error}") from error
    validate(result, str(path))
    checked: dict[str, Any] = result
    return checked


def validate(result: Any, where: str) -> None:
    """Raises `ResultFileError` unless `result` has exactly the shape at the top of this module."""

    def expect(holds: bool, what: str) -> None:
        if not holds:
            raise ResultFileError(f"{where}: {what}")

    def is_number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    def is_numbers(value: Any) -> bool:
        return isinstance(value, dict) and all(isinstance(k, str) and is_number(v) for k, v in value.items())

    expect(isinstance(result, dict), "must be a JSON object")
    keys = {"command", "commit", "date", "hardware", "versions", "rows"}
    extra = {"ceilings", "failed"} if "ceilings" in result else {"failed"} & set(result)
    expect(set(result) == keys | extra, f"must have the keys {sorted(keys | extra)}, has {sorted(result)}")
    if "ceilings" in extra:
        expect(is_numbers(result["ceilings"]), "ceilings must map names to numbers")
    if "failed" in extra:
        expect(isinstance(result["failed"], dict), "failed must map row names to reasons")
    for key in ("command", "commit", "date", "hardware"):
        expect(isinstance(result[key], str) and bool(result[key]), f"{key} must be a non-empty string")
    versions = result["versions"]
    expect(
        isinstance(versions, dict) and all(isinstance(v, str) for v in versions.values()),
        "versions must map names to strings",
    )
    expect(isinstance(result["rows"], list) and bool(result["rows"]), "rows must be a non-empty list")
    row_keys = {"name", "value", "unit", "better", "floor", "peers", "ratio"}
    for index, row in enumerate(result["rows"]):
        at = f"rows[{index}]"
        expect(
            isinstance(row, dict) and set(row) - {"details"} == row_keys,
            f"{at} must have the keys {sorted(row_keys)}",
        )
        expect(
            isinstance(row["name"], str) and isinstance(row["unit"], str),
            f"{at}: name and unit must be strings",
        )
        expect(is_number(row["value"]), f"{at}.value must be a number")
        expect(row["better"] in ("higher", "lower"), f"{at}.better must be 'higher' or 'lower'")
        expect(row["floor"] is None or is_number(row["floor"]), f"{at}.floor must be a number or null")
        expect(
            is_numbers(row["peers"]) and is_numbers(row["ratio"]),
            f"{at}: peers and ratio must map to numbers",
        )
        expect(set(row["peers"]) == set(row["ratio"]), f"{at}: every peer needs a ratio")


def commit() -> str:
    """The checked-out commit, ``+changes`` when code differs from it; ``unknown`` outside a checkout.

    Code is what is measured and what measures; results and the tables made from them are not.
    """
    try:
        head = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", ":/src", ":/bench/*.py")
        return f"{head}+changes" if changed else head
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    here = Path(__file__).parent
    return subprocess.run(
        ("git", "-C", str(here), *arguments), capture_output=True, text=True, check=True
    ).stdout.strip()


def versions() -> dict[str, str]:
    """Python and every installed package that bears on speed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> str:
    """One line: processor, what it can do, cores this process may use, memory."""
    model, flags = cpu_info()
    wide = [name for name in FLAGS if name in flags]
    parts = [model, "+".join(wide) or platform.machine(), f"{num_cores()} cores"]
    memory = memory_bytes()
    if memory:
        parts.append(f"{memory / 2**30:.0f} GiB")
    return ", ".join(parts)


def hardware_slug() -> str:
    """The folder name of this machine under bench/results/, such as ``amd-epyc-avx512-2-cores``."""
    model, flags = cpu_info()
    words = re.findall(r"[a-z0-9]+", re.sub(r"\(.*?\)|processor|cpu|@.*|\d+-core", " ", model.lower()))
    wide = ["avx512"] if "avx512f" in flags else ["avx2"] if "avx2" in flags else []
    return "-".join([*words, *wide, f"{num_cores()}-cores"])


def cpu_info() -> tuple[str, frozenset[str]]:
    """Name of the processor and its feature flags (empty where the system does not list them)."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine(), frozenset()
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    return (
        name.group(1).strip() if name else platform.machine(),
        frozenset(flags.group(1).split()) if flags else frozenset(),
    )


def gpu_name() -> str:
    """The GPU that torch uses and its driver, ``NVIDIA H200, driver 580.159.04``."""
    import torch

    name: str = torch.cuda.get_device_name()
    try:
        driver = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return name
    return f"{name}, driver {driver.group(1)}" if driver else name


def num_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Physical memory; 0 where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0


def number(value: float) -> str:
    """Three significant digits, whole from a thousand on."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if value == int(value):
        return f"{value:.0f}"
    return f"{value:.3g}"


def table(result: dict[str, Any], pattern: str = "*") -> str:
    """A Markdown table of the rows whose name matches `pattern` (alternatives are separated by ``|``), and a
    line that says where it is from.
    """
    alternatives = [alternative.strip() for alternative in pattern.split("|")]
    rows = [row for row in result["rows"] if any(fnmatch.fnmatch(row["name"], a) for a in alternatives)]
    if not rows:
        raise ResultFileError(f"no row of {result['command']!r} matches {pattern!r}")
    peers = list(dict.fromkeys(peer for row in rows for peer in row["peers"]))
    is_bound = "ceilings" in result
    has_promise = not is_bound and any(row["floor"] is not None for row in rows)
    header = [
        "",
        "Octavo",
        *(["of the bound"] if is_bound else []),
        *peers,
        *(["promised"] if has_promise else []),
    ]
    lines = ["| " + " | ".join(header) + " |", "| --- |" + " ---: |" * (len(header) - 1)]
    for row in rows:
        cells = [row["name"], f"{number(row['value'])} {row['unit']}"]
        if is_bound:
            cells.append(f"{100 * _of_bound(row):.0f} %")
        for peer in peers:
            cells.append(
                f"{number(row['peers'][peer])} ({row['ratio'][peer]:.2f}x)" if peer in row["peers"] else ""
            )
        if has_promise:
            bound = "at least" if row["better"] == "higher" else "at most"
            cells.append("" if row["floor"] is None else f"{bound} {number(row['floor'])}")
        lines.append("| " + " | ".join(cells) + " |")
    left_out = ("octavo", "numpy", "tokenizers")  # the result file has them
    used = ", ".join(
        f"{name} {version}" for name, version in result["versions"].items() if name not in left_out
    )
    machine: str = result["hardware"]
    if is_bound:
        machine = machine.split(";")[0]  # the GPU; what its host is, too, is in the file
    where = f"on {machine}; {result['date']}, commit {result['commit'][:10]}; {used}."
    source = f"`{result['command']}` {where}"
    if is_bound:
        source += (
            f" Bounds from {', '.join(f'{name} {value:g}' for name, value in result['ceilings'].items())}."
        )
    if peers:
        source += " In brackets: the ratio; above 1, Octavo is ahead."
    return "\n".join([*lines, "", source])


def _of_bound(row: dict[str, Any]) -> float:
    """The share of what the hardware could do that is reached."""
    better = (row["value"], row["floor"]) if row["better"] == "higher" else (row["floor"], row["value"])
    return float(better[0] / better[1])


_MARKED = re.compile(r"(<!-- results(\??): (\S+)(?: ([^\n>]+?))? -->\n).*?(<!-- /results -->)", re.DOTALL)


def with_tables(document: str, results: Path) -> str:
    """`document` with every marked table written anew from the files under `results`."""

    def fill(match: re.Match[str]) -> str:
        begin, may_be_absent, name, pattern, end = match.groups()
        path = results / f"{name}.json"
        if may_be_absent and not path.exists():
            return f"{begin}Not measured yet.\n{end}"
        return f"{begin}{table(read_result(path), pattern or '*')}\n{end}"

    return _MARKED.sub(fill, document)


def documents(root: Path) -> list[Path]:
    """README.md and everything in docs/ under the root of a checkout."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def main(argv: list[str] | None = None) -> int:
    """Rewrites stale tables, or with ``--check`` names them and returns 1."""
    parser = argparse.ArgumentParser(prog="python -m octavo.bench.report", description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when a table is stale")
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="root of the checkout (default: here)")
    options = parser.parse_args(argv)
    stale = 0
    for path in documents(options.root):
        text = path.read_text(encoding="utf-8")
        filled = with_tables(text, options.root / "bench" / "results")
        if filled != text:
            stale += 1
            print(f"{'stale' if options.check else 'rewritten'}: {path.relative_to(options.root)}")
            if not options.check:
                path.write_text(filled, encoding="utf-8")
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
