"""Safetensors folders: one file or many shards, read through the `safetensors` package.

A file is opened anew for each tensor: what was read stays mapped until the file is closed, and mapped pages
count as resident memory, so that a model would weigh twice. This costs about 0.2 s per GB.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from octavo.errors import WeightsError
from octavo.models.weights.checkpoint import Shape

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = ("F64", "F32", "F16", "BF16")
_LFS_POINTER = b"version https://git-lfs"


class SafetensorsCheckpoint:
    """The tensors of `folder`/model.safetensors, or of the shards its index lists."""

    fills_any_device = False

    def __init__(self, folder: Path) -> None:
        self.name = str(folder)
        self.shapes: dict[str, Shape] = {}
        self._paths: dict[str, Path] = {}
        for path in _shards(folder):
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118 (it is no mapping)
                    first = self._paths.setdefault(name, path)
                    if first != path:
                        raise WeightsError(
                            f"{folder}: tensor {name} is in two shards, {first.name} and {path.name}; "
                            "download them again"
                        )
                    self.shapes[name] = tuple(file.get_slice(name).get_shape())
        self._check_index(folder)

    def read_into(self, name: str, out: torch.Tensor) -> None:
        out.copy_(self.view(name))

    def same_values(self, first: str, second: str) -> bool:
        a, b = self.view(first), self.view(second)
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))

    def close(self) -> None:
        pass

    def view(self, name: str) -> torch.Tensor:
        """The tensor in the file's memory; it keeps the file mapped as long as it lives."""
        with _opened(self._paths[name]) as file:
            dtype = file.get_slice(name).get_dtype()
            if dtype not in _DTYPES:
                raise WeightsError(
                    f"{self._paths[name]}: tensor {name} has dtype {dtype}; known: {', '.join(_DTYPES)} "
                    "(quantised safetensors are not supported)"
                )
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor

    def _check_index(self, folder: Path) -> None:
        path = folder / _INDEX
        if (folder / _SINGLE).is_file():
            return
        for name, shard in _weight_map(path).items():
            if name not in self._paths or self._paths[name].name != shard:
                raise WeightsError(f"{path}: says that tensor {name} is in {shard}, but it is not")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """`path` for reading; whatever is wrong with it is a WeightsError."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read ({error})") from error
    except SafetensorError as error:
        with path.open("rb") as pointer:
            is_pointer = pointer.read(len(_LFS_POINTER)) == _LFS_POINTER
        if is_pointer:
            raise WeightsError(
                f"{path}: is a pointer of Git LFS in place of the weights; `git lfs pull` fetches them"
            ) from error
        raise WeightsError(
            f"{path}: is no safetensors file, or a truncated or corrupt one of {path.stat().st_size} bytes "
            f"({error}); download it again"
        ) from error


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


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
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
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
