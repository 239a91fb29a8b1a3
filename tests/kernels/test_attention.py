"""Every implementation of attention against `scaled_dot_product_attention`, within the error budget."""

import math
from dataclasses import replace

import pytest
import torch
from helpers.attention_cases import Case, prepare
from helpers.kernels import Batch, assert_within_budget, page, sdpa
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.errors import KernelArgumentError, UnsupportedKernelConfig
from octavo.kernels import backend, flash_attn_varlen_func, flash_attn_with_kvcache
from octavo.kernels.cpu import threads

# A prompt, a chunk with a past, decodes, nothing, no keys, more queries than keys, a prompt past one block.
LENS_Q = [10, 3, 1, 0, 2, 5, 1, 33]
LENS_K = [10, 7, 8, 4, 0, 2, 70, 33]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def attend(batch: Batch, block_size: int = 0, poison: float = math.nan, **options) -> Tensor:
    """Packed, or with a block size through a shuffled, poisoned cache; the output buffer is poisoned, too."""
    out = torch.full_like(batch.q, math.nan)
    if not block_size:
        return flash_attn_varlen_func(batch.q, batch.k, batch.v, *batch.lengths, out=out, **options)
    paged = page(batch, block_size, poison)
    caches = (batch.q, paged.k_cache, paged.v_cache)
    return flash_attn_varlen_func(*caches, *batch.lengths, block_table=paged.table, out=out, **options)


@pytest.mark.parametrize(
    "block_size", [0, 1, 2, 16, 64], ids=lambda size: f"block{size}" if size else "packed"
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ragged_batch(implementation: str, dtype: torch.dtype, block_size: int) -> None:
    batch = Batch.random(LENS_Q, LENS_K, heads=(9, 3), dtype=dtype)
    out = attend(batch, block_size, causal=True)
    assert_within_budget(out, sdpa(batch, causal=True), sdpa(batch, causal=True, dtype=dtype))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window_size": (2, 0)},
        {"window_size": (3, 1)},
        {"window_size": (-1, 2)},
        {"window_size": (20, -1)},
        {"causal": True, "window_size": (0, 5)},
        {"causal": True, "window_size": (4, 0), "sinks": torch.tensor([0.0, 0.5, 1.0, 2.0])},
        {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0])},
        {"alibi_slopes": torch.linspace(0, 1, 32).view(8, 4), "sinks": torch.tensor([-3.0, 0.0, 1.0, 9.0])},
        {"causal": True, "softmax_scale": 0.3},
    ],
    ids=lambda options: "-".join(options) or "full",
)
@pytest.mark.parametrize("block_size", [0, 16])
@pytest.mark.rooms("reference", "cpu")  # for Triton: triton/test_same_as_reference.py
def test_options(implementation: str, options: dict, block_size: int) -> None:
    batch = Batch.random(LENS_Q, LENS_K)
    out = attend(batch, block_size, **options)
    names = {"window_size": "window", "alibi_slopes": "slopes", "softmax_scale": "scale"}
    oracle = {names.get(key, key): value for key, value in options.items()}
    assert_within_budget(out, sdpa(batch, **oracle), sdpa(batch, **oracle, dtype=torch.float32))


@pytest.mark.parametrize("block_size", [0, 16])
@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.rooms("reference", "cpu")  # for Triton: triton/test_same_as_reference.py
def test_softcap(implementation: str, block_size: int, everything: bool) -> None:
    # tanh has no counterpart in scaled_dot_product_attention: the oracle is the formula, in float64.
    batch = Batch.random(LENS_Q, LENS_K)
    slopes, sinks = torch.tensor([0.5, 0.0, 1.0, 0.1]), torch.tensor([0.0, 1.0, -1.0, 2.0])
    options = {"alibi_slopes": slopes, "sinks": sinks, "window_size": (6, 0)} if everything else {}
    out = attend(batch, block_size, causal=True, softmax_scale=0.7, softcap=3.0, **options)
    expected = []
    for q, k, v in batch.sequences():
        keys, values = (x.double().repeat_interleave(2, dim=1) for x in (k, v))
        scores = 3.0 * torch.tanh(torch.einsum("qhd,khd->hqk", q.double(), keys) * 0.7 / 3.0)
        behind = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
        if everything:
            scores = scores - slopes.double()[:, None, None] * behind.abs()
        seen = (behind >= 0) & (behind <= (6 if everything else 1000))
        weights = scores.exp() * seen
        total = weights.sum(-1, keepdim=True) + (sinks.double().exp()[:, None, None] if everything else 0.0)
        expected.append(torch.einsum("hqk,khd->qhd", (weights / total).nan_to_num(0.0), values))
    torch.testing.assert_close(out.double(), torch.cat(expected), rtol=0, atol=2e-6)


