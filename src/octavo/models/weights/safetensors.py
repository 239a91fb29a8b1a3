"""Safetensors folders: one file or many shards, read with plain file reads.

The files are not memory-mapped: mapped pages count as resident memory, and a model would then weigh twice.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch

from octavo.errors import WeightsError
from octavo.models.weights.checkpoint import Shape

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100 * 2**20
_CHUNK_BYTES = 8 * 2**20
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class _Entry:
    path: Path
    dtype: str
    shape: Shape
    offset: int
    num_bytes: int


class SafetensorsCheckpoint:
    """The tensors of `folder`/model.safetensors, or of the shards its index lists."""

    def __init__(self, folder: Path) -> None:
        self.name = str(folder)
        self._entries: dict[str, _Entry] = {}
        self._files: dict[Path, BufferedReader] = {}
        self._chunk = torch.empty(_CHUNK_BYTES, dtype=torch.uint8)
        try:
            for path in _shards(folder):
                for name, entry in _read_header(path, self._open(path)).items():
                    if name in self._entries:
                        first = self._entries[name].path.name
                        raise WeightsError(
                            f"{folder}: tensor {name} is in two shards, {first} and {path.name}"
                        )
                    self._entries[name] = entry
            self._check_index(folder)
        except BaseException:
            self.close()
            raise
        self.shapes = {name: entry.shape for name, entry in self._entries.items()}

    def read_into(self, name: str, out: torch.Tensor) -> None:
        entry = self._entries[name]
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise WeightsError(
                f"{entry.path}: tensor {name} has dtype {entry.dtype}; known: {', '.join(_DTYPES)} "
                "(quantised safetensors are not supported)"
            )
        file = self._open(entry.path)
        file.seek(entry.offset)
        flat = out.view(-1)
        if dtype == out.dtype:
            self._fill(file, flat, entry)
            return
        chunk = self._chunk.view(dtype)
        for start in range(0, flat.numel(), chunk.numel()):
            part = chunk[: flat.numel() - start]
            self._fill(file, part, entry)
            flat[start : start + part.numel()].copy_(part)

    def same_values(self, first: str, second: str) -> bool:
        a, b = self._entries[first], self._entries[second]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        # Two handles, so that both may lie in one file.
        with a.path.open("rb") as file_a, b.path.open("rb") as file_b:
            file_a.seek(a.offset)
            file_b.seek(b.offset)
            left = a.num_bytes
            while left:
                size = min(left, _CHUNK_BYTES)
                if file_a.read(size) != file_b.read(size):
                    return False
                left -= size
        return True

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _open(self, path: Path) -> BufferedReader:
        if path not in self._files:
            try:
                self._files[path] = path.open("rb")
            except OSError as error:
                raise WeightsError(f"{path}: cannot be opened: {error.strerror}") from error
        return self._files[path]

    @staticmethod
    def _fill(file: BufferedReader, flat: torch.Tensor, entry: _Entry) -> None:
        view = flat.view(torch.uint8).numpy().data
        done = 0
        while done < len(view):
            count = file.readinto(view[done:])
            if not count:
                raise WeightsError(f"{entry.path}: the file ended early; it changed while it was read")
            done += count

    def _check_index(self, folder: Path) -> None:
        path = folder / _INDEX
        if (folder / _SINGLE).is_file():
            return
        for name, shard in _weight_map(path).items():
            entry = self._entries.get(name)
            if entry is None or entry.path.name != shard:
                raise WeightsError(f"{path}: says that tensor {name} is in {shard}, but it is not")


def _shards(folder: Path) -> list[Path]:
    single, index = folder / _SINGLE, folder / _INDEX
    if single.is_file():
        return [single]
    if not index.is_file():
        raise WeightsError(_nothing_here(folder))
    names = sorted(set(_weight_map(index).values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise WeightsError(
            f"{folder}: {len(missing)} of {len(names)} shards are missing: {', '.join(missing[:6])}; "
            "download them again, or finish the download"
        )
    return [folder / name for name in names]


def _nothing_here(folder: Path) -> str:
    found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    bins = [name for name in found if name.endswith((".bin", ".pt", ".pth"))]
    ggufs = [name for name in found if name.endswith(".gguf")]
    if bins:
        return (
            f"{folder}: the weights are pickled ({bins[0]}), which Octavo does not read because loading "
            "them can run code; convert them with Transformers: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)"
        )
    if ggufs:
        return f"{folder}: there is no {_SINGLE}, but there is {ggufs[0]}; give the path of that file"
    return f"{folder}: there is neither {_SINGLE} nor {_INDEX}; for random weights use load_format='dummy'"


def _weight_map(path: Path) -> dict[str, str]:
    try:
        weight_map: Any = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{path}: is no index of shards (a JSON object with weight_map)") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{path}: weight_map must be an object with at least one tensor")
    for name, shard in weight_map.items():
        if (
            not isinstance(shard, str)
            or os.path.basename(shard) != shard
            or not shard.endswith(".safetensors")
        ):
            raise WeightsError(
                f"{path}: tensor {name} is mapped to {shard!r}, which is no file name of a shard"
            )
    return weight_map


def _read_header(path: Path, file: BufferedReader) -> dict[str, _Entry]:
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(8)
    header_bytes = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or header_bytes > min(size - 8, _MAX_HEADER_BYTES):
        raise WeightsError(f"{path}: is no safetensors file, or is cut off in its header ({size} bytes)")
    try:
        header: Any = json.loads(file.read(header_bytes))
        start = 8 + header_bytes
        entries = {
            name: _Entry(path, info["dtype"], tuple(info["shape"]), start + info["data_offsets"][0],
                         info["data_offsets"][1] - info["data_offsets"][0])
            for name, info in header.items()
            if name != "__metadata__"
        }  # fmt: skip
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise WeightsError(f"{path}: the safetensors header is corrupt: {error}") from error
    for name, entry in entries.items():
        dtype = _DTYPES.get(entry.dtype)
        if dtype is not None and entry.num_bytes != math.prod(entry.shape) * dtype.itemsize:
            raise WeightsError(
                f"{path}: the header is corrupt: tensor {name} of shape {entry.shape} in {entry.dtype} "
                f"takes {entry.num_bytes} bytes"
            )
        if entry.offset < start:
            raise WeightsError(f"{path}: the header is corrupt: tensor {name} begins before the data")
        if entry.offset + entry.num_bytes > size:
            raise WeightsError(
                f"{path}: is truncated: tensor {name} ends at byte {entry.offset + entry.num_bytes}, "
                f"the file has {size}; download it again"
            )
    return entries
