"""Decode steps with common keys in the interpreter, where work is cut into pieces."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.attention_cases import Case, prepare
from helpers.shared_prefixes import CASES, attended, check, decode

from octavo.kernels.shared_prefixes import attend_shared, find_shared_prefixes
from octavo.kernels.triton import decode as decode_kernel

pytestmark = pytest.mark.usefixtures("triton_room", "finely_cut")


@pytest.fixture
def finely_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 keys, or of two blocks of 16 where keys are rows, and ranges as short as one."""

    def parameters(kernel: str, device: torch.device, key: str, default: dict[str, int]) -> dict[str, int]:
        tile = {"BLOCK_N": 32 if default["BY_KEY"] else 16, "num_warps": 1}
        return {**default, **tile, "LEAST_KEYS": 16, "PROGRAMS": 4}

    monkeypatch.setattr(decode_kernel, "parameters", parameters)


@pytest.mark.parametrize(("case", "expected"), CASES, ids=str)
def test_agrees_with_exact_attention(case: Case, expected: int) -> None:
    inputs = prepare(case, "cpu", share=expected // case.block_size)
    assert check(inputs) == [expected if length else 0 for length in case.lens_k]


def test_keys_that_the_octet_reads_are_not_read_again() -> None:
    """Entries 1 to 7 find a copy of the cache where these are poisoned; the octet goes by entry 0."""
    inputs = prepare(decode(*(70 + b for b in range(8))), "cpu", share=4)
    out, lens = attended(inputs, 16)
    assert lens == [64] * 8
    arguments = inputs.arguments
    for name in ("k", "v"):
        poisoned = arguments[name].clone()
        for slots in inputs.slots[1:]:
            poisoned[slots[:64] // 16, slots[:64] % 16] = math.nan
        arguments[name] = torch.cat([arguments[name], poisoned])
    table = arguments["block_table"]
    shared = find_shared_prefixes(table, arguments["cu_seqlens_k"], 16, 16)
    moved = table.clone()
    moved[1:] += len(arguments["k"]) // 2
    again = attend_shared(
        arguments["q"], arguments["k"], arguments["v"], shared, arguments["cu_seqlens_q"],
        arguments["cu_seqlens_k"], arguments["max_seqlen_k"], block_table=moved,
    )  # fmt: skip
    assert torch.equal(again, out)
