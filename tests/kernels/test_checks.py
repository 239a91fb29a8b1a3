"""Bad arguments: one wording, found before anything is written, and each beside the call that is right."""

import re

import pytest
import torch
from helpers.kernel_calls import CALLS, EMPTY, int32, paged_arguments, write_arguments
from torch import Tensor

from octavo.errors import KernelArgumentError, UnsupportedKernelConfig
from octavo.kernels import (
    apply_rotary,
    flash_attn_varlen_func,
    rms_norm,
    silu_and_mul,
    write_kv_cache,
)


def twice(name: str, memory: Tensor) -> dict[str, Tensor]:
    """The same memory under two tensors, for K and for V."""
    return {name: memory, name.replace("k", "v", 1): memory.view(memory.shape)}


def scale_mistakes() -> list[tuple[dict, str]]:
    """Changes to a right write: caches of some dtype, and scales that do not go with them."""
    per_token = torch.zeros(4, 4, 2)

    def quantised(dtype: torch.dtype, **scales: object) -> dict:
        return {name: torch.full((4, 4, 2, 8), EMPTY).to(dtype) for name in ("k_cache", "v_cache")} | scales

    float8 = torch.float8_e4m3fn
    return [
        ({"k_scale": 1.0}, "k_scale must be None with caches of torch.float32, got 1.0. Scales belong to"),
        ({"v_scale": per_token}, "v_scale must be None with caches of torch.float32"),
        (quantised(torch.int8), "k_scale must be a number or float32 of shape (4, 4, 2) with int8 caches"),
        (quantised(torch.int8, k_scale=1.0), "v_scale must be a number or float32 of shape (4, 4, 2)"),
        (quantised(float8, k_scale=0.0), "k_scale must be positive and finite, got 0.0"),
        (quantised(float8, v_scale=float("nan")), "v_scale must be positive and finite, got nan"),
        (
            quantised(float8, k_scale=torch.ones(4, 4)),
            "must be of one element, or of shape (4, 4, 2)",
        ),
        (quantised(float8, k_scale=torch.ones(1, 1, 1)), "got shape (1, 1, 1)"),
        (quantised(float8, k_scale=per_token.double()), "k_scale.dtype must be torch.float32"),
        (quantised(float8, v_scale=per_token.to("meta")), "v_scale.device must be cpu like the cache"),
        (
            quantised(float8, k_scale=per_token, v_scale=per_token),
            "v_scale must be another tensor than k_scale",
        ),
        (quantised(float8, **twice("k_scale", per_token)), "v_scale must be another tensor than k_scale"),
    ]


