"""After warm-up nothing compiles, and a captured step serves other lengths. `octavo doctor` asks it, too."""

import torch

from octavo.kernels import gpu_checks

DEVICE = torch.device("cuda", 0)


def test_nothing_compiles_after_warm_up() -> None:
    _, late = gpu_checks.late_compiles(DEVICE)
    assert [(made.kernel, made.key) for made in late] == []


def test_nothing_compiles_for_an_odd_model() -> None:
    shape = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "dtype": torch.float16, "block_size": 64}
    _, late = gpu_checks.late_compiles(DEVICE, steps=60, **shape)
    assert [(made.kernel, made.key) for made in late] == []


def test_a_captured_step_serves_other_lengths() -> None:
    assert gpu_checks.replay_error(DEVICE) <= 2.0**-7
