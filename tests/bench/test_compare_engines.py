"""bench/compare_engines.py with engines that a script plays, so that figures are known; once with Octavo."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.tiny_model import write_model_folder

from octavo.bench import report
from octavo.bench.report import read_result

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "bench"

# Speaks the protocol. A pass takes no time; how long it says it took depends on who is asked and for what.
FAKE = """
import json, os, subprocess, sys, time

kind, options = sys.argv[1], json.loads(sys.argv[2])
name = "octavo_fp8" if options["engine"].get("kv_cache_dtype") == "fp8" else kind
plan = json.loads(os.environ.get("PLAN", "{}")).get(name, {})
helper = subprocess.Popen(["sleep", "60"]) if "helper" in plan else None


def note(**what):
    with open(os.environ["NOTES"], "a") as file:
        told = {"name": name, "pids": [os.getpid()] + ([helper.pid] if helper else [])}
        file.write(json.dumps({**told, "path": os.environ.get("PYTHONPATH", ""), **what}) + "\\n")


time.sleep(plan.get("start_s", 0))
if "no start" in plan:
    sys.exit("No module named 'engine'")
facts = {"gpu": "NVIDIA H200, driver 1", "weights_nbytes": 1000} if kind == "octavo" else {"version": "9.9"}
print(json.dumps(facts), flush=True)
for number, line in enumerate(sys.stdin):
    asked = json.loads(line)
    note(number=number, prompts=asked["prompts"], num_new=asked["num_new"], salts=asked["salts"])
    if number == plan.get("die at"):
        print("the last words", file=sys.stderr)
        sys.exit(3)
    if number == plan.get("hang at"):
        time.sleep(60)
    answer = {"seconds": {"octavo": 1, "octavo_fp8": 0.5}.get(name, 2) * (0.5 + 0.01 * max(asked["num_new"]))}
    if asked["salts"]:
        answer["seconds"] *= 4
    if number == plan.get("error at"):
        answer = {"error": "RuntimeError: no memory"}
    print(json.dumps(answer), flush=True)
note(ended=True)
"""


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """`bench(*arguments, plan=...)`: the exit status, the result (None without one), what engines noted."""
    monkeypatch.syspath_prepend(BENCH)
    program = importlib.import_module("compare_engines")
    race = importlib.import_module("engine_race")
    fake = tmp_path / "fake.py"
    fake.write_text(FAKE)
    notes = tmp_path / "notes"
    folder = write_model_folder(tmp_path / "tiny", max_position_embeddings=4096)
    monkeypatch.setattr(race, "PROGRAM", fake)
    monkeypatch.setattr(race, "START_S", {"octavo": 1.0, "vllm": 1.0})
    monkeypatch.setattr(program, "exit_on_sigterm", lambda: None)
    monkeypatch.setenv("NOTES", str(notes))

    def run(*arguments, plan=None):
        notes.write_text("")
        monkeypatch.setenv("PLAN", json.dumps(plan or {}))
        path, run.noted = run.path, []
        status = program.main([str(folder), "--json", str(path), "--scale", "0.02", *arguments])
        run.noted = [json.loads(line) for line in notes.read_text().splitlines()]
        noted = [note for note in run.noted if "number" in note]
        return status, read_result(path) if path.exists() else None, noted

    run.fake, run.notes, run.folder, run.race, run.program = fake, notes, folder, race, program
    run.path = tmp_path / "result.json"
    return run


def rows_of(result):
    return {row["name"]: row for row in result["rows"]}


def is_gone(pid):
    """Whether it has ended; one that nobody has waited for counts."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def test_the_rows_and_their_sizes(bench):
    options = bench.program.parse(["qwen3-0.6b", "--peers", "vllm,nano_vllm"])
    assert options.share == 0.3
    tasks = {task.row: task for task in bench.program.tasks_of("qwen3-0.6b", options)}
    assert list(tasks) == [
        "nano/qwen3-0.6b/bf16",
        "single/qwen3-0.6b",
        "prefill/16x2048/qwen3-0.6b/e2e",
        "prefill/1x8192/qwen3-0.6b/e2e",
        "shared_prefix/64x8192+128/qwen3-0.6b",
        "nano/qwen3-0.6b/fp8",
    ]
    ((nano, passes),) = tasks["nano/qwen3-0.6b/bf16"].works
    assert (len(nano.own_lens), nano.num_input_tokens, nano.num_output_tokens) == (256, 142_827, 133_966)
    assert passes == 2
    assert nano.num_kv_reads * 28 * 2 * 8 * 128 * 2 == pytest.approx(13.9e12, rel=0.01)
    assert [(list(w.own_lens), list(w.num_new), n) for w, n in tasks["single/qwen3-0.6b"].works] == [
        ([128], [256], 5),
        ([128], [1], 7),
    ]
    shared = tasks["shared_prefix/64x8192+128/qwen3-0.6b"]
    assert [(e.label, e.is_salted) for e in shared.entries] == [
        ("octavo", False), ("vllm", False), ("vllm_no_prefix_cache", True),
    ]  # fmt: skip
    ((work, _),) = shared.works
    assert (work.num_input_tokens, work.num_output_tokens) == (64 * 8320, 64 * 128)
    # Without the cache all prompts are computed, with it the prefix once.
    alone, together = (work.expected_s(10**9, shares_prefix=shares) for shares in (False, True))
    assert alone - together == pytest.approx(63 * 8192 * 2e9 / 250e12)


