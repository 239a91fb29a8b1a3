"""`octavo bench kv-cache` on a tiny model: what it counts is exact, what it times is only there."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.models import saved, tiny_hf_model
from typer.testing import CliRunner

from octavo.bench import kv_cache
from octavo.bench.kv_cache import PARTS, Sizes, _ahead_for_good, curve_points, measure
from octavo.bench.kv_cache_engine import Models, Outcome
from octavo.bench.kv_cache_pictures import draw
from octavo.bench.report import Row
from octavo.cli.bench import app
from octavo.engine.core import Engine
from octavo.errors import ConfigError

SIZES = Sizes(
    prompt_len=9, output_len=12, rounds=1, reserved_len=64, reserved_requests=3, num_requests=8, shortest=2,
    longest_prompt=30, longest_answer=12, batch=4, turns=3, system_len=32, question_len=5, reply_len=4,
    context_len=40,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    hf = tiny_hf_model("llama", seed=3, max_position_embeddings=256)
    return saved(hf, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def told() -> list[str]:
    """What `measure` reported while it made `rows`."""
    return []


@pytest.fixture(scope="module")
def rows(folder: str, told: list[str]) -> list[Row]:
    return measure(Models(folder, num_threads=1), SIZES, report=told.append)


@pytest.fixture(scope="module")
def row(rows: list[Row]) -> Callable[[str], Row]:
    found = {row.name: row for row in rows}
    assert len(found) == len(rows), "every row has a name of its own"
    return found.__getitem__


def test_every_part_and_every_measurement_is_told_of(rows: list[Row], told: list[str]) -> None:
    sides = ["with the cache", "no cache", "Transformers", "Transformers, no cache"]
    assert told == [
        "loading Transformers",
        "part 1 of 5: growth",
        *(f"growth: warming up, {side}" for side in sides),
        *(f"growth: round 1 of 1, {side}" for side in sides),
        "part 2 of 5: fit",
        "fit: blocks, 8 requests",
        "fit: one piece, 8 requests",
        "part 3 of 5: padding",
        *(
            f"padding: {side}, {what}"
            for side in ("end to end", "padded", "Transformers")
            for what in ("reading the prompts", "prompts and answers")
        ),
        "part 4 of 5: prefix",
        "prefix: round 1 of 1, earlier turns found",
        "prefix: round 1 of 1, every turn anew",
        "part 5 of 5: dtype",
        "dtype: float32",
        "dtype: float16",
    ]


def test_growth_counts_every_token_and_gets_the_same_answer(row: Callable[[str], Row]) -> None:
    computed = row("growth/tokens computed")
    assert (computed.value, computed.peers) == (9 + 11, {"no cache": sum(range(9, 21))})
    assert row("growth/answers equal to ours with a cache").value == 100
    token_bytes = 3 * 2 * 2 * 16 * 4  # layers, K and V, heads, features, float32
    cache = row("growth/cache")
    # in blocks of 16; the last token's own K and V are never needed
    assert cache.value == pytest.approx(32 * token_bytes / 2**20, rel=1e-3)
    assert cache.peers == {"Transformers": pytest.approx(20 * token_bytes / 2**20, rel=1e-3)}


def test_growth_has_a_curve_of_each_side(rows: list[Row], row: Callable[[str], Row]) -> None:
    assert [r.name for r in rows if r.name.startswith("growth/total/")] == [
        f"growth/total/{n}" for n in range(1, 13)
    ]
    peers = {"no cache", "Transformers", "Transformers, no cache"}
    totals = [row(f"growth/total/{n}") for n in range(1, 13)]
    assert all(set(total.peers) == peers for total in totals)
    for name in ("", *peers):
        times = [total.value if name == "" else total.peers[name] for total in totals]
        assert times[0] > 0
        assert times == sorted(times)
    assert set(row("growth/times faster at the end").peers) == {"Transformers"}
    assert {name for name in (r.name for r in rows) if name.startswith("growth/token/")} == {
        f"growth/token/{n}" for n in range(2, 13)
    }


def test_one_piece_per_request_holds_so_many_and_blocks_hold_more(row: Callable[[str], Row]) -> None:
    most, mean = row("fit/requests at once, most"), row("fit/requests at once, mean")
    assert most.peers == {"one piece": 3}
    assert most.value > 3
    assert mean.value > mean.peers["one piece"]
    assert mean.details is not None
    assert mean.details["tokens of room"] == 3 * 64
    held, reserved = row("fit/tokens held, mean"), row("fit/tokens of room reserved, mean")
    assert held.value < reserved.value <= 3 * 64
    assert held.peers["one piece"] < 0.5 * reserved.peers["one piece"]
    assert reserved.peers["one piece"] <= 3 * 64


def test_the_share_of_a_rectangle_that_was_asked_for(row: Callable[[str], Row]) -> None:
    asked = row("padding/computed tokens that were asked for")
    assert asked.details is not None
    prompts, answers = ([int(n) for n in str(asked.details[key]).split()] for key in ("prompts", "answers"))
    assert len(prompts) == len(answers) == 4
    share = (sum(prompts) + sum(answers)) / (4 * (max(prompts) + max(answers)))
    assert asked.peers == {"padded": pytest.approx(100 * share, rel=1e-3)}
    assert set(row("padding/prompts and answers").peers) == {"padded", "Transformers"}


def test_a_conversation_computes_what_is_new_and_less_than_a_block(row: Callable[[str], Row]) -> None:
    sent = [32 + 5 + turn * (5 + 4) for turn in range(3)]
    computed = row("prefix/prompt tokens computed")
    # Whole blocks of what the turn before left: its prompt and its answer but the last token.
    known = [0, *((length + 4 - 1) // 16 * 16 for length in sent[:-1])]
    assert computed.value == sum(length - hit for length, hit in zip(sent, known, strict=True))
    assert computed.peers == {"every turn anew": sum(sent)}
    assert row("prefix/prompt tokens sent").value == sum(sent)


def test_a_smaller_dtype_halves_a_token(row: Callable[[str], Row]) -> None:
    assert row("dtype/a token in float16").peers == {"float32": row("dtype/a token in float32").value}
    assert row("dtype/a token in float16").value == row("dtype/a token in float32").value / 2
    assert row("dtype/tokens in a GiB of float16").value == 2 * row("dtype/tokens in a GiB of float32").value
    assert 0 < row("dtype/change of a log probability, float16").value < 0.1


def test_rounds_are_whole_and_what_warms_up_is_short(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of growth a few tokens warm up, of padding one reading of the prompts: the rest would be time lost."""
    asked: list[tuple[int, int]] = []
    before = kv_cache.run

    def watched(engine: Engine, prompts: list[list[int]], num_new: list[int]) -> Outcome:
        asked.append((len(prompts), max(num_new)))
        return before(engine, prompts, num_new)

    monkeypatch.setattr(kv_cache, "run", watched)
    models, sizes = Models(folder, num_threads=1), replace(SIZES, rounds=2)
    rows = measure(models, sizes, ["growth"], with_peer=False)
    assert asked == [(1, 8), *[(1, 1)] * 8, *[(1, 12), *[(1, 1)] * 12] * 2]
    assert {row.name for row in rows} >= {"growth/total/1", "growth/total/8", "growth/total/12"}
    asked.clear()
    measure(models, sizes, ["padding"], with_peer=False)
    whole = [request for request in asked if request[1] > 1]
    assert [number for number, _ in asked] == [4] * 10
    assert len(whole) == 4

    asked.clear()
    rows = measure(models, replace(sizes, output_len=2), ["growth"], with_peer=False)
    assert asked == [(1, 2), (1, 1), (1, 1)] * 3
    assert {row.name for row in rows} >= {"growth/total/1", "growth/total/2"}


