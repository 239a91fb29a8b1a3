"""Makes `tests/helpers` importable as `helpers`; without a GPU, Triton kernels are interpreted."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from helpers import triton_here

triton_here.interpret_without_gpu()


def pytest_report_header(config: pytest.Config) -> str:
    if triton_here.interpreted():
        return "triton kernels: interpreted on the CPU; tests/gpu is left out"
    return "triton kernels: compiled; tests/kernels/triton is left out" if triton_here.installed() else ""