def test_every_row_is_measured_in_turn_and_the_figures_are_those_of_the_engines(bench, tmp_path):
    status, result, noted = bench("--peers", "vllm", "--peer-path", "/of/peers", "--octavo", "block_size=32")
    assert status == 0
    assert result["failed"] == {}
    assert result["versions"]["vllm"] == "9.9"
    assert result["hardware"].startswith("NVIDIA H200, driver 1; ")
    assert result["command"] == (
        "python bench/compare_engines.py tiny --peers vllm "
        "--tasks nano,single,prefill,shared_prefix,fp8,start "
        "--rounds 2 --share 0.45 --scale 0.02 --octavo block_size=32"
    )
    rows = rows_of(result)
    assert list(rows) == [
        "nano/tiny/bf16", "single/tiny", "prefill/1x41/tiny/e2e", "prefill/1x164/tiny/e2e",
        "shared_prefix/1x164+3/tiny", "nano/tiny/fp8", "start/tiny", "start/tiny, no kernels on disk",
    ]  # fmt: skip
    nano = rows["nano/tiny/bf16"]
    asked = [note for note in noted if note["name"] == "octavo"][1]
    seconds = 0.5 + 0.01 * max(asked["num_new"])
    assert nano["value"] == pytest.approx(sum(asked["num_new"]) / seconds, rel=1e-4)
    assert nano["ratio"] == {"vllm": 2.0}
    assert nano["details"]["octavo, passes"] == [pytest.approx(seconds)] * 2
    assert nano["details"]["vllm, spread"] == 0
    assert nano["details"]["bytes allow, tok/s"] > 1e6
    assert rows["single/tiny"]["value"] == pytest.approx(10.0)
    assert rows["single/tiny"]["peers"] == {"vllm": pytest.approx(20.0)}
    assert len(rows["single/tiny"]["details"]["octavo, 5 new tokens"]) == 5
    assert len(rows["single/tiny"]["details"]["octavo, one new token"]) == 7
    prefill = rows["prefill/1x41/tiny/e2e"]
    assert (prefill["value"], prefill["details"]["vllm, tok/s in"]) == (
        pytest.approx(510.0),
        round(41 / 1.02),
    )
    assert rows["shared_prefix/1x164+3/tiny"]["ratio"] == {"vllm": 2.0, "vllm_no_prefix_cache": 8.0}
    assert rows["nano/tiny/fp8"]["ratio"] == {"octavo bf16": 2.0}
    assert 0 < rows["start/tiny"]["value"] < 10
    assert list(rows["start/tiny"]["peers"]) == ["vllm"]

    # In turn: while there are two, nobody has two passes on end but for the two works of `single`.
    both = [note for note in noted[2:] if note["name"] in ("octavo", "vllm")]
    turns = [note["name"] for note in both[: 2 * 3]]
    assert turns == ["octavo", "vllm"] * 3
    # One start of each serves every task; `fp8` comes after the peers have ended.
    assert len({note["pids"][0] for note in noted if note["name"] == "vllm"}) == 1
    told = [(note["name"], "ended" in note) for note in bench.noted]
    assert told.index(("vllm", True)) < told.index(("octavo_fp8", False))
    # Both get the same tokens, and no prompt comes twice (salts apart, and the first token after the start).
    ours, theirs = (
        [tuple(p) for note in noted if note["name"] == name and note["number"] and not note["salts"]
         for p in note["prompts"]]
        for name in ("octavo", "vllm")
    )  # fmt: skip
    assert ours[: len(theirs)] == theirs
    assert len(set(theirs)) == len(theirs)
    salts = [salt for note in noted for salt in note["salts"] or ()]
    assert len(set(salts)) == len(salts) == 3
    assert all(("/of/peers" in note["path"]) == (note["name"] == "vllm") for note in noted)
    assert all(is_gone(pid) for note in noted for pid in note["pids"])


