"""The header of a GGUF file: metadata and the table of tensors, without their data. No torch.

Reads the header itself instead of through gguf.GGUFReader, which builds an array per vocabulary string
and takes over a second for a small model.
"""

from __future__ import annotations

import mmap
import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from octavo.errors import WeightsError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4


@dataclass(frozen=True)
class GGUFTensor:
    """One row of the tensor table. `shape` is in torch's order, `offset` in bytes from the file's start."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int


@dataclass(frozen=True)
class GGUFArray:
    """An array in the metadata; its items are not kept."""

    length: int


class GGUFFile:
    """An open GGUF file: `metadata` (scalars, strings, lengths of arrays) and `tensors` by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        try:
            self.file = path.open("rb")
        except OSError as error:
            raise WeightsError(f"{path}: cannot be opened: {error.strerror}") from error
        try:
            self.size = path.stat().st_size
            if self.size < 24:
                raise WeightsError(f"{path}: is no GGUF file: it has {self.size} bytes")
            with mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                self.metadata, self.tensors = _Parser(path, data).header()
        except BaseException:
            self.file.close()
            raise

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.file.close()

    def read(self, offset: int, num_bytes: int) -> bytearray:
        """Bytes of the file; WeightsError if it ends before. Safe to call from several threads."""
        data = bytearray(num_bytes)
        with self._lock:
            self.file.seek(offset)
            count = self.file.readinto(data)
        if count < num_bytes:
            raise WeightsError(f"{self.path}: is truncated: it ends before byte {offset + num_bytes}")
        return data


class _Parser:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0

    def header(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        if self.data[:4] != b"GGUF":
            raise WeightsError(f"{self.path}: is no GGUF file: it starts with {self.data[:4]!r}")
        self.at = 4
        version, num_tensors, num_keys = self.scalar("I"), self.scalar("Q"), self.scalar("Q")
        if version not in (2, 3):
            raise WeightsError(
                f"{self.path}: GGUF version {version} is not supported; known: 2, 3 (little-endian)"
            )
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.string()
            metadata[key] = self.value(self.scalar("I"))
        rows = [self.tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise self.corrupt(f"general.alignment is {alignment!r}")
        start = -(-self.at // alignment) * alignment
        tensors = {
            name: GGUFTensor(name, shape, ggml_type, start + offset)
            for name, shape, ggml_type, offset in rows
        }
        if len(tensors) != num_tensors:
            raise self.corrupt("two tensors have one name")
        return metadata, tensors

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self.string(), self.scalar("I")
        if num_dims > _MAX_DIMS:
            raise self.corrupt(f"tensor {name!r} has {num_dims} dimensions")
        shape = tuple(self.scalar("Q") for _ in range(num_dims))[::-1]
        return name, shape, self.scalar("I"), self.scalar("Q")

    def scalar(self, code: str) -> Any:
        try:
            (value,) = struct.unpack_from("<" + code, self.data, self.at)
        except struct.error as error:
            raise self.corrupt("it ends inside the header") from error
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        length = self.skip_string()
        try:
            return self.data[self.at - length : self.at].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.corrupt("a string is not UTF-8") from error

    def skip_string(self) -> int:
        length: int = self.scalar("Q")
        self.at += length
        if self.at > len(self.data):
            raise self.corrupt("a string is longer than the file")
        return length

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise self.corrupt(f"unknown value type {kind}")
        item, length = self.scalar("I"), self.scalar("Q")
        if item in _SCALARS:
            self.at += length * struct.calcsize("<" + _SCALARS[item])
            if self.at > len(self.data):
                raise self.corrupt("an array is longer than the file")
        elif item == _STRING:
            for _ in range(length):
                self.skip_string()
        else:
            raise self.corrupt(f"an array of value type {item}")
        return GGUFArray(length)

    def corrupt(self, what: str) -> WeightsError:
        return WeightsError(
            f"{self.path}: is a corrupt or truncated GGUF file: {what} "
            f"(near byte {self.at} of {len(self.data)}); download it again"
        )
