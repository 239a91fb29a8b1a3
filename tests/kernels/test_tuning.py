"""Launch parameters: from this GPU's table where it has some, else the kernel's default."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from octavo.kernels.triton import tuning

GPU = torch.device("cuda", 0)
DEFAULT = {"BLOCK_N": 64, "num_warps": 4}


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A table for a GPU that this machine is made to have."""
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200 (test)")
    tuning.forget()
    entries = {"decode": {"G2 D128": {"parameters": {"BLOCK_N": 128, "num_warps": 8}, "us": 1.0}}}
    path = tmp_path / "nvidia-h200-test.json"
    path.write_text(json.dumps({"gpu": "NVIDIA H200 (test)", "kernels": entries}))
    yield path
    tuning.forget()


def test_the_table_of_this_gpu_is_found_by_its_name(table: Path) -> None:
    assert tuning.table_path(GPU) == table
    assert tuning.parameters("decode", GPU, "G2 D128", DEFAULT) == {"BLOCK_N": 128, "num_warps": 8}


@pytest.mark.parametrize(("kernel", "key"), [("decode", "G4 D128"), ("prefill", "G2 D128")])
def test_what_it_does_not_hold_is_the_default(table: Path, kernel: str, key: str) -> None:
    assert tuning.parameters(kernel, GPU, key, DEFAULT) == DEFAULT


def test_a_table_of_an_older_kernel_adds_nothing_and_lacks_nothing(table: Path) -> None:
    newer = {"BLOCK_N": 64, "num_stages": 3}
    assert tuning.parameters("decode", GPU, "G2 D128", newer) == {"BLOCK_N": 128, "num_stages": 3}


def test_the_file_is_read_once(table: Path) -> None:
    first = tuning.parameters("decode", GPU, "G2 D128", DEFAULT)
    table.unlink()
    assert tuning.parameters("decode", GPU, "G2 D128", DEFAULT) is first
    assert tuning.parameters("decode", GPU, "G4 D128", DEFAULT) == DEFAULT
    tuning.forget()
    assert tuning.parameters("decode", GPU, "G2 D128", DEFAULT) == DEFAULT


@pytest.mark.parametrize(
    "content",
    [
        '{"kernels": {"decode": {"G2',
        "",
        "[]",
        '{"gpu": "x"}',
        '{"kernels": {"decode": []}}',
        '{"kernels": {"decode": {"G2 D128": {"parameters": {"BLOCK_N": "64"}}}}}',
    ],
)
def test_a_file_that_is_no_table_is_passed_over_with_one_warning(
    table: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    table.write_text(content)
    for device in (GPU, torch.device("cuda", 1)):
        for key in ("G2 D128", "G4 D128"):
            assert tuning.parameters("decode", device, key, DEFAULT) == DEFAULT
    (record,) = caplog.records
    assert record.name == "octavo"
    assert record.getMessage().startswith(f"{table} is passed over")
    assert "octavo bench tune makes another" in record.getMessage()


def test_the_cpu_has_no_table() -> None:
    assert tuning.table_path(torch.device("cpu")) is None
    assert tuning.parameters("decode", torch.device("cpu"), "any", DEFAULT) == DEFAULT


def test_every_table_in_the_package_has_the_shape() -> None:
    for path in tuning.FOLDER.glob("*.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        assert set(content) == {"gpu", "commit", "date", "versions", "kernels"}, path
        for entries in content["kernels"].values():
            for key, entry in entries.items():
                assert set(entry) == {"parameters", "us", "default_us"}, (path, key)
                assert all(type(value) is int for value in entry["parameters"].values())