def test_random_weights_of_another_library_give_no_answers_to_compare(tmp_path: Path, folder: str) -> None:
    (tmp_path / "config.json").write_text((Path(folder) / "config.json").read_text())
    models = Models(str(tmp_path), load_format="dummy", num_threads=1)
    found = {row.name: row for row in measure(models, SIZES, ["growth"])}
    assert found["growth/answers equal to ours with a cache"].value == 100
    assert "Transformers" in found["growth/total/12"].peers


def test_from_where_on_the_cache_is_ahead() -> None:
    assert _ahead_for_good([1, 2, 3], [2, 3, 4]) == 1
    assert _ahead_for_good([1, 2, 3, 4], [2, 1, 4, 5]) == 3
    assert _ahead_for_good([1, 2], [0, 1]) == 3
    assert curve_points(3) == [1, 2, 3]
    assert set(curve_points(256)) >= {1, 2, 4, 8, 16, 32, 64, 128, 256}
    assert len(curve_points(256)) < 40


def test_pictures_of_every_part_that_has_any(rows: list[Row], tmp_path: Path) -> None:
    plain = [{**vars(r)} for r in rows]
    plain = [{k: v for k, v in r.items() if v is not None or k != "details"} for r in plain]
    drawn = draw(plain, tmp_path, "AMD EPYC, avx2+fma, 2 cores, 24 GiB")
    assert [path.name for path in drawn] == [
        f"kv-cache-{part}.png" for part in ("growth", "fit", "padding", "prefix")
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    without_peers = measure_rows_without_peers(plain)
    assert len(draw(without_peers, tmp_path, "x")) == 4


def measure_rows_without_peers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**r, "peers": {k: v for k, v in r["peers"].items() if "Trans" not in k}} for r in rows]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rounds": 0}, "rounds must be an integer of at least 1, got 0"),
        ({"output_len": 1}, "output_len must be at least 2"),
        ({"reserved_len": 1000}, "reserved_len must be a power of two"),
        ({"reserved_len": 256}, r"reserved_len \(256\) must hold the longest prompt and answer, 352 tokens"),
        ({"shortest": 300}, "longest_prompt must be at least shortest"),
    ],
)
def test_sizes_that_make_no_comparison(change: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sizes(**change)


def test_scaled_sizes_stay_comparisons() -> None:
    for factor in (0.01, 0.3, 1.0, 7.0):
        sizes = Sizes().scaled(factor)
        assert (sizes.rounds, sizes.turns) == (2, 8)
    assert Sizes().scaled(1.0) == Sizes()


def test_a_model_with_too_few_positions_is_told_so(folder: str) -> None:
    message = re.escape("has 256 positions, and this takes 1024; ask for less")
    with pytest.raises(ConfigError, match=message):
        measure(Models(folder, num_threads=1), Sizes(), ["fit"], with_peer=False)


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["kv-cache", *arguments])


