"""A stand-in for CUDA's graphs: it runs the step again, on the same tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch

from octavo.engine.core import Engine
from octavo.engine.graph import DecodeGraphs
from octavo.engine.shared_prefixes import Sharing

HOST_ONLY = ("_seq_ids", "_owners", "_ints", "_options", "_top_k", "_plain", "_filters", "_batches", "_order")


class Replaying:
    """What `CudaCapture` does, as far as a CPU can: results always come in the same tensor, and a replay
    knows nothing of the host.
    """

    def __init__(self) -> None:
        self.graphs: DecodeGraphs | None = None
        self.num_captures = 0
        self.num_replays = 0

    def serve(self, engine: Engine, sharing: Sharing | None = None, *, must_share: bool = False) -> None:
        """Have the decode steps of that engine replayed from now on."""
        engine.runner.use_graphs(engine.scheduler.max_model_len, self, sharing, must_share=must_share)
        self.graphs = engine.runner._graphs

    def serve_others(self, engine: Engine) -> None:
        """Have the model in that engine's other steps replayed; for one whose decode steps are."""
        scheduler = engine.scheduler
        self.graphs = engine.runner._graphs
        engine.runner.use_mixed_graphs(scheduler.max_model_len, scheduler.max_num_batched_tokens, self)

    def __call__(
        self, step: Callable[[], torch.Tensor], *, is_ready: bool = False
    ) -> tuple[Callable[[], object], torch.Tensor]:
        result = torch.full_like(step(), -7)
        self.num_captures += 1

        def replay() -> None:
            self.num_replays += 1
            assert self.graphs is not None
            hidden = {name: self.graphs.__dict__.pop(name) for name in HOST_ONLY}
            try:
                result.copy_(step())
            finally:
                self.graphs.__dict__.update(hidden)

        return replay, result
