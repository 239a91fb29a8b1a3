import copy
import json
from pathlib import Path

import pytest

from octavo.bench import report
from octavo.bench.report import (
    ResultFileError,
    Row,
    check_append,
    read_result,
    table,
    validate,
    with_tables,
    write_result,
)

ROOT = Path(__file__).parents[2]
RESULT_FILES = sorted((ROOT / "bench" / "results").glob("*/*.json"))

RESULT = {
    "command": "octavo bench throughput",
    "commit": "0123456789abcdef",
    "date": "2026-01-02",
    "hardware": "a machine",
    "versions": {"python": "3.11.7", "octavo": "0.1.0", "numpy": "2.4.6"},
    "rows": [
        {
            "name": "one stream",
            "value": 30.0,
            "unit": "tokens/s",
            "better": "higher",
            "floor": 20,
            "peers": {"Other": 12.0},
            "ratio": {"Other": 2.5},
        },
        {
            "name": "load",
            "value": 1234.5,
            "unit": "ms",
            "better": "lower",
            "floor": None,
            "peers": {},
            "ratio": {},
        },
    ],
}


def test_a_ratio_above_one_means_octavo_is_ahead_in_either_direction():
    assert Row("speed", 30.0, "tokens/s", peers={"a": 12.0, "b": 60.0}).ratio == {"a": 2.5, "b": 0.5}
    assert Row("time", 2.0, "s", better="lower", peers={"a": 3.0}).ratio == {"a": 1.5}


def test_what_is_written_can_be_read(tmp_path):
    path = tmp_path / "hardware" / "name.json"
    row = Row("one stream", 30.0, "tokens/s", floor=20.0, peers={"Other": 12.0})
    write_result(path, [row], command="octavo bench throughput", extra_versions={"other": "9.9"})
    result = read_result(path)
    assert result["rows"] == [
        {
            "name": "one stream",
            "value": 30.0,
            "unit": "tokens/s",
            "better": "higher",
            "floor": 20.0,
            "peers": {"Other": 12.0},
            "ratio": {"Other": 2.5},
        }
    ]
    assert result["command"] == "octavo bench throughput"
    assert result["versions"]["other"] == "9.9"
    assert set(result["versions"]) >= {"python", "torch"}
    assert list(result) == ["command", "commit", "date", "hardware", "versions", "rows"]


@pytest.fixture
def one_commit(monkeypatch):
    """Somebody may edit the checkout meanwhile."""
    monkeypatch.setattr(report, "commit", lambda: "0123")


@pytest.mark.usefixtures("one_commit")
def test_rows_are_appended_and_those_of_the_same_name_replaced(tmp_path):
    path = tmp_path / "box" / "name.json"
    first = [Row("one", 1.0, "s", details={"passes": [1.0]}), Row("two", 2.0, "s", peers={"Other": 3.0})]
    check_append(path)
    failed = {"one, Other": "slow", "five": "died", "three, Other": "absent", "four": "no time"}
    failed["two, no kernels on disk"] = "another row"
    told = {"extra_versions": {"other": "9.9"}, "gpu": "a GPU", "failed": failed}
    write_result(path, first, command="run one two", append=True, **told)
    assert read_result(path)["failed"] == failed

    check_append(path)
    check_append(path, "a GPU")
    again = [Row("three", 3.0, "s"), Row("two", 2.5, "s"), Row("five", 5.0, "s")]
    for _ in range(2):  # as a program does that writes after each of its rows
        write_result(path, again, command="run three", gpu="a GPU", failed={"one, Third": "no"}, append=True)
    result = read_result(path)
    assert [(row["name"], row["value"], row["peers"]) for row in result["rows"]] == [
        ("one", 1.0, {}), ("two", 2.5, {}), ("three", 3.0, {}), ("five", 5.0, {}),
    ]  # fmt: skip
    assert result["rows"][0]["details"] == {"passes": [1.0]}
    assert result["failed"] == {
        "one, Other": "slow", "four": "no time", "two, no kernels on disk": "another row", "one, Third": "no",
    }  # fmt: skip
    assert result["command"] == "run one two; run three"
    assert result["versions"]["other"] == "9.9"

    write_result(path, again[:1], command="x", gpu="a GPU", failed={"two": "died"}, append=True)
    result = read_result(path)
    assert [row["name"] for row in result["rows"]] == ["one", "three", "five"]
    assert result["failed"]["two"] == "died"

    write_result(path, again[:2], command="run three", gpu="a GPU")
    assert [row["name"] for row in read_result(path)["rows"]] == ["three", "two"]


