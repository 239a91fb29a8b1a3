"""bench/step_profile.py: what it makes of a profile, and its way through an engine, with scripted events."""

import importlib
import json
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers.tiny_model import write_model_folder

from octavo.bench import report
from octavo.bench.report import read_result

ROOT = Path(__file__).parents[2]
PRODUCT = "nvjet_tst_64x8_64x16_4x2_h_bz_TNT"


@pytest.fixture(scope="module")
def program():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "bench")
        yield importlib.import_module("step_profile")


def of_a_step(program, at):
    """Two layers and a head; merging starts while `_decode` still runs; idle from 42 to 50."""
    layer = [
        ("_norm", 1, 2), (PRODUCT, 2, 5), ("_rotate_and_write", 5, 6), ("_decode", 6, 10),
        ("_merge_pieces", 8, 11), (PRODUCT, 11, 12), ("_norm", 12, 13), ("_few_rows_linear", 13, 15),
        ("_silu_and_mul", 15, 16), ("void splitKreduce_kernel<32>", 16, 17),
    ]  # fmt: skip
    ends = [
        ("_norm", 33, 34), (PRODUCT, 34, 37), ("void gemv2T_kernel_val<int>", 37, 38), ("_gather", 38, 39),
        ("_choose", 39, 40), ("_finish_decode", 40, 41), ("Memcpy DtoH (Device -> Pinned)", 41, 42),
    ]  # fmt: skip
    second = [(name, a + 16, b + 16) for name, a, b in layer]
    names = [(program.BEGIN, 0, 1), *layer, *second, *ends]
    return [program.Event(name, at + a, at + b) for name, a, b in names]


def test_a_profile_by_families(program):
    events = [event for at in (0, 50, 100) for event in of_a_step(program, 1000.0 + at)]
    before = [program.Event("Memcpy HtoD", 990.0, 999.0), program.Event(PRODUCT, 997.0, 1000.5)]
    found = program.analyse([*reversed(events), *before])
    assert found.num_steps == 2
    assert found.start_to_start == 50
    assert found.at_work == 42
    assert found.families == {
        "decode attention": 2 * 7, "products": 2 * 7, "head": 4, "norms": 5, "rotate and write": 2,
        "silu and mul": 2, "sampling": 2, "rest": 3,
    }  # fmt: skip
    assert found.kernels == {
        "decode attention": 4, "products": 8, "head": 2, "norms": 5, "rotate and write": 2,
        "silu and mul": 2, "sampling": 2, "rest": 3,
    }  # fmt: skip
    rows = program.rows_of("step/m/1 rows, context 8", found, 123.456)
    assert [(row.name.split(", ")[2], row.value, row.unit) for row in rows[:5]] == [
        ("from start to start", 50.0, "us"), ("kernels at work", 42.0, "us"), ("GPU idle", 16.0, "%"),
        ("host work", 123.5, "us"), ("decode attention", 14.0, "us"),
    ]  # fmt: skip
    assert rows[0].details == {"steps": 2}
    assert rows[4].details == {"kernels": 4.0}


def test_a_profile_without_two_steps_is_an_error(program):
    with pytest.raises(ValueError, match=r"1 steps begin in the profile .*: Memcpy DtoH .*_decode"):
        program.analyse(of_a_step(program, 0.0))


def test_every_kernel_that_a_step_has_is_of_a_family(program):
    """A kernel that is renamed, or a new module, must not be counted as `rest` unseen."""
    assert program.our_kernels()[program.BEGIN] == "rest"
    expected = {
        "_decode": "decode attention", "_merge_pieces": "decode attention",
        "_find_shared_prefixes": "decode attention", "_norm": "norms",
        "_rotate_and_write": "rotate and write", "_silu_and_mul": "silu and mul", "_gather": "sampling",
        "_choose": "sampling", "_few_rows_linear": "products", "_grouped_linear": "products",
        "rows_linear": "products",
    }  # fmt: skip
    assert {name: program.family_of(name) for name in expected} == expected
    ours = {
        path.stem
        for path in (ROOT / "src/octavo/kernels/triton").glob("*.py")
        if re.search(r"^@direct$", path.read_text(), re.MULTILINE)
    }
    without = {stem for stem in ours if not any(stem.startswith(name) for name in program.MODULES)}
    assert without == {"hopper_pipeline", "kvcache", "prefill"}, (
        "say in MODULES which family their kernels are of"
    )
    for name in ("sm90_xmma_gemm_bf16", "void cutlass::Kernel2<x>", "void gemvx::kernel<int>", PRODUCT):
        assert program.family_of(name) == "products"
    for name in ("Memset (Device)", "void at::native::elementwise_kernel<128>", "_prefill"):
        assert program.family_of(name) == "rest"


