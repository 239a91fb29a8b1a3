"""Which variant wins, what is written, and that the kernels then find it. No GPU: times are made up."""

import json
import math
import re

import pytest
import torch

from octavo.bench import tune as bench_tune
from octavo.bench.timing import GpuTime
from octavo.bench.tune import space_of, tune, tune_one, write
from octavo.errors import ConfigError
from octavo.kernels.triton import tuning
from octavo.kernels.triton.tuning import Tuning

DEFAULT = {"BLOCK": 64, "num_warps": 4}
FAST, SLOW, BROKEN = (
    {"BLOCK": 128, "num_warps": 4},
    {"BLOCK": 32, "num_warps": 4},
    {"BLOCK": 0, "num_warps": 4},
)


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """A call returns its own time."""
    monkeypatch.setattr(bench_tune, "gpu_time", lambda calls, *_, **__: GpuTime(calls[0](), 0, 0, True))


def kernel(times, *cases):
    """`times`: (block, case name) -> us; what is missing raises."""

    def run(case, parameters):
        us = times[parameters["BLOCK"], case["name"]]
        return lambda: us

    return Tuning("decode", [FAST, SLOW, BROKEN], list(cases), run)


def case(name, key="G2"):
    return {"key": key, "default": DEFAULT, "name": name}


def test_the_fastest_wins_and_what_does_not_run_is_passed_over():
    said = []
    one = kernel({(64, "a"): 10.0, (128, "a"): 7.0, (32, "a"): 20.0}, case("a"))
    assert dict(tune_one(one, said.append)) == {"G2": {"parameters": FAST, "us": 7.0, "default_us": 10.0}}
    assert said == ["decode G2: 7.00 us, default 10.00 us; BLOCK=128 num_warps=4"]


def test_a_gain_within_the_noise_keeps_the_default():
    one = kernel({(64, "a"): 10.0, (128, "a"): 9.9}, case("a"))
    assert dict(tune_one(one, print))["G2"]["parameters"] == DEFAULT


def test_cases_of_one_key_are_decided_together_and_keys_apart():
    times = {
        (64, "a"): 10.0,
        (128, "a"): 5.0,
        (64, "b"): 10.0,
        (128, "b"): 40.0,
        (64, "c"): 10.0,
        (128, "c"): 5.0,
    }
    found = dict(tune_one(kernel(times, case("a"), case("b"), case("c", "G4")), print))
    assert found["G2"]["parameters"] == DEFAULT  # twice as fast on one, four times as slow on the other
    assert found["G4"]["parameters"] == FAST


def test_only_the_keys_that_are_asked_for():
    times = {(64, "a"): 10.0, (64, "b"): 10.0}
    one = kernel(times, case("a", "G2 bs16"), case("b", "G2 bs64"))
    assert [key for key, _ in tune_one(one, print, ["*bs64", "G9*"])] == ["G2 bs64"]
    assert bench_tune.wanted_keys(one, []) == ["G2 bs16", "G2 bs64"]


def test_a_kernel_that_runs_nowhere_gets_no_entry():
    said = []
    assert list(tune_one(kernel({}, case("a")), said.append)) == []
    assert said == ["decode G2: nothing runs, not even the default"]


def test_a_default_that_does_not_run_here_can_be_beaten():
    found = dict(tune_one(kernel({(128, "a"): 7.0}, case("a")), print))
    assert found["G2"] == {"parameters": FAST, "us": 7.0, "default_us": None}


