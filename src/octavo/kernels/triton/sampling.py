"""One token per row of logits, by threshold search instead of a sort.

Three launches, whatever the batch:

1. `_summarise`, a program per tile of 8,192 logits: the one full read. A tile's logits lie in registers as
   groups of 64, and each group leaves its maximum and its sum of exponentials relative to that maximum.
2. `_choose`, a program per row: 2 % of the row's numbers, the group summaries, say which groups can hold a
   token that may be drawn: at least k groups reach the k-th largest group maximum, so every one of the k
   largest tokens lies in a group that does. The tokens of these groups that reach it are gathered into a
   short list, and the cuts are searched for there. Rows without filters need only one tile; greedy ones, too.
3. `search`, a program per row, returns at once unless the list would have been too long (a flat row, a large
   top_k, equal logits by the thousand): then the cuts are searched for over the whole row.

A row's bits depend on nothing else: probabilities become integers before they are added up (2^39 for a row's
most likely token, 2^22 for a group's), so that no order of additions matters.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton import launch, tuning
from octavo.kernels.triton.attention_arguments import num_processors
from octavo.kernels.triton.launch import begin
from octavo.kernels.triton.sampling_list import choose_among_few, choose_from_list
from octavo.kernels.triton.sampling_parts import (
    LOG2E,
    LOWEST,
    ONE,
    OPEN,
    OPTIONS,
    halfway,
    key_of,
    logprob_of,
    mass_of,
    point_of,
    row_mass,
    row_options,
    scale_of,
    scaled_up,
    weight_of,
)
from octavo.kernels.triton.sampling_search import search
from octavo.kernels.triton.tuning import Parameters

# Logits of a tile, of a group, and how many of these are neighbours. Part of the arithmetic, and so the same
# for every dtype: a row has the token of its float32 copy.
TILE = 8192
GROUP = 64
VEC = 8
# Without a table for the GPU. stages: 1 is a program per tile; with more, `programs` per multiprocessor fetch
# tiles ahead. choose_registers: so few that two programs of `_choose` share a multiprocessor.
DEFAULTS = {
    "PDL": 1,
    "stages": 1,
    "programs": 4,
    "choose_warps": 8,
    "choose_registers": 128,
    "at_once": 64,
    "few": 128,
    "candidates": 1024,
    "search_warps": 16,
    "columns": 2048,
}


@triton.jit
def _group_mass(x, highest, scale):
    """Sum of a group's weights in units of 2^-22, an int32: the same in any order."""
    # The sum of a weight and 2 has that unit; its bits less those of 2.0 are the weight in it.
    units = (weight_of(x, highest[:, None], scale) + 2.0).to(tl.int32, bitcast=True) - 0x40000000
    return tl.sum(units, axis=1)


