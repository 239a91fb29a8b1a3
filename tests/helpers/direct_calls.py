"""Many calls of a kernel through `launch.direct` and through Triton, compiled for a GPU that is not there.

Prints JSON: how many kernels there were, and every call in which the two did not do the same.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import triton
import triton.language as tl
from helpers.no_gpu import NoGpu

from octavo.kernels.triton.launch import Direct, direct
from octavo.kernels.triton.monitor import watch


@triton.jit(do_not_specialize=["free"], do_not_specialize_on_alignment=["loose", "count"])
def _kernel(x, loose, maybe, free, count, number, pair, SIZE: tl.constexpr, KIND: tl.constexpr):
    at = tl.arange(0, SIZE)
    value = tl.load(x + at).to(tl.float32) * number + free + count + pair[0]
    if loose is not None:
        value += tl.load(loose + at).to(tl.float32)
    if maybe is not None:
        value += tl.load(maybe + at).to(tl.float32)
    tl.store(x + at, value.to(KIND))


_DTYPES = (torch.float32, torch.bfloat16, torch.int32)
_TENSORS = tuple(torch.zeros(64, dtype=dtype)[offset:] for dtype in _DTYPES for offset in (0, 1, 2, 4, 8))
_WHOLE = (0, 1, 2, 15, 16, 48, -1, -16, 2**31 - 1, 2**31, 2**40, True, False)
# What each argument and option may be; the first is that of the call from which others differ.
_CHOICES: dict[str, tuple[Any, ...]] = {
    "x": _TENSORS,
    "loose": (*_TENSORS, None),
    "maybe": (*_TENSORS, None),
    "free": _WHOLE,
    "count": _WHOLE,
    "number": (1.0, 0.5, 1, 16, float("nan")),
    "pair": ((1, 3), (1, 1), (16, 3), (3, 16)),
    "SIZE": (16, 32),
    "KIND": (tl.float32, tl.bfloat16),
    "num_warps": (4, 1),
    "launch_pdl": (False, True),
}


def _calls(number: int) -> Iterator[dict[str, Any]]:
    """A call, those that differ from it in one thing, and some at random."""
    plain = {name: choices[0] for name, choices in _CHOICES.items()}
    for name, choices in _CHOICES.items():
        for choice in choices:
            yield plain | {name: choice}
    draw = random.Random(0)
    for _ in range(number):
        yield {name: draw.choice(choices) for name, choices in _CHOICES.items()}


def main(calls: int) -> dict[str, Any]:
    launches: list[tuple[Any, ...]] = []
    gpu = NoGpu(90)

    def launcher(source: Any, metadata: Any) -> Any:
        def launch(*arguments: Any) -> None:
            # Not the last of what comes before a kernel's own: launch metadata, and the two hooks.
            launches.append((metadata.hash, metadata.launch_pdl, *arguments[:6], *arguments[9:]))
            described, enter = arguments[6:8]
            if enter is not None:
                enter(described)

        return launch

    gpu._launcher = launcher
    kernel, wrong = direct(_kernel), []
    assert isinstance(kernel, Direct)
    grids = ((3,), (3, 2), (3, 2, 5))
    arguments = list(_calls(calls))
    with gpu, watch() as made:
        for again in (False, True):
            for index, given in enumerate(arguments):
                grid = grids[index % 3]
                ours = kernel[grid](**given)
                theirs = _kernel[grid](**given)
                a, b = (str(launch) for launch in launches[-2:])
                if ours is not theirs or a != b:
                    wrong.append([again, str(given), a, b])
        compiled = len(made)
        before = len(made)
        seen: list[str] = []
        hook = lambda metadata: seen.append(metadata and metadata.get()["name"])  # noqa: E731
        triton.knobs.runtime.launch_enter_hook.add(hook)
        kernel[(1,)](**arguments[0])
        triton.knobs.runtime.launch_enter_hook.remove(hook)
        kernel[(1,)](**arguments[0])
    kept = len({id(one) for one in kernel._made.values()})
    return {"compiled": compiled, "kept": kept, "wrong": wrong, "hooked": seen, "late": len(made) - before}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]))))
