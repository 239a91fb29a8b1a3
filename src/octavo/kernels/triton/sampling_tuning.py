"""What `octavo bench tune` tries for sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from octavo.kernels.triton import sampling
from octavo.kernels.triton.tuning import Case, Parameters, Tuning

_VOCAB = 151_936
_COLD = 256 << 20  # bytes of different logits, more than any cache


def _run(case: Case, parameters: Parameters) -> Sequence[Callable[[], object]]:
    rows, dtype, device = case["rows"], case["dtype"], "cuda"
    sets = max(2, min(64, _COLD // (rows * _VOCAB * dtype.itemsize)))
    temperature = torch.full((rows,), 0.0 if case["greedy"] else 0.8, device=device)
    top_k = None if case["greedy"] else torch.full((rows,), 50, dtype=torch.int32, device=device)
    top_p = None if case["greedy"] else torch.full((rows,), 0.9, device=device)
    seeds = torch.arange(rows, device=device)

    def call() -> Callable[[], object]:
        logits = (3 * torch.randn(rows, _VOCAB, device=device)).to(dtype)
        options = (temperature, top_k, top_p, None, seeds, seeds, False)
        return lambda: sampling.sample(logits, *options, parameters=parameters)

    return [call() for _ in range(sets)]


TUNING = Tuning(
    name="sample",
    space=[
        {**sampling.DEFAULTS, "stages": stages, "programs": programs, "few": few, "at_once": at_once}
        for stages, programs in ((1, 0), (2, 3), (2, 4), (3, 2), (3, 3))
        for few, at_once in ((64, 32), (64, 64), (128, 32), (128, 64))
    ],
    cases=[
        {
            "key": sampling.key(dtype), "default": sampling.DEFAULTS,
            "rows": rows, "dtype": dtype, "greedy": greedy,
        }
        for dtype in (torch.float32, torch.bfloat16)
        for rows, greedy in ((1, False), (64, False), (256, False), (256, True))
    ],
    run=_run,
)  # fmt: skip
