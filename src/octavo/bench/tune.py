"""`octavo bench tune`: the launch parameters that are fastest on this GPU, kept where the kernels look.

A variant is compiled in one of several processes, which share Triton's cache on disk, and then timed alone in
this one. Kernels say what there is to try: see `octavo.kernels.triton.tuning.Tuning`.
"""

from __future__ import annotations

import fnmatch
import importlib
import json
import math
import multiprocessing
import os
import pkgutil
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from octavo.bench.report import commit, gpu_name, num_cores, versions
from octavo.bench.timing import gpu_time
from octavo.errors import ConfigError, nearest
from octavo.kernels import triton as room
from octavo.kernels.triton import tuning
from octavo.kernels.triton.tuning import Case, Parameters, Tuning

_WORTH = 0.98  # a variant must take at most this much of the default's time: less is noise
_NEAR, _FINALISTS = 1.1, 4  # what is timed a second time: within a tenth of the best, and not more than these
_BRIEF: dict[str, Any] = {"group_ms": 2.0, "groups": 1}
_LONG: dict[str, Any] = {"group_ms": 8.0, "groups": 5}


def tune(
    kernels: Sequence[str], out: Path | None, say: Callable[[str], None], keys: Sequence[str] = ()
) -> Path:
    """Tunes the kernels named (none: all that can be) and adds to the table; other entries are kept.

    Args:
        kernels: their names.      keys: patterns of the shape classes to tune; none: all.
        out: the file; None: where the kernels look for it.
        say: told of each result.

    Raises:
        ConfigError: no GPU here, no such kernel, a pattern that no shape class matches, or a file that cannot
            be written or holds something else. Nothing was run.
    """
    if not torch.cuda.is_available():
        raise ConfigError("bench tune needs a GPU that torch can use, and there is none here")
    device = torch.device("cuda", torch.cuda.current_device())
    reason = room.unfit_reason("cuda")
    if reason is not None:
        raise ConfigError(f"bench tune: {reason}")
    found = tunings()
    for name in kernels:
        if name not in found:
            raise ConfigError(f"--kernel: {name!r} is none of {', '.join(found)}{nearest(name, found)}")
    path = out or tuning.table_path(device)
    assert path is not None
    chosen = {name: one for name, one in found.items() if not kernels or name in kernels}
    _check_patterns(keys, {key for _, one in chosen.values() for key in wanted_keys(one, [])})
    _check_writable(path)
    _read(path)
    compile_all({name: module for name, (module, _) in chosen.items()}, say, keys)
    for name, (_, one) in chosen.items():
        for key, entry in tune_one(one, say, keys):
            table = _read(path)
            table.setdefault(name, {})[key] = entry
            write(path, table)  # each time, so that a run that is cut short was not in vain
    tuning.forget()
    say(f"written: {path}; octavo bench kernels checks every kernel with it")
    return path


def _check_patterns(patterns: Sequence[str], keys: Collection[str]) -> None:
    for pattern in patterns:
        if not fnmatch.filter(keys, pattern):
            raise ConfigError(
                f"--key: {pattern!r} matches none of the {len(keys)} shape classes, such as {min(keys)!r}"
                f"{nearest(pattern, keys)}"
            )


def _check_writable(path: Path) -> None:
    folder = next(folder for folder in path.absolute().parents if folder.exists())
    is_other = path.exists() and not path.is_file()  # a folder, or a device, which a file must not replace
    if is_other or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"no table can be written to {str(path)!r}; name another file with --out")


def _read(path: Path) -> dict[str, Any]:
    try:
        return tuning.read(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{str(path)!r} cannot be added to: {error}. Delete it, or name another file with --out"
        ) from error


def tunings() -> dict[str, tuple[str, Tuning]]:
    """Kernel -> (module, what there is to try) for every module of the room that exports TUNING."""
    modules = [f"{room.__name__}.{module.name}" for module in pkgutil.iter_modules(room.__path__)]
    return {one.name: (module, one) for module in modules for one in _exported(module)}


def _exported(module: str) -> Sequence[Tuning]:
    """A module exports one Tuning or several."""
    found = getattr(importlib.import_module(module), "TUNING", ())
    return (found,) if isinstance(found, Tuning) else tuple(found)


def space_of(one: Tuning, case: Case) -> Sequence[Parameters]:
    """What to try on that case, the default first and once."""
    default = case["default"]
    return [default, *(p for p in case.get("space", one.space) if dict(p) != dict(default))]