# (call, changed arguments, what the message says)
WRONG: list[tuple[str, dict, str]] = [
    ("write", {"k": torch.ones(3, 8)}, "k must be of shape (T, num_kv_heads, head_dim), got shape (3, 8)"),
    (
        "write",
        {"k": torch.ones(3, 1, 8), "v": torch.ones(3, 1, 8)},
        "k must be of shape (T, 2, 8) like the cache",
    ),
    ("write", {"v": torch.ones(2, 2, 8)}, "v must be of the shape of k (3, 2, 8), got shape (2, 2, 8)"),
    (
        "write",
        {"v": torch.ones(3, 2, 8, dtype=torch.float16)},
        "v.dtype must be torch.float32 like k, got torch.float16",
    ),
    (
        "write",
        {"k": torch.ones(3, 2, 8, dtype=torch.int32)},
        "k.dtype must be float32, float16, bfloat16 or float64",
    ),
    (
        "write",
        {"k": torch.ones(3, 8, 2).mT},
        "the last dimension of k must be contiguous (stride 1), got stride 2",
    ),
    ("write", {"v_cache": torch.ones(4, 4, 2, 9)}, "v_cache must be of the shape of k_cache"),
    (
        "write",
        {"v_cache": torch.ones(4, 4, 2, 8, dtype=torch.float16)},
        "v_cache.dtype must be torch.float32 like k_cache",
    ),
    ("write", dict.fromkeys(("k_cache", "v_cache"), torch.ones(4, 3, 2, 8)), "must be a power of two, got 3"),
    ("write", dict.fromkeys(("k_cache", "v_cache"), torch.ones(4, 0, 2, 8)), "must be a power of two, got 0"),
    ("write", {"slot_mapping": torch.tensor([0, 5])}, "slot_mapping must be of shape (3,), got shape (2,)"),
    (
        "write",
        {"slot_mapping": torch.zeros(3)},
        "slot_mapping.dtype must be torch.int64 or torch.int32, got torch.float32",
    ),
    ("write", {"slot_mapping": torch.tensor([0, 16, 1])}, "below num_blocks * block_size = 16, or negative"),
    (
        "write",
        {"k": torch.ones(3, 2, 8, device="meta")},
        "v.device must be meta like the other arguments, got cpu",
    ),
    ("packed", {"q": torch.ones(3, 4, 8, 1)}, "q must be of shape (Tq, num_heads, head_dim)"),
    ("packed", {"q": torch.ones(3, 3, 8)}, "query heads must be a multiple of the 2 KV heads, got 3"),
    ("packed", {"q": torch.ones(3, 4, 16)}, "head_dim of q must be 8 like that of k and v, got 16"),
    ("packed", {"v": torch.ones(6, 2, 8)}, "v must be of the shape of k (7, 2, 8)"),
    (
        "packed",
        {"cu_seqlens_q": torch.tensor([0, 2, 3])},
        "cu_seqlens_q.dtype must be torch.int32, got torch.int64",
    ),
    ("packed", {"cu_seqlens_q": int32(1, 2, 3)}, "cu_seqlens_q[0] must be 0, got 1"),
    (
        "packed",
        {"cu_seqlens_q": int32(0, 4, 3)},
        "cu_seqlens_q must be non-decreasing prefix sums, got 4 then 3 at 2",
    ),
    (
        "packed",
        {"cu_seqlens_q": int32(0, 2, 4)},
        "cu_seqlens_q[-1] must be the number of packed tokens, 3, got 4",
    ),
    ("packed", {"cu_seqlens_q": torch.tensor(0)}, "cu_seqlens_q must be of shape (B + 1,), got shape ()"),
    ("packed", {"cu_seqlens_k": int32(0, 7)}, "cu_seqlens_k must be of shape (3,), got shape (2,)"),
    (
        "packed",
        {"cu_seqlens_k": int32(0, 2, 8)},
        "cu_seqlens_k[-1] must be the number of packed tokens, 7, got 8",
    ),
    ("packed", {"max_seqlen_q": 1}, "max_seqlen_q must be at least the longest sequence, 2, got 1"),
    ("packed", {"max_seqlen_k": 4}, "max_seqlen_k must be at least the longest sequence, 5, got 4"),
    ("packed", {"window_size": (1,)}, "window_size must be a pair (left, right), -1 for no bound, got (1,)"),
    ("packed", {"softcap": -1.0}, "softcap must be 0 (off) or positive, got -1.0"),
    ("packed", {"softcap": float("nan")}, "softcap must be 0 (off) or positive, got nan"),
    ("packed", {"alibi_slopes": torch.ones(3)}, "alibi_slopes must be of shape (4,), got shape (3,)"),
    ("packed", {"alibi_slopes": torch.ones(3, 4)}, "alibi_slopes must be of shape (2, 4), got shape (3, 4)"),
    ("packed", {"sinks": torch.ones(2)}, "sinks must be of shape (4,), got shape (2,)"),
    ("packed", {"out": torch.full((3, 4, 9), EMPTY)}, "out must be of the shape of q (3, 4, 8)"),
    ("packed", {"out": torch.ones(3, 4, 8, dtype=torch.float16)}, "out.dtype must be torch.float32 like q"),
    ("paged", {"block_table": int32(2, 1)}, "block_table must be of shape (2, max_blocks), got shape (2,)"),
    (
        "paged",
        {"block_table": int32(2, 1, 3).view(3, 1)},
        "block_table must be of shape (2, 1), got shape (3, 1)",
    ),
    ("paged", {"block_table": torch.ones(2, 2)}, "block_table.dtype must be torch.int32"),
    (
        "paged",
        {"block_table": int32(2, 1).view(2, 1)},
        "wide enough for the 5 keys of sequence 1, got 1 blocks of 4 = 4 keys",
    ),
    (
        "paged",
        {"block_table": int32(2, -1, 1, -1).view(2, 2)},
        "block_table[1, 1] must be a block id from 0 to 3",
    ),
    (
        "paged",
        {"block_table": int32(2, -1, 4, 1).view(2, 2)},
        "block_table[1, 0] must be a block id from 0 to 3",
    ),
    ("append", {"v": None}, "v must be given exactly when k is"),
    ("append", {"cache_seqlens": None}, "cache_seqlens must be given with k"),
    ("append", {"cache_seqlens": int32(2)}, "cache_seqlens must be of shape (2,)"),
    ("append", {"cache_seqlens": torch.tensor([2, 5])}, "cache_seqlens.dtype must be torch.int32"),
    (
        "append",
        {"cache_seqlens": int32(2, 8)},
        "cache_seqlens[1] must be from 0 to the capacity 8 less the 1 new keys",
    ),
    ("append", {"cache_seqlens": int32(-1, 5)}, "cache_seqlens[0] must be from 0 to the capacity 8"),
    ("append", {"cache_seqlens": int32(4, 5)}, "block_table[0, 1] must be a block id from 0 to 3"),
    ("append", {"cache_seqlens": 2**40}, "cache_seqlens must be from 0 to the capacity 8"),
    (
        "append",
        {"k": torch.ones(2, 1, 1, 8), "v": torch.ones(2, 1, 1, 8)},
        "k must be of shape (2, Snew, 2, 8)",
    ),
    ("append", {"cache_batch_idx": int32(0, 1)}, "cache_batch_idx must be None with block_table"),
    (
        "append",
        {"block_table": None, "cache_batch_idx": int32(0, 4)},
        "cache_batch_idx[1] must be from 0 to 3",
    ),
    (
        "append",
        {"block_table": None, "cache_seqlens": int32(2, 4)},
        "from 0 to the capacity 4 less the 1 new keys",
    ),
    ("append", {"cache_leftpad": int32(4, 0)}, "cache_leftpad[0] must be from 0 to the 3 keys, got 4"),
    ("append", {"rotary_cos": torch.ones(9, 4)}, "rotary_sin must be given exactly when rotary_cos is"),
    (
        "append",
        dict.fromkeys(("rotary_cos", "rotary_sin"), torch.ones(5, 4)),
        "every position must be from 0 to 4",
    ),
    (
        "append",
        dict.fromkeys(("rotary_cos", "rotary_sin"), torch.ones(9, 5)),
        "even and at most head_dim = 8, got 10",
    ),
    (
        "append",
        {"k": None, "v": None} | dict.fromkeys(("rotary_cos", "rotary_sin"), torch.ones(9, 4)),
        "None without k",
    ),
    (
        "write",
        dict.fromkeys(("k_cache", "v_cache"), torch.ones(4, 4, 2, 8)),
        "v_cache must be another tensor",
    ),
    (
        "append",
        dict.fromkeys(("k_cache", "v_cache"), torch.ones(4, 4, 2, 8)),
        "v_cache must be another tensor",
    ),
    *(
        (name, twice("k_cache", torch.ones(4, 4, 2, 8)), "got the same memory")
        for name in ("write", "append")
    ),
    (
        "write",
        dict.fromkeys(("k_cache", "v_cache"), torch.ones(4, 4, 2, 8, dtype=torch.int32)),
        "k_cache.dtype must be float32, float16, bfloat16, float64, or quantised: float8_e4m3fn or int8",
    ),
    ("append", {"cache_seqlens": 2.5}, "cache_seqlens must be from 0 to the capacity 8 as an int, got 2.5"),
    *(
        (name, {"causal": value}, f"causal must be True or False, got {value!r}")
        for name in ("packed", "append")
        for value in ("no", None, 1)
    ),
    ("packed", {"return_softmax_lse": "no"}, "return_softmax_lse must be True or False, got 'no'"),
    ("append", {"return_softmax_lse": None}, "return_softmax_lse must be True or False, got None"),
    ("append", {"rotary_interleaved": 0}, "rotary_interleaved must be True or False, got 0"),
    *(
        (name, {"softmax_scale": value}, f"softmax_scale must be None or finite, got {value!r}")
        for name in ("packed", "append")
        for value in (float("nan"), float("inf"))
    ),
    ("packed", {"softcap": float("inf")}, "softcap must be 0 (off) or positive, got inf"),
    *(("write", changes, message) for changes, message in scale_mistakes()),
]