@pytest.mark.parametrize(
    ("plan", "first", "later"),
    [
        (
            "no start",
            "it died (exit status 1): No module named 'engine'",
            "it did not start: ",
        ),
        ("die at", "it died (exit status 3): the last words", "lost before: "),
        ("hang at", "no answer in 4 s", "lost before: "),
        ("error at", "RuntimeError: no memory", None),
    ],
)
def test_a_peer_that_fails_is_told_of_and_the_rest_goes_on(bench, plan, first, later):
    patience = "4" if plan == "hang at" else "120"
    options = ("--peers", f"vllm,other={bench.fake}", "--tasks", "nano,single", "--timeout", patience)
    status, result, noted = bench(*options, plan={"vllm": {plan: 2, "helper": 1}})
    assert status == 0
    rows = rows_of(result)
    expected = {"nano/tiny/bf16, vllm": first}
    if later:
        expected["single/tiny, vllm"] = later + first
    assert result["failed"] == expected
    assert rows["nano/tiny/bf16"]["ratio"] == {"other": 2.0}
    assert rows["single/tiny"]["ratio"] == {"other": 2.0} | ({} if later else {"vllm": 2.0})
    assert all(is_gone(pid) for note in noted for pid in note["pids"])


def test_a_peer_that_dies_takes_its_other_column_along(bench):
    plan = {"vllm": {"die at": 1}}
    status, result, _ = bench("--peers", "vllm", "--tasks", "shared_prefix", plan=plan)
    assert status == 0
    row = "shared_prefix/1x164+3/tiny"
    assert rows_of(result)[row]["peers"] == {}
    assert result["failed"] == {
        f"{row}, vllm": "it died (exit status 3): the last words",
        f"{row}, vllm_no_prefix_cache": "lost before: it died (exit status 3): the last words",
    }


def test_octavo_gets_another_chance_in_the_next_task(bench):
    plan = {"octavo": {"die at": 3}}
    status, result, _ = bench("--peers", "none", "--tasks", "nano,prefill", "--rounds", "1", plan=plan)
    assert status == 0
    assert list(rows_of(result)) == ["nano/tiny/bf16"]
    assert list(result["failed"]) == ["prefill/1x41/tiny/e2e", "prefill/1x164/tiny/e2e"]


def test_what_cannot_end_in_time_is_not_begun(bench, capsys):
    tasks = ("--peers", "none", "--tasks", "nano,start", "--rounds", "60")
    status, result, noted = bench(*tasks, "--limit", "0.5")
    assert (status, result, noted) == (1, None, [])
    assert re.search(r"nano/tiny/bf16: left out: 0 s left, about \d+ needed", capsys.readouterr().out)

    # Starts took half a second at the least, so that sixty more are sure to take too long.
    status, result, _ = bench(*tasks, "--limit", "30", plan={"octavo": {"start_s": 0.5}})
    assert status == 0
    assert list(rows_of(result)) == ["nano/tiny/bf16"]
    assert result["failed"].keys() == {"start/tiny"}
    assert result["failed"]["start/tiny"].startswith("left out: ")


def test_one_file_is_made_by_several_commands(bench, capsys, monkeypatch):
    monkeypatch.setattr(report, "commit", lambda: "0123")  # somebody may edit the checkout meanwhile
    bench("--peers", "vllm", "--tasks", "nano,single")
    plan = {"vllm": {"no start": 1}}
    _, result, _ = bench("--peers", "vllm", "--tasks", "single,prefill", "--append", plan=plan)
    assert [(row["name"], list(row["peers"])) for row in result["rows"]] == [
        ("nano/tiny/bf16", ["vllm"]), ("single/tiny", []), ("prefill/1x41/tiny/e2e", []),
        ("prefill/1x164/tiny/e2e", []),
    ]  # fmt: skip
    assert "single/tiny, vllm" in result["failed"]
    assert result["versions"]["vllm"] == "9.9"
    _, result, _ = bench("--peers", "vllm", "--tasks", "single", "--append")
    assert "single/tiny, vllm" not in result["failed"]
    assert "prefill/1x41/tiny/e2e, vllm" in result["failed"]
    assert rows_of(result)["single/tiny"]["ratio"] == {"vllm": 2.0}
    told = [part.split(" --tasks ")[1].split()[0] for part in result["command"].split("; ")]
    assert told == ["nano,single", "single,prefill", "single"]
    _, result, _ = bench("--peers", "none", "--tasks", "single")
    assert list(rows_of(result)) == ["single/tiny"]

    bench.path.write_text(json.dumps({**result, "commit": "f00"}))
    with pytest.raises(SystemExit):
        bench("--peers", "none", "--tasks", "nano", "--append")
    assert "cannot be appended to: it is of commit 'f00'" in capsys.readouterr().err
    assert bench.noted == []


