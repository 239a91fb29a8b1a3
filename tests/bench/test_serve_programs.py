"""What HTTP and the front cost, in seconds and on a tiny model: that the programs measure what they say."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.tiny_model import write_model_folder

from octavo.bench.report import read_result
from octavo.bench.serve import Answer, Load

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model_folder(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=4096)


def run(program, path, *arguments):
    command = (sys.executable, ROOT / "bench" / program, *arguments, "--json", path)
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    rows = {row["name"]: row for row in read_result(path)["rows"]} if path.exists() else {}
    assert rows, done.stdout + done.stderr
    return done, rows


def test_the_cost_of_http(folder, tmp_path):
    engine = [f"--engine={option}" for option in ("load_format=dummy", "num_threads=1", "num_blocks=256")]
    lens = ("--input-len", "8", "--output-len", "uniform:8:24", "--max-token-id", "255")
    done, rows = run(
        "serve_cost.py", tmp_path / "r.json", folder, "--num-seqs", "2", "--rounds", "1", "--clients", "3",
        *lens, *engine
    )  # fmt: skip
    share = rows["through HTTP, of the offline engine"]
    assert share["floor"] == 90
    # A step of this model costs next to nothing, so that HTTP's share is large; the bound is for real ones.
    assert done.returncode == (share["value"] < 90)
    output = rows["through HTTP, output"]
    assert output["value"] > 0
    assert output["peers"]["offline"] > 0
    assert sorted(share["details"]) == ["pair 1"]
    assert "warm-up: offline" in done.stdout
    assert "2 calls in" in done.stdout  # of two clients; the third has nothing to send
    assert ", 2 connections" in done.stdout


def test_clients_beside_each_other_are_one_run(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from serve_cost import joined

    first = Load([Answer(0.0, end_s=3.0)], elapsed_s=3.0, cpu_s=0.5, num_connections=2, started=100.0)
    second = Load([Answer(0.0, end_s=4.0)], elapsed_s=4.0, cpu_s=0.9, num_connections=3, started=100.5)
    run = joined([first, second])
    assert run.answers == [*first.answers, *second.answers]
    assert (run.started, run.elapsed_s) == (100.0, 4.5)  # from the first start to the last end
    assert (run.cpu_s, run.num_connections) == (0.9, 5)


def test_what_the_front_passes_on(folder, tmp_path):
    options = ("--streams", "8", "--num-tokens", "300", "--rounds", "1", "--model", folder)
    done, rows = run("serve_flood.py", tmp_path / "r.json", *options)
    assert done.returncode == 0
    assert rows["through the front"]["value"] > 0
    # A front that is behind joins; at the least its chunk with a role and the one at the end are no tokens.
    assert rows["tokens an event"]["value"] > 1
    assert rows["a token, the front's processor time"]["value"] > 0


def test_what_the_front_adds(folder, tmp_path):
    options = (
        "--streams",
        "8",
        "--interval",
        "0.02",
        "--num-tokens",
        "40",
        "--rounds",
        "1",
        "--settle",
        "0.1",
    )
    done, rows = run("serve_front.py", tmp_path / "r.json", "--model", folder, *options)
    for how in ("together", "apart"):
        for percentile in ("p50", "p99"):
            row = rows[f"added by the front, tokens {how}, {percentile}"]
            through, without = row["details"]["through the front, ms"], row["details"]["without, ms"]
            assert row["value"] == pytest.approx(through - without, abs=0.01)
            assert without > 0
            # Are the stamps read, not how fast is this machine.
            assert 0 < through < 30_000
    p99 = [rows[f"added by the front, tokens {how}, p99"] for how in ("together", "apart")]
    assert done.returncode == any(row["value"] > row["floor"] for row in p99)
