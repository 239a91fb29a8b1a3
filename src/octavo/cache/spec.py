"""What one token costs in the KV cache: the layout in numbers, without tensors.

Per layer there is one K cache `(num_blocks, block_size, num_kv_heads, head_dim)` and one V cache of the same
shape with `value_head_dim` at its end. Multi-head latent attention is the case of one KV head of width
`kv_lora_rank + qk_rope_head_dim` and no V at all.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import ConfigError, nearest

DTYPE_BYTES: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3": 1, "int8": 1}
"""Bytes of one element, by the canonical name of each cache dtype."""

_DTYPE_ALIASES: dict[str, str] = {
    "fp32": "float32",
    "float": "float32",
    "f32": "float32",
    "fp16": "float16",
    "half": "float16",
    "f16": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3",
    "fp8_e4m3": "float8_e4m3",
    "float8_e4m3fn": "float8_e4m3",
    "i8": "int8",
}

SCALE_FORMS: tuple[str, ...] = ("tensor", "token_head")
"""How a one-byte cache is scaled: one number per layer and tensor, or one fp32 number per token and head."""

SCALE_BYTES = 4


def canonical_dtype(name: str) -> str:
    """The canonical name of a cache dtype, "bfloat16" for "bf16" or "torch.bfloat16"; else a ConfigError."""
    short = name.strip().lower().removeprefix("torch.")
    short = _DTYPE_ALIASES.get(short, short)
    if short not in DTYPE_BYTES:
        known = ", ".join(DTYPE_BYTES)
        hint = nearest(short, [*DTYPE_BYTES, *_DTYPE_ALIASES])
        raise ConfigError(f"unknown KV cache dtype {name!r}{hint}; known are {known}")
    return short


def check_block_size(block_size: int) -> None:
    """ConfigError unless `block_size` is a power of two."""
    if block_size < 1 or block_size & (block_size - 1):
        raise ConfigError(f"block_size must be a power of two (1, 2, 4, ... 16 ...), got {block_size}")


@dataclass(frozen=True)
class KVCacheSpec:
    """The shape of a model's KV cache. Immutable and hashable; wrong values are ConfigErrors.

    `dtype` accepts the aliases of `canonical_dtype` and is stored under the canonical name. `windows` gives
    for each layer how many tokens it attends to, the current one included, or None for all of them; it does
    not change what a token costs, only how many tokens a request needs (`octavo.cache.sizing`). `scales` is
    "tensor" for one scale per layer, which is not worth counting, or "token_head" for one fp32 scale per
    token and KV head, for K and for V, which is.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "float32"
    block_size: int = 16
    value_head_dim: int | None = None
    """Width of V; None means `head_dim`, 0 means that there is no V (latent attention)."""
    windows: tuple[int | None, ...] | None = None
    scales: str = "tensor"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", canonical_dtype(self.dtype))
        if self.value_head_dim is None:
            object.__setattr__(self, "value_head_dim", self.head_dim)
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.value_width < 0:
            raise ConfigError(f"value_head_dim must not be negative, got {self.value_width}")
        check_block_size(self.block_size)
        if self.windows is not None:
            if len(self.windows) != self.num_layers:
                raise ConfigError(f"windows has {len(self.windows)} entries for {self.num_layers} layers")
            if any(window is not None and window < 1 for window in self.windows):
                raise ConfigError(
                    f"a window must be at least 1 token, got {min(w for w in self.windows if w is not None)}"
                )
        if self.scales not in SCALE_FORMS:
            raise ConfigError(
                f"unknown scales {self.scales!r}{nearest(self.scales, SCALE_FORMS)}; "
                f"known are {', '.join(SCALE_FORMS)}"
            )
        if self.scales == "token_head" and DTYPE_BYTES[self.dtype] > 1:
            raise ConfigError(
                f"scales per token and head go with int8 and float8_e4m3, not with {self.dtype}"
            )

    @property
    def value_width(self) -> int:
        """`value_head_dim` as a number."""
        return self.head_dim if self.value_head_dim is None else self.value_head_dim

    @property
    def has_token_scales(self) -> bool:
        return self.scales == "token_head"

    @property
    def bytes_per_token_layer(self) -> int:
        """Bytes of one token in one layer: K, V and scales."""
        width = self.head_dim + self.value_width
        num_scales = (1 + (self.value_width > 0)) if self.has_token_scales else 0
        return self.num_kv_heads * (width * DTYPE_BYTES[self.dtype] + num_scales * SCALE_BYTES)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers."""
        return self.num_layers * self.bytes_per_token_layer

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in all layers; `storage.KVCache` allocates exactly this for each block."""
        return self.block_size * self.bytes_per_token
