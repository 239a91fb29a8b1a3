"""Which kernel does which sequence: its own length decides, and every row is written once."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.attention_cases import Case, prepare

from octavo.errors import KernelArgumentError, UnsupportedKernelConfig
from octavo.kernels import backend, flash_attn_varlen_func
from octavo.kernels.triton import attention, decode, decode_invariant, prefill, tiles

SHORT = tiles.SHORT
pytestmark = pytest.mark.usefixtures("triton_room")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that are called, which then do nothing."""
    made: list[str] = []
    monkeypatch.setattr(decode, "prepare", lambda *_, **__: lambda *_: made.append("decode"))
    monkeypatch.setattr(prefill, "prefill_attention", lambda *_, **__: made.append("prefill"))
    return made


@pytest.mark.parametrize(
    ("lens", "bound", "kernels"),
    [
        ((1,), 1, ["decode"]),
        ((SHORT,), SHORT, ["decode"]),
        ((1, SHORT, 0), SHORT, ["decode"]),
        ((SHORT + 1,), SHORT + 1, ["prefill"]),
        ((SHORT + 1, 1), SHORT + 1, ["decode", "prefill"]),
        ((3,), 500, ["decode"]),  # no more rows than that, whatever the bound says
        ((3, 4), 500, ["decode"]),
        ((5, 5), 500, ["decode", "prefill"]),  # lengths are not read: one of them might have all ten rows
        ((20, 20, 20), 20, ["prefill"]),  # by the bound there is no room for a short one
        ((20, 20, 20 - SHORT), 20, ["prefill"]),
        ((20, 20, SHORT), 20, ["decode", "prefill"]),
        ((20, 20, 20), 27, ["decode", "prefill"]),
        ((), 0, []),
        ((0, 0), 0, []),
    ],
    ids=str,
)
def test_kernels_that_a_batch_needs(
    calls: list[str], lens: tuple[int, ...], bound: int, kernels: list[str]
) -> None:
    inputs = prepare(Case(lens, tuple(n + 5 for n in lens), head_dim=16), "cpu")
    inputs.run(max_seqlen_q=bound)
    assert calls == kernels


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["", "invariant"])
@pytest.mark.parametrize("heads", [(4, 2), (3, 1)], ids=str)
def test_every_row_of_a_mixed_batch_is_written(heads: tuple[int, int], batch_invariant: bool) -> None:
    case = Case(
        (1, SHORT, SHORT + 1, 0, 20, 2), (30, 3, 9, 4, 33, 0), heads=heads, head_dim=16, dtype=torch.float32
    )
    prepare(case, "cpu").check(batch_invariant=batch_invariant)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ((torch.float64, torch.float64, 64), "no Triton kernel for torch.float64"),
        ((torch.float32, torch.float64, 64), "no Triton kernel for torch.float64"),
        ((torch.bfloat16, torch.float8_e5m2, 64), "no Triton kernel for torch.float8_e5m2"),
        ((torch.bfloat16, torch.bfloat16, 257), "head_dim is over 256"),
        ((torch.bfloat16, torch.bfloat16, 256), None),
        ((torch.float16, torch.float8_e4m3fn, 1), None),
        ((torch.float32, torch.int8, 80), None),
        ((torch.float32, torch.bfloat16, 64), None),
    ],
    ids=str,
)
def test_what_is_supported(facts: tuple[Any, ...], reason: str | None) -> None:
    assert attention.supports(*facts) == reason


@pytest.mark.parametrize(
    ("capability", "reads"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)]
)
def test_float8_needs_a_gpu_that_has_it(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], reads: bool
) -> None:
    monkeypatch.setattr(attention, "is_interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    reason = attention.supports(torch.bfloat16, torch.float8_e4m3fn, 64)
    assert reason == (None if reads else "this GPU has no float8: that takes compute capability 8.9")
    assert attention.supports(torch.bfloat16, torch.int8, 64) is None


def test_float64_goes_to_the_reference_unless_triton_is_forced() -> None:
    inputs = prepare(Case((3,), (9,), head_dim=16), "cpu")
    wide = {name: inputs.arguments[name].double() for name in "qkv"}
    with pytest.raises(UnsupportedKernelConfig, match=r"'triton' kernels are forced.*float64"):
        inputs.run(**wide, out=None)
    with backend.use("auto"):
        inputs.run(**wide, out=None)


def test_packed_keys_have_no_scales() -> None:
    inputs = prepare(Case((3,), (9,), head_dim=16, block_size=0), "cpu")
    out = torch.full_like(inputs.arguments["q"], math.nan)
    with pytest.raises(Exception, match="k_scale must be None without a block table, got a scale"):
        flash_attn_varlen_func(**inputs.arguments, out=out, k_scale=2.0)
    assert out.isnan().all()


def test_a_kernel_for_hopper_that_does_not_import_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_hopper", lambda: "prefill_hopper does not import")
    prepare(Case((SHORT + 1,), (20,), head_dim=16, dtype=torch.float32), "cpu").check()


def attend(
    q_rows: int, lens: tuple[int, ...], keys: tuple[int, ...], max_q: int, max_k: int, **options: Any
) -> torch.Tensor:
    """The room's function, with bounds and paddings that the public one refuses on the CPU."""
    inputs = prepare(Case(lens, keys, heads=(8, 1), head_dim=16, dtype=torch.float32), "cpu")
    given = inputs.arguments
    q = torch.cat([given["q"], torch.zeros(q_rows - sum(lens), 8, 16)])
    out = torch.full_like(q, math.nan)
    attention.varlen_attention(
        q, given["k"], given["v"], given["cu_seqlens_q"], given["cu_seqlens_k"], max_q, max_k,
        softmax_scale=0.25, causal=True, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, sinks=None,
        block_table=given["block_table"], out=out, lse=None, **options,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["", "invariant"])
def test_a_bound_of_rows_that_is_too_small_does_not_hang(batch_invariant: bool) -> None:
    out = attend(6, (5, 1), (40, 30), 1, 40, batch_invariant=batch_invariant)
    assert not out[5].isnan().any()  # the sequence that it holds for


@pytest.mark.parametrize("bound", [1000, 2000])
def test_a_bound_of_keys_that_is_too_small_writes_nothing_elsewhere(
    bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[torch.Tensor] = []
    real = torch.empty

    def empty(shape: tuple[int, ...], **how: Any) -> torch.Tensor:
        """Memory with a guarded margin behind it."""
        count = math.prod(shape)
        memory = real(count + 40_000, **how).fill_(7.0)
        made.append(memory[count:])
        return memory[:count].view(shape)

    monkeypatch.setattr(decode_invariant, "torch", SimpleNamespace(empty=empty, float32=torch.float32))
    attend(1, (1,), (2100,), 1, bound, batch_invariant=True)
    assert made
    assert all(bool((margin == 7.0).all()) for margin in made)


def test_rows_of_a_padded_batch_are_written() -> None:
    """Seen where a CUDA graph is captured for more rows than a step has."""
    out = attend(16, (1,), (40,), 1, 40)
    assert not out[0].isnan().any()
    assert out[1:].isnan().all()


def test_more_rows_than_the_bound_allows_are_refused_on_any_device() -> None:
    q, k = torch.empty(10, 2, 16, device="meta"), torch.empty(20, 2, 16, device="meta")
    lens = torch.empty(3, dtype=torch.int32, device="meta")
    message = "max_seqlen_q must be at least 5 for 10 rows of q in 2 sequences, got 4. Pass the number"
    with pytest.raises(KernelArgumentError, match=message):
        flash_attn_varlen_func(q, k, k, lens, lens, 4, 20)
