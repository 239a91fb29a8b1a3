"""FlashAttention's own cases in full size: both functions, drawn from the grid of their tests."""

import pytest
from helpers.attention_cases import Case, prepare
from helpers.flash_attention_grid import KvCase, check, draw_cases, varlen_cases

HEAD_DIMS = [40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256]
VARLEN = [
    (1, 1), (1, 147), (64, 128), (239, 1), (799, 3), (113, 203), (128, 217), (113, 211), (108, 256),
    (256, 512), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023), (2048, 2048), (4224, 4224),
]  # fmt: skip
KV_CACHE = [
    (1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (64, 2048), (16, 20000), (128, 128),
    (8, 3131), (1, 131072), (2048, 3577),
]  # fmt: skip


@pytest.mark.parametrize("case", draw_cases(48, KV_CACHE, [59, 64, 128, 256]), ids=str)
def test_with_kvcache(case: KvCase) -> None:
    check(case, "cuda")


@pytest.mark.parametrize("case", varlen_cases(32, VARLEN, HEAD_DIMS, batch=4), ids=str)
def test_varlen(case: Case) -> None:
    prepare(case, "cuda").check()
