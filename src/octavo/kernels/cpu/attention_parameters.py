"""The parameters of the attention kernel: `attention.py` fills them in, `attention_kernel.py` reads them."""

from __future__ import annotations

from typing import NamedTuple

from octavo.kernels.cpu.threads import FIRST_PARAMETER


class Parameters(NamedTuple):
    """All but the scratch memory, in the order of their slots."""

    batch: int
    group: int
    kv_heads: int
    dim: int
    q: int
    q_token: int  # strides are in bytes
    q_head: int
    k: int
    k_block: int
    k_slot: int
    k_head: int
    v: int
    v_block: int
    v_slot: int
    v_head: int
    out: int
    out_token: int
    out_head: int
    lse: int  # address; 0: none
    lse_head: int
    starts_q: int
    starts_k: int
    table: int  # 0: packed keys
    table_row: int
    block_size: int
    scale: int  # bits of an fp32 number, as softcap
    softcap: int
    left: int  # negative: unbounded, as right
    right: int
    slopes: int  # 0: none; fp32 (H,), with a stride from sequence to sequence
    slopes_row: int
    sinks: int  # 0: none; fp32 (H,)
    tokens_per_task: int
    rows_stride: int
    zeros: int  # address of a panel of zeros
    lane_numbers: int  # address of 0, 1, 2, ... in fp32
    scratch_size: int  # of one worker


SLOTS = Parameters(*range(FIRST_PARAMETER, FIRST_PARAMETER + len(Parameters._fields)))
SCRATCH_SLOT = FIRST_PARAMETER + len(SLOTS)
