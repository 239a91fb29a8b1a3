"""bench/compare_transformers.py on a toy: what it measures comes out as a result file."""

import importlib.util
from pathlib import Path

import pytest
import torch

from octavo.bench import report
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


ROWS = [
    "transformers/generate/toy b1 128+4",
    "transformers/generate/toy b2 16+32 left-padded",
    "transformers/prefill/toy 1x64",
    "transformers/continuous/toy 3 sequences",
]
BOTH = [name for row in ROWS for name in (row, f"{row}, fused")]


def test_rows_beside_their_peers(script, tmp_path):
    path = tmp_path / "transformers.json"
    script.main(["--rounds", "1", "--sequences", "3", "--json", str(path)])
    result = read_result(path)
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == BOTH
    assert [list(row["peers"]) for row in rows.values()] == [["sdpa"]] * 6 + [["sdpa_paged"]] * 2
    for plain, fused in zip(BOTH[::2], BOTH[1::2], strict=True):
        assert rows[plain]["peers"] == rows[fused]["peers"]
        assert rows[plain]["value"] != rows[fused]["value"]
    for name, contestant in zip(BOTH[6:], ("octavo", "octavo fused"), strict=True):
        assert list(rows[name]["details"]) == [contestant, "sdpa_paged"]
        assert "block table 2" in rows[name]["details"][contestant]
    assert result["failed"] == {}
    assert result["command"] == (
        "python bench/compare_transformers.py --model toy --tasks generate,wide,prefill,static,continuous "
        "--rounds 1 --sequences 3 --peer-passes 1 --peer-limit 300"
    )


def test_tasks_one_by_one_and_a_peer_that_does_not_end_in_time(script, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(report, "commit", lambda: "0123")  # somebody may edit the checkout meanwhile
    path = tmp_path / "transformers.json"
    same = ("--rounds", "1", "--sequences", "3", "--json", str(path), "--append")
    script.main(["--tasks", "continuous", "--peer-limit", "0", *same])
    result = read_result(path)
    assert [(row["name"], row["peers"]) for row in result["rows"]] == [(name, {}) for name in BOTH[6:]]
    assert result["rows"][0]["value"] > 0
    late = "RuntimeError: 0 of 3 answers, pass 1 of 1, in 0 s"
    assert result["failed"] == {f"{ROWS[3]}, sdpa_paged": late}

    def broken(*arguments, **options):
        raise torch.OutOfMemoryError("no memory\nfor it")

    monkeypatch.setitem(script.integration.transformers.AttentionInterface._global_mapping, "sdpa", broken)
    monkeypatch.setattr(script, "check", lambda *_: None)
    script.main(["--tasks", "prefill", *same])
    result = read_result(path)
    names = [*BOTH[6:], *BOTH[4:6]]
    assert [(row["name"], row["peers"]) for row in result["rows"]] == [(name, {}) for name in names]
    assert result["failed"] == {
        f"{ROWS[3]}, sdpa_paged": late,
        f"{ROWS[2]}, sdpa": "OutOfMemoryError: no memory",
    }
    assert len(result["command"].split("; ")) == 2

    path.write_text(path.read_text().replace(result["commit"], "f00"))
    with pytest.raises(SystemExit):
        script.main(["--tasks", "prefill", *same])
    assert "it is of commit 'f00'" in capsys.readouterr().err


def test_no_round_at_all_is_refused(script, capsys):
    with pytest.raises(SystemExit):
        script.main(["--rounds", "0"])
    assert "--rounds must be at least 1, got 0" in capsys.readouterr().err


def test_ours_failing_is_no_row(script, monkeypatch, tmp_path):
    monkeypatch.setattr(script, "ms_per_token", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        script.main(["--tasks", "generate", "--json", str(tmp_path / "none.json")])
    assert not list(tmp_path.iterdir())


def test_wrong_logits_are_not_timed(script, monkeypatch, tmp_path):
    from octavo.integrations.transformers import dense

    before = dense.attend
    monkeypatch.setattr(dense, "attend", lambda *args: before(*args) + 1)
    with pytest.raises(SystemExit, match=r"wrong logits \(octavo, prompts\): nothing is timed"):
        script.main(["--model", "toy", "--json", str(tmp_path / "none.json")])
    assert not list(tmp_path.iterdir())
    assert torch.is_grad_enabled()


def test_wrong_logits_of_the_fused_model_are_not_timed_either(script, monkeypatch, tmp_path):
    from octavo.integrations.transformers import fused, fusing

    before = fused.silu_and_mul
    monkeypatch.setattr(fused, "silu_and_mul", lambda *args: before(*args) + 1)
    monkeypatch.setattr(fusing, "_is_close", lambda *_: True)
    with pytest.raises(SystemExit, match=r"wrong logits \(octavo fused, prompts\): nothing is timed"):
        script.main(["--model", "toy", "--json", str(tmp_path / "none.json")])
    assert not list(tmp_path.iterdir())


def test_a_model_that_is_fused_in_part_is_not_timed_as_fused(script, monkeypatch, tmp_path):
    from octavo.integrations.transformers import fusing

    monkeypatch.setattr(fusing, "_is_close", lambda *_: False)
    with pytest.raises(
        SystemExit, match=r"not the whole model is fused: 0 norms.*left alone: 5 Qwen3RMSNorm"
    ):
        script.main(["--model", "toy", "--json", str(tmp_path / "none.json")])
    assert not list(tmp_path.iterdir())