@pytest.mark.usefixtures("one_commit")
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"commit": "f00"}, "it is of commit 'f00', here "),
        ({"hardware": "a GPU; another host"}, "hardware 'a GPU; another host', here 'a GPU; "),
        ({"hardware": "another GPU; HOST"}, "hardware 'another GPU; .*here 'a GPU; "),
        ({"hardware": "HOST"}, "hardware '.*here 'a GPU; "),
        ({"versions": {"torch": "1.0"}}, "torch '1.0', here "),
        ({"versions": {"other": "8"}}, "other '8', here '9'"),
        ({"ceilings": {"read": 1.0}, "failed": {}}, "ceilings {'read': 1.0}, here None"),
    ],
    ids=str,
)
def test_a_file_of_another_run_is_not_appended_to_and_stays_as_it_is(tmp_path, changed, message):
    path = tmp_path / "name.json"
    told = {"command": "run", "extra_versions": {"other": "9"}, "gpu": "a GPU"}
    write_result(path, [Row("one", 1.0, "s")], **told)
    changed = {
        key: value.replace("HOST", report.hardware()) if key == "hardware" else value
        for key, value in changed.items()
    }
    text = json.dumps({**read_result(path), **changed})
    path.write_text(text)
    with pytest.raises(ResultFileError, match=f"name.json cannot be appended to: .*{message}.*another file"):
        write_result(path, [Row("two", 1.0, "s")], append=True, **told)
    assert path.read_text() == text
    with pytest.raises(ResultFileError, match="cannot be appended to"):
        check_append(path, "a GPU", {"other": "9"})


@pytest.mark.parametrize("name", ["unknown", "0123+changes"])
def test_code_that_no_commit_has_is_not_appended(tmp_path, monkeypatch, name):
    monkeypatch.setattr(report, "commit", lambda: name)
    path = tmp_path / "name.json"
    with pytest.raises(ResultFileError, match="cannot be appended to: the code here is"):
        check_append(path)
    write_result(path, [Row("one", 1.0, "s")], command="run")
    with pytest.raises(ResultFileError, match="cannot be appended to: the code here is"):
        write_result(path, [Row("two", 1.0, "s")], command="run", append=True)
    assert [row["name"] for row in read_result(path)["rows"]] == ["one"]


@pytest.mark.usefixtures("one_commit")
def test_appending_before_the_gpu_is_known_looks_at_the_host(tmp_path):
    path = tmp_path / "name.json"
    write_result(path, [Row("one", 1.0, "s")], command="run", gpu="a GPU")
    check_append(path)
    with pytest.raises(ResultFileError, match="here 'another GPU"):
        check_append(path, "another GPU")
    path.write_text(json.dumps({**read_result(path), "hardware": "a GPU; another host"}))
    with pytest.raises(ResultFileError, match="another host"):
        check_append(path)
    path.write_text("{")
    with pytest.raises(ResultFileError, match="no readable result file"):
        check_append(path)


def _without(key):
    def change(result):
        del result[key]

    return change