@pytest.mark.parametrize("block_size", [0, 16])
def test_rows_without_keys_are_zero_and_their_lse_is_minus_infinity(
    implementation: str, block_size: int
) -> None:
    batch = Batch.random([5, 2], [2, 0])
    paged = page(batch, 16)
    source = (batch.k, batch.v) if not block_size else (paged.k_cache, paged.v_cache)
    table = {"block_table": paged.table} if block_size else {}
    for sinks in (None, torch.zeros(4)):
        out, lse = flash_attn_varlen_func(
            batch.q, *source, *batch.lengths, causal=True, return_softmax_lse=True, sinks=sinks, **table
        )
        empty = [True, True, True, False, False, True, True]
        assert (out == 0).flatten(1).all(1).tolist() == empty
        assert (lse == -math.inf).all(0).tolist() == empty
        assert torch.isfinite(lse[:, 3:5]).all()


@pytest.mark.parametrize(
    "options", [{}, {"window_size": (5, 0)}, {"sinks": torch.linspace(-1, 1, 4)}], ids=str
)
def test_lse_matches_the_formula(implementation: str, options: dict) -> None:
    batch = Batch.random(LENS_Q, LENS_K)
    paged = page(batch, 16)
    caches = (batch.q, paged.k_cache, paged.v_cache)
    _, lse = flash_attn_varlen_func(
        *caches, *batch.lengths, causal=True, block_table=paged.table, return_softmax_lse=True, **options
    )
    assert lse.shape == (4, sum(LENS_Q))
    assert lse.dtype == torch.float32
    left = options.get("window_size", (-1, 0))[0]
    expected = []
    for q, k, _ in batch.sequences():
        keys = k.double().repeat_interleave(2, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q.double(), keys) / 8
        ahead = torch.arange(len(k)) - torch.arange(len(q))[:, None] - (len(k) - len(q))
        seen = (ahead <= 0) & ((ahead >= -left) if left >= 0 else (ahead <= 0))
        total = scores.masked_fill(~seen, -math.inf).exp().sum(-1)
        if "sinks" in options:
            total = (total + options["sinks"].double().exp()[:, None]) * seen.any(-1)
        expected.append(total.log())
    torch.testing.assert_close(lse.double(), torch.cat(expected, dim=1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("block_size", [1, 16])
def test_unwritten_memory_never_reaches_a_result(implementation: str, block_size: int, poison: float) -> None:
    batch = Batch.random(LENS_Q, LENS_K)
    clean = attend(batch, block_size, poison=0.0, causal=True)
    assert torch.isfinite(clean).all()
    assert torch.equal(attend(batch, block_size, poison=poison, causal=True), clean)


@pytest.mark.rooms("reference", "cpu")  # a GPU multiplies whole tiles: 0 x NaN, if a later row sees that key
def test_a_masked_key_that_holds_nan_does_not_reach_the_rows_before_it(implementation: str) -> None:
    batch = Batch.random([6], [6])
    clean = attend(batch, causal=True)
    batch.k[4], batch.v[4] = math.nan, math.nan
    out = attend(batch, causal=True)
    torch.testing.assert_close(out[:4], clean[:4], rtol=0, atol=1e-6)
    assert torch.isnan(out[4:]).all()


def test_sequences_may_share_blocks(implementation: str) -> None:
    """Two requests with a common prefix of 32 tokens hold the same two blocks."""
    batch = Batch.random([1, 4], [40, 45])
    batch.k[40:72], batch.v[40:72] = batch.k[:32], batch.v[:32]
    paged = page(batch, 16)
    paged.table[1, :2] = paged.table[0, :2]
    caches = (batch.q, paged.k_cache, paged.v_cache)
    out = flash_attn_varlen_func(*caches, *batch.lengths, causal=True, block_table=paged.table)
    assert_within_budget(out, sdpa(batch, causal=True), sdpa(batch, causal=True, dtype=torch.float32))


@pytest.mark.parametrize("nowhere", [-1, 2**31 - 1])
def test_entries_that_no_visible_key_needs_are_not_looked_at(implementation: str, nowhere: int) -> None:
    """Blocks left of the window may be gone, and the padding of the table may be anything."""
    batch = Batch.random([1, 2], [70, 40])
    expected = attend(batch, 16, causal=True, window_size=(8, 0))
    paged = page(batch, 16)
    paged.table[0, :3] = nowhere  # key 69 sees 61..69: blocks 3 and 4
    paged.table[1, :1] = nowhere  # keys 38, 39 see 30..39: blocks 1 and 2
    paged.table[0, 5:] = nowhere
    paged.table[1, 3:] = nowhere
    caches = (batch.q, paged.k_cache, paged.v_cache)
    options = {"causal": True, "window_size": (8, 0), "block_table": paged.table}
    assert torch.equal(flash_attn_varlen_func(*caches, *batch.lengths, **options), expected)


def test_indices_may_be_slices_of_larger_buffers(implementation: str) -> None:
    """As a captured step has them: tables and prefix sums cut out of arrays for the largest batch."""
    batch = Batch.random(LENS_Q, LENS_K)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0])
    right = attend(batch, 16, causal=True, alibi_slopes=slopes)
    paged, size = page(batch, 16), len(LENS_Q)
    tables = torch.full((size + 3, paged.table.shape[1] + 5), 2**31 - 1, dtype=torch.int32)
    tables[1 : size + 1, 2 : 2 + paged.table.shape[1]] = paged.table
    table = tables[1 : size + 1, 2 : 2 + paged.table.shape[1]]
    sums = torch.full((2, size + 9), -1, dtype=torch.int32)
    sums[0, 3 : size + 4], sums[1, 3 : size + 4] = batch.cu_q, batch.cu_k
    lengths = (sums[0, 3 : size + 4], sums[1, 3 : size + 4], 33, 70)
    caches = (batch.q, paged.k_cache, paged.v_cache)
    for biases in (slopes, slopes.expand(size, 4)):
        options = {"causal": True, "block_table": table, "alibi_slopes": biases}
        assert torch.equal(flash_attn_varlen_func(*caches, *lengths, **options), right)