def test_the_default_comes_first_and_once():
    one = Tuning("decode", [FAST, DEFAULT], [], lambda case, parameters: list)
    assert space_of(one, case("a")) == [DEFAULT, FAST]
    assert space_of(one, {**case("a"), "space": [SLOW]}) == [DEFAULT, SLOW]


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A machine with a GPU whose tables lie in an empty folder."""
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "A GPU")
    monkeypatch.setattr(bench_tune.room, "unfit_reason", lambda device_type: None)
    monkeypatch.setattr(bench_tune, "compile_all", lambda modules, say, keys: None)
    tuning.forget()
    yield tmp_path
    tuning.forget()


def test_the_kernels_find_the_table_that_was_written(gpu, monkeypatch):
    one = kernel({(64, "a"): 10.0, (128, "a"): 7.0}, case("a"))
    other = Tuning("prefill", [], [case("a", "G9")], lambda case, parameters: lambda: 3.0)
    monkeypatch.setattr(bench_tune, "tunings", lambda: {"decode": ("m", one), "prefill": ("m", other)})
    device = torch.device("cuda", 0)
    assert tuning.parameters("decode", device, "G2", DEFAULT) == DEFAULT
    path = tune(["decode"], None, print)
    assert tuning.parameters("decode", device, "G2", DEFAULT) == FAST
    tune(["prefill"], None, print)
    assert set(json.loads(path.read_text())["kernels"]) == {"decode", "prefill"}  # the first entry is kept
    with pytest.raises(ConfigError, match=r"--kernel: 'decod' is none of decode, prefill \(did you mean"):
        tune(["decod"], None, print)


@pytest.fixture
def one_kernel(gpu, monkeypatch):
    """The one kernel there is to tune; times it was run."""
    ran = []

    def run(case, parameters):
        ran.append(case["key"])
        return lambda: float(parameters["BLOCK"])

    one = Tuning("decode", [SLOW], [case("a", "G2 bs16"), case("b", "G4 bs64")], run)
    monkeypatch.setattr(bench_tune, "tunings", lambda: {"decode": ("m", one)})
    return ran


def test_a_pattern_that_matches_nothing_is_refused_by_name(one_kernel, tmp_path):
    message = (
        "--key: 'G2 bs15' matches none of the 2 shape classes, such as 'G2 bs16' (did you mean 'G2 bs16'?)"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        tune([], tmp_path / "table.json", print, ["*bs64", "G2 bs15"])
    assert (one_kernel, list(tmp_path.iterdir())) == ([], [])


@pytest.mark.parametrize(
    "content",
    [
        '{"kernels": {"decode": {"G2"',
        "",
        "\x00\xff",
        "[]",
        '{"rows": []}',
        '{"kernels": {"decode": {"G2": 3}}}',
    ],
)
def test_a_file_that_is_no_table_is_refused_and_kept(one_kernel, tmp_path, content):
    path = tmp_path / "table.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(
        ConfigError, match=r"table\.json' cannot be added to: .* name another file with --out"
    ):
        tune([], path, print)
    assert path.read_text(encoding="latin-1") == content
    assert one_kernel == []


@pytest.mark.parametrize("where", ["folder", "file/table.json", "/dev/null"])
def test_a_place_that_takes_no_file_is_refused_before_the_run(one_kernel, tmp_path, where):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"no table can be written to .* name another file with --out"):
        tune([], tmp_path / where, print)
    assert one_kernel == []


def test_the_kernels_own_folder_must_be_writable(one_kernel, monkeypatch):
    monkeypatch.setattr(bench_tune.os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="no table can be written"):
        tune([], None, print)
    assert one_kernel == []


def test_what_another_run_added_meanwhile_is_kept(one_kernel, tmp_path):
    path = tmp_path / "table.json"
    entry = {"parameters": FAST, "us": 7.0, "default_us": 10.0}

    def other_run(text):
        if text.startswith("decode G4"):
            write(path, tuning.read(path) | {"prefill": {"G9": entry}})

    tune([], path, other_run)
    table = tuning.read(path)
    assert table["prefill"] == {"G9": entry}
    assert set(table["decode"]) == {"G2 bs16", "G4 bs64"}


def test_a_write_that_fails_leaves_the_table_as_it_was(gpu, monkeypatch, tmp_path):
    path = tmp_path / "table.json"
    entry = {"parameters": FAST, "us": 7.0, "default_us": 10.0}
    write(path, {"decode": {"G2": entry}})

    def fails(self, text, **_):
        with open(self, "w") as file:
            file.write(text[:20])
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(type(path), "write_text", fails)
        with pytest.raises(OSError, match="the disk is full"):
            write(path, {"decode": {"G2": entry, "G4": entry}})
    assert tuning.read(path) == {"decode": {"G2": entry}}
    assert list(tmp_path.iterdir()) == [path]


def test_a_table_has_a_line_for_each_key(gpu, tmp_path):
    entry = {"parameters": FAST, "us": 7.0, "default_us": 10.0}
    path = tmp_path / "folder" / "table.json"
    write(path, {"decode": {"G4": entry, "G2": entry}})
    lines = path.read_text().splitlines()
    assert '   "G2": {"parameters": {"BLOCK": 128, "num_warps": 4}, "us": 7.0, "default_us": 10.0},' in lines
    assert json.loads(path.read_text())["gpu"] == "A GPU"


def test_every_tuning_of_the_package_is_complete():
    pytest.importorskip("triton")
    for name, (module, one) in bench_tune.tunings().items():
        assert one.name == name
        assert module.startswith("octavo.kernels.triton.")
        assert one.cases
        for case in one.cases:
            assert isinstance(case["key"], str)
            for parameters in space_of(one, case):
                assert set(parameters) == set(case["default"]), (name, case["key"])
                assert all(math.isfinite(value) for value in parameters.values())


def test_without_a_gpu_it_refuses(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="needs a GPU"):
        tune([], None, print)