UNSUPPORTED: list[tuple[str, dict, str]] = [
    *(
        (
            "write",
            dict.fromkeys(("k_cache", "v_cache"), torch.ones(4, 4, 2, 8).to(dtype)),
            f"k_cache.dtype = {dtype}",
        )
        for dtype in (torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.uint8)
    ),
    ("write", {"k": torch.ones(3, 2, 8).to(torch.float8_e4m3fn)}, "k.dtype = torch.float8_e4m3fn"),
    ("paged", dict.fromkeys(("k", "v"), torch.ones(4, 4, 2, 8).to(torch.uint8)), "k.dtype = torch.uint8"),
    (
        "append",
        dict.fromkeys(("k_cache", "v_cache"), torch.ones(4, 4, 2, 8).to(torch.uint8)),
        "k_cache.dtype = torch.uint8",
    ),
    ("packed", {"q": torch.ones(3, 4, 8, requires_grad=True)}, "q.requires_grad = True"),
]


def written(arguments: dict) -> list[Tensor]:
    return [arguments[name] for name in ("k_cache", "v_cache", "out") if arguments.get(name) is not None]


@pytest.mark.parametrize("name", CALLS)
def test_the_unchanged_call_is_right(implementation: str, name: str) -> None:
    function, build = CALLS[name]
    arguments = build()
    function(**arguments)
    assert all((tensor != EMPTY).any() for tensor in written(arguments))