def test_outputs_may_be_strided(implementation: str) -> None:
    batch = Batch.random(LENS_Q, LENS_K)
    right = attend(batch, causal=True)
    wide = torch.full((sum(LENS_Q), 6, 70), math.nan)
    out = wide[:, 1:5, 3:67]
    flash_attn_varlen_func(batch.q, batch.k, batch.v, *batch.lengths, causal=True, out=out)
    assert torch.equal(out, right)
    assert torch.isnan(wide[:, [0, 5]]).all()
    assert torch.isnan(wide[:, :, [0, 1, 2, 67, 68, 69]]).all()


@pytest.mark.parametrize("cache_dtype", [torch.float16, torch.bfloat16], ids=str)
def test_float32_queries_over_a_low_precision_cache(implementation: str, cache_dtype: torch.dtype) -> None:
    batch = Batch.random(LENS_Q, LENS_K)
    stored = Batch(LENS_Q, LENS_K, batch.q, batch.k.to(cache_dtype), batch.v.to(cache_dtype))
    paged = page(stored, 16)
    caches = (batch.q, paged.k_cache, paged.v_cache)
    out = flash_attn_varlen_func(*caches, *batch.lengths, causal=True, block_table=paged.table)
    assert out.dtype == torch.float32
    assert_within_budget(out, sdpa(stored, causal=True), sdpa(stored, causal=True, dtype=torch.float32))


def test_an_empty_batch_is_fine(implementation: str) -> None:
    batch = Batch.random([], [])
    zero = torch.zeros(1, dtype=torch.int32)
    assert flash_attn_varlen_func(batch.q, batch.k, batch.v, zero, zero, 0, 0).shape == (0, 4, 64)
    nothing = Batch.random([0, 0], [3, 0])
    out, lse = flash_attn_varlen_func(
        nothing.q, nothing.k, nothing.v, *nothing.lengths, return_softmax_lse=True
    )
    assert out.shape == (0, 4, 64)
    assert lse.shape == (4, 0)


