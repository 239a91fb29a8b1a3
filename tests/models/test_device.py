from __future__ import annotations

import threading

import pytest
import torch

from octavo.errors import ConfigError
from octavo.models.device import _use, resolve_device


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was begun beside the rest of loading."""
    found: list[str] = []
    monkeypatch.setattr("octavo.models.device.hashing_of_triton", lambda: found.append("hashing"))
    monkeypatch.setattr("octavo.models.device._use", lambda device: found.append(f"use of {device}"))
    return found


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, begun: list[str]) -> None:
    """A machine whose second GPU is the current one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr("octavo.models.device.unfit_reason", lambda device_type: None)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("gpu")
def test_with_a_gpu() -> None:
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda", 1)
    assert resolve_device("cpu") == torch.device("cpu")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("device", "is_gpu"), [("auto", True), ("cuda", True), ("cpu", False)])
def test_a_gpu_is_used_and_triton_hashes_itself_while_the_weights_load(
    device: str, is_gpu: bool, begun: list[str]
) -> None:
    resolve_device(device)
    for thread in threading.enumerate():
        if thread.name == "first use of the GPU":
            thread.join()
    assert begun == (["hashing", "use of cuda:1"] if is_gpu else [])


def test_a_gpu_that_cannot_be_used_is_left_to_whoever_uses_it_next(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def zeros(*_: object, **options: object) -> torch.Tensor:
        asked.append(options["device"])
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch, "zeros", zeros)
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    thread = threading.Thread(target=_use, args=(torch.device("cuda", 1),))
    thread.start()
    thread.join()
    assert asked == [torch.device("cuda", 1)]
    assert raised == []


@pytest.mark.usefixtures("gpu")
def test_auto_takes_the_cpu_where_the_gpu_would_have_plain_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        "octavo.models.device.unfit_reason", lambda device_type: f"no Triton for {device_type}"
    )
    assert resolve_device("auto") == torch.device("cpu")
    assert "device='auto' takes the CPU: no Triton for cuda." in caplog.text
    caplog.clear()
    assert resolve_device("cuda") == torch.device("cuda", 1)
    assert not caplog.records


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu() -> None:
    assert resolve_device("auto") == resolve_device("cpu") == torch.device("cpu")


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("cuda", "reason"),
    [
        (None, "is built for the CPU alone; install a build for your GPU"),
        ("13.0", "finds no GPU; check that"),
    ],
)
def test_a_gpu_that_is_not_there_is_named_with_the_way_out(
    cuda: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    message = f"device='cuda' was asked for, and torch .* {reason}.*, or pass device='cpu'"
    with pytest.raises(ConfigError, match=message):
        resolve_device("cuda")


def test_an_unknown_device_is_named() -> None:
    with pytest.raises(ConfigError, match="device must be one of 'auto', 'cpu', 'cuda'; got 'gpu'"):
        resolve_device("gpu")