@pytest.mark.parametrize(
    ("name", "changes", "message", "error"),
    [(*case, KernelArgumentError) for case in WRONG]
    + [(*case, UnsupportedKernelConfig) for case in UNSUPPORTED],
    ids=[f"{name}-{'-'.join(changes)}-{i}" for i, (name, changes, _) in enumerate(WRONG + UNSUPPORTED)],
)
def test_a_wrong_call_says_so_and_writes_nothing(name: str, changes: dict, message: str, error: type) -> None:
    function, build = CALLS[name]
    arguments = build()
    kept = arguments | changes
    before = [tensor.clone() for tensor in written(kept)]
    with pytest.raises(error, match=re.escape(message)) as caught:
        function(**kept)
    assert str(caught.value).startswith((function.__name__, "apply_rotary"))
    for tensor, was in zip(written(kept), before, strict=True):
        assert torch.equal(tensor, was)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: rms_norm(torch.tensor(1.0), torch.ones(1), 1e-6),
            "x must be of shape (..., D), got a scalar",
        ),
        (lambda: rms_norm(torch.ones(2, 8), torch.ones(4), 1e-6), "weight must be of shape (8,)"),
        (lambda: rms_norm(torch.ones(2, 8), torch.ones(1, 8), 1e-6), "weight must be of shape (D)"),
        (
            lambda: rms_norm(torch.ones(2, 8), torch.ones(8), 1e-6, residual=torch.ones(1, 8)),
            "residual must be torch.float32",
        ),
        (
            lambda: rms_norm(torch.ones(8, 2).T, torch.ones(8), 1e-6),
            "the last dimension of x must be contiguous",
        ),
        (lambda: silu_and_mul(torch.ones(2, 3)), "the last dimension of x must be even: [gate | up], got 3"),
        (lambda: rms_norm(torch.ones(2, 8), torch.ones(8), -1.0), "eps must be 0 or positive, got -1.0"),
        (
            lambda: silu_and_mul(torch.ones(2, 3), torch.ones(2, 2)),
            "up must be torch.float32 of shape (2, 3) like x, got torch.float32 of shape (2, 2)",
        ),
        (lambda: silu_and_mul(torch.ones(3)), "x must be of shape (T, 2 * I), got shape (3,)"),
    ],
)
def test_norm_and_activation_name_what_is_wrong(call, message: str) -> None:
    with pytest.raises(KernelArgumentError, match=re.escape(message)):
        call()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"positions": torch.tensor([0, 9])},
            "every position must be from 0 to 8, the rows of the cos/sin table, got 9",
        ),
        ({"positions": torch.tensor([0, -1])}, "every position must be from 0 to 8"),
        ({"positions": int32(0, 1)}, "positions.dtype must be torch.int64, got torch.int32"),
        ({"positions": torch.tensor([0])}, "positions must be of shape (2,)"),
        ({"cos_sin_cache": torch.ones(9, 10)}, "rotary_dim must be even and at most head_dim = 8, got 10"),
        (
            {"cos_sin_cache": torch.ones(9, 8).half()},
            "cos_sin_cache.dtype must be torch.float32, got torch.float16",
        ),
        ({"k": torch.ones(3, 1, 8)}, "k must be of shape (2, num_kv_heads, 8) like q"),
        ({"k": torch.ones(2, 1, 8).half()}, "k.dtype must be torch.float32 like q"),
        ({"interleaved": "no"}, "interleaved must be True or False, got 'no'"),
        ({"out": (torch.ones(2, 2, 8),) * 2}, "out[1] must be of shape (2, 1, 8), got shape (2, 2, 8)"),
        ({"out": ()}, "out must be a pair of tensors, for q and for k, got 0 of them"),
        ({"out": (torch.ones(2, 2, 8),)}, "out must be a pair of tensors, for q and for k, got 1 of them"),
        ({"out": (torch.ones(2, 2, 8), *(torch.ones(2, 1, 8),) * 2)}, "for q and for k, got 3 of them"),
        (
            {"k": torch.ones(2, 2, 8), "out": torch.ones(2, 2, 2, 8)},
            "out must be None or a pair of tensors, got a Tensor",
        ),
        ({"out": 5}, "out must be a value of type"),
        ({"out": (torch.ones(2, 2, 8), None)}, "out must be a value of type"),
        (
            {"out": (torch.ones(2, 8).expand(2, 2, 8), torch.ones(2, 1, 8))},
            "out[0] must be a tensor whose elements have a place each, got strides (0, 8, 1)",
        ),
        (
            {"out": (torch.ones(2, 2, 8), torch.ones(8).expand(2, 1, 8))},
            "out[1] must be a tensor whose elements have a place each, got strides (0, 8, 1)",
        ),
    ],
)
def test_rotary_names_what_is_wrong_and_turns_nothing(changes: dict, message: str) -> None:
    right = {
        "q": torch.ones(2, 2, 8),
        "k": torch.ones(2, 1, 8),
        "cos_sin_cache": torch.full((9, 8), 0.5),
        "positions": torch.tensor([0, 8]),
    }
    with pytest.raises(KernelArgumentError, match=re.escape(message)):
        apply_rotary(**(right | changes))
    assert (right["q"] == 1.0).all()
    apply_rotary(**right)
    assert not (right["q"] == 1.0).all()


