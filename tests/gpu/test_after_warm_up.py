"""After warm-up nothing compiles, and a captured step serves other lengths. `octavo doctor` asks it, too."""

from typing import Any

import pytest
import torch

from octavo.kernels import gpu_checks

DEVICE = torch.device("cuda", 0)


# Each compiles some forty kernels of its own where none is on disk.
MODELS: dict[str, dict[str, Any]] = {
    "SmolLM2": {"num_heads": 9, "num_kv_heads": 3, "hidden_size": 576, "block_size": 64, "qk_norm": False},
    "windows": {"window_sizes": ((-1, -1), (1023, 0)), "softcap": 30.0, "sinks": True},
    "fp8": {"cache_dtype": torch.float8_e4m3fn, "scales": "token"},
    "invariant": {"batch_invariant": True},
}


@pytest.mark.parametrize("model", MODELS)
def test_nothing_compiles_after_warm_up(model: str) -> None:
    _, late = gpu_checks.late_compiles(DEVICE, steps=60, **MODELS[model])
    assert [(made.kernel, made.key) for made in late] == []


def test_a_captured_step_serves_other_lengths() -> None:
    assert gpu_checks.replay_error(DEVICE) <= 2.0**-7
