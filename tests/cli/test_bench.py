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


def test_an_unknown_workload_is_named(octavo):
    status, _, err = octavo("bench", "throughput", "m", "--workload", "shared-prefx")
    assert status == 2
    assert "got 'shared-prefx' (did you mean 'shared-prefix'?)" in err


def test_an_impossible_shape_is_named(octavo):
    status, _, err = octavo("bench", "throughput", "m", "--min-input", "9", "--max-input", "8")
    assert status == 1
    assert "min_input must not be above max_input" in err


def test_a_result_file_that_cannot_be_written_is_refused_before_the_run(octavo, tmp_path, monkeypatch):
    arguments = ("bench", "throughput", tmp_path / "no model", "--json")
    path = tmp_path / "nowhere" / "result.json"
    status, out, err = octavo(*arguments, path)
    assert (status, out) == (1, "")
    assert err == f"octavo: error: --json: there is no folder '{path.parent}'; make it first\n"
    assert not path.parent.exists()
    assert octavo(*arguments, tmp_path)[2] == (
        f"octavo: error: --json: '{tmp_path}' cannot be written; name another file\n"
    )
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert "cannot be written" in octavo(*arguments, tmp_path / "result.json")[2]


def test_a_result_that_turns_out_unwritable_is_one_line(octavo, wide):
    status, out, err = octavo("bench", "throughput", *wide, *SMALL, "--json", "/dev/full")
    assert status == 1
    assert out.startswith("6 requests, ")
    assert err == "octavo: error: /dev/full cannot be written: No space left on device\n"
