"""The numbers of docs/kv_cache_layout.md, taken from the kernels and looked up on the page."""

from pathlib import Path

import pytest
import torch
from helpers.kernels import prefix_sums
from torch import Tensor

from octavo.kernels import flash_attn_varlen_func, flash_attn_with_kvcache, write_kv_cache

PAGE = (Path(__file__).parents[2] / "docs" / "kv_cache_layout.md").read_text()

NEW, PAST, INCLUSIVE = [10, 3, 1], [0, 1, 7], [10, 4, 8]
LENGTHS, BLOCK_SIZE = [30, 32, 70], 32
TABLE = [[2, -1, -1, -1], [0, 1, -1, -1], [3, 5, 6, -1]]


def on_the_page(block: str) -> bool:
    return block.strip("\n") in PAGE


def seen_by_varlen() -> Tensor:
    """(14, 10): which key of its own request each row sees. Key j has value e_j, all scores are 0."""
    keys = torch.cat([torch.eye(10)[:n] for n in INCLUSIVE])[:, None]
    q = torch.zeros(sum(NEW), 1, 10)
    lengths = (prefix_sums(NEW), prefix_sums(INCLUSIVE), max(NEW), max(INCLUSIVE))
    return flash_attn_varlen_func(q, torch.zeros_like(keys), keys, *lengths, causal=True)[:, 0] > 0


def seen_by_appending() -> Tensor:
    """The same through `flash_attn_with_kvcache`, which takes the past only and appends."""
    rows = []
    for new, past in zip(NEW, PAST, strict=True):
        caches = [torch.zeros(1, 16, 1, 10) for _ in range(2)]
        caches[1][0, :past, 0] = torch.eye(10)[:past]
        q, v = torch.zeros(1, new, 1, 10), torch.eye(10)[None, past : past + new, None]
        out = flash_attn_with_kvcache(q, *caches, torch.zeros_like(v), v, cache_seqlens=past, causal=True)
        rows.append(out[0, :, 0] > 0)
    return torch.cat(rows)


def test_example_1_lengths_positions_and_keys(implementation: str) -> None:
    seen = seen_by_varlen()
    assert torch.equal(seen, seen_by_appending())
    positions = [past + i for new, past in zip(NEW, PAST, strict=True) for i in range(new)]
    assert seen.int().argmin(1).tolist()[:9] == list(range(1, 10))  # no gap before the first unseen key
    assert [past + new for past, new in zip(PAST, NEW, strict=True)] == INCLUSIVE

    def row(name: str, values: list) -> str:
        return f"{name:9}{''.join(f'{value:>3}' for value in values)}"

    assert on_the_page(
        "\n".join(
            [
                f"new tokens                {NEW[0]:2}{NEW[1]:4}{NEW[2]:4}",
                f"past only                 {PAST[0]:2}{PAST[1]:4}{PAST[2]:4}",
                f"inclusive                 {INCLUSIVE[0]:2}{INCLUSIVE[1]:4}{INCLUSIVE[2]:4}",
                "",
                f"cu_seqlens_q              {prefix_sums(NEW).tolist()}",
                f"cu_seqlens_k, inclusive   {prefix_sums(INCLUSIVE).tolist()}",
                f"prefix sums, past only    {prefix_sums(PAST).tolist()}",
                "",
                row("row", list(range(14))),
                row("request", list("AAAAAAAAAABBBC")),
                row("position", positions),
                row("keys seen", seen.sum(1).tolist()),
            ]
        )
    )


def test_example_1_the_masks_as_drawn(implementation: str) -> None:
    drawn = [
        ["".join("1" if see else "." for see in row[:keys]) for row in rows.tolist()]
        for rows, keys in zip(seen_by_varlen().split(NEW), INCLUSIVE, strict=True)
    ]
    a, b, c = drawn
    lines = [f"A  {a[0]}   B  {b[0]}   C  {c[0]}"]
    lines += [f"   {a[i]}      {b[i]}" for i in (1, 2)]
    lines += [f"   {row}" for row in a[3:]]
    assert on_the_page("\n".join(lines))


def test_example_1_past_only_sums_are_silently_wrong(implementation: str) -> None:
    keys = torch.cat([torch.eye(10)[:n] for n in PAST])[:, None]
    lengths = (prefix_sums(NEW), prefix_sums(PAST), max(NEW), max(PAST))
    out = flash_attn_varlen_func(torch.zeros(14, 1, 10), torch.zeros_like(keys), keys, *lengths, causal=True)
    assert (out[:10] == 0).all()


def written_slots(cache: Tensor) -> list[int]:
    return cache.flatten(0, 1)[:, 0, 0].nonzero().flatten().tolist()


