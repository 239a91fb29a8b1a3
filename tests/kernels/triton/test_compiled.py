"""What a GPU would get, compiled without one: public calls, and the instructions that came of them.

`python tests/helpers/compiled_calls.py 90 all` prints what is looked at here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from helpers.no_gpu import find_loops

SCRIPT = Path(__file__).parents[2] / "helpers" / "compiled_calls.py"
ARCHS = {90: "all", 80: "some", 86: "some", 89: "some"}
SHARED = {90: 227 * 1024, 80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024}
# Instructions in a loop that move a register through memory, by architecture and call: the most that Triton
# 3.6, 3.7 and 3.9 make today; none in any other call. They are where fewer registers were measured to be
# faster: the Hopper kernel gives 240 to the 64 rows of a group of warps, the other prefill kernel 128 so that
# two programs share a multiprocessor.
SPILLS_IN_LOOPS = {
    (90, "decode 32/8/120 fp8"): 3,
    (90, "prefill 16/8/128"): 57,
    (90, "prefill 16/8/128 packed"): 54,
    (90, "prefill 32/8/128 block 64"): 54,
    (90, "prefill 16/8/256"): 96,
    (90, "prefill 9/3/64"): 15,
    (90, "prefill 16/8/128 fp8"): 115,
    (90, "prefill 16/8/128 block 1"): 47,
    (90, "prefill 16/8/128 sinks"): 51,
    (90, "prefill 16/8/128 alibi"): 103,
    (90, "prefill 16/8/128 split"): 31,
    (90, "prefill 16/8/128 behind 8064"): 57,
    (90, "prefill 8/4/80"): 45,
    (90, "sample 1"): 2,
    (90, "sample 64"): 2,
    (90, "sample 256"): 2,
    (90, "sample 256 bf16"): 33,
    (80, "prefill 16/8/128"): 6,
    (86, "prefill 16/8/128"): 6,
    (86, "sample 64"): 4,
    (89, "prefill 16/8/128"): 6,
    (89, "prefill 16/8/128 fp8"): 171,
    (89, "sample 64"): 4,
}

Kernel = dict[str, Any]
Compiled = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def everything(request: pytest.FixtureRequest) -> dict[int, Compiled]:
    """Every architecture in a process of its own: 90 s of processor time, or 15 from the cache."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    cache = getattr(request.config, "cache", None)
    if cache is not None:
        environment["TRITON_CACHE_DIR"] = str(cache.mkdir("triton"))
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)

    def compile_for(arch: int) -> Compiled:
        command = (sys.executable, SCRIPT, str(arch), ARCHS[arch])
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found: Compiled = json.loads(done.stdout.splitlines()[-1])  # the compiler prints, too
        return found

    with ThreadPoolExecutor(min(len(ARCHS), os.cpu_count() or 1)) as pool:
        return dict(zip(ARCHS, pool.map(compile_for, ARCHS), strict=True))