def _row(**changes):
    def change(result):
        result["rows"][0].update(changes)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("commit"), "must have the keys"),
        (lambda r: r.update(date=""), "date must be a non-empty string"),
        (lambda r: r.update(rows=[]), "rows must be a non-empty list"),
        (lambda r: r.update(versions={"torch": 2}), "versions must map names to strings"),
        (_row(value="30"), r"rows\[0\]\.value must be a number"),
        (_row(value=True), r"rows\[0\]\.value must be a number"),
        (_row(better="more"), "must be 'higher' or 'lower'"),
        (_row(floor="20"), "floor must be a number or null"),
        (_row(ratio={}), "every peer needs a ratio"),
        (_row(extra=1), r"rows\[0\] must have the keys"),
    ],
)
def test_a_wrong_file_is_refused_by_the_key_that_is_wrong(change, message):
    validate(RESULT, "here")  # the positive control
    result = copy.deepcopy(RESULT)
    change(result)
    with pytest.raises(ResultFileError, match=f"here: .*{message}"):
        validate(result, "here")


def test_a_file_that_is_no_json_is_named(tmp_path):
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ResultFileError, match=r"broken\.json is no readable result file"):
        read_result(tmp_path / "broken.json")


def test_a_table_shows_values_peers_and_promises():
    assert table(RESULT).splitlines() == [
        "|  | Octavo | Other | promised |",
        "| --- | ---: | ---: | ---: |",
        "| one stream | 30 tokens/s | 12 (2.50x) | at least 20 |",
        "| load | 1,234 ms |  |  |",
        "",
        "`octavo bench throughput` on a machine; 2026-01-02, commit 0123456789; python 3.11.7. "
        "In brackets: the ratio; above 1, Octavo is ahead.",
    ]


KERNELS = {
    **RESULT,
    "hardware": "NVIDIA H200, driver 1; a host",
    "ceilings": {"read TB/s": 4.6},
    "failed": {"decode/3 fa3": "wrong by 1"},
    "rows": [
        {
            "name": "decode/1",
            "value": 10.0,
            "unit": "us",
            "better": "lower",
            "floor": 8.0,
            "peers": {"fa3": 12.0},
            "ratio": {"fa3": 1.2},
            "details": {"us": 10.0, "spread": 0.01},
        },
        {
            "name": "prefill/1",
            "value": 600.0,
            "unit": "TFLOP/s",
            "better": "higher",
            "floor": 800.0,
            "peers": {},
            "ratio": {},
            "details": {},
        },
    ],
}


def test_a_table_of_kernels_shows_the_share_of_the_bound():
    validate(KERNELS, "here")
    assert table(KERNELS).splitlines() == [
        "|  | Octavo | of the bound | fa3 |",
        "| --- | ---: | ---: | ---: |",
        "| decode/1 | 10 us | 80 % | 12 (1.20x) |",
        "| prefill/1 | 600 TFLOP/s | 75 % |  |",
        "",
        "`octavo bench throughput` on NVIDIA H200, driver 1; 2026-01-02, commit 0123456789; "
        "python 3.11.7. Bounds from read TB/s 4.6. In brackets: the ratio; above 1, Octavo is ahead.",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.update(ceilings={"read": "fast"}), "ceilings must map names to numbers"),
        (lambda r: r.update(failed=[]), "failed must map row names to reasons"),
        (lambda r: r.pop("failed"), "must have the keys"),
    ],
)
def test_a_wrong_file_of_kernels_is_refused(change, message):
    result = copy.deepcopy(KERNELS)
    change(result)
    with pytest.raises(ResultFileError, match=f"here: {message}"):
        validate(result, "here")


def test_kernels_are_written_with_their_gpu_and_what_failed(tmp_path):
    row = Row("decode/1", 10.0, "us", "lower", 8.0, details={"spread": 0.1})
    path = tmp_path / "kernels.json"
    write_result(path, [row], command="x", gpu="A GPU", ceilings={"read": 4.0}, failed={"b": "no"})
    result = read_result(path)
    assert result["hardware"].startswith("A GPU; ")
    assert result["failed"] == {"b": "no"}
    assert result["rows"][0]["details"] == {"spread": 0.1}


