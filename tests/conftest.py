"""Makes `tests/helpers` importable as `helpers`; without a GPU, Triton kernels are interpreted.

Every run draws the same: a test that fails does so again, and one that passed did not by luck.
`--hypothesis-profile=default` draws anew.
"""

import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

from helpers import triton_here

triton_here.interpret_without_gpu()

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # there are as many of us as cores; torch's threads would wait for each other

# Neither how long an example takes nor how long it takes to draw is a property of what is tested.
settings.register_profile(
    "same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same")


def pytest_report_header(config: pytest.Config) -> str:
    if triton_here.interpreted():
        return "triton kernels: interpreted on the CPU; tests/gpu is left out"
    return "triton kernels: compiled; tests/kernels/triton is left out" if triton_here.installed() else ""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before fixtures, so that what a test draws does not hang on those that ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
