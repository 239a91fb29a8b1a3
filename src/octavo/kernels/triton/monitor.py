"""Counts what Triton compiles, so that nothing compiles unnoticed while requests are served.

::

    with watch() as made:
        engine.step()
    print(made)              # [Made(kernel='_decode', ..., seconds=0.8, from_disk=False)]

    with forbid_compiles():  # raises UnexpectedCompile, naming each kernel and what it was specialised for
        engine.step()

A specialisation that is loaded from Triton's cache on disk counts as well: it stops a request for less long,
and on another machine it would have been compiled.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Made:
    """One specialisation of one kernel that this process did not have before.

    Attributes:
        kernel: name of the function.
        key: what it was made for: types of arguments, with ``:16`` where divisibility by 16 is used,
            constants and options.
        from_disk: loaded from the cache on disk rather than compiled.
        seconds: how long the compiler took, by its own account; 0 from disk.
    """

    kernel: str
    key: str
    from_disk: bool
    seconds: float


class UnexpectedCompile(AssertionError):
    """A kernel was compiled where everything was to be ready."""


_watchers: list[list[Made]] = []
_installing = threading.Lock()
_installed = False
_last_compile = threading.local()  # what the compiler reported of the specialisation it is about to hand over


@contextmanager
def watch() -> Iterator[list[Made]]:
    """Collects, in the list it hands out, every specialisation made inside the block, in any thread."""
    _install()
    made: list[Made] = []
    _watchers.append(made)
    try:
        yield made
    finally:
        _watchers[:] = [watcher for watcher in _watchers if watcher is not made]


@contextmanager
def forbid_compiles() -> Iterator[list[Made]]:
    """`watch`, and raises `UnexpectedCompile` at the end of the block if the list is not empty."""
    with watch() as made:
        yield made
    if made:
        lines = [f"{one.kernel}: {one.key}{' (from disk)' if one.from_disk else ''}" for one in made]
        raise UnexpectedCompile(f"compiled after warm-up, {len(made)} in all:\n  " + "\n  ".join(lines))


def _install() -> None:
    """Put our hooks before Triton's, once; hooks of others are still called."""
    global _installed
    with _installing:
        if _installed:
            return
        _installed = True
        from triton import knobs

        others_hook, others_listener = knobs.runtime.jit_post_compile_hook, knobs.compilation.listener

        def after_compile(**what: Any) -> Any:
            if _watchers:
                _record(what)
            return others_hook(**what) if others_hook is not None else None

        def listener(**what: Any) -> None:
            times = what.get("times")
            _last_compile.report = (bool(what.get("cache_hit")), getattr(times, "total", 0) / 1e6)
            if others_listener is not None:
                others_listener(**what)

        knobs.runtime.jit_post_compile_hook = after_compile
        knobs.compilation.listener = listener


def _record(what: dict[str, Any]) -> None:
    from_disk, seconds = getattr(_last_compile, "report", (False, 0.0))
    _last_compile.report = (False, 0.0)
    made = Made(*describe(what), from_disk, 0.0 if from_disk else seconds)
    for watcher in _watchers:
        watcher.append(made)


def describe(what: dict[str, Any]) -> tuple[str, str]:
    """The `kernel` and `key` of `Made`, from what Triton tells its hooks of a specialisation."""
    name = getattr(what.get("fn"), "name", None) or str(what.get("repr", "?")).split("[")[0]
    return name, _key(what)


def _key(what: dict[str, Any]) -> str:
    """``q:*bf16:16 batch:i32 BLOCK=64 num_warps=4``: types, ``:16`` where divisibility is used, constants."""
    compiled = what.get("compile") or {}
    signature, constants = compiled.get("signature") or {}, compiled.get("constants") or {}
    names = list(signature)
    attributes = next(iter(compiled.get("configs") or ()), None) or {}
    aligned = {path[0] for path, found in attributes.items() if found and len(path) == 1}
    parts = []
    for index, (name, kind) in enumerate(signature.items()):
        if kind != "constexpr":
            parts.append(f"{name}:{kind}{':16' if index in aligned else ''}")
    for path, value in constants.items():
        index = path[0] if isinstance(path, tuple) else path
        parts.append(f"{names[index] if isinstance(index, int) else index}={value}")
    parts += [f"{name}={compiled[name]}" for name in ("num_warps", "num_stages") if name in compiled]
    return " ".join(parts) or str(what.get("key", ""))
