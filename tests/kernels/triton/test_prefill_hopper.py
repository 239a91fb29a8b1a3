"""The Hopper kernel without a Hopper: what it refuses, how it sees memory, what the assembler makes of it.

Gluon is not interpreted; tests/gpu compares results.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.kernels.triton import prefill_hopper

TESTS = Path(__file__).parents[2]


# --- What it refuses


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_hopper, "_unfit_reason", lambda device: None)


def ask(**changes: Any) -> str | None:
    """supports_hopper of an ordinary call, with changes."""
    block_size = changes.pop("block_size", 16)
    dtype, head_dim = changes.pop("dtype", torch.bfloat16), changes.pop("head_dim", 128)
    q = torch.empty(40, 4, head_dim, dtype=dtype)
    cache = torch.empty(8, block_size, 2, head_dim, dtype=changes.pop("cache_dtype", dtype))
    arguments = {"q": q, "k": cache, "v": cache, "block_table": torch.zeros(1, 8, dtype=torch.int32)}
    arguments = {
        **arguments,
        "out": torch.empty_like(q),
        "max_seqlen_q": 400,
        "softmax_scale": 1.0,
        **changes,
    }
    return prefill_hopper.supports_hopper(**arguments)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("block_size", [8, 16, 256])
def test_supports_what_it_is_for(head_dim: int, block_size: int) -> None:
    assert ask(head_dim=head_dim, block_size=block_size) is None
    assert ask(head_dim=head_dim, block_size=block_size, dtype=torch.float16) is None


@pytest.mark.usefixtures("on_hopper")
def test_few_rows_are_for_tiles_of_a_group_where_there_is_one() -> None:
    q, one_to_one = torch.empty(40, 4, 128).bfloat16(), torch.empty(8, 16, 4, 128).bfloat16()
    assert ask(max_seqlen_q=97) is None
    assert ask(q=q, k=one_to_one, v=one_to_one, max_seqlen_q=9) is None


def cache_of(num_blocks: int, block_size: int, **strides: int) -> torch.Tensor:
    x = torch.empty(1 << 20, dtype=torch.bfloat16)
    return x.as_strided((num_blocks, block_size, 2, 128), (*strides.values(), 1))


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float32}, "float32"),
        ({"cache_dtype": torch.float8_e4m3fn}, "float8"),
        ({"head_dim": 96}, "head_dim 96"),
        ({"block_size": 4}, "blocks of 4"),
        ({"alibi_slopes": torch.ones(4)}, "alibi_slopes"),
        ({"sinks": torch.ones(4)}, "sinks"),
        ({"k_scale": 2.0}, "k_scale"),
        ({"v_scale": torch.ones(1)}, "v_scale"),
        ({"leftpad": torch.zeros(1, dtype=torch.int32)}, "leftpad"),
        ({"batch_invariant": True}, "batch_invariant"),
        ({"max_seqlen_q": 9}, "at most 9 rows"),
        ({"max_seqlen_q": 96}, "at most 96 rows"),
        ({"softmax_scale": 0.0}, "not positive"),
        ({"softmax_scale": -1.0}, "not positive"),
        ({"q": torch.empty(40 * 512 + 1, dtype=torch.bfloat16)[1:].view(40, 4, 128)}, "aligned"),
        ({"q": torch.empty(1, 4, 128, dtype=torch.bfloat16).expand(40, 4, 128)}, "aligned"),
        ({"k": cache_of(8, 16, block=4096, slot=260, head=128)}, "aligned"),
        ({"v": cache_of(8, 16, block=4160, slot=256, head=128)}, "whole number of rows"),
        ({"out": torch.empty(40, 4, 132, dtype=torch.bfloat16)[:, :, :128]}, "output"),
        ({"k": torch.empty(0, 2, 128, dtype=torch.bfloat16), "block_table": None}, "no keys"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_refuses_with_a_reason(changes: dict[str, Any], reason: str) -> None:
    said = ask(**changes)
    assert said is not None
    assert reason in said


def test_refuses_the_interpreter_and_unproven_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unfit = prefill_hopper._unfit_reason.__wrapped__
    assert unfit(torch.device("cpu")) == "Gluon is not interpreted"
    for version in ("3.5.1", "3.10.0", "4.0.0+git1"):
        monkeypatch.setattr(prefill_hopper.triton, "__version__", version)
        assert unfit(torch.device("cpu")) == f"not proven on Triton {version}"


@pytest.mark.parametrize(
    ("capability", "said"), [((9, 0), None), ((8, 0), "not a Hopper GPU"), ((10, 0), "not a Hopper GPU")]
)
def test_is_for_one_architecture(
    capability: tuple[int, int], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_hopper, "is_interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    assert prefill_hopper._unfit_reason.__wrapped__(torch.device("cuda", 0)) == said


# --- How it sees memory


def slots(kind: str) -> torch.Tensor:
    """A cache (5 blocks, 8 slots, 3 heads, 64), each element its own number."""
    numbers = torch.arange(2 * 5 * 8 * 3 * 64, dtype=torch.int16)
    match kind:
        case "slots first":
            return numbers[: 5 * 8 * 3 * 64].view(5, 8, 3, 64)
        case "heads first":
            return numbers[: 5 * 8 * 3 * 64].view(5, 3, 8, 64).transpose(1, 2)
        case "K beside V, by block":
            return numbers.view(5, 2, 8, 3, 64)[:, 1]
        case "K beside V, by slot":
            return numbers.view(5, 8, 3, 128)[..., 64:]
    raise AssertionError(kind)


@pytest.mark.parametrize(
    "kind", ["slots first", "heads first", "K beside V, by block", "K beside V, by slot"]
)
def test_a_cache_is_a_matrix_with_a_row_per_token(kind: str) -> None:
    cache = slots(kind)
    matrix = prefill_hopper._as_matrix(cache, 8)
    rows = cache.as_strided(matrix.shape, matrix.strides, cache.storage_offset())
    for block, slot, head in [(0, 0, 0), (0, 7, 2), (3, 1, 1), (4, 7, 2)]:
        row = block * prefill_hopper._rows_per_block(cache) + slot
        column = head * cache.stride(2)
        assert torch.equal(rows[row, column : column + 64], cache[block, slot, head])
    assert matrix.shape[0] == 4 * prefill_hopper._rows_per_block(cache) + 8


# --- What the assembler makes of it

# Compiles the kernel of each case for sm_90 and prints what its innermost loops of products look like.
COMPILE = """
import json, re, subprocess, tempfile
import torch
from triton.knobs import nvidia
from helpers.no_gpu import NoGpu
from octavo.kernels import flash_attn_varlen_func