def test_any_file_may_say_what_failed(tmp_path):
    path = tmp_path / "engines.json"
    row = Row("nano", 10.0, "tok/s", details={"passes": [1.5, 2.0]})
    write_result(path, [row], command="x", failed={"single": "no time"})
    result = read_result(path)
    assert result["failed"] == {"single": "no time"}
    assert result["rows"][0]["details"] == {"passes": [1.5, 2.0]}
    assert table(result).splitlines()[:3] == ["|  | Octavo |", "| --- | ---: |", "| nano | 10 tok/s |"]
    with pytest.raises(ResultFileError, match="failed must map row names to reasons"):
        validate({**result, "failed": []}, "here")


def test_a_pattern_picks_rows_and_must_match_some():
    assert "one stream" not in table(RESULT, "lo*")
    assert table(RESULT, "lo* | one*") == table(RESULT)
    with pytest.raises(ResultFileError, match=r"no row .* matches 'x'"):
        table(RESULT, "x")


@pytest.mark.parametrize(
    ("value", "text"), [(0.12345, "0.123"), (12.345, "12.3"), (7, "7"), (128.0, "128"), (1234.5, "1,234")]
)
def test_numbers_have_three_digits(value, text):
    assert report.number(value) == text


def test_a_marked_table_is_replaced_and_the_rest_stays(tmp_path):
    write_result(
        tmp_path / "box" / "speed.json", [Row("one", 1.0, "s"), Row("two", 2.0, "s")], command="run me"
    )
    document = "before\n<!-- results: box/speed t* -->\nold\n<!-- /results -->\nafter\n"
    filled = with_tables(document, tmp_path)
    assert filled.startswith("before\n<!-- results: box/speed t* -->\n|  | Octavo |\n")
    assert filled.endswith("<!-- /results -->\nafter\n")
    assert "| two | 2 s |" in filled
    assert "old" not in filled
    assert "one" not in filled
    assert with_tables(filled, tmp_path) == filled


def test_an_empty_place_for_a_table_is_filled(tmp_path):
    write_result(tmp_path / "box" / "speed.json", [Row("one", 1.0, "s")], command="run me")
    place = "<!-- results: box/speed -->\n<!-- /results -->\n"
    filled = with_tables(place + "between\n" + place, tmp_path)
    assert filled.count("| one | 1 s |") == 2
    assert "between" in filled


def test_a_table_that_may_be_absent_is_filled_once_it_is_measured(tmp_path):
    place = "<!-- results?: box/speed -->\n<!-- /results -->\n"
    assert with_tables(place, tmp_path).splitlines()[1:-1] == ["Not measured yet."]
    with pytest.raises(ResultFileError, match="no readable result file"):
        with_tables(place.replace("?", ""), tmp_path)
    write_result(tmp_path / "box" / "speed.json", [Row("one", 1.0, "s")], command="run me")
    filled = with_tables(with_tables(place, tmp_path.parent), tmp_path)
    assert filled.startswith("<!-- results?: box/speed -->\n|  | Octavo |\n")
    assert "Not measured" not in filled


def test_check_finds_a_stale_table_and_the_command_repairs_it(tmp_path, capsys):
    write_result(tmp_path / "bench/results/box/speed.json", [Row("one", 1.0, "s")], command="run me")
    (tmp_path / "README.md").write_text("<!-- results: box/speed -->\nold\n<!-- /results -->\n")
    assert report.main(["--root", str(tmp_path), "--check"]) == 1
    assert capsys.readouterr().out == "stale: README.md\n"
    assert report.main(["--root", str(tmp_path)]) == 0
    assert report.main(["--root", str(tmp_path), "--check"]) == 0


def test_every_committed_result_file_has_the_shape():
    assert RESULT_FILES, "bench/results holds no result file"
    for path in RESULT_FILES:
        read_result(path)


def test_readme_and_docs_show_the_committed_result_files():
    assert report.main(["--root", str(ROOT), "--check"]) == 0, "run scripts/tables"


def test_the_machine_is_described_in_one_line():
    line = report.hardware()
    assert f"{report.num_cores()} cores" in line
    assert "\n" not in line
    assert report.hardware_slug().endswith(f"-{report.num_cores()}-cores")
