"""The tensors: their bytes, their shapes, and the copying of blocks."""

import pytest
import torch

from octavo.cache import storage
from octavo.cache.sizing import request_bytes
from octavo.cache.spec import KVCacheSpec
from octavo.cache.storage import KVCache
from octavo.errors import CapacityError

SPECS = {
    "float32": KVCacheSpec(3, 2, 8),
    "bfloat16, block 1": KVCacheSpec(3, 2, 8, "bfloat16", block_size=1),
    "float16": KVCacheSpec(3, 2, 8, "float16"),
    "float8": KVCacheSpec(3, 2, 8, "float8_e4m3"),
    "int8": KVCacheSpec(3, 2, 8, "int8"),
    "narrow v": KVCacheSpec(3, 2, 8, value_head_dim=4),
    "float8, scales": KVCacheSpec(3, 2, 8, "float8_e4m3", scales="token_head"),
    "int8, scales, block 1": KVCacheSpec(3, 2, 8, "int8", block_size=1, scales="token_head"),
}


def tensors_of(cache: KVCache) -> list[torch.Tensor]:
    return [tensor for layer in cache.layers for tensor in layer if tensor is not None]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_it_allocates_what_the_spec_says_and_nothing_more(spec: KVCacheSpec) -> None:
    cache = KVCache(spec, 5)
    tensors = tensors_of(cache)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    assert sum(storages.values()) == cache.nbytes == spec.bytes_per_block * 5
    assert cache.nbytes == request_bytes(spec, 5 * spec.block_size)


def test_the_layout_of_a_layer() -> None:
    cache = KVCache(KVCacheSpec(3, 2, 8, "int8", value_head_dim=4), 5)
    assert len(cache.layers) == 3
    k, v, k_scale, v_scale = cache.layers[1]
    assert (k.shape, v.shape) == ((5, 16, 2, 8), (5, 16, 2, 4))
    assert k.dtype == v.dtype == torch.int8
    assert k.is_contiguous()
    assert k_scale is v_scale is None


@pytest.mark.parametrize("dtype", ["float8_e4m3", "int8"])
def test_a_quantised_cache_has_a_scale_for_each_token_and_head(dtype: str) -> None:
    cache = KVCache(KVCacheSpec(3, 2, 8, dtype, scales="token_head"), 5)
    assert len(cache.layers) == 3
    _, _, k_scale, v_scale = cache.layers[2]
    for scale in (k_scale, v_scale):
        assert scale is not None
        assert (scale.shape, scale.dtype) == ((5, 16, 2), torch.float32)
        assert scale.is_contiguous()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize(
    ("copies", "result"),
    [
        ([], [0, 1, 2, 3, 4]),
        ([(0, 3), (1, 4)], [0, 1, 2, 0, 1]),
        ([(0, 1), (1, 2)], [0, 0, 0, 3, 4]),  # the second pair sees the first
        ([(1, 2), (0, 1)], [0, 0, 1, 3, 4]),
        ([(0, 4), (1, 4)], [0, 1, 2, 3, 1]),  # the later one stays
    ],
    ids=["none", "apart", "chained", "moved on", "same target"],
)
def test_blocks_are_copied_in_order(
    spec: KVCacheSpec, copies: list[tuple[int, int]], result: list[int]
) -> None:
    cache = KVCache(spec, 5)
    for tensor in tensors_of(cache):
        for block_id in range(5):
            tensor[block_id] = torch.full(tensor.shape[1:], block_id + 1).to(tensor.dtype)
    cache.copy_blocks(copies)
    for tensor in tensors_of(cache):
        for block_id, source in enumerate(result):
            assert torch.all(tensor[block_id].float() == source + 1)


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_many_blocks_are_copied_a_few_at_a_time(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVCache(SPECS["int8, scales, block 1"], 12)
    monkeypatch.setattr(storage, "COPY_BYTES", at_once * cache.nbytes // 12)
    for tensor in tensors_of(cache):
        for block_id in range(12):
            tensor[block_id] = block_id
    taken = []

    def index_select(tensor: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        taken.append(len(index))
        return select(tensor, dim, index)

    select = torch.Tensor.index_select
    monkeypatch.setattr(torch.Tensor, "index_select", index_select)
    cache.copy_blocks([(5, 6), (4, 5), (0, 8), (0, 9), (1, 10), (2, 10), (0, 11), (1, 4)])
    for tensor in tensors_of(cache):
        assert tensor.reshape(12, -1)[:, 0].tolist() == [0, 1, 2, 3, 1, 4, 5, 7, 0, 0, 2, 0]
    assert max(taken) == at_once


def test_memory_that_is_not_there_is_named() -> None:
    with pytest.raises(
        CapacityError, match=r"cpu cannot give .* bytes for .* KV cache blocks; lower num_blocks"
    ):
        KVCache(KVCacheSpec(64, 64, 256), 2**40)
