"""Bytes of requests, blocks of budgets, and the memory that is left."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.cache.sizing import (
    available_memory_bytes,
    describe_capacity,
    format_bytes,
    num_blocks_for_bytes,
    parse_memory,
    parse_share,
    request_bytes,
    resolve_num_blocks,
    size_requests,
    windowed_request_bytes,
)
from octavo.cache.spec import KVCacheSpec
from octavo.errors import CapacityError, ConfigError

QWEN3_06B = KVCacheSpec(28, 8, 128, "bfloat16")
QWEN3_4B = KVCacheSpec(36, 8, 128, "bfloat16")


def test_qwen3_06b_takes_4_375_gib_for_40960_tokens() -> None:
    assert request_bytes(QWEN3_06B, 40_960) == 4.375 * 2**30


@pytest.mark.parametrize(
    ("num_tokens", "num_bytes"), [(1, 16 * 147_456), (1_000, 148_635_648), (32_768, int(4.5 * 2**30))]
)
def test_c57_qwen3_4b(num_tokens: int, num_bytes: int) -> None:
    assert QWEN3_4B.bytes_per_token == 147_456
    assert request_bytes(QWEN3_4B, num_tokens) == num_bytes


def test_blocks_against_one_piece() -> None:
    sizing = size_requests(QWEN3_4B, 1_000, max_len=40_960, memory_bytes=24 * 2**30)
    assert (sizing.num_blocks, sizing.waste_tokens, sizing.waste_bytes) == (63, 8, 8 * 147_456)
    assert sizing.request_bytes == 63 * 16 * 147_456
    assert sizing.contiguous_bytes == 40_960 * 147_456
    # 24 GiB hold 10,922 whole blocks, and 10,922 // 63 = 173; in one piece 24 GiB // 5.625 GiB = 4.
    assert (sizing.requests_fit, sizing.contiguous_requests_fit) == (173, 4)


def test_without_a_budget_nothing_is_said_about_fitting() -> None:
    sizing = size_requests(QWEN3_06B, 17)
    assert (sizing.requests_fit, sizing.windowed_requests_fit, sizing.contiguous_requests_fit) == (
        None,
        None,
        None,
    )
    assert (sizing.max_len, sizing.num_blocks, sizing.waste_tokens) == (17, 2, 15)


def test_window_layers_need_only_the_blocks_their_window_touches() -> None:
    spec = KVCacheSpec(3, 1, 8, "int8", windows=(None, 32, 1))
    layer = spec.block_size * spec.bytes_per_token_layer
    assert layer == 256
    # 100 tokens: 7 blocks; a window of 32 can lie in 3 blocks, a window of 1 in 1.
    assert windowed_request_bytes(spec, 100) == (7 + 3 + 1) * layer
    assert windowed_request_bytes(spec, 20) == (2 + 2 + 1) * layer
    assert request_bytes(spec, 100) == 21 * layer
    assert windowed_request_bytes(QWEN3_06B, 100) == request_bytes(QWEN3_06B, 100)


@given(window=st.integers(1, 70), log_size=st.integers(0, 5))
def test_the_window_bound_is_the_worst_alignment(window: int, log_size: int) -> None:
    size = 2**log_size
    spec = KVCacheSpec(1, 1, 1, "int8", block_size=size, windows=(window,))
    touched = max(
        (last // size) - (last - window + 1) // size + 1 for last in range(window - 1, window - 1 + size)
    )
    assert windowed_request_bytes(spec, 10_000) == touched * size * spec.bytes_per_token_layer


@pytest.mark.parametrize(("num_tokens", "max_len"), [(0, None), (-5, None), (10, 9)])
def test_lengths_that_make_no_sense(num_tokens: int, max_len: int | None) -> None:
    with pytest.raises(ConfigError, match="must be at least"):
        size_requests(QWEN3_06B, num_tokens, max_len=max_len)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("24GiB", 24 * 2**30), ("24GB", 24 * 10**9), ("512MiB", 2**29), ("1.5 gib", 3 * 2**29), (".5KiB", 512),
     ("1048576", 2**20), (4096, 4096), ("7B", 7), (" 2TiB ", 2**41)],
)  # fmt: skip
def test_memory_strings(text: int | str, num_bytes: int) -> None:
    assert parse_memory(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "24G", "24 gigs", "-1GiB", "1e9", "0", "0.1", 0, -1, True, "24GiB2"]
)
def test_bad_memory_strings_are_answered_with_examples(text: int | str) -> None:
    with pytest.raises(ConfigError, match=r"'24GiB', '24GB', '512MiB' or a number of bytes, got") as caught:
        parse_memory(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (896, "896 B"), (112 * 1024, "112 KiB"), (4_697_620_480, "4.375 GiB"),
     (148_635_648, "141.8 MiB"), (2**50, "1 PiB"), (2**61, "2,048 PiB"), (1536, "1.5 KiB")],
)  # fmt: skip
def test_bytes_for_people(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


SMALL = KVCacheSpec(1, 1, 8, "float32", block_size=4)  # 64 bytes a token, 256 a block


def test_blocks_for_bytes_are_whole() -> None:
    assert [num_blocks_for_bytes(SMALL, n) for n in (-1, 0, 255, 256, 1_000)] == [0, 0, 0, 1, 3]


def resolve(**arguments: Any) -> int:
    return resolve_num_blocks(
        SMALL, **{"max_model_len": 10, "max_num_seqs": 2, "free_bytes": 10_000, **arguments}
    )


def test_stated_sizes_are_taken_as_they_are() -> None:
    assert resolve(num_blocks=1_000) == 1_000
    assert resolve(memory_bytes=256 * 50 + 255) == 50


def test_from_free_memory_the_cache_takes_its_share_but_no_more_than_the_requests_need() -> None:
    assert resolve(free_bytes=3_000) == 4  # 40 % are 1,200 bytes
    assert resolve(free_bytes=3_000, share=0.5) == 5
    assert resolve(free_bytes=10**9) == 6  # two requests of 10 tokens: 3 blocks each
    assert 1 <= resolve(free_bytes=None) <= 6


def test_a_budget_below_one_block_says_what_would_fit() -> None:
    with pytest.raises(CapacityError) as caught:
        resolve(memory_bytes=255)
    for part in ("kv_cache_memory is 255 bytes", "256 bytes", "max_model_len=10", "768 bytes"):
        assert part in str(caught.value)
    with pytest.raises(CapacityError, match="90% of free memory is 0 bytes"):
        resolve(free_bytes=-5, share=0.9)
    with pytest.raises(CapacityError, match="40% of free memory is 40 bytes"):
        resolve(free_bytes=100)
    with pytest.raises(ConfigError, match="num_blocks must be at least 1, got 0"):
        resolve(num_blocks=0)


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal:       2000 kB\nMemFree:  10 kB\nMemAvailable:   1000 kB\n"


def test_available_memory_is_what_linux_says(tmp_path: Path) -> None:
    assert available_memory_bytes(write(tmp_path, proc__meminfo=MEMINFO)) == 1000 * 1024


def test_a_container_may_have_less(tmp_path: Path) -> None:
    write(tmp_path, proc__meminfo=MEMINFO)
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("500000\n")
    (group / "memory.current").write_text("300000\n")
    (group / "memory.stat").write_text("anon 1\ninactive_file 100000\n")
    assert available_memory_bytes(tmp_path) == 500_000 - 300_000 + 100_000
    (group / "memory.max").write_text("max\n")
    assert available_memory_bytes(tmp_path) == 1000 * 1024


def test_an_old_container_too(tmp_path: Path) -> None:
    write(tmp_path, proc__meminfo=MEMINFO)
    group = tmp_path / "sys/fs/cgroup/memory"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text("100\n")
    (group / "memory.usage_in_bytes").write_text("300\n")
    assert available_memory_bytes(tmp_path) == 0


def test_elsewhere_it_is_the_physical_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr("os.sysconf", sizes.__getitem__)
    assert available_memory_bytes(tmp_path) == 4_096_000

    def unknown(name: str) -> int:
        raise ValueError(name)

    monkeypatch.setattr("os.sysconf", unknown)
    with pytest.raises(ConfigError, match="set kv_cache_memory or num_blocks"):
        available_memory_bytes(tmp_path)


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.9, 900),
        (1.0, 1000),
        ("0.9", 900),
        (".5", 500),
        ("1.0", 1000),
        ("90%", 900),
        (" 90 % ", 900),
        (700, 700),
        ("700", 700),
        ("1", 1),
        ("0.5kb", 500),
    ],
)
def test_a_share_or_a_size_of_memory(share: float | int | str, expected: int) -> None:
    assert parse_share(share, 1000) == expected


@pytest.mark.parametrize(
    ("share", "message"),
    [
        (0.0, r"a share of the memory must be above 0 and at most 1, got 0\.0"),
        (1.5, r"a share of the memory must be above 0 and at most 1, got 1\.5"),
        (float("nan"), "a share of the memory must be above 0"),
        ("120%", "a share of the memory must be above 0 and at most 1, got '120%'"),
        ("much", "memory must be a positive size such as '24GiB'.* got 'much'"),
        (True, "memory must be a positive size"),
        ("2kb", "'2kb' is more than there is: 1,000 B"),
    ],
)
def test_no_share_of_memory(share: float | int | str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_share(share, 1000)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        (
            (1000, 16, 4096, 8),
            "16,000 tokens: requests of up to 4,096 tokens, 3 of these at once, or 8 of 2,000",
        ),
        (
            (100, 16, 4096, 8),
            "1,600 tokens: requests of up to 1,600 tokens (max_model_len is 4,096), 1 of these at once, "
            "or 8 of 192",
        ),
        ((2048, 16, 4096, 8), "32,768 tokens: requests of up to 4,096 tokens, 8 of these at once"),
        (
            (3, 16, 64, 8),
            "48 tokens: requests of up to 48 tokens (max_model_len is 64), 1 of these at once",
        ),
    ],
)
def test_what_a_cache_can_serve(sizes: tuple[int, int, int, int], text: str) -> None:
    assert describe_capacity(*sizes) == text