def test_from_an_engine_to_a_result_file(program, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(report, "commit", lambda: "0123")  # somebody may edit the checkout meanwhile
    folder = write_model_folder(tmp_path / "tiny")
    path = tmp_path / "step.json"
    steps = []

    def record(step, num_steps):
        steps.append((num_steps, len(step.__self__.scheduler.running)))
        for _ in range(num_steps):
            step()
        return [event for i in range(num_steps) for event in of_a_step(program, 50.0 * i)]

    same = ["--steps", "3", "--kv-cache-memory", "8MiB", "--json", str(path)]
    assert program.main([str(folder), "--rows", "1,3", "--context", "5", *same], record) == 0
    assert program.main([str(folder), "--rows", "2", "--context", "9", "--append", *same], record) == 0
    assert steps == [(3, 1), (3, 3), (3, 2)]
    result = read_result(path)
    names = [row["name"] for row in result["rows"]]
    assert len(names) == len(set(names)) == 3 * 12
    assert names[0] == "step/tiny/1 rows, context 5, from start to start"
    assert names[-1] == "step/tiny/2 rows, context 9, rest"
    host = [row["value"] for row in result["rows"] if row["name"].endswith("host work")]
    assert all(value > 0 for value in host)
    assert result["command"].split("; ") == [
        f"python bench/step_profile.py tiny --rows {told} --steps 3 --kv-cache-memory 8MiB"
        for told in ("1,3 --context 5", "2 --context 9")
    ]
    assert "step/tiny/2 rows, context 9, GPU idle: 16 %" in capsys.readouterr().out

    path.write_text(json.dumps({**result, "commit": "f00"}))
    assert program.main([str(folder), "--append", *same], record) == 1
    assert "it is of commit 'f00'" in capsys.readouterr().err


def test_every_step_of_the_profile_has_all_rows(program, tmp_path, monkeypatch):
    """Though the first requests make a token in each of the thirty steps that the last prompts take."""
    monkeypatch.setattr(report, "commit", lambda: "0123")
    folder, seen = write_model_folder(tmp_path / "tiny", max_position_embeddings=512), []

    def record(step, num_steps):
        for _ in range(num_steps):
            step()
            seen.append(sum(seq.num_tokens < seq.max_total_tokens for seq in step.__self__.scheduler.running))
        return [event for i in range(num_steps) for event in of_a_step(program, 50.0 * i)]

    told = ["--rows", "24", "--context", "300", "--steps", "3", "--kv-cache-memory", "64MiB"]
    assert program.main([str(folder), *told, "--json", str(tmp_path / "step.json")], record) == 0
    assert seen == [24] * 3

    options = {"load_format": "dummy", "enable_prefix_caching": False, "num_blocks": 1000}
    too_short = pytest.raises(RuntimeError, match="ended before the profile did: length")
    with program.LLM(str(folder), max_model_len=330, **options) as llm, too_short:
        program.measure(llm, 24, 300, 3, record)
    with program.LLM(str(folder), max_model_len=400, max_num_batched_tokens=16, **options) as llm:
        add = llm.engine.add_request

        def late(step, num_steps):
            add([1] * 40, program.SamplingParams(max_tokens=1))
            return record(step, num_steps)

        with pytest.raises(RuntimeError, match=r"not every step was 2 decoding rows .*: 2 of 2, 2 of 1\d "):
            program.measure(llm, 2, 20, 3, late)


def test_a_request_that_ends_before_its_first_token_is_an_error(program, tmp_path):
    folder = write_model_folder(tmp_path / "tiny")
    with program.LLM(str(folder), load_format="dummy", num_blocks=100) as llm:
        fails = mock.patch.object(llm.engine.runner, "launch", side_effect=ValueError("no memory"))
        with fails, pytest.raises(RuntimeError, match=r"ended before the profile did: .*no memory"):
            program.measure(llm, 2, 20, 3, None)
        before = llm.engine._span
        stops = mock.patch.object(llm.engine, "step", side_effect=KeyboardInterrupt)
        with stops, pytest.raises(KeyboardInterrupt):
            program._host_s(llm, 1)
        assert llm.engine._span is before


def test_the_host_s_work_has_no_waiting_in_it(program, monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(program.time, "perf_counter", lambda: float(next(now)))
    work = program.HostWork()
    with work.span("launch"), work.span("wait for tokens"):
        pass
    with work.span("wait for tokens"):
        pass
    assert work.waited_s == 2.0


def test_without_a_gpu_it_says_so(program, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert program.main(["qwen3-0.6b"]) == 1
    assert "there is none" in capsys.readouterr().err
