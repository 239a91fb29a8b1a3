"""The tensors of the KV cache.

One allocation for all K and one for all V: `(num_layers, num_blocks, block_size, num_kv_heads, head_dim)`,
and likewise for their scales, where there are any, without the last dimension. A layer sees its contiguous
slice of each; copying a block is one operation over all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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


COPY_BYTES = 2**25
"""About how many bytes of blocks are copied at a time: each piece is held a second time meanwhile."""


def storage_dtype(spec: KVCacheSpec) -> torch.dtype:
    """The dtype of the tensors of such a cache."""
    return _TORCH_DTYPES[spec.dtype]


class LayerCache(NamedTuple):
    """What one layer of a model writes to and reads from.

    k, v: (num_blocks, block_size, num_kv_heads, head_dim). k_scale, v_scale: (num_blocks, block_size,
    num_kv_heads) float32, the scale of each token's head; only for a quantised cache, where a value is what
    is stored times its scale.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


class KVCache:
    """`num_blocks` blocks on `device`, uninitialised: no kernel reads what nothing has written.

    `layers[i]` is the cache of layer i; all its tensors are contiguous (V ends in `value_head_dim`). `nbytes`
    is `spec.bytes_per_block * num_blocks` exactly. The caches are written in place by the kernels.
    CapacityError when the device cannot give the memory.

    A spec without V is for sizing only: no kernel reads such a cache.
    """

    def __init__(self, spec: KVCacheSpec, num_blocks: int, device: str | torch.device = "cpu") -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        self.device = torch.device(device)
        slots = (spec.num_layers, num_blocks, spec.block_size)
        dtype = storage_dtype(spec)
        assert spec.value_width > 0
        try:
            self._tensors = [
                torch.empty((*slots, spec.num_kv_heads, width), dtype=dtype, device=self.device)
                for width in (spec.head_dim, spec.value_width)
            ]
            if spec.has_token_scales:
                self._tensors += [
                    torch.empty((*slots, spec.num_kv_heads), dtype=torch.float32, device=self.device)
                    for _ in range(2)
                ]
        except (RuntimeError, MemoryError) as error:
            raise CapacityError(
                f"{self.device} cannot give {num_blocks * spec.bytes_per_block:,} bytes for {num_blocks} KV "
                f"cache blocks; lower num_blocks, kv_cache_memory, max_model_len or max_num_seqs"
            ) from error
        self.layers = [LayerCache(*parts) for parts in zip(*self._tensors, strict=True)]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy block `src` to block `dst` in every layer, pair after pair: later ones see earlier ones.

        Nothing waits for a GPU to be done with it.
        """
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
        # From pinned memory, which torch keeps until the copy is done: from any other the host would wait.
        pairs = torch.tensor(
            [list(run), list(run.values())], device="cpu", pin_memory=self.device.type == "cuda"
        )
        num_at_once = max(1, COPY_BYTES // self.spec.bytes_per_block)
        for dst, src in torch.split(pairs.to(self.device, non_blocking=True), num_at_once, dim=1):
            for tensor in self._tensors:
                # As bytes, because index operations lack float8 on some devices.
                raw = tensor.view(torch.uint8)
                raw.index_copy_(1, dst, raw.index_select(1, src))
