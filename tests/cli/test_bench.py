import re
import sys

import pytest

from octavo.bench.report import read_result

SMALL = ("--num-seqs", "6", "--min-input", "4", "--max-input", "20", "--min-output", "2", "--max-output", "6")


def test_throughput_prints_and_writes_a_result_file(octavo, tiny, tmp_path):
    path = tmp_path / "result.json"
    status, out, err = octavo("bench", "throughput", *tiny, *SMALL, "--json", path, "--max-num-seqs", "4")
    # Prompt ids up to 10,000 do not fit this vocabulary of 258, and that is said.
    assert (status, out) == (1, "")
    assert "vocabulary" in err


def test_throughput_on_the_random_workload(octavo, wide, tmp_path):
    path = tmp_path / "result.json"
    status, out, err = octavo("bench", "throughput", *wide, *SMALL, "--json", path)
    assert (status, err) == (0, "")
    assert out.startswith("6 requests, ")
    result = read_result(path)
    names = [row["name"] for row in result["rows"]]
    assert names[0] == "random workload: output"
    assert all(row["value"] > 0 for row in result["rows"][:3])


def test_shared_prefixes_are_found_in_the_cache(octavo, wide, tmp_path):
    path = tmp_path / "result.json"
    arguments = (
        "--workload",
        "shared-prefix",
        "--num-prefixes",
        "1",
        "--prefix-len",
        "32",
        "--max-num-seqs",
        "1",
    )
    octavo("bench", "throughput", *wide, *SMALL, *arguments, "--json", path)
    rows = {row["name"]: row["value"] for row in read_result(path)["rows"]}
    assert rows["shared-prefix workload: prompt tokens from the cache"] > 40


def test_a_run_that_is_too_long_for_the_model_says_how_to_shorten_it(octavo, wide):
    for arguments, tokens, way_out in (
        (("throughput", "--num-seqs", "1", "--min-input", "400", "--max-input", "400",
          "--min-output", "9", "--max-output", "9"), 409, "lower --max-input and --max-output, or --scale"),
        (("latency", "--input-len", "250", "--output-len", "50"), 300, "lower --input-len or --output-len"),
        (("serve-sim", "--num-requests", "1", "--input-lens", "300", "--output-lens", "9"), 309,
         "shorten --input-lens or --output-lens"),
    ):  # fmt: skip
        status, out, err = octavo("bench", arguments[0], *wide, *arguments[1:])
        assert (status, out) == (1, "")
        assert err.startswith(
            f"octavo: error: the longest request of this run has {tokens} tokens, prompt and answer, and "
            f"that is too many for {wide[0]}; {way_out} (max_model_len: expected 1 to 256, "
        )
    status, _, err = octavo("bench", "latency", *wide, "--max-model-len", "999")
    assert status == 1
    assert err.startswith("octavo: error: max_model_len: expected 1 to 256")


def test_requests_may_be_shorter_than_those_of_the_warm_up(octavo, wide):
    status, _, err = octavo(
        "bench", "latency", *wide, "--input-len", "1", "--output-len", "2", "--repeats", "1"
    )
    assert (status, err) == (0, "")


def test_throughput_draws_what_happened_over_time(octavo, wide, tmp_path):
    path = tmp_path / "run.svg"
    status, _, err = octavo("bench", "throughput", *wide, *SMALL, "--plot", path)
    assert (status, err) == (0, "")
    assert "KV cache in use" in path.read_text()


def test_latency_prints_and_writes_each_batch(octavo, wide, tmp_path):
    path = tmp_path / "result.json"
    sizes = (
        "--input-len",
        "8",
        "--output-len",
        "4",
        "--repeats",
        "1",
        "--batch-size",
        "1",
        "--batch-size",
        "3",
    )
    status, out, err = octavo("bench", "latency", *wide, *sizes, "--json", path)
    assert (status, err) == (0, "")
    assert [line.split(":")[0] for line in out.splitlines()] == ["batch 1", "batch 3"]
    rows = {row["name"]: row["value"] for row in read_result(path)["rows"]}
    assert len(rows) == 8
    for batch in (1, 3):
        name = f"latency, 8 in, 4 out, batch {batch}"
        assert 0 < rows[f"{name}: per token, median"] <= rows[f"{name}: per token, 99th percentile"]