def wanted_keys(one: Tuning, patterns: Sequence[str]) -> list[str]:
    """The shape classes of a kernel that match one of the patterns; without patterns all of them."""
    keys = dict.fromkeys(case["key"] for case in one.cases)
    return [key for key in keys if not patterns or any(fnmatch.fnmatch(key, pattern) for pattern in patterns)]


def tune_one(
    one: Tuning, say: Callable[[str], None], patterns: Sequence[str] = ()
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Keys and their entries: the variant with the least product of times over the cases of the key.

    All variants are timed briefly, and those near the best once more at length.
    """
    for key in wanted_keys(one, patterns):
        alike = [case for case in one.cases if case["key"] == key]
        space = space_of(one, alike[0])
        brief = {index: _mean(one, alike, parameters, _BRIEF) for index, parameters in enumerate(space)}
        least = min(brief.values())
        if not math.isfinite(least):
            say(f"{one.name} {key}: nothing runs, not even the default")
            continue
        near = sorted(
            (index for index in brief if brief[index] < _NEAR * least), key=lambda index: brief[index]
        )
        means = {index: _mean(one, alike, space[index], _LONG) for index in {0, *near[:_FINALISTS]}}
        best = min(means, key=lambda index: means[index])
        if means[best] > _WORTH * means[0]:
            best = 0
        parameters = dict(space[best])
        kept = " ".join(f"{name}={value}" for name, value in parameters.items()) if best else "the default"
        say(f"{one.name} {key}: {means[best]:.2f} us, default {means[0]:.2f} us; {kept}")
        default_us = round(means[0], 2) if math.isfinite(means[0]) else None
        yield key, {"parameters": parameters, "us": round(means[best], 2), "default_us": default_us}


def _mean(one: Tuning, cases: Sequence[Case], parameters: Parameters, how: dict[str, Any]) -> float:
    """Geometric mean of the microseconds; infinite where these parameters do not fit a case or the GPU."""
    logarithms = []
    for case in cases:
        try:
            calls = one.run(case, parameters)
            us = gpu_time([calls] if callable(calls) else calls, **how).median_us
        except Exception as error:
            if "illegal memory access" in str(error):
                raise  # this process can do nothing more with the GPU
            return math.inf
        logarithms.append(math.log(us))
    return math.exp(sum(logarithms) / len(logarithms))


def compile_all(modules: dict[str, str], say: Callable[[str], None], patterns: Sequence[str] = ()) -> None:
    """Compile every variant of every kernel, in a process for each core, into the cache on disk."""
    jobs = []
    for name, module in modules.items():
        one = _tuning(module, name)
        first = {case["key"]: index for index, case in reversed(list(enumerate(one.cases)))}
        jobs += [
            (module, name, index, variant)
            for index in (first[key] for key in wanted_keys(one, patterns))
            for variant in range(len(space_of(one, one.cases[index])))
        ]
    if not jobs:
        return
    # Variants that differ in a number given at run time are one to compile: apart, one finds the other made.
    random.Random(0).shuffle(jobs)
    workers = max(1, min(num_cores() - 1, 16, len(jobs)))
    say(f"compiling {len(jobs)} variants in {workers} processes")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_one_thread) as pool:
        list(pool.map(_compile, *zip(*jobs, strict=True), chunksize=1))


def _one_thread() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"


def _tuning(module: str, name: str) -> Tuning:
    return next(one for one in _exported(module) if one.name == name)


def _compile(module: str, name: str, case: int, variant: int) -> None:
    """One launch, for the sake of what it leaves on disk; a variant that fails will fail again when timed."""
    one = _tuning(module, name)
    try:
        calls = one.run(one.cases[case], space_of(one, one.cases[case])[variant])
        (calls if callable(calls) else calls[0])()
        torch.cuda.synchronize()
    except Exception:
        return


def write(path: Path, table: dict[str, Any]) -> None:
    """The table as JSON, a line for each key. A reader finds the old file or the new one, never a part."""
    head = {
        "gpu": gpu_name().split(",")[0],
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": {name: version for name, version in versions().items() if name in ("torch", "triton")},
    }
    blocks = []
    for kernel, entries in sorted(table.items()):
        lines = [f"   {json.dumps(key)}: {json.dumps(entry)}" for key, entry in sorted(entries.items())]
        blocks.append(f"  {json.dumps(kernel)}: {{\n" + ",\n".join(lines) + "\n  }")
    text = json.dumps(head, indent=1)[:-2] + ',\n "kernels": {\n' + ",\n".join(blocks) + "\n }\n}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
