"""Reported faults in a size for the interpreter; tests/kernels/test_reported_faults.py has the others."""

import pytest
from helpers.attention_cases import Case, prepare

pytestmark = pytest.mark.usefixtures("triton_room")


@pytest.mark.parametrize("group", [1, 3, 5, 6, 7, 8, 12, 71])
def test_any_dividing_head_ratio(group: int) -> None:
    """flashinfer-ai/flashinfer#4316, its ratios over one KV head: decode and prefill."""
    for lens_q in ((1,), (9,)):
        prepare(Case(lens_q, (17,), heads=(group, 1), head_dim=16), "cpu").check()
