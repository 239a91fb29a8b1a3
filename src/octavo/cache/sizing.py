"""How many bytes and blocks: what a request needs, what fits into a budget, how large the cache shall be."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from octavo.cache.spec import KVCacheSpec
from octavo.errors import CapacityError, ConfigError

DEFAULT_MEMORY_SHARE = 0.4
"""Share of the main memory left by the weights that the cache takes when nobody says a size."""
DEFAULT_DEVICE_MEMORY_SHARE = 0.9
"""The same share of a GPU's memory, which few others use, once weights and the largest step have theirs."""

_UNITS: dict[str, int] = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def parse_memory(text: int | str, name: str = "memory") -> int:
    """Bytes from "24GiB" (2**30), "24GB" (10**9), "1.5MiB" or a plain number; ConfigError for the rest."""
    number: float | int | None = None
    unit = ""
    if isinstance(text, int) and not isinstance(text, bool):
        number = text
    elif isinstance(text, str):
        match = re.fullmatch(r"\s*(\d{1,20}|\d{0,9}\.\d{1,9})\s*([a-zA-Z]*)\s*", text)
        unit = match[2].lower() if match else ""
        if match and unit in _UNITS:
            number = int(match[1]) if match[1].isdigit() else float(match[1])
    num_bytes = 0 if number is None else int(number * _UNITS[unit])
    if num_bytes < 1:
        raise ConfigError(
            f"{name} must be a positive size such as '24GiB', '24GB', '512MiB' or a number of bytes, "
            f"got {text!r}"
        )
    return num_bytes


def parse_share(share: float | int | str, total_bytes: int) -> int:
    """Bytes from a share of `total_bytes` (0.9, "0.9", "90%") or a size as `parse_memory` takes it.

    ConfigError for the rest, and for more than `total_bytes`.
    """
    part: float | None = share if isinstance(share, float) else None
    if isinstance(share, str) and (match := re.fullmatch(r"\s*(0?\.\d{1,9}|1\.0*|\d{1,3}\s*%)\s*", share)):
        text = match[1]
        part = int(text[:-1]) / 100 if text.endswith("%") else float(text)
    if part is not None:
        if not 0 < part <= 1:
            raise ConfigError(f"a share of the memory must be above 0 and at most 1, got {share!r}")
        return int(part * total_bytes)
    num_bytes = parse_memory(share)  # type: ignore[arg-type]  # a float was a share
    if num_bytes > total_bytes:
        raise ConfigError(f"{share!r} is more than there is: {format_bytes(total_bytes)}")
    return num_bytes