def test_serve_sim_prints_writes_and_draws(octavo, wide, tmp_path):
    arguments = ("--rate", "inf", "--num-requests", "5", "--input-lens", "uniform:4:20", "--output-lens", "6")
    files = ("--json", tmp_path / "result.json", "--plot", tmp_path / "run.png")
    status, out, err = octavo("bench", "serve-sim", *wide, *arguments, *files)
    assert (status, err) == (0, "")
    assert "30 generated" in out
    rows = {row["name"]: row["value"] for row in read_result(tmp_path / "result.json")["rows"]}
    assert rows["serve-sim, inf requests/s: first token, p50"] > 0
    assert (tmp_path / "run.png").stat().st_size > 10_000


def test_serve_sim_names_what_it_cannot_read(octavo):
    for arguments, message in (
        (("--rate", "0"), "--rate must be above 0"),
        (("--burstiness", "nan"), "--burstiness must be above 0"),
        (("--input-lens", "uniform:9:3"), "--input-lens must be a number of tokens"),
        (("--output-lens", "zipf:2"), "--output-lens must be a number of tokens"),
        (("--prefix-len", "5"), "--num-prefixes and prefix_len go together"),
        (("--temperature", "-1"), "--temperature must be"),
        (("--json", "/nowhere/r.json"), "--json: there is no folder '/nowhere'"),
        (("--plot", "run.gif"), "must end in one of .png, .svg, .pdf"),
    ):
        status, _, err = octavo("bench", "serve-sim", "m", *arguments)
        assert (status, message in err) == (2, True), err


def test_an_unknown_workload_is_named(octavo):
    status, _, err = octavo("bench", "throughput", "m", "--workload", "shared-prefx")
    assert status == 2
    assert "got 'shared-prefx' (did you mean 'shared-prefix'?)" in err


def test_an_impossible_shape_is_named(octavo):
    status, _, err = octavo("bench", "throughput", "m", "--min-input", "9", "--max-input", "8")
    assert status == 2
    assert "--min-input must not be above max_input" in err
    for option in ("--scale", "--num-seqs"):
        status, _, err = octavo("bench", "throughput", "m", option, "0")
        assert status == 2
        assert err.startswith(f"octavo: error: {option} must be ")


def test_a_result_file_that_cannot_be_written_is_refused_before_the_run(octavo, tmp_path, monkeypatch):
    arguments = ("bench", "throughput", tmp_path / "no model", "--json")
    path = tmp_path / "nowhere" / "result.json"
    status, out, err = octavo(*arguments, path)
    assert (status, out) == (2, "")
    way_out = "see `octavo bench throughput --help`\n"
    assert err == f"octavo: error: --json: there is no folder '{path.parent}'; make it first; {way_out}"
    assert not path.parent.exists()
    assert octavo(*arguments, tmp_path)[2] == (
        f"octavo: error: --json: '{tmp_path}' cannot be written; name another file; {way_out}"
    )
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert "cannot be written" in octavo(*arguments, tmp_path / "result.json")[2]


def test_a_result_that_turns_out_unwritable_is_one_line(octavo, wide):
    status, out, err = octavo("bench", "throughput", *wide, *SMALL, "--json", "/dev/full")
    assert status == 1
    assert out.startswith("6 requests, ")
    assert err == "octavo: error: /dev/full cannot be written: No space left on device\n"