@launch.direct
@triton.jit(
    do_not_specialize=["num_tiles", "num_units", "num_programs"],
    do_not_specialize_on_alignment=["temperatures"],
)
def _summarise(
    logits,
    temperatures,
    group_max,
    group_sum,
    raw_sum,
    row_stride,
    vocab_size,
    num_tiles,
    num_units,
    num_programs,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    VEC: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Maximum and mass of each group of tiles num_programs apart; raw_sum, if any: at temperature 1."""
    begin(PDL)
    for unit in tl.range(tl.program_id(0), num_units, num_programs, num_stages=STAGES):
        row = tl.zeros((), tl.int64) + unit // num_tiles
        temperature = tl.load(temperatures + row)
        ids = tl.arange(0, ROWS)[:, None] * (GROUPS * VEC) + tl.arange(0, GROUPS * VEC)[None, :]
        ids += (unit % num_tiles) * (ROWS * GROUPS * VEC)
        source = logits + row * row_stride
        x = tl.load(source + ids, mask=ids < vocab_size, other=-float("inf")).to(tl.float32)
        # Loaded as a matrix: a warp reads consecutive memory, and a group is the ROWS x VEC numbers of one
        # thread, or of two where VEC numbers are 32 bytes.
        x = tl.permute(tl.reshape(x, (ROWS, GROUPS, VEC)), (1, 0, 2))
        x = tl.reshape(x, (GROUPS, ROWS * VEC))
        x = tl.where(x == x, x, float("inf"))  # NaN and +inf are equally bad
        highest = tl.max(x, axis=1)
        out = (tl.zeros((), tl.int64) + unit) * GROUPS + tl.arange(0, GROUPS)
        tl.store(group_max + out, highest)
        if temperature > 0:
            tl.store(group_sum + out, _group_mass(x, highest, scale_of(temperature)))
        if raw_sum is not None:
            tl.store(raw_sum + out, _group_mass(x, highest, LOG2E))


@triton.jit
def _first_in_tile(
    source, tile, highest, vocab_size, ROWS: tl.constexpr, GROUPS: tl.constexpr, VEC: tl.constexpr
):
    """The lowest id of a tile whose logit is `highest`."""
    ids = tile * (ROWS * GROUPS * VEC) + tl.arange(0, ROWS * GROUPS * VEC)
    x = tl.load(source + ids, mask=ids < vocab_size, other=-float("inf")).to(tl.float32)
    return tl.min(tl.where((x == highest) & (ids < vocab_size), ids, vocab_size))


@triton.jit
def _draw_in_tile(
    source, tile, fraction, scale, vocab_size, ROWS: tl.constexpr, GROUPS: tl.constexpr, VEC: tl.constexpr
):
    """The token at `fraction` of a tile's mass, in id order: first its run of GROUPS x VEC ids, then itself.

    Masses are relative to the tile's largest logit, so that a tile far below the row's still has some.
    """
    lanes = tl.arange(0, GROUPS * VEC)
    runs = tl.arange(0, ROWS)
    first = tile * (ROWS * GROUPS * VEC)
    ids = first + runs[:, None] * (GROUPS * VEC) + lanes[None, :]
    x = tl.load(source + ids, mask=ids < vocab_size, other=-float("inf"))
    highest = tl.max(x).to(tl.float32)
    run_mass = tl.sum((weight_of(x.to(tl.float32), highest, scale) * ONE).to(tl.int64), axis=1)
    total = tl.sum(run_mass)
    point = tl.minimum((fraction * total.to(tl.float64)).to(tl.int64), total - 1)
    run = tl.sum((tl.cumsum(run_mass, axis=0) <= point).to(tl.int32))
    point -= tl.sum(tl.where(runs < run, run_mass, 0))
    first += run * (GROUPS * VEC)
    x = tl.load(source + first + lanes, mask=first + lanes < vocab_size, other=-float("inf"))
    ends = tl.cumsum((weight_of(x.to(tl.float32), highest, scale) * ONE).to(tl.int64), axis=0)
    return first + tl.sum((ends <= point).to(tl.int32))


@triton.jit
def _lowest_candidate(maxima, highest, likely, mass, total, scale, top_k, top_p, min_p):
    """A key that every token which the filters keep reaches, as high as the group summaries can prove.

    The k largest tokens reach the k-th largest group maximum. Where only top_p cuts, the tokens below a key
    must be too few for its rest: at most the whole mass of the groups whose maximum is below it, and of every
    other group the mass beside its maximum or 63 tokens as likely as the key. With min_p alone each token
    tells for itself whether it is kept.
    """
    keys = key_of(maxima)
    live = maxima > -float("inf")
    low = tl.min(tl.where(live, keys, 2147483647)).to(tl.int64)
    high = key_of(highest).to(tl.int64) + 1
    if top_k > 0:
        if tl.sum(live.to(tl.int32)) < top_k:
            low = high - high + LOWEST
        enough = top_k + top_k // 8 + 2
        while (high - low > 1) & (low > LOWEST):
            middle = halfway(low, high)
            count = tl.sum((live & (keys >= middle.to(tl.int32))).to(tl.int32))
            if count >= top_k:
                low = middle
                if count <= enough:
                    high = low + 1
            else:
                high = middle
    elif min_p > 0:
        low = high - high + LOWEST
    else:
        rest = total - scaled_up(top_p, total)
        beside = tl.maximum(mass - (likely * ONE).to(tl.int64), 0)
        if tl.sum(tl.minimum(beside, 63 * mass_of(low.to(tl.int32), highest, scale))) > rest:
            low = high - high + LOWEST
        inside = 1 << 20
        above = 0
        while (high - low > 1) & (low > LOWEST) & (inside > 8 + above // 4):
            middle = halfway(low, high)
            reaches = keys >= middle.to(tl.int32)
            most = 63 * mass_of(middle.to(tl.int32), highest, scale)
            missing = tl.sum(tl.where(reaches, tl.minimum(beside, most), mass))
            count = tl.sum(reaches.to(tl.int32))
            if missing <= rest:
                low = middle
                inside = count - above
            else:
                inside -= count - above
                high = middle
                above = count
    return low.to(tl.int32)


@triton.jit
def _gather(
    source, own_max, num_groups, lowest, min_p, highest, scale, vocab_size, own_groups, own_logits, own_ids,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, VEC: tl.constexpr, ALL_GROUPS: tl.constexpr,
    CANDIDATES: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Write the candidates' logits and ids, in no order that matters; returns how many there are."""
    groups = tl.arange(0, ALL_GROUPS)
    # Read again, not handed down: registers are what keeps programs from running side by side.
    maxima = tl.load(own_max + groups, mask=groups < num_groups, other=-float("inf"))
    live = (
        (maxima > -float("inf")) & (key_of(maxima) >= lowest) & (weight_of(maxima, highest, scale) >= min_p)
    )
    live_order = tl.cumsum(live.to(tl.int32), axis=0)
    num_live = tl.sum(live.to(tl.int32))
    tl.store(own_groups + live_order - 1, groups, mask=live)
    tl.debug_barrier()
    num_found = 0
    start = 0
    while (start < num_live) & (num_found <= CANDIDATES):
        lanes = start + tl.arange(0, AT_ONCE)
        group = tl.load(own_groups + lanes, mask=lanes < num_live, other=0)
        first = (group // GROUPS) * (ROWS * GROUPS * VEC) + (group % GROUPS) * VEC
        ids = first[:, None, None] + tl.arange(0, ROWS)[None, :, None] * (GROUPS * VEC)
        ids = ids + tl.arange(0, VEC)[None, None, :]
        inside = (ids < vocab_size) & (lanes < num_live)[:, None, None]
        x = tl.load(source + ids, mask=inside, other=-float("inf")).to(tl.float32)
        kept = (x > -float("inf")) & (key_of(x) >= lowest) & (weight_of(x, highest, scale) >= min_p)
        flags = tl.reshape(kept, (AT_ONCE * ROWS * VEC,))
        order = num_found + tl.cumsum(flags.to(tl.int32), axis=0) - 1
        fits = flags & (order < CANDIDATES)
        tl.store(own_logits + order, tl.reshape(x, (AT_ONCE * ROWS * VEC,)), mask=fits)
        tl.store(own_ids + order, tl.reshape(ids, (AT_ONCE * ROWS * VEC,)), mask=fits)
        num_found += tl.sum(flags.to(tl.int32))
        start += AT_ONCE
    tl.debug_barrier()
    return num_found


@launch.direct
@triton.jit(do_not_specialize=["num_tiles"], do_not_specialize_on_alignment=OPTIONS)
def _choose(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    positions,
    group_max,
    group_sum,
    raw_sum,
    live_groups,
    candidate_logits,
    candidate_ids,
    out_ids,
    out_logprobs,
    row_stride,
    vocab_size,
    num_tiles,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    VEC: tl.constexpr,
    ALL_GROUPS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    FEW: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The row's token, -1 for a row without a distribution, or OPEN."""
    begin(PDL)
    row = tl.program_id(0)
    num_groups = num_tiles * GROUPS
    source = logits + row.to(tl.int64) * row_stride
    temperature = tl.load(temperatures + row)
    groups = tl.arange(0, ALL_GROUPS)
    here = groups < num_groups
    own_max = group_max + row.to(tl.int64) * num_groups
    maxima = tl.load(own_max + groups, mask=here, other=-float("inf"))
    highest = tl.max(maxima)
    token = tl.full((), -1, tl.int32)
    if (highest < float("inf")) & (highest > -float("inf")):
        if not temperature > 0:
            tile = tl.min(tl.where(maxima == highest, groups // GROUPS, num_tiles))
            token = _first_in_tile(source, tile, highest, vocab_size, ROWS, GROUPS, VEC)
        else:
            scale = scale_of(temperature)
            top_k, top_p, min_p = row_options(row, top_ks, top_ps, min_ps, vocab_size)
            units = tl.load(group_sum + row.to(tl.int64) * num_groups + groups, mask=here, other=0)
            likely = weight_of(maxima, highest, scale)
            mass = row_mass(units, likely)
            total = tl.sum(mass)
            if (top_k == 0) & (top_p >= 1) & (min_p <= 0):
                tile_mass = tl.sum(tl.reshape(mass, (ALL_GROUPS // GROUPS, GROUPS)), axis=1)
                point = point_of(row, seeds, positions, total)
                ends = tl.cumsum(tile_mass, axis=0)
                tile = tl.sum((ends <= point).to(tl.int32))
                tiles = tl.arange(0, ALL_GROUPS // GROUPS)
                own = tl.sum(tl.where(tiles == tile, tile_mass, 0))
                rest = point - tl.sum(tl.where(tiles < tile, tile_mass, 0))
                fraction = rest.to(tl.float64) / own.to(tl.float64)
                token = _draw_in_tile(source, tile, fraction, scale, vocab_size, ROWS, GROUPS, VEC)
            else:
                lowest = _lowest_candidate(maxima, highest, likely, mass, total, scale, top_k, top_p, min_p)
                own_logits = candidate_logits + row.to(tl.int64) * CANDIDATES
                own_ids = candidate_ids + row.to(tl.int64) * CANDIDATES
                own_groups = live_groups + row.to(tl.int64) * num_groups
                num_found = _gather(
                    source, own_max, num_groups, lowest, min_p, highest, scale, vocab_size,
                    own_groups, own_logits, own_ids, ROWS, GROUPS, VEC, ALL_GROUPS, CANDIDATES, AT_ONCE,
                )  # fmt: skip
                token = OPEN
                if num_found <= FEW:
                    token = choose_among_few(
                        own_logits, own_ids, num_found, total, highest, scale, top_k, top_p, min_p,
                        row, seeds, positions, vocab_size, FEW,
                    )  # fmt: skip
                elif num_found <= CANDIDATES:
                    token = choose_from_list(
                        own_logits, own_ids, num_found, total, highest, scale, top_k, top_p, min_p,
                        row, seeds, positions, vocab_size, CANDIDATES,
                    )  # fmt: skip
    tl.store(out_ids + row, token.to(tl.int64))
    if out_logprobs is not None:
        logprob = float("nan")
        if token >= 0:
            logprob = logprob_of(row, token, source, group_max, raw_sum, highest, num_groups, ALL_GROUPS)
        tl.store(out_logprobs + row, logprob)


def key(logits_dtype: torch.dtype) -> str:
    """Of the table of launch parameters."""
    return str(logits_dtype).removeprefix("torch.")


def supports(logits_dtype: torch.dtype) -> str | None:
    """None for the dtypes these kernels read; the reason otherwise."""
    if logits_dtype in (torch.float32, torch.float16, torch.bfloat16):
        return None
    return "reads float32, float16 and bfloat16 logits"


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    return_logprobs: bool,
    *,
    parameters: Parameters | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`(ids, logprobs)`; see `octavo.kernels.sample`. `parameters`: of launch; None takes the table's."""
    num_rows, vocab_size = logits.shape
    device = logits.device
    ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=device) if return_logprobs else None
    if num_rows == 0:
        return ids, logprobs
    given = parameters or tuning.parameters("sample", device, key(logits.dtype), DEFAULTS)
    dependent = launch.options({"PDL": given["PDL"]}, device)
    groups = TILE // GROUP
    num_tiles = triton.cdiv(vocab_size, TILE)
    num_groups = num_tiles * groups
    shape = {"ROWS": GROUP // VEC, "GROUPS": groups, "VEC": VEC}
    all_groups = max(2 * groups, triton.next_power_of_2(num_groups))
    group_max = torch.empty((num_rows, num_groups), dtype=torch.float32, device=device)
    group_sum = torch.empty_like(group_max, dtype=torch.int32)
    raw_sum = torch.empty_like(group_sum) if return_logprobs else None
    num_units = num_programs = num_rows * num_tiles
    if given["stages"] > 1:
        # As many rounds as it takes, and no more programs than all rounds need.
        rounds = triton.cdiv(num_units, given["programs"] * num_processors(device))
        num_programs = triton.cdiv(num_units, rounds)
    size = (logits.stride(0), vocab_size, num_tiles)
    _summarise[(num_programs,)](
        logits, temperature, group_max, group_sum, raw_sum, *size, num_units, num_programs,
        **shape, STAGES=given["stages"], num_warps=4, **dependent,
    )  # fmt: skip
    candidates = given["candidates"]
    live_groups = torch.empty((num_rows, num_groups), dtype=torch.int32, device=device)
    candidate_logits = torch.empty((num_rows, candidates), dtype=torch.float32, device=device)
    candidate_ids = torch.empty((num_rows, candidates), dtype=torch.int32, device=device)
    options = (temperature, top_k, top_p, min_p, seeds, positions)
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    limit = {"maxnreg": given["choose_registers"]} if is_nvidia else {}
    _choose[(num_rows,)](
        logits, *options, group_max, group_sum, raw_sum, live_groups, candidate_logits, candidate_ids,
        ids, logprobs, *size, **shape, ALL_GROUPS=all_groups, CANDIDATES=candidates, FEW=given["few"],
        AT_ONCE=given["at_once"], num_warps=given["choose_warps"], **limit, **dependent,
    )  # fmt: skip
    if top_k is not None or top_p is not None or min_p is not None:
        search[(num_rows,)](
            logits, *options, group_max, group_sum, raw_sum, candidate_logits.view(torch.int32),
            candidate_ids, ids, logprobs, *size, GROUPS=groups, ALL_GROUPS=all_groups, CANDIDATES=candidates,
            COLUMNS=given["columns"], DEPTH=4, num_warps=given["search_warps"], **dependent,
        )  # fmt: skip
    return ids, logprobs
