"""Launch parameters: a table for this GPU, or a kernel's own default. Nothing is tried out at run time.

`octavo bench tune` makes ``tuned/<gpu>.json``, one line for each kernel and key::

    {"gpu": "NVIDIA H200", "commit": "...", "date": "...", "versions": {"triton": "3.6.0"}, "kernels": {
     "decode_attention": {
      "G2 D128 bf16 bs16": {"parameters": {"BLOCK_N": 64, "num_warps": 4}, "us": 12.3, "default_us": 13.1}}}}

A GPU without a table runs on the defaults, which are safe anywhere (`octavo doctor` says which it is).
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from octavo.kernels import known_calls

logger = logging.getLogger("octavo")

FOLDER = Path(__file__).parent / "tuned"

Parameters = Mapping[str, int]
Case = Mapping[str, Any]


@dataclass(frozen=True)
class Tuning:
    """What `octavo bench tune` needs to know of a kernel; its module exports one as ``TUNING``.

    Attributes:
        name: the kernel, as it calls `parameters`.
        space: parameters to try, each complete.
        cases: inputs to try them on. A case is a dict of the kernel module's own making with two keys that
            are read here: ``"key"``, the string under which the kernel looks its parameters up, and
            ``"default"``, those it takes without a table. Cases of one key are decided together, by the
            product of their times. ``"space"``, where present, stands in for `space`.
        run: ``run(case, parameters)`` returns what to time: a callable without arguments that launches the
            kernel once, or a list of such callables over different inputs that together are larger than the
            GPU's cache. May raise where the parameters do not fit the case: they are passed over.
    """

    name: str
    space: Sequence[Parameters]
    cases: Sequence[Case]
    run: Callable[[Case, Parameters], Callable[[], object] | Sequence[Callable[[], object]]]


def parameters(kernel: str, device: torch.device, key: str, default: Parameters) -> Parameters:
    """What `kernel` is launched with for `key` on that GPU; dictionary look-ups after the first time.

    Args:
        kernel: name of the kernel, as in its `Tuning`.
        device: where it is to run.
        key: the shape class, dtype and block size, readable: ``"G2 D128 bf16 bs16"``.
        default: what is safe on any GPU; always the same for one kernel and key.

    Returns:
        The keys of `default`, with the values of this GPU's table where it has some.
    """
    asked = (kernel, device, key)
    found = _decided.get(asked)
    if found is None:
        tuned = table(device).get(kernel, {}).get(key, {}).get("parameters", {})
        # A table made for an older kernel may name parameters it no longer has, and lack new ones.
        found = _decided[asked] = {name: tuned.get(name, value) for name, value in default.items()}
    return found


_decided: dict[tuple[str, torch.device, str], Parameters] = {}
_tables: dict[Path | None, dict[str, Any]] = {}


def table(device: torch.device) -> dict[str, Any]:
    """Kernel -> key -> entry for that GPU; empty where there is no table for it, or none to be read."""
    path = table_path(device)
    found = _tables.get(path)
    if found is None:
        try:
            found = {} if path is None else read(path)
        except (OSError, ValueError) as error:
            logger.warning(
                "%s is passed over, and the kernels run on their defaults: it cannot be read (%s). "
                "Delete it; octavo bench tune makes another.",
                path,
                error,
            )
            found = {}
        _tables[path] = found
    return found


def read(path: Path) -> dict[str, Any]:
    """Kernel -> key -> entry of that file, empty where there is none; ValueError or OSError otherwise."""
    if not path.exists():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    kernels: dict[str, Any] | None = content.get("kernels") if isinstance(content, dict) else None
    if not isinstance(kernels, dict) or not all(map(_is_entries, kernels.values())):
        raise ValueError("it is no table of launch parameters")
    return kernels


def _is_entries(entries: object) -> bool:
    """Key -> {"parameters": name -> int, ...}."""
    return isinstance(entries, dict) and all(
        isinstance(entry, dict)
        and isinstance(entry.get("parameters"), dict)
        and all(type(value) is int for value in entry["parameters"].values())
        for entry in entries.values()
    )


@functools.cache  # a start asks some two hundred times, and the driver takes a millisecond to answer
def table_path(device: torch.device) -> Path | None:
    """Where the table of that GPU is or would be; None for a device that is no GPU here."""
    if device.type == "cuda" and torch.cuda.is_available():
        name = torch.cuda.get_device_name(device)
    elif device.type == "xpu" and torch.xpu.is_available():
        name = torch.xpu.get_device_name(device)
    else:
        return None
    return FOLDER / f"{'-'.join(re.findall('[a-z0-9]+', name.lower()))}.json"


def forget() -> None:
    """Reads the tables anew at the next call: after one was written, or in a test that brings its own."""
    _decided.clear()
    _tables.clear()
    table_path.cache_clear()
    known_calls.forget()
