"""GGUF files: dequantised row by row, under Hugging Face names, with the q and k rows back in their order."""

from __future__ import annotations

import math
import os
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from octavo.errors import WeightsError
from octavo.gguf_file import GGUFFile, GGUFTensor
from octavo.models.config import ModelConfig
from octavo.models.weights.gguf_config import ROPE_FREQS

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# Values dequantised in one go: small enough for the processor's cache, large enough to hide numpy's overhead.
_CHUNK_VALUES = 256 * 1024


class GGUFCheckpoint:
    """The tensors of `file`, which stays its owner's to close."""

    fills_any_device = False

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self.name = str(file.path)
        self._file = file
        self._tensors: dict[str, GGUFTensor] = {}
        for tensor in file.tensors.values():
            self._check(tensor)
            if tensor.name != ROPE_FREQS:  # in the config already
                self._tensors[_hugging_face_name(tensor.name)] = tensor
        self._pool = ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1))
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self._rotary_order = _rotary_order(config)
        self._is_reordered = file.metadata.get("general.architecture") == "llama"

    def read_into(self, name: str, out: torch.Tensor) -> None:
        tensor = self._tensors[name]
        kind = GGMLQuantizationType(tensor.ggml_type)
        is_reordered = self._is_reordered and re.search(r"self_attn\.[qk]_proj\.", name) is not None
        # A vector is one row, unless its rows have to move.
        num_rows = tensor.shape[0] if len(tensor.shape) == 2 or is_reordered else 1
        row_values = out.numel() // num_rows
        row_bytes = _num_bytes(tensor) // num_rows
        head_rows = len(self._rotary_order) if is_reordered else 1
        step = max(1, _CHUNK_VALUES // (row_values * head_rows)) * head_rows
        flat = out.view(-1)

        def dequantise(row: int) -> None:
            count = min(step, num_rows - row)
            raw = self._file.read(tensor.offset + row * row_bytes, count * row_bytes)
            packed = np.frombuffer(raw, dtype=np.uint8)
            if is_reordered:
                packed = packed.reshape(-1, head_rows, row_bytes)[:, self._rotary_order].reshape(-1)
            # As one row: `dequantize` goes through rows in small groups.
            values = dequantize(packed.reshape(1, -1), kind).reshape(-1)
            flat[row * row_values : (row + count) * row_values].copy_(torch.from_numpy(values))

        try:
            list(self._pool.map(dequantise, range(0, num_rows, step)))
        except NotImplementedError as error:
            raise WeightsError(f"{self.name}: tensor {tensor.name}: {error}") from error

    def same_values(self, first: str, second: str) -> bool:
        a, b = self._tensors[first], self._tensors[second]
        if (a.ggml_type, a.shape) != (b.ggml_type, b.shape):
            return False
        size = _num_bytes(a)
        return self._file.read(a.offset, size) == self._file.read(b.offset, size)

    def close(self) -> None:
        self._pool.shutdown()

    def _check(self, tensor: GGUFTensor) -> None:
        try:
            kind = GGMLQuantizationType(tensor.ggml_type)
        except ValueError as error:
            raise WeightsError(
                f"{self.name}: tensor {tensor.name} has the unknown type {tensor.ggml_type}; "
                "a newer gguf package may know it"
            ) from error
        block = GGML_QUANT_SIZES[kind][0]
        if not tensor.shape or tensor.shape[-1] % block:
            raise WeightsError(
                f"{self.name}: tensor {tensor.name} of shape {tensor.shape} does not divide into "
                f"{kind.name} blocks of {block}"
            )
        end = tensor.offset + _num_bytes(tensor)
        if end > self._file.size:
            raise WeightsError(
                f"{self.name}: is truncated: tensor {tensor.name} ends at byte {end}, "
                f"the file has {self._file.size}; download it again"
            )


def _num_bytes(tensor: GGUFTensor) -> int:
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.ggml_type)]
    return math.prod(tensor.shape) // block * block_bytes


def _hugging_face_name(name: str) -> str:
    """The Hugging Face name, or `name` itself where there is none (it is then reported as unknown)."""
    if name in _TOP:
        return _TOP[name]
    match = _LAYER_TENSOR.fullmatch(name)
    if match and match[2] in _IN_LAYER:
        return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"
    return name


def _rotary_order(config: ModelConfig) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """For each row of a head, the stored row that belongs there.

    Files of architecture llama store the two features that turn together side by side, 0 d/2 1 d/2+1 ...; the
    rest of a partly rotated head is in place. Query and key heads are treated alike, each with its own count.
    """
    order = np.arange(config.head_dim)
    dim = config.rope.rotary_dim
    order[:dim] = np.arange(dim).reshape(dim // 2, 2).T.reshape(-1)
    return order
