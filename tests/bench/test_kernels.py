"""A run of rows: what is checked, timed, compared, and told when something fails. Without a GPU."""

import dataclasses
import functools
import math

import pytest
import torch

from octavo.bench import kernels, peers
from octavo.bench.attention_work import AttentionShape, attention
from octavo.bench.kernel_cases import Case
from octavo.bench.kernel_work import Memory, Work
from octavo.bench.kernels import Bench, chosen
from octavo.bench.peers import NotForThis, Peer
from octavo.bench.roofline import Ceilings
from octavo.bench.timing import GpuTime
from octavo.errors import ConfigError

CEILINGS = Ceilings(4e12, 3e12, 8e14, empty_kernel_us=1.0)


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Every kernel takes 10 us, give or take one; calls are counted."""
    timed = []

    def gpu_time(calls, group_ms):
        timed.append((len(calls), group_ms))
        return GpuTime(10.0, 9.5, 10.5, is_graph=True)

    monkeypatch.setattr(kernels, "gpu_time", gpu_time)
    return timed


def work(error=0.0, **options):
    options = {"calls": [lambda: None] * 3, "tolerance": 1e-2, "bytes_moved": 20e6, **options}
    return Work(error=lambda: error, **options)


def case(name="decode/1x8", build=lambda memory: work(), **options):
    return Case(name, build, **options)


def bench(*found):
    return Bench(Memory(torch.device("cpu"), 1000), CEILINGS, list(found), {})


def peer(calls, name="other", families=("decode",)):
    return Peer(name, "torch", "torch", families, calls)


def test_a_row_has_its_value_floor_and_spread():
    (measured,) = bench().run([case(bar=12.0)])
    row = measured.row()
    assert (row.name, row.value, row.unit, row.better) == ("decode/1x8", 10.0, "us", "lower")
    assert row.floor == 5.0  # 20 MB at 4 TB/s
    assert row.details == {"us": 10.0, "spread": 0.1, "error": 0.0, "bar": 12.0}


def test_a_row_of_operations_counts_them_and_takes_longer_runs(clock):
    build = functools.partial(lambda memory: work(flops=4e9))
    (measured,) = bench().run([case("prefill/1x8", build, unit="TFLOP/s")])
    assert clock == [(3, 60.0)]
    row = measured.row()
    assert (row.value, row.better, row.floor) == (400.0, "higher", 800.0)
    assert (measured.point.flops_per_byte, measured.point.flops_per_s) == (200.0, 4e14)


def test_what_copies_is_held_against_the_copy_rate_and_an_empty_kernel():
    (copied,) = bench().run([case(build=lambda memory: work(copies=True, bytes_moved=30e6))])
    (tiny,) = bench().run([case(build=lambda memory: work(bytes_moved=8.0))])
    assert (copied.floor, tiny.floor) == (10.0, 1.0)


@pytest.mark.parametrize(
    ("options", "bar", "met"),
    [
        ({}, None, True),
        ({"bar": 10.0}, 10.0, True),
        ({"bar": 9.9}, 9.9, False),
        ({"bar_over_floor": 1.9}, 9.5, False),  # the floor is 5 us
        ({"bar_over_floor": 2.0}, 10.0, True),
    ],
)
def test_a_bar_is_a_time_or_a_multiple_of_the_floor(options, bar, met):
    (measured,) = bench().run([case(**options)])
    assert (measured.bar, measured.meets_bar) == (bar, met)


def test_a_bar_of_operations_is_the_least():
    row = case("prefill/1x8", lambda memory: work(flops=4e9), unit="TFLOP/s", bar=401.0)
    (measured,) = bench().run([row])
    assert not measured.meets_bar


@pytest.mark.parametrize("error", [0.5, math.inf, math.nan])
def test_a_wrong_kernel_is_not_timed(clock, error):
    (measured,) = bench().run([case(build=lambda memory: work(error=error))])
    assert measured.time is None
    assert "against the reference (1e-02 allowed)" in measured.failure
    assert clock == []


def test_a_row_that_raises_fails_alone():
    def broken(memory):
        raise RuntimeError("no\nsuch kernel")

    first, second = bench().run([case(build=broken), case()])
    assert first.failure == "RuntimeError: no such kernel"
    assert (second.failure, second.value) == ("", 10.0)


def test_nothing_runs_after_an_illegal_access():
    def fatal(memory):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    (only,) = bench().run([case(build=fatal), case()])
    assert "illegal memory access" in only.failure


def test_a_row_is_kept_when_a_peer_kills_the_process_and_is_the_last():
    def fatal(inputs):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    (only,) = bench(peer(fatal, "bad"), peer(fatal, "next")).run([case(), case()])
    assert (only.value, list(only.peer_failures)) == (10.0, ["bad"])


def test_a_peer_runs_only_rows_of_its_own_family():
    write = peer(lambda inputs: [lambda: None], "other", ("kv_write",))
    plain, fused = bench(write).run([case("kv_write/8"), case("kv_write_fused/8")])
    assert (plain.peers, fused.peers) == ({"other": 10.0}, {})


def test_every_pattern_of_a_peer_matches_rows_that_exist():
    rows = [c.name for c in chosen([], quick=False)]
    for found in peers.PEERS:
        for pattern in found.rows:
            narrowed = dataclasses.replace(found, rows=(pattern,))
            assert any(narrowed.runs(row) for row in rows), (found.name, pattern)
    assert len([row for row in rows if peers.PEERS[1].runs(row)]) > 40  # FlashAttention 3: all of attention


def attention_case():
    shape = AttentionShape((40, 40), 1, (4, 2, 64), 16)
    return case("decode/2x40", functools.partial(attention, shape))


def test_a_peer_is_checked_before_it_is_timed():
    def right(inputs):
        def call():
            index, exact = inputs.sampled()
            inputs.out[index] = exact.to(inputs.out.dtype)

        return [call]

    def wrong(inputs):
        return [lambda: inputs.out.zero_()]

    found = peer(right, "right"), peer(wrong, "wrong")
    (measured,) = bench(*found).run([attention_case()])
    assert measured.peers == {"right": 10.0}
    assert measured.peer_failures["wrong"].startswith("wrong by ")


def test_a_peer_may_return_its_result_decline_or_fail():
    def returns(inputs):
        def call():
            index, exact = inputs.sampled()
            out = torch.zeros_like(inputs.out)
            out[index] = exact.to(out.dtype)
            return out

        return [call]

    def declines(inputs):
        raise NotForThis

    def fails(inputs):
        raise ValueError("page size")

    found = peer(returns, "a"), peer(declines, "b"), peer(fails, "c"), peer(fails, "d", ("sample",))
    (measured,) = bench(*found).run([attention_case()])
    assert measured.peers == {"a": 10.0}
    assert measured.peer_failures == {"c": "ValueError: page size"}


@pytest.mark.parametrize("q_len", [1, 8])
def test_a_dense_peer_gives_the_answer_for_its_own_layout(q_len):
    shape = AttentionShape((40, 40), q_len, (4, 2, 64), 16)

    def math_sdpa(inputs):
        q, k, v = peers.dense(inputs)
        mask = torch.ones(q_len, 40, dtype=torch.bool).tril(40 - q_len)
        scaled = torch.nn.functional.scaled_dot_product_attention
        return [lambda: scaled(q[0], k[0], v[0], attn_mask=mask, enable_gqa=True)]

    dense = peer(math_sdpa, "sdpa")
    (measured,) = bench(dense).run([case("decode/2x40", functools.partial(attention, shape))])
    assert (measured.peers, measured.peer_failures) == ({"sdpa": 10.0}, {})


@pytest.mark.parametrize(("q_len", "block_size"), [(1, 16), (8, 16), (40, 0)])
def test_torchs_own_attention_runs_and_is_right(q_len, block_size):
    shape = AttentionShape((40, 40), q_len, (4, 2, 64), block_size)
    plain = peer(functools.partial(peers._sdpa, backend="MATH"), "sdpa")
    (measured,) = bench(plain).run([case("decode/2x40", functools.partial(attention, shape))])
    assert (measured.peers, measured.peer_failures) == ({"sdpa": 10.0}, {})


def test_the_backends_of_torchs_attention_exist():
    from torch.nn.attention import SDPBackend

    named = [found.calls.keywords["backend"] for found in peers.PEERS if found.name in ("cudnn", "sdpa")]
    assert len(named) == 2
    assert all(isinstance(getattr(SDPBackend, name), SDPBackend) for name in named)


def test_peers_that_are_not_installed_say_so(monkeypatch):
    monkeypatch.setattr(peers, "PEERS", (Peer("gone", "no_such_module", "x", (), list), *peers.PEERS[:0]))
    found, missing = peers.usable(None)
    assert found == []
    assert missing == {"gone": "ModuleNotFoundError: No module named 'no_such_module'"}


def test_the_first_of_two_packages_of_one_library_is_taken(monkeypatch):
    one, two = peer(list, "fa3"), peer(list, "fa3")
    monkeypatch.setattr(peers, "PEERS", (one, two))
    assert peers.usable(["fa3"]) == ([one], {})
    assert peers.usable([]) == ([], {})


def test_rows_are_chosen_by_pattern():
    assert {c.family for c in chosen(["sample/*"], quick=False)} == {"sample"}
    quick = chosen([], quick=True)
    assert 10 < len(quick) < len(chosen([], quick=False)) / 2
    assert {c.family for c in quick} >= {"decode", "prefill", "kv_write", "sample"}
    with pytest.raises(ConfigError, match=r"--rows: 'sampl/\*' matches no row; there are decode/\*"):
        chosen(["sampl/*"], quick=False)
