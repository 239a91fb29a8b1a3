"""The tensors of the KV cache.

One allocation for all K and one for all V: `(num_layers, num_blocks, block_size, num_kv_heads, head_dim)`. A
layer sees its contiguous slice of each; copying a block is one operation over all layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.cache.spec import KVCacheSpec
from octavo.errors import CapacityError

_TORCH_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3": torch.float8_e4m3fn,
    "int8": torch.int8,
}


class KVCache:
    """`num_blocks` blocks on `device`, uninitialised: no kernel reads what nothing has written.

    `layers[i]` is `(k_cache, v_cache)` of layer i, each `(num_blocks, block_size, num_kv_heads, head_dim)`
    and contiguous (V ends in `value_head_dim`). `scales[i]` is `(k_scale, v_scale)`, each `(num_blocks,
    block_size, num_kv_heads)` float32, when the spec has scales per token and head, else `scales` is empty.
    `nbytes` is `spec.bytes_per_block * num_blocks` exactly. The caches are written in place by the kernels.
    CapacityError when the device cannot give the memory.
    """

    def __init__(self, spec: KVCacheSpec, num_blocks: int, device: str | torch.device = "cpu") -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        self.device = torch.device(device)
        slots = (spec.num_layers, num_blocks, spec.block_size)
        heads, dtype = spec.num_kv_heads, _TORCH_DTYPES[spec.dtype]
        # Shape after `slots` and dtype of: K, V, the scales of K, the scales of V (none where V is empty).
        parts: list[tuple[tuple[int, ...], torch.dtype]] = [
            ((heads, spec.head_dim), dtype),
            ((heads, spec.value_width), dtype),
        ]
        if spec.has_token_scales:
            parts += [((heads,), torch.float32), ((heads if spec.value_width else 0,), torch.float32)]
        try:
            self._tensors = [
                torch.empty(slots + shape, dtype=dtype, device=self.device) for shape, dtype in parts
            ]
        except (RuntimeError, MemoryError) as error:
            raise CapacityError(
                f"{self.device} cannot give {num_blocks * spec.bytes_per_block:,} bytes for {num_blocks} KV "
                f"cache blocks; lower num_blocks, kv_cache_memory, max_model_len or max_num_seqs"
            ) from error
        per_layer = [tensor.unbind() for tensor in self._tensors]
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = list(zip(*per_layer[:2], strict=True))
        self.scales: list[tuple[torch.Tensor, torch.Tensor]] = list(zip(*per_layer[2:], strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy block `src` to block `dst` in every layer, pair after pair: later ones see earlier ones."""
        run: dict[int, int] = {}
        for src, dst in copies:
            # In a run all reads come before all writes, so reading what it writes must start a new one.
            if src in run:
                self._copy_run(run)
                run = {}
            run[dst] = src
        self._copy_run(run)

    def _copy_run(self, run: dict[int, int]) -> None:
        if not run:
            return
        dst = torch.tensor(list(run.keys()), device=self.device)
        src = torch.tensor(list(run.values()), device=self.device)
        for tensor in self._tensors:
            # As bytes, because index operations lack float8 on some devices.
            raw = tensor.view(torch.uint8)
            raw.index_copy_(1, dst, raw.index_select(1, src))