@pytest.fixture(params=ARCHS, ids=lambda arch: f"sm_{arch}")
def arch(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def compiled(arch: int, everything: dict[int, Compiled]) -> Compiled:
    return everything[arch]


def kernels_of(compiled: Compiled, *names: str) -> list[tuple[str, Kernel]]:
    """(call, kernel) of the kernels so named, or of all."""
    return [
        (call, kernel)
        for call, result in compiled.items()
        for kernel in result["kernels"]
        if not names or kernel["name"] in names
    ]


def count(kernel: Kernel, pattern: str) -> int:
    return sum(n for opcode, n in kernel["instructions"].items() if re.match(pattern, opcode))


def assert_no_kernel_is(compiled: Compiled, wrong: Callable[[Kernel], bool], *names: str) -> None:
    """Fails with a table of the kernels that are `wrong`; there must be some of those names at all."""
    looked_at = kernels_of(compiled, *names)
    assert looked_at
    patterns = ("H?G?MMA", "LDGSTS", "UTMALDG", r"LDG\S*128", r"LDG\.", r"STG\S*128", "STG")
    titles = ("MMA", "LDGSTS", "UTMALDG", "LDG.128", "LDG", "STG.128", "STG")
    lines = [
        f"{'call':30}{'kernel':20}  regs spills in loops   shared " + " ".join(f"{t:>7}" for t in titles)
    ]
    for call, one in looked_at:
        if wrong(one):
            counts = " ".join(f"{count(one, pattern):7}" for pattern in patterns)
            head = f"{call[:29]:30}{one['name'][:19]:20}{one['registers']:6}{one['spills']:7}"
            lines.append(f"{head}{one['spills_in_loops']:9}{one['shared']:9} {counts}")
    if len(lines) > 1:
        pytest.fail("\n".join(lines), pytrace=False)


def test_a_loop_is_a_jump_back_within_the_kernel() -> None:
    text = [("LDL", " R1"), ("BRA", " 0x30 ;"), ("HMMA", " R2"), ("BRA", " P1, 0x20 ;"), ("BRA", " 0x90;")]
    after = [("CALL.REL", " 0x10 ;"), ("BRA.U", " !UP0, 0x50 ;"), ("BRA", " 0x10 ;"), ("BRA", " 0x80 ;")]
    assert find_loops(text, 0) == (["LDL", "BRA", "HMMA", "BRA", "BRA"], [(2, 3)])
    assert find_loops(after, 5)[1] == [(0, 1), (3, 3)]


def test_every_call_compiles_or_is_refused_by_name(arch: int, compiled: Compiled) -> None:
    refused = {call for call in compiled if arch < 89 and "fp8" in call}  # no float8 in those GPUs
    for call in refused:
        assert re.match("UnsupportedKernelConfig.*compute capability 8.9", compiled[call]["error"])
    errors = {call: result["error"] for call, result in compiled.items() if "error" in result}
    assert {call: error for call, error in errors.items() if call not in refused} == {}
    assert all(result["kernels"] for call, result in compiled.items() if call not in refused)


def test_registers_are_enough(arch: int, compiled: Compiled) -> None:
    """A value that goes through memory once, between two loops, does no harm; in a loop it does."""
    too_many = {
        call: found
        for call, result in compiled.items()
        if (found := max((one["spills_in_loops"] for one in result["kernels"]), default=0))
        > SPILLS_IN_LOOPS.get((arch, call), 0)
    }
    assert too_many == {}


def test_shared_memory_is_enough(arch: int, compiled: Compiled) -> None:
    assert_no_kernel_is(compiled, lambda one: one["shared"] > SHARED[arch])


def test_attention_multiplies_in_matrix_units(arch: int, compiled: Compiled) -> None:
    assert_no_kernel_is(compiled, lambda one: count(one, "HG?MMA") == 0, "_decode")
    instruction = "HGMMA" if arch == 90 else "HMMA"
    low_precision = {call: result for call, result in compiled.items() if "fp32" not in call}
    assert_no_kernel_is(low_precision, lambda one: count(one, instruction) == 0, "_prefill", "attend")


def test_over_one_byte_the_matrix_unit_multiplies_no_empty_rows(arch: int, compiled: Compiled) -> None:
    """Keys as rows: each warp's two times 16 keys by 8 columns of queries, and back, 128 dims deep."""
    calls = {
        call: result
        for call, result in compiled.items()
        if re.match("decode .*(fp8|int8)", call) and "softcap" not in call and "error" not in result
    }
    assert len(calls) == {90: 10, 89: 4}.get(arch, 2)
    for call, decode in kernels_of(calls, "_decode"):
        assert (call, decode["num_warps"], count(decode, "HMMA")) == (call, 2, 32)
        assert count(decode, r"HMMA\.16816") == 32


def test_over_one_byte_programs_run_side_by_side(everything: dict[int, Compiled]) -> None:
    """As many as the defaults have for a multiprocessor: 64 K registers, 228 KB, of which each takes one."""
    looked_at = Counter[int]()
    for call, decode in kernels_of(everything[90], "_decode"):
        if re.match("decode .*(fp8|int8)", call) and "softcap" not in call:
            programs = 4 if re.search("one scale|block 64", call) else 5
            assert programs * decode["registers"] * 64 <= 65536, call
            assert programs * (decode["shared"] + 1024) <= 228 * 1024, call
            looked_at[programs] += 1
    assert looked_at == {4: 5, 5: 5}


def test_options_over_one_byte_take_the_form_that_knows_them(everything: dict[int, Compiled]) -> None:
    ((_, decode),) = kernels_of({"": everything[90]["decode 4/2/64 fp8 softcap"]}, "_decode")
    assert (decode["num_warps"], decode["registers"]) == (4, 128)


def test_experts_multiply_in_matrix_units_and_fetch_ahead(arch: int, compiled: Compiled) -> None:
    calls = {
        call: result
        for call, result in compiled.items()
        if call.startswith("experts") and not call.endswith("fp32")
    }
    assert_no_kernel_is(calls, lambda one: count(one, "H?G?MMA") == 0 or count(one, "LDGSTS|UTMALDG") == 0)
    if arch == 90:
        many = {call: result for call, result in calls.items() if call.endswith("many")}
        assert_no_kernel_is(many, lambda one: count(one, "HGMMA") == 0)


def test_rows_meet_weights_in_matrix_units(everything: dict[int, Compiled]) -> None:
    """From registers into which 16 bytes at a time come; and all of them before the wait, where they fit."""
    calls = {call: result for call, result in everything[90].items() if call.startswith("rows ")}
    assert [one["name"] for _, one in kernels_of(calls)] == ["rows_linear"] * 6
    wrong = ("LDL|STL", "LDSM", r"LDG\.E(\.EF)?(\.64)?$")
    assert_no_kernel_is(calls, lambda one: any(count(one, pattern) for pattern in wrong))
    for pattern in ("HMMA.16816", r"LDG\S*EF\S*128", "ACQBULK", "PREEXIT"):
        assert_no_kernel_is(calls, lambda one, pattern=pattern: count(one, pattern) == 0)  # type: ignore[misc]
    assert not kernels_of(everything[80], "rows_linear")


def test_keys_and_values_are_fetched_ahead(compiled: Compiled) -> None:
    """By asynchronous copies into shared memory, or by the copy engine."""
    assert_no_kernel_is(
        compiled, lambda one: count(one, "LDGSTS|UTMALDG") == 0, "_decode", "_prefill", "attend"
    )


def test_heads_that_begin_at_multiples_of_eight_are_fetched_ahead(everything: dict[int, Compiled]) -> None:
    """8 or 16 bytes at a time, and no number of keys or values by itself."""
    for call, copy in (("decode 32/8/120", r"LDGSTS\S*128"), ("decode 32/8/120 fp8", r"LDGSTS\S*64")):
        ((_, decode),) = kernels_of({call: everything[90][call]}, "_decode")
        assert count(decode, copy) >= 48
        assert (count(decode, r"LDG\S*U8"), count(decode, r"LDG\S*U16")) == (0, 16)  # those are queries


def test_hopper_has_a_kernel_of_its_own(everything: dict[int, Compiled]) -> None:
    ordinary = [
        call
        for call in everything[90]
        if re.fullmatch(r"prefill (16/8/128|32/8/128|9/3/64|16/8/256)( packed| block 64)?", call)
    ]
    assert len(ordinary) == 5
    chosen = {call: everything[90][call] for call in ordinary}
    assert [one["name"] for _, one in kernels_of(chosen)] == ["attend"] * 5
    assert_no_kernel_is(chosen, lambda one: count(one, "UTMALDG") == 0)
    assert not kernels_of(everything[80], "attend")


def test_hoppers_kernel_is_the_same_where_it_divides_keys(everything: dict[int, Compiled]) -> None:
    """Numbers of splits, and whether there are partials, are no part of a variant."""
    divided, whole = (everything[90][f"prefill 16/8/128{more}"]["kernels"] for more in (" behind 8064", ""))
    assert [one["name"] for one in divided] == ["attend", "_combine"]
    assert divided[:1] == whole
    (combine,) = (
        one for one in everything[90]["prefill 16/8/128 split"]["kernels"] if one["name"] == "_combine"
    )
    assert divided[1] == combine


def test_memory_is_moved_8_or_16_bytes_at_a_time(compiled: Compiled) -> None:
    assert_no_kernel_is(
        compiled,
        lambda one: count(one, r"LDG\S*(128|64)") == 0 or count(one, r"STG\S*(128|64)") == 0,
        "_write", "_norm", "_rotate", "_rotate_and_write", "_silu_and_mul", "_gelu_tanh",
    )  # fmt: skip
