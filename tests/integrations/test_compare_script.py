"""bench/compare_transformers.py on a toy: what it measures comes out as a result file."""

import importlib.util
from pathlib import Path

import pytest
import torch

from octavo.bench.report import read_result

SCRIPT = Path(__file__).parents[2] / "bench" / "compare_transformers.py"


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("compare_transformers", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    small = dict(module.CONFIGS["toy"], num_hidden_layers=1)
    monkeypatch.setitem(module.CONFIGS, "toy", small)
    monkeypatch.setitem(module.SIZES, "toy", (module.WorkloadShape().scaled(0.01), 4, (2, 16), 64))
    return module


def test_rows_beside_their_peers(script, tmp_path):
    path = tmp_path / "transformers.json"
    script.main(["--model", "toy", "--rounds", "1", "--sequences", "3", "--json", str(path)])
    rows = {row["name"]: row for row in read_result(path)["rows"]}
    assert list(rows) == [
        "transformers/generate/toy b1 128+4",
        "transformers/generate/toy b2 16+32 left-padded",
        "transformers/prefill/toy 1x64",
        "transformers/continuous/toy 3 sequences",
    ]
    assert [list(row["peers"]) for row in rows.values()] == [["sdpa"]] * 3 + [["sdpa_paged"]]
    assert "block table 2" in rows["transformers/continuous/toy 3 sequences"]["details"]["octavo"]


def test_wrong_logits_are_not_timed(script, monkeypatch, tmp_path):
    from octavo.integrations.transformers import dense

    before = dense.attend
    monkeypatch.setattr(dense, "attend", lambda *args: before(*args) + 1)
    with pytest.raises(SystemExit, match="nothing is timed"):
        script.main(["--model", "toy", "--json", str(tmp_path / "none.json")])
    assert not list(tmp_path.iterdir())
    assert torch.is_grad_enabled()