@pytest.mark.rooms("reference", "cpu")  # Triton's has a mode for it, with tests of its own
def test_a_row_has_the_same_bits_alone_in_a_batch_and_in_chunks(implementation: str) -> None:
    """Same answer: the prompt in one call, in chunks of 7, and each token alone over the cache.

    The reference leaves the order of additions to torch, so only its values are the same.
    """
    batch = Batch.random([40], [40], heads=(9, 3))
    whole = attend(batch, 16, causal=True)
    paged = page(batch, 16)
    for size in (1, 7, 16):
        pieces = []
        for start in range(0, 40, size):
            stop = min(40, start + size)
            cu_q = torch.tensor([0, stop - start], dtype=torch.int32)
            cu_k = torch.tensor([0, stop], dtype=torch.int32)
            rows = batch.q[start:stop]
            lengths = (cu_q, cu_k, stop - start, stop)
            caches = (rows, paged.k_cache, paged.v_cache)
            pieces.append(flash_attn_varlen_func(*caches, *lengths, causal=True, block_table=paged.table))
        if implementation == "cpu":
            assert torch.equal(torch.cat(pieces), whole)
        else:
            torch.testing.assert_close(torch.cat(pieces), whole, rtol=0, atol=1e-6)


@pytest.mark.rooms("reference", "cpu")
def test_the_numbers_of_threads_do_not_change_the_bits(implementation: str) -> None:
    batch = Batch.random(LENS_Q, LENS_K, heads=(9, 3))
    before = threads.num_threads()
    try:
        threads.configure(1)
        one = attend(batch, 16, causal=True)
        threads.configure(2)
        two = attend(batch, 16, causal=True)
    finally:
        threads.configure(before)
    torch.testing.assert_close(one, two, rtol=0, atol=0 if implementation == "cpu" else 1e-6)


def test_softmax_of_large_scores_does_not_overflow(implementation: str) -> None:
    """exp overflows from 89 on. A score is known to its last bit, which is 6e-5 here, and no better."""
    batch = Batch.random([3], [50])
    large = Batch([3], [50], batch.q * 200, batch.k, batch.v)
    scores = torch.einsum("qhd,khd->hqk", large.q, large.k.repeat_interleave(2, dim=1)) / 8
    assert scores.max() > 500
    lengths = large.lengths
    out, lse = flash_attn_varlen_func(
        large.q, large.k, large.v, *lengths, causal=True, return_softmax_lse=True
    )
    assert torch.isfinite(lse).all()
    last_bit = torch.finfo(torch.float32).eps * scores.abs().max().item()
    torch.testing.assert_close(out.double(), sdpa(large, causal=True), rtol=0, atol=2 * last_bit)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Batch, int, dict]:
    lens = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), min_size=1, max_size=5))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    batch = Batch.random(
        [q for q, _ in lens],
        [k for _, k in lens],
        heads=(kv_heads * group, kv_heads),
        head_dim=draw(st.integers(1, 72)),
        dtype=draw(st.sampled_from(DTYPES)),
        seed=draw(st.integers(0, 2**16)),
    )
    window = st.integers(-1, 20)
    options = {
        "causal": draw(st.booleans()),
        "window": (draw(window), draw(window)),
        "sinks": torch.linspace(-2, 2, kv_heads * group) if draw(st.booleans()) else None,
        "slopes": torch.linspace(1, 0, kv_heads * group) if draw(st.booleans()) else None,
    }
    return batch, draw(st.sampled_from([0, 1, 2, 8, 32])), options


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(case=cases())
@pytest.mark.parametrize("room", ["reference", "cpu"])
def test_any_shape_and_any_mask(room: str, case: tuple[Batch, int, dict]) -> None:
    batch, block_size, options = case
    ours = {"causal": options["causal"], "window_size": options["window"]}
    ours |= {"sinks": options["sinks"], "alibi_slopes": options["slopes"]}
    with backend.use(room):
        out = attend(batch, block_size, **ours)
    assert_within_budget(out, sdpa(batch, **options), sdpa(batch, **options, dtype=batch.q.dtype))


