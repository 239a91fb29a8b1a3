from __future__ import annotations

import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader
from helpers.tokenizers_by_hand import smollm2_path, write_gguf

from octavo.errors import ModelError, WeightsError
from octavo.gguf_file import GGUFArray, GGUFFile

EVERYTHING: dict[str, Any] = {
    "a.bool": True,
    "a.int": 7,
    "a.float": 0.5,
    "a.text": "grüße",
    "a.ints": [1, -2, 3],
    "a.floats": [0.25, -1.0],
    "a.flags": [True, False],
    "a.words": ["x", "", "中文"],  # last, so that a cut file can end within a string of a list
}


def metadata(path: Path, prefix: str = "") -> dict[str, Any]:
    with GGUFFile(path) as file:
        return file.values(prefix)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", EVERYTHING)


def test_every_kind_of_value_comes_back(file: Path) -> None:
    assert metadata(file) == {"general.architecture": "llama", **EVERYTHING}


def test_arrays_are_stepped_over_until_they_are_asked_for(file: Path) -> None:
    assert metadata(file, "a.f") == {key: EVERYTHING[key] for key in ("a.float", "a.floats", "a.flags")}
    with GGUFFile(file) as opened:
        arrays = {key: value for key, value in opened.metadata.items() if isinstance(value, GGUFArray)}
        assert {key: array.length for key, array in arrays.items()} == {
            key: len(value) for key, value in EVERYTHING.items() if isinstance(value, list)
        }
        assert {key: value for key, value in opened.metadata.items() if key not in arrays} == {
            key: value for key, value in metadata(file).items() if not isinstance(value, list)
        }


def test_reads_of_several_threads_do_not_mix(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", {"a": 1})
    start = path.stat().st_size
    with path.open("ab") as file:
        file.write(struct.pack("<20000I", *range(20_000)))
    with GGUFFile(path) as opened, ThreadPoolExecutor(8) as pool:
        pieces = pool.map(lambda i: opened.read(start + 4 * i, 4), range(20_000))
        assert [int.from_bytes(piece, "little") for piece in pieces] == list(range(20_000))
        with pytest.raises(WeightsError, match=f"is truncated: it ends before byte {start + 80_001}"):
            opened.read(start + 79_999, 2)


def test_every_fixed_width_type(tmp_path: Path) -> None:
    values: dict[int, tuple[str, Any]] = {
        0: ("B", 200),
        1: ("b", -3),
        2: ("H", 60000),
        3: ("h", -300),
        4: ("I", 1 << 31),
        5: ("i", -(1 << 30)),
    }
    values |= {6: ("f", 0.5), 7: ("?", True), 10: ("Q", 1 << 40), 11: ("q", -(1 << 40)), 12: ("d", 0.1)}
    data = b"GGUF" + struct.pack("<IQQ", 2, 0, 2 * len(values))
    for kind, (code, value) in values.items():
        key = f"k{kind}".encode()
        data += struct.pack("<Q", len(key)) + key + struct.pack(f"<I{code}", kind, value)
        data += struct.pack("<Q", len(key)) + key.upper() + struct.pack(f"<IIQ2{code}", 9, kind, 2, value, 0)
    path = tmp_path / "types.gguf"
    path.write_bytes(data)
    scalars = {f"k{kind}": value for kind, (_, value) in values.items()}
    assert metadata(path) == scalars | {f"K{kind}": [value, 0] for kind, (_, value) in values.items()}


def test_a_file_cut_anywhere_is_an_error(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in range(len(whole)):
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError if length < 4 else WeightsError, match=str(cut)):
            metadata(cut)


def test_absurd_lengths_are_corruption_not_memory(tmp_path: Path) -> None:
    path = tmp_path / "absurd.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k"
    for tail in (
        struct.pack("<IQ", 8, 1 << 62),  # a string
        struct.pack("<IIQ", 9, 4, 1 << 62),  # an array of uint32
        struct.pack("<IIQQ", 9, 8, 1 << 62, 1 << 62),  # an array of strings
        struct.pack("<IQ", 13, 0),  # an unknown type
        struct.pack("<IIQ", 9, 9, 1),  # an array of arrays
    ):
        path.write_bytes(head + tail)
        with pytest.raises(WeightsError, match="truncated or corrupt"):
            metadata(path)


def test_text_that_is_not_utf8_is_corruption(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Qc", 1, b"k")
    path.write_bytes(head + struct.pack("<IQ", 8, 1) + b"\xff")
    with pytest.raises(WeightsError, match="truncated or corrupt"):
        GGUFFile(path)
    path.write_bytes(head + struct.pack("<IIQQQ", 9, 8, 2, 0, 1) + b"\xff")
    with pytest.raises(WeightsError, match=r"truncated or corrupt .* item 1 of k is not UTF-8"):
        metadata(path)


def test_other_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(ModelError, match="not a GGUF file"):
        metadata(path)
    path.write_bytes(b"GGUF" + struct.pack("<I", 1) + b"\0" * 16)
    with pytest.raises(ModelError, match="GGUF version 1 is not supported"):
        metadata(path)
    with pytest.raises(ModelError, match=r"missing\.gguf: cannot be read \(No such file"):
        metadata(tmp_path / "missing.gguf")


def test_the_real_file_reads_as_the_gguf_package_reads_it_and_faster() -> None:
    started = time.process_time()
    ours = metadata(smollm2_path())
    ours_s = time.process_time() - started
    started = time.process_time()
    reader = GGUFReader(smollm2_path())
    theirs_s = time.process_time() - started
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert ours.keys() == fields.keys()
    for key, field in fields.items():
        if len(field.data) < 1000:
            assert ours[key] == field.contents()
        else:  # their strings cost 0.1 ms each, so a sample of the vocabulary
            assert len(ours[key]) == len(field.data)
            assert all(ours[key][i] == field.contents(i) for i in range(0, len(field.data), 97))
    assert ours_s < theirs_s / 3
