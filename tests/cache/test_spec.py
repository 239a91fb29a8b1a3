"""Bytes of a token, by hand."""

import pytest

from octavo.cache.spec import DTYPE_BYTES, KVCacheSpec, canonical_dtype
from octavo.errors import ConfigError


def test_qwen3_06b_in_bf16_takes_112_kib_a_token() -> None:
    spec = KVCacheSpec(28, 8, 128, "bfloat16")
    assert spec.bytes_per_token == 112 * 1024
    assert spec.bytes_per_block == 16 * 112 * 1024


@pytest.mark.parametrize(
    ("dtype", "scales", "bytes_per_token"),
    [
        ("float32", "tensor", 2 * 3 * (2 * 64) * 4),
        ("float16", "tensor", 2 * 3 * (2 * 64) * 2),
        ("int8", "tensor", 2 * 3 * (2 * 64)),
        ("float8_e4m3", "tensor", 2 * 3 * (2 * 64)),
        ("int8", "token_head", 2 * 3 * (2 * 64 + 2 * 4)),
        ("float8_e4m3", "token_head", 2 * 3 * (2 * 64 + 2 * 4)),
    ],
)
def test_every_dtype_and_its_scales(dtype: str, scales: str, bytes_per_token: int) -> None:
    assert KVCacheSpec(2, 3, 64, dtype, scales=scales).bytes_per_token == bytes_per_token


def test_a_latent_cache_has_one_vector_and_no_v() -> None:
    spec = KVCacheSpec(61, 1, 512 + 64, "bfloat16", value_head_dim=0)
    assert spec.bytes_per_token == 61 * 576 * 2
    quantised = KVCacheSpec(61, 1, 576, "int8", value_head_dim=0, scales="token_head")
    assert quantised.bytes_per_token == 61 * (576 + 4)


def test_k_and_v_may_differ_in_width() -> None:
    assert KVCacheSpec(1, 2, 192, "float16", value_head_dim=128).bytes_per_token == 2 * (192 + 128) * 2


def test_a_window_does_not_change_what_a_token_costs() -> None:
    assert KVCacheSpec(2, 1, 8, windows=(4, None)).bytes_per_token == KVCacheSpec(2, 1, 8).bytes_per_token


@pytest.mark.parametrize(
    ("alias", "name"),
    [("bf16", "bfloat16"), ("torch.float16", "float16"), ("FP32", "float32"), ("half", "float16"),
     ("fp8", "float8_e4m3"), ("float8_e4m3fn", "float8_e4m3"), ("int8", "int8")],
)  # fmt: skip
def test_aliases_of_dtypes(alias: str, name: str) -> None:
    assert canonical_dtype(alias) == name
    assert KVCacheSpec(1, 1, 8, alias).dtype == name
    assert name in DTYPE_BYTES


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"dtype": "bfloat61"},
            r"unknown KV cache dtype 'bfloat61' \(did you mean 'bfloat16'\?\); known are float32",
        ),
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"num_kv_heads": -1}, "num_kv_heads must be at least 1, got -1"),
        ({"head_dim": 0}, "head_dim must be at least 1, got 0"),
        ({"value_head_dim": -1}, "value_head_dim must not be negative, got -1"),
        ({"block_size": 12}, "block_size must be a power of two .* got 12"),
        ({"windows": (1,)}, "windows has 1 entries for 2 layers"),
        ({"windows": (None, 0)}, "a window must be at least 1 token, got 0"),
        ({"scales": "token"}, r"unknown scales 'token' \(did you mean"),
        ({"scales": "token_head"}, "go with int8 and float8_e4m3, not with float32"),
    ],
)
def test_wrong_values_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KVCacheSpec(**{"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, **arguments})
