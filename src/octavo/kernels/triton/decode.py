"""Attention of few query rows (1 to 8) over many keys: decoding, and verifying a draft.

Reading the cache is all the work, so the kernel is about keeping every multiprocessor reading, whatever the
lengths are, without the host knowing them. A fixed number of programs divides the work by itself::

    key tiles (BLOCK_N keys of one sequence and one KV head), laid end to end, sequence by sequence, head by head

      sequence 0, head 0      head 1                  sequence 1, head 0      head 1
    | . . . . . . . . . . . | . . . . . . . . . . . | . . . . . . . . . . . . | . . .
    '---- program 0 ----' '---- program 1 ----' '---- program 2 ----' '---- program 3 ---
               piece 0      1                     2

Each program takes an equal range of tiles, finds where it begins from the prefix sums of all lengths, and walks
it. An item (a sequence and head) that lies wholly in one range is written at once. One that is cut leaves a
partial result (accumulator, maximum, sum) per piece; a range cuts at most two items, its first and its last,
so that the workspace has two slots per program. The pieces are merged in the order of the keys.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

SHORT = 8  # query rows of a sequence, at most
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
FAR = 1 << 30  # no bound on that side of a window


@triton.jit
def _sequence(
    cu_q, cu_k, leftpad, b, batch, left,
    G: tl.constexpr, KVH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SHORT: tl.constexpr,
    HAS_LEFTPAD: tl.constexpr,
):  # fmt: skip
    """The work of sequence b, or of a vector of sequences: `units` tiles in `m_tiles` x KVH items."""
    there = b < batch
    q_start = tl.load(cu_q + b, mask=there, other=0)
    rows = tl.load(cu_q + b + 1, mask=there, other=0) - q_start
    k_start = tl.load(cu_k + b, mask=there, other=0)
    length = tl.load(cu_k + b + 1, mask=there, other=0) - k_start
    first = tl.maximum(length - rows - left, 0)  # the first key that a row sees
    if HAS_LEFTPAD:
        first = tl.maximum(first, tl.load(leftpad + b, mask=there, other=0))
    first_tile = first // BLOCK_N
    tiles = tl.maximum((length + BLOCK_N - 1) // BLOCK_N - first_tile, 1)  # one where nothing is seen: it writes 0
    m_tiles = (rows * G + BLOCK_M - 1) // BLOCK_M
    units = tl.where((rows > 0) & (rows <= SHORT), tiles * m_tiles * KVH, 0)
    return q_start, rows, k_start, length, first, first_tile, tiles, m_tiles, units


@triton.jit
def _convert(x, COMPUTE: tl.constexpr, PIN: tl.constexpr):
    """x in the dtype COMPUTE. PIN: converted as it lies in memory, 16 bytes at a time.

    Otherwise the compiler converts after it has taken the tile apart for the matrix unit, and reads single bytes
    from shared memory for that. Its layout pass moves nothing across assembly that may have side effects.
    """
    x = x.to(COMPUTE)
    if PIN:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x


@triton.jit
def _write(
    out, lse, sinks, acc, m, l, q_start, rows, head, r, d, v_scale,
    stride_ot, stride_oh, stride_lh,
    G: tl.constexpr, D: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Normalise the rows r of an item and store them. m is in units of log2."""
    i = r // G
    h = head * G + r % G
    real = i < rows
    seen = l > 0
    if HAS_SINKS:
        sink = tl.load(sinks + h, mask=real, other=0.0).to(tl.float32) * LOG2E
        top = tl.maximum(m, sink)
        shrink = tl.exp2(m - top)
        l = l * shrink + tl.where(seen, tl.exp2(sink - top), 0.0)
        acc = acc * shrink[:, None]
        m = top
    acc = acc * tl.where(seen, v_scale / l, 0.0)[:, None]
    row = (q_start + i).to(tl.int64)
    at = out + row[:, None] * stride_ot + h[:, None] * stride_oh + d[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=real[:, None] & (d < D)[None, :])
    if HAS_LSE:
        total = tl.where(seen, (m + tl.log2(l)) * LN2, float("-inf"))
        tl.store(lse + h.to(tl.int64) * stride_lh + row, total, mask=real)