def describe_capacity(num_blocks: int, block_size: int, max_model_len: int, max_num_seqs: int) -> str:
    """What a cache of that many blocks can serve, for people."""
    num_tokens = num_blocks * block_size
    longest = min(max_model_len, num_tokens)
    at_once = min(max_num_seqs, num_blocks // blocks_for_tokens(longest, block_size))
    each = min(longest, num_blocks // max_num_seqs * block_size)
    batch = f", or {max_num_seqs:,} of {each:,}" if each and at_once < max_num_seqs else ""
    of_model = "" if longest == max_model_len else f" (max_model_len is {max_model_len:,})"
    return (
        f"{num_tokens:,} tokens: requests of up to {longest:,} tokens{of_model}, {at_once:,} of these at once"
        f"{batch}"
    )


def format_bytes(num_bytes: int) -> str:
    """`num_bytes` for people: "896 B", "112 KiB", "4.375 GiB"; at most four digits after the point."""
    size, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    digits = f"{size:,.4f}".rstrip("0").rstrip(".") if size < 100 else f"{size:,.1f}".removesuffix(".0")
    return f"{digits} {units[0]}"


# What requests need


def blocks_for_tokens(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def request_bytes(spec: KVCacheSpec, num_tokens: int) -> int:
    """Bytes of the whole blocks that one request of `num_tokens` tokens occupies, each layer keeping every
    token.

    This is what the engine allocates: its block table is the same for all layers, with or without a window.
    """
    return blocks_for_tokens(num_tokens, spec.block_size) * spec.bytes_per_block


def windowed_request_bytes(spec: KVCacheSpec, num_tokens: int) -> int:
    """The same if each window layer kept only the blocks that its window can touch.

    A window of W tokens lies in at most `(W - 2) // block_size + 2` blocks, whatever its alignment.
    """
    size = spec.block_size
    all_blocks = blocks_for_tokens(num_tokens, size)
    windows = spec.windows or (None,) * spec.num_layers
    layer_blocks = sum(
        all_blocks if window is None else min(all_blocks, (window - 2) // size + 2) for window in windows
    )
    return layer_blocks * size * spec.bytes_per_token_layer


@dataclass(frozen=True)
class RequestSizing:
    """What requests of one length cost. Bytes, tokens and counts; `*_fit` are None without a memory budget.

    `contiguous_bytes` is what an engine without blocks reserves for a request: room for `max_len` tokens.
    """

    num_tokens: int
    max_len: int
    num_blocks: int
    request_bytes: int
    windowed_request_bytes: int
    waste_tokens: int
    waste_bytes: int
    contiguous_bytes: int
    requests_fit: int | None
    windowed_requests_fit: int | None
    contiguous_requests_fit: int | None


def size_requests(
    spec: KVCacheSpec, num_tokens: int, *, max_len: int | None = None, memory_bytes: int | None = None
) -> RequestSizing:
    """Sizes of a request of `num_tokens` tokens against one of `max_len` (default: the same) reserved in one
    piece.

    ConfigError when `num_tokens` is below 1 or above `max_len`.
    """
    max_len = num_tokens if max_len is None else max_len
    if num_tokens < 1:
        raise ConfigError(f"the number of tokens must be at least 1, got {num_tokens}")
    if max_len < num_tokens:
        raise ConfigError(f"max_len must be at least the request's {num_tokens} tokens, got {max_len}")
    num_blocks = blocks_for_tokens(num_tokens, spec.block_size)
    waste_tokens = num_blocks * spec.block_size - num_tokens
    paged, windowed = request_bytes(spec, num_tokens), windowed_request_bytes(spec, num_tokens)
    contiguous = max_len * spec.bytes_per_token
    return RequestSizing(
        num_tokens=num_tokens,
        max_len=max_len,
        num_blocks=num_blocks,
        request_bytes=paged,
        windowed_request_bytes=windowed,
        waste_tokens=waste_tokens,
        waste_bytes=waste_tokens * spec.bytes_per_token,
        contiguous_bytes=contiguous,
        requests_fit=None if memory_bytes is None else memory_bytes // paged,
        windowed_requests_fit=None if memory_bytes is None else memory_bytes // windowed,
        contiguous_requests_fit=None if memory_bytes is None else memory_bytes // contiguous,
    )


# How large the cache shall be


def num_blocks_for_bytes(spec: KVCacheSpec, num_bytes: int) -> int:
    """Whole blocks that fit into `num_bytes`; 0 when not one does."""
    return max(0, num_bytes) // spec.bytes_per_block


def resolve_num_blocks(
    spec: KVCacheSpec,
    *,
    num_blocks: int | None = None,
    memory_bytes: int | None = None,
    free_bytes: int | None = None,
    share: float = DEFAULT_MEMORY_SHARE,
    max_model_len: int,
    max_num_seqs: int,
) -> int:
    """Blocks the engine's cache shall have.

    A stated `num_blocks` or `memory_bytes` is taken as it is. Otherwise the cache gets `share` of
    `free_bytes`, the memory available once the weights are loaded (default: `available_memory_bytes()`), but
    not more than `max_num_seqs` requests of `max_model_len` tokens need.
    CapacityError when that is not even one block.
    """
    if num_blocks is not None:
        if num_blocks < 1:
            raise ConfigError(f"num_blocks must be at least 1, got {num_blocks}")
        return num_blocks
    if memory_bytes is not None:
        budget, name = memory_bytes, "kv_cache_memory"
        resolved = num_blocks_for_bytes(spec, budget)
    else:
        free_bytes = available_memory_bytes() if free_bytes is None else free_bytes
        budget, name = int(max(0, free_bytes) * share), f"{share:.0%} of free memory"
        most = max_num_seqs * blocks_for_tokens(max_model_len, spec.block_size)
        resolved = min(most, num_blocks_for_bytes(spec, budget))
    if resolved < 1:
        raise CapacityError(
            f"{name} is {budget:,} bytes, too small for one KV cache block: {spec.block_size} tokens take "
            f"{spec.bytes_per_block:,} bytes, a request of max_model_len={max_model_len} tokens takes "
            f"{request_bytes(spec, max_model_len):,} bytes; set kv_cache_memory to at least one of these"
        )
    return resolved


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes of main memory this process may still take, without swapping others out.

    On Linux MemAvailable, or what the control group (container) leaves when that is less; elsewhere all
    physical memory, since the standard library knows no better. `root` is where /proc and /sys are found.
    """
    bounds: list[int] = []
    meminfo = _read(root / "proc/meminfo")
    if meminfo and (match := re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)):
        bounds.append(int(match[1]) * 1024)
    for limit_file, usage_file in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        limit, usage = _read(root / limit_file), _read(root / usage_file)
        if limit and usage and limit.strip().isdigit() and usage.strip().isdigit():
            stat = _read((root / usage_file).with_name("memory.stat")) or ""
            # Pages of files that were read count as usage, but are given up on demand.
            cache = re.search(r"^(?:total_)?inactive_file (\d+)", stat, re.MULTILINE)
            bounds.append(max(0, int(limit) - int(usage) + (int(cache[1]) if cache else 0)))
    if bounds:
        return min(bounds)
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError) as error:
        raise ConfigError(
            "this system does not tell how much memory is free; set kv_cache_memory or num_blocks"
        ) from error


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