@pytest.mark.parametrize(
    ("tasks", "changed"),
    [("prefill", {"commit": "f00"}), ("start", {"commit": "f00"}), ("prefill", {"versions": {"vllm": "8"}})],
    ids=str,
)
def test_what_cannot_be_appended_is_said_before_a_pass(bench, capsys, monkeypatch, tmp_path, tasks, changed):
    """The file's name has the GPU in it, which is known once Octavo has started; so is a peer's version."""
    monkeypatch.setattr(report, "commit", lambda: "0123")
    monkeypatch.setattr(bench.program, "ROOT", tmp_path)
    path = tmp_path / "bench" / "results" / "nvidia-h200" / "engines.json"
    told = [str(bench.folder), "--scale", "0.02", "--peers", "vllm", "--rounds", "1"]
    assert bench.program.main([*told, "--tasks", "nano"]) == 0
    text = json.dumps({**read_result(path), **changed})
    path.write_text(text)
    bench.notes.write_text("")
    assert bench.program.main([*told, "--tasks", tasks, "--append"]) == 1
    assert "cannot be appended to: it is of " in capsys.readouterr().err
    noted = [json.loads(line) for line in bench.notes.read_text().splitlines()]
    assert {note["number"] for note in noted if "number" in note} == {0}  # the token of a start
    assert all(is_gone(pid) for note in noted for pid in note["pids"])
    assert path.read_text() == text


def test_a_promise_is_the_hardest_of_its_multiples(bench):
    name = "shared_prefix/64x8192+128/qwen3-8b"

    def floor(*arguments):
        options = bench.program.parse(["qwen3-8b", *arguments])
        return bench.program.row_of(options, name, "s", "lower", found, {}).floor

    found = {"octavo": 2.0, "vllm": 3.0, "vllm_no_prefix_cache": 6.0}
    assert floor() == 2.0
    assert floor("--octavo", "deterministic=true") is None
    found["vllm_no_prefix_cache"] = 30.0
    assert floor() == 3.0
    del found["vllm"], found["vllm_no_prefix_cache"]
    assert floor() is None


def test_another_mode_has_no_promises(bench, monkeypatch):
    promises = {"single/tiny": 8.0, "start/tiny": 9.0, "start/tiny, no kernels on disk": 25.0}
    monkeypatch.setattr(bench.program, "PROMISES", promises)
    found = []
    for options in ((), ("--octavo", "deterministic=true")):
        _, result, _ = bench("--peers", "none", "--tasks", "single,start", "--rounds", "1", *options)
        found.append({row["name"]: row["floor"] for row in result["rows"]})
    assert found == [promises, dict.fromkeys(promises)]


def test_the_engines_end_with_the_program(bench):
    code = (
        f"import sys; sys.path.insert(0, {str(BENCH)!r})\n"
        f"import compare_engines, engine_race\nengine_race.PROGRAM = {bench.fake!r}\n"
        "compare_engines.main(sys.argv[1:])"
    )
    code = code.replace(repr(bench.fake), repr(str(bench.fake)))
    command = (sys.executable, "-c", code, str(bench.folder), "--tasks", "nano", "--scale", "0.02")
    plan = json.dumps({"vllm": {"hang at": 1, "helper": 1}})
    bench.notes.write_text("")
    with subprocess.Popen(command, env={**os.environ, "PLAN": plan}, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120
        while '"name": "vllm"' not in bench.notes.read_text() or bench.notes.read_text().count("\n") < 4:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 128 + signal.SIGTERM
    pids = {pid for line in bench.notes.read_text().splitlines() for pid in json.loads(line)["pids"]}
    assert len(pids) == 3
    assert all(map(is_gone, pids))


def test_with_octavo_itself(tmp_path):
    folder = write_model_folder(tmp_path / "tiny", max_position_embeddings=4096)
    path = tmp_path / "result.json"
    done = subprocess.run(
        (
            sys.executable, BENCH / "compare_engines.py", folder, "--peers", "none", "--json", path,
            "--tasks", "nano,single,shared_prefix,fp8", "--scale", "0.02", "--logs", tmp_path / "logs",
            "--octavo", "num_blocks=512", "--octavo", "num_threads=1",
        ),
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = read_result(path)
    assert list(rows_of(result)) == ["nano/tiny/bf16", "single/tiny", "shared_prefix/1x164+3/tiny"]
    assert all(row["value"] > 0 for row in result["rows"])
    assert "needs a GPU" in result["failed"]["nano/tiny/fp8"]
    assert "Traceback" not in (tmp_path / "logs" / "tiny-octavo.log").read_text()