@pytest.mark.parametrize("bound", [2**31 - 1, 2**31 + 100, 2**40, 2**63 - 1, 2**70])
@pytest.mark.rooms("reference", "cpu")  # for Triton: triton/test_same_as_reference.py
def test_a_window_wider_than_any_sequence_is_no_window(implementation: str, bound: int) -> None:
    batch = Batch.random(LENS_Q, LENS_K)
    unbounded = attend(batch, 16)
    assert torch.equal(attend(batch, 16, window_size=(bound, bound)), unbounded)
    paged = page(batch, 16)
    paged.table[:, 0] = 10**8
    caches = (batch.q, paged.k_cache, paged.v_cache)
    with pytest.raises(KernelArgumentError, match="block_table"):
        flash_attn_varlen_func(*caches, *batch.lengths, window_size=(bound, 0), block_table=paged.table)


@pytest.mark.parametrize("name", ["dropout_p", "deterministic", "num_splits", "return_attn_probs"])
def test_an_argument_that_only_flash_attention_has_is_refused_by_name(name: str) -> None:
    batch = Batch.random([1], [1])
    with pytest.raises(TypeError, match=name):
        flash_attn_varlen_func(batch.q, batch.k, batch.v, *batch.lengths, **{name: 0})
    q, k = batch.q[None], batch.k[None]
    with pytest.raises(TypeError, match=name):
        flash_attn_with_kvcache(q, k, k, **{name: 0})


SCALED = [
    (torch.float8_e4m3fn, "none"),
    *((dtype, scales) for dtype in (torch.float8_e4m3fn, torch.int8) for scales in ("tensor", "token")),
]


@pytest.mark.parametrize(("cache_dtype", "scales"), SCALED, ids=str)
@pytest.mark.parametrize("block_size", [1, 16])
def test_quantised_caches(cache_dtype: torch.dtype, scales: str, block_size: int) -> None:
    """No room but the reference has them on the CPU; unwritten slots and their scales hold NaN."""
    case = Case((3, 1, 0, 9), (20, 33, 2, 4), head_dim=24, dtype=torch.float32, sinks=True)
    case = replace(case, cache_dtype=cache_dtype, scales=scales, block_size=block_size)
    prepare(case, "cpu").check()


def test_the_compiled_kernels_refuse_a_quantised_cache() -> None:
    case = Case((1,), (5,), dtype=torch.float32, cache_dtype=torch.int8, scales="token")
    with (
        backend.use("cpu"),
        pytest.raises(UnsupportedKernelConfig, match=r"no compiled kernel for torch\.int8"),
    ):
        prepare(case, "cpu").run()


@pytest.mark.parametrize("batch_invariant", [1, None, "yes"])
def test_batch_invariant_is_a_flag(batch_invariant: object) -> None:
    batch = Batch.random([1], [1])
    with pytest.raises(KernelArgumentError, match="batch_invariant must be True or False"):
        flash_attn_varlen_func(batch.q, batch.k, batch.v, *batch.lengths, batch_invariant=batch_invariant)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn])
def test_batch_invariant_is_refused_where_only_the_reference_runs(dtype: torch.dtype) -> None:
    """An engine that was promised the same bits would not get them."""
    q = torch.ones(1, 1, 2, 8, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    k_cache, v_cache = torch.zeros(2, 1, 4, 1, 8).to(dtype)
    new = torch.ones(1, 1, 1, 8)
    message = "batch_invariant = True is not supported. For queries of .* only the reference runs here"
    with pytest.raises(UnsupportedKernelConfig, match=message):
        flash_attn_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=0, batch_invariant=True)
    assert (k_cache.float() == 0).all()
    lengths = (torch.tensor([0, 1], dtype=torch.int32),) * 2
    table = torch.zeros(1, 1, dtype=torch.int32)
    arguments = (q[0], k_cache, v_cache, *lengths, 1, 1)
    with pytest.raises(UnsupportedKernelConfig, match=message):
        flash_attn_varlen_func(*arguments, block_table=table, batch_invariant=True)
    assert flash_attn_varlen_func(*arguments, block_table=table).shape == (1, 2, 8)


def test_batch_invariant_is_refused_where_the_reference_is_forced() -> None:
    batch = Batch.random([1], [1])
    arguments = (batch.q, batch.k, batch.v, *batch.lengths)
    with backend.use("cpu"):
        assert flash_attn_varlen_func(*arguments, batch_invariant=True).shape == batch.q.shape
    with backend.use("reference"), pytest.raises(UnsupportedKernelConfig, match="batch_invariant = True"):
        flash_attn_varlen_func(*arguments, batch_invariant=True)
