"""The rows of `octavo bench kernels`: their names, what they count, and that they tell right from wrong."""

import fnmatch
import functools

import pytest
import torch

from octavo import kernels
from octavo.bench import kernel_work
from octavo.bench.attention_work import AttentionShape, attention, attention_inputs, ragged_lengths
from octavo.bench.kernel_cases import cases
from octavo.bench.kernel_work import Memory

HEADS = (4, 2, 64)


@pytest.fixture
def memory():
    return Memory(torch.device("cpu"), cold_bytes=50_000)


def test_names_are_unique_and_every_bar_has_its_row():
    names = [case.name for case in cases()]
    assert len(names) == len(set(names))
    bars = {case.name: case.bar for case in cases() if case.bar is not None}
    assert bars["decode/1x8192/16-8-128/16/bf16"] == bars["decode/1x8192/32-8-128/64/bf16"] == 14.0
    assert bars["decode/256xragged2048/32-8-128/16/bf16"] == 270.0
    assert bars["prefill/1x2048+30720/32-8-128/64/bf16"] == 590
    assert bars["kv_write/8192/8-128/16/bf16"] == 18.0
    assert bars["sample/256x151936/greedy"] == 45.0
    for pattern in (
        "decode/*/8-1-128/*",
        "decode/*/9-3-64/*",
        "*/fp8",
        "*/int8",
        "*/packed/*",
        "*-invariant",
        "*/fp8-token-scales",
        "*/int8-token-scales",
    ):
        assert fnmatch.filter(names, pattern), pattern


def test_the_unit_tells_which_way_is_better():
    assert {case.unit for case in cases() if case.family == "prefill"} == {"TFLOP/s"}
    assert {case.unit for case in cases() if case.family != "prefill"} == {"us"}


def test_bytes_and_operations_of_attention():
    decode = AttentionShape((1024,) * 32, 1, (16, 8, 128), 16)
    assert decode.kv_bytes == 32 * 1024 * 8 * 128 * 2 * 2
    assert decode.flops == 32 * 4 * 16 * 128 * 1024
    prefill = AttentionShape((10,), 4, (2, 1, 64), 16)  # four rows that see 7, 8, 9 and 10 keys
    assert prefill.flops == 4 * 2 * 64 * (7 + 8 + 9 + 10)
    assert AttentionShape((1024,), 1, (16, 8, 128), 16, "fp8").kv_bytes == 1024 * 8 * 128 * 2
    scaled = AttentionShape((1024,), 1, (16, 8, 128), 16, "fp8", token_scales=True)
    assert scaled.kv_bytes == 1024 * 8 * (128 + 4) * 2


def test_inputs_rotate_through_more_than_the_cache(memory):
    shape = AttentionShape((32,), 1, HEADS, 16)
    inputs = attention_inputs(shape, memory)
    assert inputs.sets * (shape.kv_bytes + shape.qo_bytes) >= memory.cold_bytes
    assert sorted(inputs.tables.reshape(-1).tolist()) == list(range(inputs.k.shape[0]))


def test_ragged_lengths_are_the_same_every_time():
    assert ragged_lengths(3, 2048) == ragged_lengths(256, 2048)[:3]
    assert all(100 <= length <= 2048 for length in ragged_lengths(256, 2048))


WORK = {
    "decode": functools.partial(attention, AttentionShape((40, 17, 33), 1, HEADS, 16)),
    "prefill": functools.partial(attention, AttentionShape((40, 40), 24, HEADS, 16)),
    "packed": functools.partial(attention, AttentionShape((20, 20), 20, HEADS, 0)),
    "fp8": functools.partial(attention, AttentionShape((40, 40), 1, HEADS, 16, "fp8")),
    "int8": functools.partial(attention, AttentionShape((40, 40), 1, HEADS, 16, "int8")),
    "token scales": functools.partial(
        attention, AttentionShape((40, 40), 1, HEADS, 16, "fp8", token_scales=True)
    ),
    "invariant": functools.partial(attention, AttentionShape((40, 40), 1, HEADS, 16, batch_invariant=True)),
    "write": functools.partial(kernel_work.kv_write, 20, HEADS, 16, "bf16"),
    "write fp8": functools.partial(kernel_work.kv_write, 20, HEADS, 16, "fp8"),
    "fused": functools.partial(kernel_work.fused_write, 20, HEADS, 16, "bf16"),
    "greedy": functools.partial(kernel_work.sampling, 4, 500, "greedy"),
    "drawn": functools.partial(kernel_work.sampling, 4, 500, "top_k+top_p"),
    "norm": functools.partial(kernel_work.rms_norm, 4, 64, False),
    "norm add": functools.partial(kernel_work.rms_norm, 4, 64, True),
    "silu": functools.partial(kernel_work.silu_and_mul, 4, 64),
}


@pytest.mark.parametrize("name", WORK)
def test_a_right_kernel_passes_its_check(memory, name):
    work = WORK[name](memory)
    assert work.error() <= work.tolerance
    for call in work.calls:
        call()
    assert work.bytes_moved > 0


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("decode", "flash_attn_varlen_func"),
        ("packed", "flash_attn_varlen_func"),
        ("write", "write_kv_cache"),
        ("fused", "rotate_and_write_kv_cache"),
    ],
)
def test_a_kernel_that_does_nothing_fails_its_check(memory, monkeypatch, name, function):
    real = getattr(kernels, function)
    calls = []

    def nothing_at_first(*arguments, **options):
        """The first call is the one that is checked; those after it are the reference's."""
        calls.append(function)
        if len(calls) == 1:
            return torch.zeros_like(arguments[0])
        return real(*arguments, **options)

    monkeypatch.setattr(kernels, function, nothing_at_first)
    work = WORK[name](memory)
    assert not work.error() <= work.tolerance


def test_one_sequence_wrong_is_found(memory, monkeypatch):
    real = kernels.flash_attn_varlen_func

    def last_row_wrong(*arguments, out=None, **options):
        result = real(*arguments, out=out, **options)
        if out is not None:
            out[-1] *= 1.1
        return result

    monkeypatch.setattr(kernels, "flash_attn_varlen_func", last_row_wrong)
    work = WORK["decode"](memory)
    assert work.error() > work.tolerance