def test_the_command_writes_a_file_that_it_can_show_and_draw_again(folder: str, tmp_path: Path) -> None:
    path = tmp_path / "kv_cache.json"
    sizes = (
        "--output-len",
        "64",
        "--rounds",
        "1",
        "--scale",
        "0.05",
        "--peers",
        "none",
        "--num-threads",
        "1",
    )
    done = invoke(folder, "--parts", "growth,dtype", *sizes, "--json", str(path))
    assert done.exit_code == 0, done.output
    assert re.search(r"^ +\d+ s  part 2 of 2: dtype$", done.stderr, re.MULTILINE)
    names = [r["name"] for r in json.loads(path.read_text())["rows"]]
    assert {name.partition("/")[0] for name in names} == {"growth", "dtype"}
    shown = invoke("--from", str(path), "--plot", str(tmp_path))
    assert shown.exit_code == 0, shown.output
    assert "| growth/total/2 |" in shown.output
    assert "growth/total/3 " not in shown.output
    assert f"drew {tmp_path / 'kv-cache-growth.png'}" in shown.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--parts", "groth"), "did you mean 'growth'?"),
        (("--parts", ","), "needs at least one of growth"),
        (("--peers", "vllm"), "--peers must be transformers or none"),
        (("--block-size", "32"), "--block-size: the parts of kv-cache choose this themselves"),
        (("--no-prefix-caching",), "--no-prefix-caching: the parts of kv-cache choose this themselves"),
        (("--plot", "nowhere/at/all"), "--plot: there is no folder"),
    ],
)
def test_what_the_command_refuses(arguments: tuple[str, ...], message: str) -> None:
    done = invoke("m", *arguments)
    assert done.exit_code != 0
    text = f"{done.output} {done.exception}"
    assert message in re.sub(r"[\s│]+", " ", text)


def test_the_parts_are_those_that_the_help_names() -> None:
    assert ", ".join(PARTS) in re.sub(r"[\s│]+", " ", invoke("--help").output)
