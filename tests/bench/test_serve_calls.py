import itertools
import json
import random
import statistics

import pytest

from octavo.bench.serve_calls import TRACE_BLOCK, Arrivals, Lengths, Mix, read_trace
from octavo.errors import ConfigError


def mix(**changes):
    options = {
        "input_lens": Lengths.parse("input_len", "uniform:4:9"),
        "output_lens": Lengths.parse("output_len", "12"),
        "arrivals": Arrivals(),
        **changes,
    }
    return Mix(**options)


def first(number, source):
    return list(itertools.islice(source, number))


def test_the_same_seed_asks_the_same_and_another_does_not():
    assert first(20, mix().calls(3)) == first(20, mix().calls(3))
    assert first(20, mix().calls(3)) != first(20, mix().calls(4))


def test_another_rate_asks_the_same_things_at_other_times():
    slow, fast = (first(50, mix(arrivals=Arrivals(rate)).calls(0)) for rate in (1.0, 10.0))
    assert [call.prompt for call in slow] == [call.prompt for call in fast]
    assert [call.at_s for call in slow] == pytest.approx([10 * call.at_s for call in fast])


@pytest.mark.parametrize(("burstiness", "spread"), [(1.0, 1.0), (0.25, 2.0), (100.0, 0.1)])
def test_gaps_have_the_mean_of_the_rate_and_the_spread_of_the_burstiness(burstiness, spread):
    times = [0.0, *first(20_000, Arrivals(5.0, burstiness).times(random.Random(1)))]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) / mean == pytest.approx(spread, rel=0.05)


def test_an_infinite_rate_sends_all_at_once_and_no_rate_sends_on_demand():
    assert first(3, Arrivals(float("inf")).times(random.Random(0))) == [0.0, 0.0, 0.0]
    assert first(3, Arrivals().times(random.Random(0))) == [None, None, None]


@pytest.mark.parametrize(
    ("spec", "low", "high", "mean"),
    [
        ("128", 128, 128, 128),
        ("uniform:3:5", 3, 5, 4),
        ("normal:100:10", 50, 150, 100),
        ("normal:100:50:110", 1, 110, 85.4),  # what lies above is 110
        ("lognormal:100:0.5", 10, 1000, 113.3),  # 100 exp(0.125)
        ("exponential:50:60", 1, 60, 35),  # 50 (1 - exp(-1.2)) for the part below 60
    ],
)
def test_lengths(spec, low, high, mean):
    rng = random.Random(0)
    lens = [Lengths.parse("x", spec).draw(rng) for _ in range(20_000)]
    assert low <= min(lens) <= max(lens) <= high
    assert statistics.fmean(lens) == pytest.approx(mean, rel=0.03)


@pytest.mark.parametrize(
    "spec", ["", "0", "-1", "a", "1:2", "uniform:5", "uniform:5:3", "uniform:1:2:3", "zipf:3", "normal:nan:1"]
)
def test_lengths_that_are_none_are_named(spec):
    with pytest.raises(ConfigError, match="input_len must be a number of tokens, uniform:LOW:HIGH"):
        Lengths.parse("input_len", spec)


def test_prompts_share_their_beginnings():
    calls = first(60, mix(num_prefixes=3, prefix_len=40).calls(0))
    beginnings = {" ".join(call.prompt.split()[:40]) for call in calls}
    assert len(beginnings) == 3
    assert {len(call.prompt.split()) for call in calls} == set(range(44, 50))


def test_ids_keep_to_the_vocabulary():
    calls = first(60, mix(as_text=False, max_token_id=7).calls(0))
    assert {token_id for call in calls for token_id in call.prompt} == set(range(8))


def test_clients_that_hang_up_do_so_before_the_end():
    calls = first(2000, mix(drop_share=0.2).calls(0))
    drops = [call.drop_after for call in calls if call.drop_after is not None]
    assert len(drops) == pytest.approx(400, rel=0.1)
    assert (min(drops), max(drops)) == (1, 11)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"num_prefixes": 2}, "num_prefixes and prefix_len go together"),
        ({"drop_share": 1.5}, "drop_share must be from 0 to 1, got 1.5"),
        ({"max_token_id": 0}, "max_token_id must be at least 1"),
    ],
)
def test_an_impossible_mix_is_named(changes, what):
    with pytest.raises(ConfigError, match=what):
        mix(**changes)


@pytest.mark.parametrize(("options", "what"), [((0.0,), "rate must be above 0"), ((1.0, 0.0), "burstiness")])
def test_impossible_arrivals_are_named(options, what):
    with pytest.raises(ConfigError, match=what):
        Arrivals(*options)


def write(path, *entries):
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def test_a_trace_is_replayed_from_its_first_call_in_order_of_time(tmp_path):
    path = write(
        tmp_path / "t.jsonl",
        {"timestamp": 3000, "input_length": 7, "output_length": 2},
        {"timestamp": 1000, "input_length": 5, "output_length": 3},
        {"arrival_s": 2, "prompt": "hello", "output_length": 4},
    )
    calls = read_trace(path, speed=2.0, as_text=False)
    assert [call.at_s for call in calls] == [0.0, 0.5, 1.0]
    assert [call.output_len for call in calls] == [3, 4, 2]
    assert (len(calls[0].prompt), calls[1].prompt, len(calls[2].prompt)) == (5, "hello", 7)


def test_calls_of_a_trace_share_the_blocks_with_the_same_id(tmp_path):
    length = TRACE_BLOCK + 88
    entry = {"timestamp": 0, "input_length": length, "output_length": 1}
    path = write(tmp_path / "t.jsonl", {**entry, "hash_ids": [4, 9]}, {**entry, "hash_ids": [4, 5]})
    one, other = (call.prompt for call in read_trace(path, as_text=False))
    assert len(one) == len(other) == length
    assert one[:TRACE_BLOCK] == other[:TRACE_BLOCK]
    assert one[TRACE_BLOCK:] != other[TRACE_BLOCK:]
    words = [call.prompt.split() for call in read_trace(path)]
    assert words[0][:TRACE_BLOCK] == words[1][:TRACE_BLOCK]
    assert len(words[0]) == length


def test_a_csv_trace(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,374,44\n2023-11-16 18:17:04.0319600,396,109\n"
    )
    calls = read_trace(path, as_text=False)
    assert [call.at_s for call in calls] == pytest.approx([0.0, 0.052])
    assert [(len(call.prompt), call.output_len) for call in calls] == [(374, 44), (396, 109)]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "entry 2 is no call"),
        ("[]", "entry 2 is no call"),
        ('{"timestamp": 1, "output_length": 1}', "entry 2 is no call .KeyError: 'input_length'"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}', "lengths count from 1"),
        ('{"timestamp": 1, "prompt": [1, "a"], "output_length": 1}', "prompt must be a string or a list"),
    ],
)
def test_a_line_that_is_no_call_is_named(tmp_path, line, what):
    path = write(tmp_path / "t.jsonl", {"timestamp": 1, "input_length": 5, "output_length": 3})
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ConfigError, match=what):
        read_trace(path)


def test_a_trace_that_is_missing_or_empty_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "no.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="holds no call"):
        read_trace(tmp_path / "empty.jsonl")
