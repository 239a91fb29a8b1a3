"""The Chrome trace of steps: spans that lie where they belong, on the host and on the device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import saved, tiny_hf_model

from octavo.config import EngineConfig
from octavo.engine.build import build_engine
from octavo.engine.device_profile import DeviceProfile
from octavo.engine.profile import StepProfile
from octavo.engine.sampler import PendingSample, SamplerOutput
from octavo.errors import ConfigError
from octavo.models.registry import load_model
from octavo.sampling_params import SamplingParams


def events_in(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())
    return events


def test_every_step_is_told_part_by_part(tmp_path: Path) -> None:
    loaded = load_model(saved(tiny_hf_model("llama"), tmp_path / "model"), dtype="float32")
    path = tmp_path / "profile.json"
    engine = build_engine(EngineConfig(model="m", num_blocks=16, overlap=True, profile=path), loaded, None)
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True))
    while engine.has_work:
        engine.step()
    engine.close()
    events = events_in(path)
    assert [(e["tid"], e["args"]["name"]) for e in events if e["ph"] == "M"] == [(1, "host"), (2, "device")]
    spans = [e for e in events if e["ph"] == "X"]
    counts = {name: sum(e["name"] == name for e in spans) for name in {e["name"] for e in spans}}
    parts = ("launch", "advance", "wait for tokens", "commit", "output")
    assert counts == {
        "schedule": counts["schedule"],
        **dict.fromkeys((*parts, "build and upload", "model", "logits and sampling"), 5),
    }
    for launch in (e for e in spans if e["name"] == "launch"):
        inner = [
            e
            for e in spans
            if e["name"] in ("build and upload", "model", "logits and sampling")
            and launch["ts"] <= e["ts"]
            and e["ts"] + e["dur"] <= launch["ts"] + launch["dur"] + 0.01
        ]
        assert len(inner) == 3


class Event:
    """An event of a device whose clock runs twice as slow and began at another time."""

    now = 100.0

    def record(self) -> None:
        Event.now += 4.0
        self.at = Event.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at


def test_spans_of_the_device_are_told_by_the_clock_of_the_host(tmp_path: Path) -> None:
    ticks = iter([10.0, 11.0])
    path = tmp_path / "profile.json"
    profile = StepProfile(path, clock=lambda: next(ticks))
    device = DeviceProfile(profile, Event)
    output = SamplerOutput([1], [None], {})
    steps = [device.around(lambda: PendingSample(torch.empty(0), lambda: output)) for _ in range(2)]
    assert [step.collect() for step in steps] == [output] * 2
    profile.close()
    spans = [e for e in events_in(path) if e["ph"] == "X"]
    assert [(e["name"], e["tid"]) for e in spans] == [("step", 2)] * 2
    assert [e["ts"] for e in spans] == pytest.approx([1_004_000, 1_012_000])
    assert [e["dur"] for e in spans] == pytest.approx([4000, 4000])


def test_a_profile_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"profile: cannot write .*No such file or directory"):
        StepProfile(tmp_path / "no" / "where.json")
    with pytest.raises(ConfigError, match="profile must be the path of a file to write, got ''"):
        EngineConfig(model="m", profile="")


def test_a_full_disk_ends_the_profile_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    profile = StepProfile("/dev/full")
    for _ in range(1000):
        with profile.span("part"):
            pass
    profile.close()
    assert [record.getMessage() for record in caplog.records] == [
        "the profile ends here, it cannot be written: No space left on device"
    ]
