"""The faults that people met, as tests/kernels has them, on this GPU: the same tests, in full size."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

_PATH = Path(__file__).parents[1] / "kernels" / "test_reported_faults.py"
_SPEC = importlib.util.spec_from_file_location("reported_faults", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
_FAULTS = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_FAULTS)

# What the CPU's checks refuse, and memory that only the CPU has, are left out.
_ONLY_ON_THE_CPU = ("test_a_slot_past_32_bits_is_refused_and_not_wrapped", "test_addresses_are_64_bit")


@pytest.fixture
def implementation() -> Iterator[str]:
    """New tensors are on the GPU, and Triton's kernels take them."""
    torch.set_default_device("cuda")
    yield "triton on a GPU"
    torch.set_default_device(None)


globals().update(
    {
        name: test
        for name, test in vars(_FAULTS).items()
        if name.startswith("test_") and name not in _ONLY_ON_THE_CPU
    }
)