@triton.jit
def _merge(partial_acc, partial_ml, first, pieces, ROWS: tl.constexpr, r0, BLOCK_R: tl.constexpr,
           BLOCK_D: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Rows r0 .. r0 + BLOCK_R of the item whose pieces programs first, first + 1, ... left."""
    r = r0 + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    m = tl.full([BLOCK_R], -1.0e30, tl.float32)
    l = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for c in range(0, pieces, CHUNK):
        piece = c + tl.arange(0, CHUNK)
        slot = 2 * (first + piece) + (piece == 0).to(tl.int32)
        there = piece < pieces
        at = partial_ml + slot[:, None] * (2 * ROWS) + r[None, :]
        ms = tl.load(at, mask=there[:, None], other=-1.0e30, cache_modifier=".cg")
        ls = tl.load(at + ROWS, mask=there[:, None], other=0.0, cache_modifier=".cg")
        at = partial_acc + (slot[:, None] * ROWS + r[None, :])[:, :, None] * BLOCK_D + d[None, None, :]
        accs = tl.load(at, mask=there[:, None, None], other=0.0, cache_modifier=".cg")
        top = tl.maximum(m, tl.max(ms, 0))
        shrink = tl.exp2(m - top)
        w = tl.exp2(ms - top[None, :])
        l = l * shrink + tl.sum(ls * w, 0)
        acc = acc * shrink[:, None] + tl.sum(accs * w[:, :, None], 0)
        m = top
    return acc, m, l


@triton.jit(do_not_specialize=["batch", "left", "right", "stride_tb", "stride_lh", "stride_ab", "min_tiles"])
def _decode(
    q, k, v, out, lse, table, cu_q, cu_k, leftpad, alibi, sinks, k_scales, v_scales,
    partial_acc, partial_ml, notes,
    scale, softcap, v_scale, batch, left, right, min_tiles,
    stride_qt, stride_qh, stride_ot, stride_oh, stride_lh, stride_tb, stride_ab,
    stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_ksb, stride_kst, stride_ksh, stride_vsb, stride_vst, stride_vsh,
    G: tl.constexpr, KVH: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, ROWS: tl.constexpr,
    SHORT: tl.constexpr, COMPUTE: tl.constexpr, PAGED: tl.constexpr, ONE_VECTOR: tl.constexpr,
    HAS_LOW: tl.constexpr, HAS_LEFTPAD: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr, K_SCALE: tl.constexpr, V_SCALE: tl.constexpr,
    EVICT: tl.constexpr, TRANSPOSED: tl.constexpr, IN_PLACE: tl.constexpr, PDL: tl.constexpr,
    CHUNK: tl.constexpr, AHEAD: tl.constexpr, SAME_STRIDES: tl.constexpr, SHIFT: tl.constexpr,
    PIN: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    p = tl.program_id(0)
    programs = tl.num_programs(0)
    if not IN_PLACE:
        tl.store(notes + p * 4, 0)

    # The plan.
    v_b = tl.arange(0, BLOCK_B)
    if ONE_VECTOR:
        _, _, _, _, _, _, _, _, v_units = _sequence(
            cu_q, cu_k, leftpad, v_b, batch, left, G, KVH, BLOCK_M, BLOCK_N, SHORT, HAS_LEFTPAD
        )
        total = tl.sum(v_units)
    else:
        total = 0
        for b0 in range(0, batch, BLOCK_B):
            _, _, _, _, _, _, _, _, v_units = _sequence(
                cu_q, cu_k, leftpad, b0 + v_b, batch, left, G, KVH, BLOCK_M, BLOCK_N, SHORT, HAS_LEFTPAD
            )
            total += tl.sum(v_units)
    per = tl.maximum((total + programs - 1) // programs, min_tiles)
    unit = p * per
    stop = tl.minimum(unit + per, total)
    if ONE_VECTOR:
        v_before = tl.cumsum(v_units, 0) <= unit
        b = tl.sum(v_before.to(tl.int32))
        begin = tl.sum(tl.where(v_before, v_units, 0))
    else:
        b = 0
        begin = 0
        base = 0
        for b0 in range(0, batch, BLOCK_B):
            _, _, _, _, _, _, _, _, v_units = _sequence(
                cu_q, cu_k, leftpad, b0 + v_b, batch, left, G, KVH, BLOCK_M, BLOCK_N, SHORT, HAS_LEFTPAD
            )
            v_before = (base + tl.cumsum(v_units, 0) <= unit) & (b0 + v_b < batch)
            b += tl.sum(v_before.to(tl.int32))
            begin += tl.sum(tl.where(v_before, v_units, 0))
            base += tl.sum(v_units)

    d = tl.arange(0, BLOCK_D)
    v_n = tl.arange(0, BLOCK_N)
    v_m = tl.arange(0, BLOCK_M)
    zero = tl.full((), 0, tl.int64)
    k_rows = v_n[:, None] * stride_kt + d[None, :]
    v_rows = v_n[:, None] * stride_vt + d[None, :]

    while unit < stop:
        q_start, rows, k_start, length, first, first_tile, tiles, m_tiles, units = _sequence(
            cu_q, cu_k, leftpad, b, batch, left, G, KVH, BLOCK_M, BLOCK_N, SHORT, HAS_LEFTPAD
        )
        if unit >= begin + units:
            begin += units
            b += 1
        else:
            item = (unit - begin) // tiles
            tile = (unit - begin) % tiles
            count = tl.minimum(tiles - tile, stop - unit)
            head = item // m_tiles
            r0 = (item % m_tiles) * BLOCK_M
            r = r0 + v_m
            i = r // G
            h = head * G + r % G
            real = i < rows
            in_d = d < D

            q_at = q + (q_start + i).to(tl.int64)[:, None] * stride_qt + h[:, None] * stride_qh + d[None, :]
            b_q = tl.load(q_at, mask=real[:, None] & in_d[None, :], other=0.0).to(COMPUTE)
            if TRANSPOSED:
                b_q = tl.trans(b_q)
            position = i + length - rows
            high = tl.minimum(position + right + 1, length)
            low = tl.maximum(position - left, 0)
            if HAS_LEFTPAD:
                low = tl.maximum(low, tl.load(leftpad + b))
            if HAS_ALIBI:
                slope = tl.load(alibi + b * stride_ab + h, mask=real, other=0.0) * LOG2E
            s_scale = scale
            if K_SCALE == 1:
                s_scale = scale * tl.load(k_scales)
            w_scale = v_scale
            if V_SCALE == 1:
                w_scale = v_scale * tl.load(v_scales)

            if PAGED:
                row_of_table = table + b.to(tl.int64) * stride_tb
            k_base = k + head * stride_kh
            v_base = v + head * stride_vh
            if PAGED and BLOCK_SIZE == 0:
                block = tl.load(row_of_table, mask=length > 0, other=0).to(tl.int64)
                k_base += block * stride_kb
                v_base += block * stride_vb
            if not PAGED:
                k_base += k_start.to(tl.int64) * stride_kt
                v_base += k_start.to(tl.int64) * stride_vt

            m = tl.full([BLOCK_M], -1.0e30, tl.float32)
            v_l = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # summed over keys at the end: a barrier less per tile
            if TRANSPOSED:
                acc = tl.zeros([BLOCK_D, BLOCK_M], tl.float32)
            else:
                acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            start = first_tile + tile
            if PAGED and BLOCK_SIZE > 0:
                # The block of the next tile is looked up one tile ahead, so that K and V wait for no table.
                if BLOCK_N <= BLOCK_SIZE:
                    next_block = tl.load(row_of_table + (start * BLOCK_N >> SHIFT), mask=start * BLOCK_N < length, other=0)
                else:
                    n = start * BLOCK_N + v_n
                    needed = n < length
                    if HAS_LOW:
                        needed = needed & (n >= first)
                    next_block = tl.load(row_of_table + (n >> SHIFT), mask=needed, other=0)
            for j in range(start, start + count):
                n = j * BLOCK_N + v_n
                needed = n < length
                if HAS_LOW:
                    needed = needed & (n >= first)
                if PAGED and BLOCK_SIZE > 0:
                    if AHEAD:
                        block = next_block.to(tl.int64)
                        if BLOCK_N <= BLOCK_SIZE:
                            n1 = (j + 1) * BLOCK_N
                            next_block = tl.load(row_of_table + (n1 >> SHIFT), mask=n1 < length, other=0)
                        else:
                            n1 = n + BLOCK_N
                            next_block = tl.load(row_of_table + (n1 >> SHIFT), mask=n1 < length, other=0)
                    else:
                        if BLOCK_N <= BLOCK_SIZE:
                            block = tl.load(row_of_table + (j * BLOCK_N >> SHIFT), mask=j * BLOCK_N < length, other=0).to(tl.int64)
                        else:
                            block = tl.load(row_of_table + (n >> SHIFT), mask=needed, other=0).to(tl.int64)
                    if BLOCK_N <= BLOCK_SIZE:
                        slot = zero + ((j * BLOCK_N) & (BLOCK_SIZE - 1))
                        k_at = (k_base + block * stride_kb + slot * stride_kt) + k_rows
                        v_at = (v_base + block * stride_vb + slot * stride_vt) + v_rows
                    else:
                        slot = n & (BLOCK_SIZE - 1)
                        k_offset = block * stride_kb + slot * stride_kt
                        v_offset = k_offset
                        if not SAME_STRIDES:
                            v_offset = block * stride_vb + slot * stride_vt
                        k_at = k_base + k_offset[:, None] + d[None, :]
                        v_at = v_base + v_offset[:, None] + d[None, :]
                else:
                    slot = zero + j * BLOCK_N
                    k_at = (k_base + slot * stride_kt) + k_rows
                    v_at = (v_base + slot * stride_vt) + v_rows
                if D == BLOCK_D:
                    kv_mask = needed[:, None]
                else:
                    kv_mask = needed[:, None] & in_d[None, :]
                b_k = _convert(tl.load(k_at, mask=kv_mask, other=0.0, eviction_policy=EVICT), COMPUTE, PIN)
                if TRANSPOSED:
                    s = tl.trans(tl.dot(b_k, b_q, input_precision="ieee"))
                else:
                    s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
                if K_SCALE == 2:
                    at = k_scales + head * stride_ksh + block * stride_ksb + slot * stride_kst
                    if BLOCK_SIZE == 0 or BLOCK_N <= BLOCK_SIZE:
                        at = at + v_n * stride_kst
                    s = s * tl.load(at, mask=needed, other=0.0)[None, :]
                if HAS_SOFTCAP:
                    tanh = 1.0 - 2.0 / (tl.exp2(s * (2.0 * s_scale / softcap)) + 1.0)
                    s = tanh * (softcap * LOG2E)
                else:
                    s = s * s_scale
                if HAS_ALIBI:
                    s = s - slope[:, None] * tl.abs(position[:, None] - n[None, :]).to(tl.float32)
                visible = n[None, :] < high[:, None]
                if HAS_LOW:
                    visible = visible & (n[None, :] >= low[:, None])
                s = tl.where(visible, s, float("-inf"))
                top = tl.maximum(m, tl.max(s, 1))
                w = tl.exp2(s - top[:, None])
                shrink = tl.exp2(m - top)
                v_l = v_l * shrink[:, None] + w
                m = top
                if V_SCALE == 2:
                    at = v_scales + head * stride_vsh + block * stride_vsb + slot * stride_vst
                    if BLOCK_SIZE == 0 or BLOCK_N <= BLOCK_SIZE:
                        at = at + v_n * stride_vst
                    w = w * tl.load(at, mask=needed, other=0.0)[None, :]
                b_v = _convert(tl.load(v_at, mask=kv_mask, other=0.0, eviction_policy=EVICT), COMPUTE, PIN)
                if TRANSPOSED:
                    acc = tl.dot(
                        tl.trans(b_v), tl.trans(w.to(COMPUTE)), acc * shrink[None, :], input_precision="ieee"
                    )
                else:
                    acc = tl.dot(w.to(COMPUTE), b_v, acc * shrink[:, None], input_precision="ieee")
            l = tl.sum(v_l, 1)
            if TRANSPOSED:
                acc = tl.trans(acc)

            if count == tiles:
                _write(
                    out, lse, sinks, acc, m, l, q_start, rows, head, r, d, w_scale,
                    stride_ot, stride_oh, stride_lh, G, D, HAS_SINKS, HAS_LSE,
                )  # fmt: skip
            else:
                mine = 2 * p + (tile == 0).to(tl.int32)
                local = v_m < ROWS
                at = partial_ml + mine * (2 * ROWS) + v_m
                tl.store(at, m, mask=local)
                tl.store(at + ROWS, l, mask=local)
                at = partial_acc + (mine * ROWS + v_m)[:, None] * BLOCK_D + d[None, :]
                tl.store(at, acc, mask=local[:, None])
                p_first = (unit - tile) // per
                pieces = (unit - tile + tiles - 1) // per - p_first + 1
                if IN_PLACE:
                    tl.debug_barrier()
                    arrived = tl.atomic_add(notes + p_first, 1, sem="acq_rel", scope="gpu")
                    if arrived == pieces - 1:
                        tl.store(notes + p_first, 0)
                        acc2, m2, l2 = _merge(partial_acc, partial_ml, p_first, pieces, ROWS, 0, ROWS, BLOCK_D, CHUNK)
                        _write(
                            out, lse, sinks, acc2, m2, l2, q_start, rows, head, r0 + tl.arange(0, ROWS), d, w_scale,
                            stride_ot, stride_oh, stride_lh, G, D, HAS_SINKS, HAS_LSE,
                        )  # fmt: skip
                else:
                    if tile == 0:
                        tl.store(notes + p * 4, pieces)
                        tl.store(notes + p * 4 + 1, b)
                        tl.store(notes + p * 4 + 2, head)
                        tl.store(notes + p * 4 + 3, r0)
            unit += count


@triton.jit(do_not_specialize=["stride_lh"])
def _combine(
    out, lse, cu_q, sinks, v_scales, partial_acc, partial_ml, notes, v_scale,
    stride_ot, stride_oh, stride_lh,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BLOCK_R: tl.constexpr,
    CHUNK: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr, V_SCALE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Merge the pieces of the item whose first piece program p left, if there is one."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    p = tl.program_id(0)
    r0 = tl.program_id(1) * BLOCK_R
    pieces = tl.load(notes + p * 4)
    b = tl.load(notes + p * 4 + 1)
    head = tl.load(notes + p * 4 + 2)
    item_r0 = tl.load(notes + p * 4 + 3)
    if pieces > 0:
        q_start = tl.load(cu_q + b)
        rows = tl.load(cu_q + b + 1) - q_start
        w_scale = v_scale
        if V_SCALE == 1:
            w_scale = v_scale * tl.load(v_scales)
        acc, m, l = _merge(partial_acc, partial_ml, p, pieces, ROWS, r0, BLOCK_R, BLOCK_D, CHUNK)
        _write(
            out, lse, sinks, acc, m, l, q_start, rows, head, item_r0 + r0 + tl.arange(0, BLOCK_R),
            tl.arange(0, BLOCK_D), w_scale, stride_ot, stride_oh, stride_lh, G, D, HAS_SINKS, HAS_LSE,
        )  # fmt: skip


DEFAULT: Mapping[str, int] = {
    "block_n": 64, "warps": 4, "stages": 3, "programs": 2, "min_keys": 128, "evict": 0,
    "transposed": 0, "in_place": 1, "pdl": 0, "ahead": 1, "pin": 1, "maxnreg": 0,
}  # fmt: skip
_QUANTISED = (torch.float8_e4m3fn, torch.int8)
_TL_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_counters: dict[tuple[torch.device, int], Tensor] = {}


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    block_table: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    leftpad: Tensor | None = None,
    batch_invariant: bool = False,
    parameters: Mapping[str, int] | None = None,
) -> None:
    """Fill the rows of the sequences that have 1 to 8 query rows; leave the others alone."""
    config = dict(DEFAULT, **(parameters or {}))
    batch = cu_seqlens_q.shape[0] - 1
    num_heads, head_dim = q.shape[1:]
    kv_heads = k.shape[-2]
    group = num_heads // kv_heads
    paged = block_table is not None
    if batch == 0:
        return
    block_size = k.shape[1] if paged else 0
    if block_table is not None and block_table.shape[1] == 1:
        block_size = 0
    packed_rows = triton.next_power_of_2(min(max(max_seqlen_q, 1), SHORT) * group)
    block_m = min(max(packed_rows, 16), 64)
    rows = min(packed_rows, 64)
    quantised = k.dtype in _QUANTISED
    compute = (q.dtype if q.element_size() == 4 else torch.float16) if quantised else torch.promote_types(q.dtype, k.dtype)
    block_d = max(triton.next_power_of_2(head_dim), 16)
    block_b = 16 if batch <= 16 else 256 if batch <= 256 else 1024
    left, right = (w if w >= 0 else FAR for w in window_size)
    if causal:
        right = 0
    units = num_programs(q.device) * config["programs"]
    log2e = 1.4426950408889634
    scale = softmax_scale * log2e * (k_scale if isinstance(k_scale, float) else 1.0)
    value_scale = v_scale if isinstance(v_scale, float) else 1.0
    k_mode, k_scales, k_strides = _scales(k_scale)
    v_mode, v_scales, v_strides = _scales(v_scale)

    partial_acc = torch.empty((2 * units, rows, block_d), dtype=torch.float32, device=q.device)
    partial_ml = torch.empty((2 * units, 2, rows), dtype=torch.float32, device=q.device)
    if config["in_place"]:
        notes = _zero_counters(q.device, units)
    else:
        notes = torch.empty((units, 4), dtype=torch.int32, device=q.device)
    kb, kt, kh = (k.stride(0), k.stride(1), k.stride(2)) if paged else (0, k.stride(0), k.stride(1))
    vb, vt, vh = (v.stride(0), v.stride(1), v.stride(2)) if paged else (0, v.stride(0), v.stride(1))
    lse_stride = lse.stride(0) if lse is not None else 0
    chunk = max(1, 4096 // (rows * block_d))
    _decode[(units,)](
        q, k, v, out, lse, block_table, cu_seqlens_q, cu_seqlens_k, leftpad, alibi_slopes, sinks, k_scales, v_scales,
        partial_acc, partial_ml, notes,
        scale, softcap, value_scale, batch, left, right, max(1, config["min_keys"] // config["block_n"]),
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), lse_stride,
        block_table.stride(0) if block_table is not None else 0,
        alibi_slopes.stride(0) if alibi_slopes is not None and alibi_slopes.dim() == 2 else 0,
        kb, kt, kh, vb, vt, vh, *k_strides, *v_strides,
        G=group, KVH=kv_heads, D=head_dim, BLOCK_D=block_d, BLOCK_SIZE=block_size,
        BLOCK_M=block_m, BLOCK_N=config["block_n"], BLOCK_B=block_b, ROWS=rows,
        SHORT=SHORT, COMPUTE=_TL_DTYPES[compute], PAGED=paged, ONE_VECTOR=batch <= block_b,
        HAS_LOW=left != FAR or leftpad is not None, HAS_LEFTPAD=leftpad is not None, HAS_SOFTCAP=softcap > 0.0,
        HAS_ALIBI=alibi_slopes is not None, HAS_SINKS=sinks is not None, HAS_LSE=lse is not None,
        K_SCALE=k_mode, V_SCALE=v_mode, EVICT=("", "evict_first", "evict_last")[config["evict"]],
        TRANSPOSED=bool(config["transposed"]), IN_PLACE=bool(config["in_place"]), PDL=bool(config["pdl"]),
        CHUNK=chunk, AHEAD=bool(config["ahead"]), SAME_STRIDES=k.stride() == v.stride(), SHIFT=max(block_size, 1).bit_length() - 1,
        PIN=bool(config["pin"]) and quantised and compute != torch.float32, num_warps=config["warps"], num_stages=config["stages"],
        **({"maxnreg": config["maxnreg"]} if config["maxnreg"] else {}),
    )  # fmt: skip
    if not config["in_place"]:
        options = {"launch_pdl": True} if config["pdl"] else {}
        _combine[(units, rows)](
            out, lse, cu_seqlens_q, sinks, v_scales, partial_acc, partial_ml, notes, value_scale,
            out.stride(0), out.stride(1), lse_stride,
            G=group, D=head_dim, BLOCK_D=block_d, ROWS=rows, BLOCK_R=1, CHUNK=max(1, 4096 // block_d),
            HAS_SINKS=sinks is not None, HAS_LSE=lse is not None, V_SCALE=v_mode, PDL=bool(config["pdl"]),
            num_warps=4, **options,
        )  # fmt: skip


def _scales(scale: float | Tensor | None) -> tuple[int, Tensor | None, tuple[int, int, int]]:
    if not isinstance(scale, Tensor):
        return 0, None, (0, 0, 0)
    if scale.numel() == 1:
        return 1, scale, (0, 0, 0)
    return 2, scale, (scale.stride(0), scale.stride(1), scale.stride(2))


def num_programs(device: torch.device) -> int:
    """How many programs run side by side when each multiprocessor has one."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 4


def _zero_counters(device: torch.device, count: int) -> Tensor:
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    found = _counters.get((device, stream))
    if found is None or found.numel() < count:
        found = _counters[device, stream] = torch.zeros(count, dtype=torch.int32, device=device)
    return found
