"""The same bits again: repeats, graph replays, other neighbours, other chunks."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from helpers.attention_cases import Case, Inputs, prefix_sums, prepare
from torch import Tensor

from octavo.kernels import (
    flash_attn_varlen_func,
    linear,
    pack_weight,
    rms_norm,
    rotate_and_write_kv_cache,
    silu_and_mul,
    warm_up,
)
from octavo.kernels.triton.monitor import forbid_compiles

DECODE = Case((1, 2, 0, 8, 1, 1), (1, 33, 3, 300, 5000, 16), heads=(8, 2), head_dim=128)
PREFILL = Case((9, 64, 130, 20, 300), (9, 300, 1300, 10, 300), heads=(8, 2), head_dim=128)
MIXED = replace(DECODE, lens_q=DECODE.lens_q + PREFILL.lens_q, lens_k=DECODE.lens_k + PREFILL.lens_k)
PATHS = {"decode": DECODE, "prefill": PREFILL, "mixed": MIXED}


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["", "invariant"])
def test_a_hundred_repeats(path: str, batch_invariant: bool) -> None:
    inputs = prepare(PATHS[path], "cuda")
    right = inputs.run(batch_invariant=batch_invariant)
    for _ in range(100):
        out, lse = inputs.run(batch_invariant=batch_invariant)
        assert torch.equal(out, right[0])
        assert torch.equal(lse, right[1])


def graph_of(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    call()  # compiles and allocates what the capture must not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def load(static: dict, inputs: Inputs) -> None:
    """Put another batch into the tensors that a graph reads; rows that are left over have no queries."""
    case, used = inputs.case, inputs.arguments
    batch = static["block_table"].shape[0]
    for name, lens in (("cu_seqlens_q", case.lens_q), ("cu_seqlens_k", case.lens_k)):
        static[name].copy_(prefix_sums([*lens, *([0] * (batch - len(lens)))], "cuda"))
    static["q"].fill_(float("nan"))
    static["q"][: sum(case.lens_q)] = used["q"]
    for name in ("k", "v"):
        static[name].fill_(float("nan"))
        static[name][: used[name].shape[0]] = used[name]
    static["block_table"].fill_(-1)
    rows, columns = used["block_table"].shape
    static["block_table"][:rows, :columns] = used["block_table"]


LENS = {  # by the longest query: three batches, as (lens_q, lens_k)
    1: [((1,) * 8, (5, 900, 17, 33, 2000, 1, 64, 7)), ((1,) * 3, (40, 3000, 16)), ((1,) * 8, (6000,) * 8)],
    8: [((1, 8, 2), (900, 17, 300)), ((8, 8, 8, 1), (8, 40, 3000, 1)), ((3,), (6000,))],
    300: [((300, 1, 20), (300, 900, 400)), ((64,), (6000,)), ((1, 1, 1, 9), (70, 80, 2000, 9))],
}


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["", "invariant"])
@pytest.mark.parametrize("longest", LENS)
def test_a_graph_is_replayed_over_other_lengths_tables_and_live_rows(
    longest: int, batch_invariant: bool
) -> None:
    base = Case((1,), (1,), heads=(8, 2), head_dim=128)
    if longest == 1:
        lens = [
            ((1,) * 8, (5, 900, 17, 33, 2000, 1, 64, 7)),
            ((1,) * 3, (40, 3000, 16)),
            ((1,) * 8, (6000,) * 8),
        ]
    elif longest == 8:
        lens = [((1, 8, 2), (900, 17, 300)), ((8, 8, 8, 1), (8, 40, 3000, 1)), ((3,), (6000,))]
    else:
        lens = [((300, 1, 20), (300, 900, 400)), ((64,), (6000,)), ((1, 1, 1, 9), (70, 80, 2000, 9))]
    cases = [replace(base, lens_q=q, lens_k=k, seed=i) for i, (q, k) in enumerate(lens)]
    tokens = max(sum(case.lens_q) for case in cases)
    shape = (1 + max(sum(-(-n // 16) for n in case.lens_k) for case in cases) + 3, 16, 2, 128)
    static = {
        "q": torch.zeros(tokens, 8, 128, dtype=torch.bfloat16, device="cuda"),
        "k": torch.zeros(shape, dtype=torch.bfloat16, device="cuda"),
        "v": torch.zeros(shape, dtype=torch.bfloat16, device="cuda"),
        "block_table": torch.full((8, 400), -1, dtype=torch.int32, device="cuda"),
        "cu_seqlens_q": torch.zeros(9, dtype=torch.int32, device="cuda"),
        "cu_seqlens_k": torch.zeros(9, dtype=torch.int32, device="cuda"),
        "out": torch.zeros(tokens, 8, 128, dtype=torch.bfloat16, device="cuda"),
    }
    inputs = [prepare(case, "cuda") for case in cases]
    load(static, inputs[0])
    bounds = {"max_seqlen_q": longest, "max_seqlen_k": 6400}
    options = {"causal": True, "batch_invariant": batch_invariant}
    graph = graph_of(lambda: flash_attn_varlen_func(**static, **bounds, **options))
    for one in (*inputs, *reversed(inputs)):
        load(static, one)
        for _ in range(2):  # what a launch counts must be back at its start
            static["out"].fill_(float("nan"))
            graph.replay()
            out = static["out"][: sum(one.case.lens_q)].clone()
            eager = flash_attn_varlen_func(
                **static | {"out": torch.empty_like(static["out"])}, **bounds, **options
            )
            assert torch.equal(out, eager[: len(out)])
        direct, _ = one.check(batch_invariant=batch_invariant)
        if batch_invariant:
            assert torch.equal(out, direct)
        else:
            torch.testing.assert_close(out, direct, rtol=2**-6, atol=2**-7)


@pytest.mark.parametrize(("batch", "num_keys"), [(1, 8000), (48, 1000)], ids=str)
def test_each_kernel_of_a_captured_chain_waits_for_the_ones_before_it(batch: int, num_keys: int) -> None:
    """Layers that all write the same slots of one cache: each write must wait for the reads before it.

    A kernel may begin while its predecessor still runs, and read or write too early; then some replay differs
    from the same calls one at a time.
    """
    blocks = -(-num_keys // 16)
    rng = torch.Generator("cuda").manual_seed(0)
    shape = (batch * blocks, 16, 2, 128)
    history = [torch.randn(shape, generator=rng, device="cuda").bfloat16() for _ in range(2)]
    caches = [cache.clone() for cache in history]
    start = torch.randn(batch, 1024, generator=rng, device="cuda").bfloat16()
    tables = torch.randperm(batch * blocks, device="cuda").int().view(batch, blocks)
    slots = tables[:, (num_keys - 1) // 16].long() * 16 + (num_keys - 1) % 16
    positions = torch.full((batch,), 7, device="cuda")
    angles = torch.rand(8, 64, generator=rng, device="cuda")
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    weight = torch.rand(1024, generator=rng, device="cuda").bfloat16()
    lengths = (prefix_sums([1] * batch, "cuda"), prefix_sums([num_keys] * batch, "cuda"), 1, num_keys)

    def layers(after_each: Callable[[], object]) -> Tensor:
        x = start
        for _ in range(8):
            k = x[:, :256].view(batch, 2, 128)
            q = rotate_and_write_kv_cache(
                x.view(batch, 8, 128), k, k, table, positions, *caches, slots,
                q_weight=weight[:128], k_weight=weight[:128], eps=1e-6,
            )  # fmt: skip
            after_each()
            out = flash_attn_varlen_func(q, *caches, *lengths, causal=True, block_table=tables)
            after_each()
            y, x = rms_norm(out.view(batch, 1024), weight, 1e-6, residual=x)
            after_each()
            x = x + silu_and_mul(torch.cat([y, y], dim=1))
            after_each()
        return x

    right = layers(torch.cuda.synchronize)
    written = [cache.clone() for cache in caches]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers(lambda: None)
    for _ in range(200):
        for cache, content in zip(caches, history, strict=True):
            cache.copy_(content)
        out.zero_()
        graph.replay()
        assert torch.equal(out, right)
        assert all(map(torch.equal, caches, written))


def one_by_one(inputs: Inputs, **options: object) -> list[Tensor]:
    """Each sequence in a call of its own, over the same cache."""
    used, outs = inputs.arguments, []
    for b, (num_rows, num_keys) in enumerate(zip(inputs.case.lens_q, inputs.case.lens_k, strict=True)):
        start = int(used["cu_seqlens_q"][b])
        changes = {
            "q": used["q"][start : start + num_rows],
            "cu_seqlens_q": prefix_sums([num_rows], "cuda"),
            "cu_seqlens_k": prefix_sums([num_keys], "cuda"),
            "max_seqlen_q": num_rows,
            "max_seqlen_k": num_keys,
            "block_table": used["block_table"][b : b + 1],
        }
        outs.append(flash_attn_varlen_func(**{**used, **changes, **options}))
    return outs


INVARIANT = [
    {},
    {"window": (200, 0), "sinks": True, "softcap": 5.0},
    {"alibi": "head", "block_size": 64},
    {"cache_dtype": torch.float8_e4m3fn, "scales": "token"},
    {"cache_dtype": torch.int8, "scales": "tensor", "block_size": 1},
    {"heads": (9, 3), "head_dim": 64},
    {"heads": (5, 1), "head_dim": 80, "dtype": torch.float16},
    {"heads": (16, 2), "head_dim": 256},
    {"dtype": torch.float32},
]


@pytest.mark.parametrize("options", INVARIANT, ids=str)
def test_batch_invariant_rows_do_not_depend_on_their_neighbours(options: dict) -> None:
    inputs = prepare(replace(MIXED, **options), "cuda")
    together, _ = inputs.check(batch_invariant=True)
    alone = torch.cat(one_by_one(inputs, batch_invariant=True))
    assert torch.equal(alone, together)
    used = inputs.arguments
    for chosen in ([4, 8], [3, 10, 7, 0, 1], [5, 6]):  # other batches, in another order
        q, k = ([lens[b] for b in chosen] for lens in (inputs.case.lens_q, inputs.case.lens_k))
        parts = used["q"].split(inputs.case.lens_q)
        changes = {
            "q": torch.cat([parts[b] for b in chosen]),
            "cu_seqlens_q": prefix_sums(q, "cuda"),
            "cu_seqlens_k": prefix_sums(k, "cuda"),
            "max_seqlen_q": max(q),
            "max_seqlen_k": max(k) + 5000,
            "block_table": used["block_table"][chosen],
            "batch_invariant": True,
        }
        out = flash_attn_varlen_func(**{**used, **changes})
        expected = together.split(inputs.case.lens_q)
        assert torch.equal(out, torch.cat([expected[b] for b in chosen]))


@pytest.mark.parametrize("options", INVARIANT, ids=str)
def test_batch_invariant_rows_do_not_depend_on_the_chunks_of_their_prompt(options: dict) -> None:
    """The whole prompt at once, in chunks, and its last tokens one at a time as decode computes them."""
    length = 1300
    inputs = prepare(replace(PREFILL, lens_q=(length,), lens_k=(length,), **options), "cuda")
    whole, _ = inputs.check(batch_invariant=True)
    used = inputs.arguments
    for starts in ([0, 512, 1024], [0, 1100, 1200, 1201, 1209], [0, 1297, 1298, 1299], [0, 7, 15, 1025]):
        pieces = []
        for start, stop in zip(starts, [*starts[1:], length], strict=True):
            changes = {
                "q": used["q"][start:stop],
                "cu_seqlens_q": prefix_sums([stop - start], "cuda"),
                "cu_seqlens_k": prefix_sums([stop], "cuda"),
                "max_seqlen_q": stop - start,
                "max_seqlen_k": stop,
                "batch_invariant": True,
            }
            pieces.append(flash_attn_varlen_func(**{**used, **changes}))
        assert torch.equal(torch.cat(pieces), whole), f"chunks at {starts}"


def test_after_warm_up_other_lengths_and_batches_compile_nothing(path: str) -> None:
    case = PATHS[path]
    warm_up(
        *case.heads, case.head_dim, case.dtype, case.dtype, case.block_size, "cuda",
        max_num_seqs=32, max_num_batched_tokens=2048, max_model_len=8192, rotary_dim=0,
    )  # fmt: skip
    others = [
        case,
        replace(case, lens_q=(1,) if path == "decode" else (9,), lens_k=(17,)),
        replace(case, lens_q=case.lens_q * 3, lens_k=case.lens_k * 3),
        replace(case, lens_q=case.lens_q[:2], lens_k=(1, 4096)),
        replace(case, lens_q=(16, 16) if path != "decode" else (1, 1), lens_k=(160, 16)),
    ]
    prepared = [prepare(other, "cuda") for other in others]
    with forbid_compiles():
        for inputs in prepared:
            assert attended(inputs).isfinite().all()
        for start in (1, 2, 3):  # rows that begin at odd places of a larger buffer
            used = prepared[2].arguments
            attended(prepared[2], q=torch.cat([used["q"][:start], used["q"]])[start:])


def attended(inputs: Inputs, **changes: object) -> Tensor:
    """As a layer calls it: without the LSE, which kernels that store it are compiled apart for."""
    arguments = {**inputs.arguments, **changes}
    return flash_attn_varlen_func(out=torch.full_like(arguments["q"], torch.nan), **arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(576, 576), (1024, 3072), (50_000, 1024)], ids=str)
def test_rows_of_an_invariant_product_do_not_depend_on_their_company(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    width, depth = shape
    x = torch.randn(1000, depth, device="cuda", dtype=dtype)
    weight = pack_weight(torch.randn(width, depth, device="cuda", dtype=dtype), "invariant")
    together = linear(x, weight)
    for rows in (slice(0, 1), slice(999, 1000), slice(63, 130), slice(1, 1000)):
        assert torch.equal(linear(x[rows], weight), together[rows])
    assert torch.equal(linear(x.flip(0), weight).flip(0), together)
