"""What decode attention is launched with: the class of a call, by which a table has it, and the defaults."""

from __future__ import annotations

from typing import Any

import torch
import triton

from octavo.kernels.triton import decode_by_key, tiles
from octavo.kernels.triton.attention_arguments import shape_key
from octavo.kernels.triton.tuning import Parameters


def key_and_defaults(facts: dict[str, Any], together: int) -> tuple[str, Parameters]:
    """The class of a call with these `arguments` in the table of tuned parameters, and its defaults.

    The defaults run on every GPU from compute capability 8.0. Where head_dim is 32 or more and a multiple of
    8, and blocks and slots lie multiples of 16 elements apart, few registers are spilled in a loop, and with
    multiples of 16 none; by key, a few go through memory once for each item. With an odd head_dim, or slots
    elsewhere, keys are read number by number, not ahead, and more than a hundred are spilled. `together`:
    rows of a sequence for which a tile is made.

    BLOCK_N keys at a time, LEAST_KEYS to a range at least; PROGRAMS programs per multiprocessor, side by side
    where its shared memory has room for them. BY_KEY: 1 for `decode_by_key`, 0 for `decode_by_query`. PIN, in
    the latter: 1 for values, 2 for keys too, see `load_quickly`. What counts is bytes on their way: tiles
    have about 32 KB of keys and values, half of that over one byte. MERGED: numbers of pieces merged at once.
    """
    q, k = facts["q"], facts["k"]
    shape = shape_key(q, k, facts["BLOCK_SIZE"])
    shared = {"LEAST_KEYS": 64, "PIN": 1, "PDL": 1, "MERGED": 8192}
    if _goes_by_key(facts, together):
        scales = " scales" if tiles.TOKEN_SCALES in (facts["K_SCALES"], facts["V_SCALES"]) else ""
        # Scales of tokens take instructions, and more warps to issue them: five programs, where a Hopper has
        # room for them. With larger blocks it has not: there a warp's keys are fetched as one.
        programs, registers = (5, 168) if scales and facts["BLOCK_SIZE"] == 16 else (4, 200)
        return f"M{decode_by_key.COLUMNS} {shape}{scales}", {
            **shared, "BY_KEY": 1, "BLOCK_N": 64, "PROGRAMS": programs, "num_warps": 2, "num_stages": 3,
            "maxnreg": registers,
        }  # fmt: skip
    exact = _is_exact(facts)
    rows = query_rows(facts, together)
    quantised = k.element_size() == 1 and not exact and rows <= 16
    block_n = max(32, min(128, 8192 // facts["BLOCK_D"]))
    if exact or rows > 16:
        block_n = 16 if exact and q.shape[2] > 128 else 32
    return f"M{rows} {shape}", {
        **shared, "BY_KEY": 0, "BLOCK_N": block_n, "PROGRAMS": 4 if quantised else 2, "num_warps": 4,
        "num_stages": 2 if exact else 3, "maxnreg": 128 if quantised else 0,
    }  # fmt: skip


def query_rows(facts: dict[str, Any], together: int) -> int:
    """Rows of a tile of `decode_by_query`."""
    most = 16 if _is_exact(facts) else 32 if facts["HEAD_DIM"] > 128 else 64
    return min(max(int(triton.next_power_of_2(together * facts["GROUP"])), 16), most)


def _is_exact(facts: dict[str, Any]) -> bool:
    """Products in float32: no matrix unit, so few rows at a time."""
    return torch.float32 in (facts["q"].dtype, facts["k"].dtype)


def _goes_by_key(facts: dict[str, Any], together: int) -> bool:
    """Whether such a call is for `decode_by_key`: few rows over bytes, with nothing that it does not know."""
    k, block_size = facts["k"], facts["BLOCK_SIZE"]
    strides = [facts[f"{of}_stride_{place}"] for of in ("k", "v") for place in ("block", "slot")]
    slots = [facts[f"{of}_stride_slot"] for of in ("k", "v", "k_scale", "v_scale")]
    return (
        k.element_size() == 1
        and not _is_exact(facts)
        and together * facts["GROUP"] <= decode_by_key.COLUMNS
        and 64 <= facts["HEAD_DIM"] <= 128
        and block_size >= 16
        and facts["softcap"] is None
        and facts["alibi_slopes"] is None
        and all(stride % 16 == 0 for stride in strides)
        and max(slots) * block_size < 2**31
        and k.device.type != "xpu"
        and torch.version.hip is None
    )
