"""The soak of bench/serve_soak.py in seconds, on a tiny model; and that its checks can fail."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.tiny_model import write_model_folder

from octavo.bench.report import read_result

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def soak():
    path = ROOT / "bench" / "serve_soak.py"
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location("serve_soak", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look themselves up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]
    sys.path.remove(str(path.parent))


def test_nothing_is_lost_and_nothing_grows(tmp_path):
    folder = write_model_folder(tmp_path / "tiny", max_position_embeddings=4096)
    path = tmp_path / "soak.json"
    command = [
        sys.executable, ROOT / "bench" / "serve_soak.py", folder, "--clients", "16", "--seconds", "4",
        "--drop-share", "0.3", "--output-len", "uniform:8:120", "--json", path, "--",
        "--load-format", "dummy", "--num-threads", "1", "--num-blocks", "512",
    ]  # fmt: skip
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert path.exists(), done.stdout + done.stderr
    rows = {row["name"]: row for row in read_result(path)["rows"]}
    bounded = [row for row in rows.values() if row["floor"] is not None]
    assert done.returncode == any(row["value"] > row["floor"] for row in bounded)
    assert "the server's exit status: 0" in done.stdout
    assert rows["calls"]["value"] >= 16
    assert 0 < rows["dropped by clients"]["value"] < rows["calls"]["value"]
    assert 0 < rows["aborted in the engine"]["value"] <= rows["dropped by clients"]["value"]
    for name in ("failed", "blocks not free at the end", "/health, failed", "errors in the log"):
        assert (rows[name]["value"], rows[name]["floor"]) == (0, 0)
    # How long at most is a question for the program, on a machine that does nothing else.
    assert rows["/health, slowest"]["value"] >= rows["/health, median"]["value"] > 0


@pytest.mark.parametrize(
    ("samples", "is_flat"),
    [
        ([100.0] * 50, True),
        ([100.0 + 0.1 * i for i in range(50)], True),  # 3 MiB between the second fifth and the last
        ([100.0 + 0.5 * i for i in range(50)], False),
        ([50.0 * min(i, 8) for i in range(50)], True),  # it grows at the start only
        ([2000.0 + i for i in range(50)], True),  # 30 of 2000 MiB
        ([7.0], True),
    ],
)
def test_what_counts_as_flat(soak, samples, is_flat):
    growth, bound = soak.growth_mib(samples)
    assert (growth <= bound) is is_flat