class Gpu(NoGpu):
    def sass(self):
        (kernel,) = [k for k in self._compiled.values() if k.metadata.name == "attend"]
        self._compiled.clear()
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            command = [nvidia.nvdisasm.path, "-c", file.name]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout

with Gpu(90) as gpu:
    for heads, head_dim, block_size, options in CASES:
        q = torch.empty(9000, heads, head_dim, dtype=torch.bfloat16)
        cache = torch.empty(40, block_size, 1, head_dim, dtype=torch.bfloat16)
        table = torch.zeros(1, 40, dtype=torch.int32)
        rows, keys = torch.tensor([[0, 9000], [0, 256]], dtype=torch.int32)  # enough to fill the GPU
        packed = (q, cache, cache, rows, keys, 9000, 256)
        flash_attn_varlen_func(*packed, block_table=table, causal=True, **options)
        (kernel,) = gpu.take()
        print(json.dumps({"shared": kernel.shared, "sass": gpu.sass()}))
"""
CASES = {
    "plain": (4, 128, 64, {}),
    "window": (3, 64, 16, {"window_size": (100, 0), "return_softmax_lse": True}),
    "capped": (2, 256, 16, {"softcap": 30.0}),
}


def loops_of_products(sass: str) -> list[str]:
    """Innermost loops with tensor core instructions: the text of each."""
    lines = sass.splitlines()
    labels = {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"\s*(\.L_x_\d+):", line))}
    jumps = (
        (i, m[1])
        for i, line in enumerate(lines)
        if (m := re.search(r"@!?U?P\d BRA[^`]*`\((\.L_x_\d+)\)", line))
    )
    spans = [(labels[label], i) for i, label in jumps if labels[label] < i]
    spans = [(a, b) for a, b in spans if any("HGMMA" in line for line in lines[a:b])]
    inner = [(a, b) for a, b in spans if not any(a <= c and d <= b and (c, d) != (a, b) for c, d in spans)]
    return ["\n".join(lines[a:b]) for a, b in inner]


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, Any]]:
    code = f"CASES = {list(CASES.values())!r}\n{COMPILE}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "PYTHONPATH": ":".join([str(TESTS), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(CASES, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_copies_by_tma_and_multiplies_by_warpgroups(case: str, compiled: dict[str, dict[str, Any]]) -> None:
    sass = compiled[case]["sass"]
    assert compiled[case]["shared"] <= 227 * 1024
    for instruction in ("HGMMA", "UTMALDG", "USETMAXREG"):
        assert instruction in sass
    assert "HMMA." not in sass.replace("HGMMA", "")
    # A warpgroup has a loop without a mask and one or two with one
    loops = loops_of_products(sass)
    assert len(loops) == 2 * (3 if case == "window" else 2)
    for loop in loops:
        # An address or two may be spilled; of an accumulator it would be 32 registers and more
        assert len(re.findall(r"\b(?:LDL|STL)\b", loop)) <= 16


@pytest.mark.parametrize("case", CASES)
def test_softmax_runs_beside_the_product(case: str, compiled: dict[str, dict[str, Any]]) -> None:
    """Between the wait for the scores and the wait for the product."""
    for loop in loops_of_products(compiled[case]["sass"]):
        _, _, after_scores = loop.partition("WARPGROUP.DEPBAR.LE gsb0, 0x1")
        beside, found, after_product = after_scores.partition("WARPGROUP.DEPBAR.LE gsb0, 0x0")
        assert found
        assert beside.count("MUFU.EX2") > 9 * after_product.count("MUFU.EX2")


@pytest.mark.parametrize(
    ("batch", "num_rows", "num_heads", "num_keys", "splits"),
    [
        (1, 128, 32, 32768, 4),  # 128 programs for 132 processors
        (1, 256, 32, 32768, 2),
        (1, 300, 32, 32768, 4),  # 96 tiles: 2 turns would be half empty at the end, 3 are full
        (1, 512, 32, 32768, 1),
        (1, 700, 32, 32700, 2),  # 192 tiles: half of the second turn would be empty
        (1, 128, 16, 32768, 8),
        (1, 128, 1, 32768, 58),  # 64 at most, of 512 keys; 58 are nearly as good
        (1, 128, 16, 1024, 2),
        (4, 512, 16, 4096, 1),  # up to 7 tiles: 112 programs, which no number fills better
        (1, 128, 16, 1000, 1),  # fewer keys than two splits should have, or than 8 times the rows
        (1, 1024, 16, 8191, 1),
        (1, 8192, 32, 65536, 1),  # tiles enough
    ],
)
def test_keys_are_divided_where_tiles_are_few(
    monkeypatch: pytest.MonkeyPatch, batch: int, num_rows: int, num_heads: int, num_keys: int, splits: int
) -> None:
    monkeypatch.setattr(prefill_hopper, "num_processors", lambda _: 132)
    q = torch.empty(num_rows, num_heads, 128, device="meta")
    assert prefill_hopper.splits_for(q, batch, -(-num_rows // batch), num_keys) == splits


@pytest.mark.parametrize(
    ("window", "splits"),
    [((4095, 0), 8), ((1023, 0), 2), ((895, 0), 1), ((600, 296), 2), ((1023, None), 8), ((None, 0), 8)],
)
def test_a_split_has_keys_enough_of_a_window(
    monkeypatch: pytest.MonkeyPatch, window: tuple[int | None, int | None], splits: int
) -> None:
    monkeypatch.setattr(prefill_hopper, "num_processors", lambda _: 132)
    q = torch.empty(128, 16, 128, device="meta")
    assert prefill_hopper.splits_for(q, 1, 128, 32768, window) == splits
