"""FlashAttention's own cases in small: both functions, drawn from the grid of their tests, interpreted."""

import pytest
from helpers.attention_cases import Case, prepare
from helpers.flash_attention_grid import KvCase, check, draw_cases, varlen_cases

SHORT_BLOCKS = (0, 1, 4, 16)
pytestmark = pytest.mark.usefixtures("triton_room")


@pytest.mark.parametrize(
    "case",
    draw_cases(24, [(1, 30), (3, 40), (12, 37), (16, 16)], [16, 24, 64], block_size=SHORT_BLOCKS),
    ids=str,
)
def test_with_kvcache(case: KvCase) -> None:
    check(case, "cpu")


@pytest.mark.parametrize(
    "case", varlen_cases(12, [(1, 1), (11, 20), (30, 3), (18, 33)], [16, 20, 59], batch=2), ids=str
)
def test_varlen(case: Case) -> None:
    prepare(case, "cpu").check()