def test_what_was_right_once_is_checked_again_after_it_changed() -> None:
    """The indices of a step pass through every layer; they are recognised by content and not by identity."""
    arguments = paged_arguments()
    flash_attn_varlen_func(**arguments)
    arguments["block_table"][1, 1] = -1
    with pytest.raises(KernelArgumentError, match="block_table"):
        flash_attn_varlen_func(**arguments)
    with torch.inference_mode():
        writes = write_arguments()
        write_kv_cache(**writes)
        writes["slot_mapping"][1] = 99
        with pytest.raises(KernelArgumentError, match="slot_mapping"):
            write_kv_cache(**writes)
    smaller = write_arguments() | {name: torch.zeros(3, 4, 2, 8) for name in ("k_cache", "v_cache")}
    with pytest.raises(KernelArgumentError, match="= 12, or negative"):
        write_kv_cache(**smaller)


def test_parameters_are_fine_under_inference_mode() -> None:
    weight = torch.nn.Parameter(torch.ones(8))
    with torch.inference_mode():
        assert rms_norm(torch.ones(1, 8), weight, 0.0).tolist() == [[1.0] * 8]
    with pytest.raises(UnsupportedKernelConfig, match="inference_mode"):
        rms_norm(torch.ones(1, 8), weight, 0.0)