def test_kernels_refuses_a_machine_without_a_gpu_and_says_what_runs(octavo, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    status, out, err = octavo("bench", "kernels", "--quick")
    assert (status, out) == (1, "")
    assert "needs a GPU" in err
    assert "octavo bench throughput" in err
    assert "octavo doctor" in err


def test_kernels_lists_its_rows_anywhere(octavo):
    status, out, err = octavo("bench", "kernels", "--list", "--rows", "decode/1x8192/*/16/bf16")
    assert (status, err) == (0, "")
    assert out.splitlines()[:2] == ["decode/1x8192/16-8-128/16/bf16", "decode/1x8192/32-8-128/16/bf16"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rows", "decod/*"), "--rows: 'decod/*' matches no row; there are decode/*, prefill/*"),
        (("--peers", "fa4"), "--peers: unknown library 'fa4', expected all, none or some of fa3, fa2"),
        (("--list", "--peers", "nosuch"), "--peers: unknown library 'nosuch', expected all, none or some"),
        (("--json", "/nowhere/x.json"), "--json: there is no folder '/nowhere'; make it first"),
        (("--plot", "/nowhere/x.png"), "--plot: there is no folder '/nowhere'; make it first"),
        (("--plot", "x.bogus"), "--plot: 'x.bogus' must end in one of .png, .svg, .pdf"),
        (("--plot", "picture"), "--plot: 'picture' must end in one of .png, .svg, .pdf"),
    ],
)
def test_kernels_names_a_wrong_option(octavo, arguments, message):
    status, out, err = octavo("bench", "kernels", *arguments)
    assert (status, out) == (2, "")
    assert message in err


@pytest.fixture
def measured_elsewhere(monkeypatch):
    """`octavo bench kernels` on a GPU that is played by the CPU: two rows, one of them wrong."""
    import torch

    from octavo.bench import kernels, report, roofline
    from octavo.bench.kernel_cases import Case
    from octavo.bench.kernel_work import Memory, Work
    from octavo.bench.timing import GpuTime
    from octavo.cli import kernel_table

    def work(error):
        return lambda memory: Work([lambda: None], lambda: error, 1e-2, bytes_moved=20e6, flops=1e6)

    rows = [Case("decode/good", work(0.001), bar=9.0), Case("decode/bad", work(0.5))]
    ceilings = roofline.Ceilings(4e12, 3e12, 8e14, empty_kernel_us=1.0)
    bench = kernels.Bench(Memory(torch.device("cpu"), 1), ceilings, [], {"fa3": "no module"})
    monkeypatch.setattr(kernels, "chosen", lambda patterns, quick: rows[: 2 if quick else 1])
    monkeypatch.setattr(kernels, "gpu_time", lambda calls, group_ms: GpuTime(10.0, 9.0, 11.0, True))
    monkeypatch.setattr(kernels.Bench, "open", classmethod(lambda cls, device, names: bench))
    monkeypatch.setattr(kernels.Bench, "compile", lambda self, cases: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for module in (kernel_table, report):
        monkeypatch.setattr(module, "gpu_name", lambda: "A GPU, driver 1.2")


@pytest.mark.usefixtures("measured_elsewhere")
def test_kernels_prints_a_line_per_row_and_writes_a_result_file(octavo, tmp_path):
    path = tmp_path / "kernels.json"
    status, out, err = octavo("bench", "kernels", "--json", path, "--plot", tmp_path / "roof.png")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("A GPU, driver 1.2; read TB/s 4, copy TB/s 3")
    assert lines[1] == "not compared with fa3: no module"
    assert lines[3].split() == ["decode/good", "10", "us", "50%", "20.0%", "bar", "9", "MISSED"]
    assert re.fullmatch(r"1 rows in \d+ s; 0 of 1 bars met", lines[4])
    result = read_result(path)
    assert result["hardware"].startswith("A GPU, driver 1.2; ")
    assert result["ceilings"]["read TB/s"] == 4.0
    assert result["failed"] == {}
    (row,) = result["rows"]
    assert (row["value"], row["floor"], row["details"]["bar"]) == (10.0, 5.0, 9.0)
    assert (tmp_path / "roof.png").exists()


def test_kernels_looks_for_matplotlib_before_the_run(octavo, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, out, err = octavo("bench", "kernels", "--plot", "x.png")
    assert (status, out) == (1, "")
    assert "--plot needs matplotlib: pip install 'octavo[plot]'" in err


@pytest.mark.usefixtures("measured_elsewhere")
def test_a_picture_that_fails_does_not_lose_the_result_file(octavo, monkeypatch, tmp_path):
    def fails(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr("octavo.cli.kernel_table.plot", fails)
    path = tmp_path / "kernels.json"
    status, _, err = octavo("bench", "kernels", "--json", path, "--plot", tmp_path / "roof.png")
    assert status != 0
    assert "the disk is full" in err
    assert [row["name"] for row in read_result(path)["rows"]] == ["decode/good"]


@pytest.mark.usefixtures("measured_elsewhere")
def test_a_wrong_kernel_fails_the_command_and_is_named_in_the_file(octavo, tmp_path):
    path = tmp_path / "kernels.json"
    status, out, _ = octavo("bench", "kernels", "--quick", "--json", path)
    assert status == 1
    assert "FAILED: wrong by 5.0e-01 against the reference" in out
    assert out.endswith("; 0 of 1 bars met; 1 FAILED\n")
    assert list(read_result(path)["failed"]) == ["decode/bad"]


def test_tune_refuses_a_machine_without_a_gpu(octavo, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    status, _, err = octavo("bench", "tune")
    assert status == 1
    assert "bench tune needs a GPU" in err