def appended_slots(cache_seqlens: list[int]) -> list[int]:
    """Where `flash_attn_with_kvcache` puts one new token per request."""
    slots = []
    for b, length in enumerate(cache_seqlens):
        caches = [torch.zeros(8, BLOCK_SIZE, 1, 4) for _ in range(2)]
        new = torch.ones(1, 1, 1, 4)
        table = torch.tensor([TABLE[b]], dtype=torch.int32)
        flash_attn_with_kvcache(new, *caches, new, new, cache_seqlens=length, block_table=table, causal=True)
        (slot,) = written_slots(caches[0])
        assert written_slots(caches[1]) == [slot]
        slots.append(slot)
    return slots


@pytest.mark.parametrize(
    ("convention", "positions", "slots"),
    [("include", [29, 31, 69], [93, 31, 197]), ("exclude", [30, 32, 70], [94, 32, 198])],
)
def test_example_2_slots(
    implementation: str, convention: str, positions: list[int], slots: list[int]
) -> None:
    assert positions == [length - (convention == "include") for length in LENGTHS]
    assert appended_slots(positions) == slots
    parts = []
    for b, position in enumerate(positions):
        block, offset = TABLE[b][position // BLOCK_SIZE], position % BLOCK_SIZE
        assert block * BLOCK_SIZE + offset == slots[b]
        parts.append(f"{block}*{BLOCK_SIZE}+{offset}={slots[b]}")
    first = f"lengths {convention} the new token   position"
    assert on_the_page(first + "".join(f"{position:>12}" for position in positions))
    assert on_the_page(f"{'slot':>36}    " + "".join(f"{part:>12}" for part in parts))
    assert on_the_page(f"key lengths    {LENGTHS}\nblock table    {TABLE}")

    caches = [torch.zeros(8, BLOCK_SIZE, 1, 4) for _ in range(2)]
    write_kv_cache(torch.ones(3, 1, 4), torch.ones(3, 1, 4), *caches, torch.tensor(slots))
    assert written_slots(caches[0]) == sorted(slots)


def test_example_2_attention_with_inclusive_lengths_reads_the_new_token(implementation: str) -> None:
    """Write first, then attend: request b averages LENGTHS[b] values, of which only the newest is 1."""
    caches = [torch.zeros(8, BLOCK_SIZE, 1, 4) for _ in range(2)]
    write_kv_cache(torch.zeros(3, 1, 4), torch.ones(3, 1, 4), *caches, torch.tensor([93, 31, 197]))
    table = torch.tensor(TABLE, dtype=torch.int32)
    lengths = (prefix_sums([1, 1, 1]), prefix_sums(LENGTHS), 1, 70)
    out = flash_attn_varlen_func(torch.zeros(3, 1, 4), *caches, *lengths, causal=True, block_table=table)
    assert out[:, 0, 0].tolist() == pytest.approx([1 / 30, 1 / 32, 1 / 70])


def test_example_3_padding_against_packing(implementation: str) -> None:
    rows, padded_rows = sum(NEW), 3 * max(NEW)
    pairs = sum(new * keys for new, keys in zip(NEW, INCLUSIVE, strict=True))
    padded_pairs = 3 * max(NEW) * max(INCLUSIVE)
    seen = int(seen_by_varlen().sum())
    assert (rows, padded_rows, pairs, padded_pairs, seen) == (14, 30, 120, 300, 72)
    assert on_the_page(
        f"""
                         padded   packed   of the padded, wasted
rows computed            {padded_rows:6}   {rows:6}   {1 - rows / padded_rows:.1%}
query-key pairs          {padded_pairs:6}   {pairs:6}   {1 - pairs / padded_pairs:.1%}
pairs a causal row sees  {seen:6}   {seen:6}
""".replace("%", " %")
    )


def test_example_3_slots_of_the_cache() -> None:
    tokens = sum(LENGTHS)
    assert tokens == 132
    lines = [f"{'slots':>31}   wasted", f"contiguous, 3 x 70      {210:7}   {1 - tokens / 210:5.1%}"]
    for size in (32, 16):
        blocks = [-(-length // size) for length in LENGTHS]
        slots = sum(blocks) * size
        counts = " + ".join(map(str, blocks))
        lines.append(f"blocks of {size}: {counts}{slots:8}   {1 - tokens / slots:5.1%}")
    assert on_the_page("\n".join(lines).replace("%", " %"))


def test_the_drawing() -> None:
    """Token 5 of the request with blocks [2, 0] is slot 0 * 4 + 1, and 0 is offset 0 of block 2."""
    table, block_size = [2, 0], 4
    places = [(table[i // block_size], i % block_size) for i in range(6)]
    line = "  ".join(f"{block},{offset}" for block, offset in places)
    assert on_the_page(f" block, offset           {line}")
