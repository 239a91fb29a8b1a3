"""GET /metrics: names and units by Prometheus' conventions, and every number after known events."""

import re
from types import SimpleNamespace

import pytest
from helpers.serve import CARD, STATS, Answer, run, scripted_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from octavo.engine.stats import EngineStats
from octavo.outputs import CompletionOutput, RequestMetrics, RequestOutput
from octavo.serve import metrics as metrics_module
from octavo.serve.messages import News, Stage
from octavo.serve.metrics import Metrics
from octavo.serve.settings import ServeSettings

# What `promtool check metrics` looks at, and Prometheus' page on naming.
UNITS = {
    "milliseconds": "seconds", "ms": "seconds", "minutes": "seconds", "kilobytes": "bytes", "mb": "bytes",
    "percent": "ratio",
}  # fmt: skip


def problems(text):
    """What Prometheus' conventions say against an exposition."""
    found = []
    for family in text_string_to_metric_families(text):
        name = family.name
        samples = {sample.name for sample in family.samples}
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or "__" in name:
            found.append(f"{name}: not in snake case")
        if not family.documentation.strip():
            found.append(f"{name}: no HELP")
        if family.type == "unknown":
            found.append(f"{name}: no TYPE")
        if family.type == "counter" and any(
            not sample.endswith(("_total", "_created")) for sample in samples
        ):
            found.append(f"{name}: a counter ends in _total")
        if family.type != "counter" and name.endswith("_total"):
            found.append(f"{name}: only counters end in _total")
        if family.type != "histogram" and name.endswith(("_count", "_sum", "_bucket")):
            found.append(f"{name}: the ending of a histogram's series")
        if any(word in ("gauge", "counter", "histogram", "summary") for word in name.split("_")):
            found.append(f"{name}: names its type")
        found += [f"{name}: {word} instead of {UNITS[word]}" for word in name.split("_") if word in UNITS]
        for sample in family.samples:
            for label in sample.labels:
                if not re.fullmatch(r"[a-z][a-z0-9_]*", label):
                    found.append(f"{name}: label {label}")
                if label in name.split("_") and not name.endswith("_info") and label != "state":
                    found.append(f"{name}: label {label} is in the name")
        if family.type == "histogram":
            bounds = [s.labels["le"] for s in family.samples if s.name.endswith("_bucket")]
            counts = [s.value for s in family.samples if s.name.endswith("_bucket")]
            if bounds[-1] != "+Inf" or counts != sorted(counts):
                found.append(f"{name}: its buckets are not cumulative up to +Inf")
    return found


@pytest.mark.parametrize(
    ("metric", "name", "problem"),
    [
        (Gauge, "octavo_wait_total", "only counters end in _total"),
        (Gauge, "octavo_wait_ms", "ms instead of seconds"),
        (Gauge, "octavo_waitGauge", "not in snake case"),
        (Gauge, "octavo_gauge_of_waiting", "names its type"),
        (Histogram, "octavo_wait_milliseconds", "milliseconds instead of seconds"),
    ],
)
def test_the_rules_catch_what_they_are_for(metric, name, problem):
    registry = CollectorRegistry()
    metric(name, "Help.", registry=registry)
    assert problem in "; ".join(problems(generate_latest(registry).decode()))
    assert "no HELP" in "; ".join(problems("# TYPE octavo_x gauge\noctavo_x 1\n"))
    Counter("octavo_good", "Help.", registry=(good := CollectorRegistry()))
    assert problems(generate_latest(good).decode()) == []


def exposition(metrics):
    return generate_latest(metrics.registry).decode()


def values(text):
    """{name or name{label="value"}: value}, without the process's own."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def output_of(request_id, tokens=3, reason="stop", error=None, **times):
    metrics = RequestMetrics(
        **{"queue_s": 0.02, "ttft_s": 0.2, "tpot_s": 0.04, "e2e_s": 0.7, "num_preemptions": 0} | times
    )
    completion = CompletionOutput(0, "", [0] * tokens, reason)
    return RequestOutput(request_id, None, [1] * 5, [completion], 0, metrics, error=error)


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(metrics_module, "time", SimpleNamespace(perf_counter=lambda: now.s))
    return now


def news(stats=STATS, step_s=0.03, num_tokens=1):
    return News([], stats, step_s, num_tokens)


def test_an_idle_server_tells_every_family_and_keeps_to_the_conventions():
    metrics = Metrics()
    settings = ServeSettings(served_model_names=("shown",))
    metrics.engine = SimpleNamespace(num_waiting=0, num_active=0, model=CARD, settings=settings)
    metrics.stage(Stage("weights", 1.5))
    metrics.state("ready")
    text = exposition(metrics)
    assert problems(text) == []
    found = values(text)
    assert found['octavo_load_seconds{stage="weights"}'] == 1.5
    assert found['octavo_engine_state{octavo_engine_state="ready"}'] == 1
    assert found['octavo_engine_state{octavo_engine_state="dead"}'] == 0
    assert found['octavo_kv_cache_blocks{state="free"}'] == 64
    assert found['octavo_requests_total{finish_reason="abort"}'] == 0  # there from the start, for rate()
    (model,) = (name for name in found if name.startswith("octavo_model_info"))
    assert 'model="shown"' in model  # and not where its files are
    assert 'max_model_len="200"' in model
    families = {
        family.name for family in openmetrics.text_string_to_metric_families(openmetrics_text(metrics))
    }
    assert {"octavo_requests", "octavo_time_to_first_token_seconds", "octavo_build_info"} <= families


def openmetrics_text(metrics):
    from prometheus_client.openmetrics.exposition import generate_latest as generate

    return generate(metrics.registry).decode()


def test_a_stream_is_timed_from_its_submission_and_from_piece_to_piece(clock):
    metrics = Metrics()
    metrics.submitted("a", 12)
    clock.s += 0.3
    metrics.told(["a"])
    clock.s += 0.02
    metrics.told([])  # text held back: no piece
    clock.s += 0.02
    metrics.told(["a"])
    clock.s += 0.08
    metrics.told(["a"])
    metrics.finished(output_of("a"))
    for _ in range(4):
        metrics.step(news())
    found = values(exposition(metrics))
    assert found["octavo_time_to_first_token_seconds_count"] == 1
    assert found["octavo_time_to_first_token_seconds_sum"] == pytest.approx(0.3)
    assert found['octavo_time_to_first_token_seconds_bucket{le="0.25"}'] == 0
    assert found['octavo_time_to_first_token_seconds_bucket{le="0.5"}'] == 1
    assert found["octavo_inter_token_latency_seconds_count"] == 2
    assert found["octavo_inter_token_latency_seconds_sum"] == pytest.approx(0.12)
    assert found['octavo_inter_token_latency_seconds_bucket{le="0.05"}'] == 1
    assert found["octavo_request_prompt_tokens_sum"] == 12
    assert found["octavo_request_output_tokens_sum"] == 3
    assert found["octavo_request_queue_seconds_sum"] == pytest.approx(0.02)
    assert found["octavo_time_per_output_token_seconds_sum"] == pytest.approx(0.04)
    assert found["octavo_request_duration_seconds_sum"] == pytest.approx(0.7)
    assert found["octavo_step_seconds_sum"] == pytest.approx(0.12)
    assert found['octavo_requests_total{finish_reason="stop"}'] == 1


def test_streams_of_one_step_are_counted_one_by_one(clock):
    metrics = Metrics()
    names = [f"r{i}" for i in range(256)]
    for name in names:
        metrics.submitted(name, 1)
    for _ in range(3):
        clock.s += 0.01
        metrics.told(names)
    found = values(exposition(metrics))
    assert found["octavo_time_to_first_token_seconds_count"] == 256
    assert found["octavo_inter_token_latency_seconds_count"] == 512
    assert found["octavo_inter_token_latency_seconds_sum"] == pytest.approx(5.12)


def test_a_whole_answer_is_timed_by_the_engine(clock):
    metrics = Metrics()
    metrics.submitted("a", 4)
    clock.s += 5
    metrics.finished(output_of("a"))
    found = values(exposition(metrics))
    assert found["octavo_time_to_first_token_seconds_sum"] == pytest.approx(0.2)
    assert found["octavo_inter_token_latency_seconds_count"] == 0


def test_what_ended_badly_is_in_no_duration(clock):
    metrics = Metrics()
    for name, reason, error in (("a", "abort", None), ("b", "error", "broke")):
        metrics.submitted(name, 1)
        done = output_of(name, 0, reason, error, ttft_s=None, queue_s=None, tpot_s=None)
        metrics.finished(done)
        metrics.step(news(num_tokens=0))
    found = values(exposition(metrics))
    assert found['octavo_requests_total{finish_reason="abort"}'] == 1
    assert found['octavo_requests_total{finish_reason="error"}'] == 1
    assert found["octavo_request_duration_seconds_count"] == 0
    assert found["octavo_time_to_first_token_seconds_count"] == 0
    assert found["octavo_step_seconds_count"] == 0  # an abort is no step


def test_counts_of_the_engine_are_told_as_they_are():
    metrics = Metrics()
    stats = EngineStats(
        num_waiting=3, num_running=4, num_free_blocks=10, num_cached_blocks=20, num_owned_blocks=34,
        num_steps=7, num_prompt_tokens=100, num_output_tokens=50, num_hit_tokens=30, num_preemptions=2,
        num_evictions=5,
    )  # fmt: skip
    metrics.step(news(stats=stats, num_tokens=9))
    metrics.engine = SimpleNamespace(num_waiting=2, num_active=7)
    found = values(exposition(metrics))
    assert {k: v for k, v in found.items() if k.startswith("octavo_kv_cache_blocks")} == {
        'octavo_kv_cache_blocks{state="free"}': 10,
        'octavo_kv_cache_blocks{state="cached"}': 20,
        'octavo_kv_cache_blocks{state="owned"}': 34,
    }
    for name, value in (
        ("octavo_requests_waiting", 2), ("octavo_requests_running", 5), ("octavo_steps_total", 7),
        ("octavo_prompt_tokens_total", 100), ("octavo_output_tokens_total", 50),
        ("octavo_prefix_hit_tokens_total", 30), ("octavo_preemptions_total", 2),
        ("octavo_evictions_total", 5),
        ('octavo_engine_sequences{state="waiting"}', 3), ('octavo_engine_sequences{state="running"}', 4),
        ("octavo_step_tokens_sum", 9),
    ):  # fmt: skip
        assert found[name] == value, name


def test_what_was_refused_or_died_is_forgotten():
    metrics = Metrics()
    metrics.submitted("a", 1)
    metrics.submitted("b", 1)
    metrics.refused("invalid", "a")
    metrics.refused("overloaded")
    assert set(metrics._open) == {"b"}
    metrics.state("dead")
    assert not metrics._open
    found = values(exposition(metrics))
    assert found['octavo_requests_refused_total{reason="invalid"}'] == 1
    assert found['octavo_requests_refused_total{reason="overloaded"}'] == 1


async def ask(client, **changes):
    body = {"model": "scripted", "prompt": "ab", **changes}
    return await client.post("/v1/completions", json=body)


def test_through_the_whole_server():
    async def test():
        def script(submit):
            if submit.params.max_tokens == 7:
                return Answer(refuse=("RequestError", "no"))
            return Answer(["ab", "c", "d"])

        async with scripted_client(script) as (client, _):
            assert (await ask(client)).status_code == 200
            assert (await ask(client, stream=True)).status_code == 200
            assert (await ask(client, max_tokens=7)).status_code == 400
            assert (await client.get("/nowhere/at/all")).status_code == 404
            answer = await client.get("/metrics")
            assert answer.headers["content-type"].startswith("text/plain; version=")
            assert problems(answer.text) == []
            found = values(answer.text)
            other = await client.get("/metrics", headers={"Accept": "application/openmetrics-text"})
            assert other.headers["content-type"].startswith("application/openmetrics-text")
            assert other.text.endswith("# EOF\n")
            return found

    found = run(test())
    assert found['octavo_requests_total{finish_reason="stop"}'] == 2
    assert found['octavo_requests_refused_total{reason="invalid"}'] == 1
    assert found["octavo_inter_token_latency_seconds_count"] == 2
    assert found["octavo_time_to_first_token_seconds_count"] == 2
    assert found["octavo_requests_running"] == found["octavo_requests_waiting"] == 0
    responses = {k: v for k, v in found.items() if k.startswith("octavo_http_responses_total")}
    assert responses == {
        'octavo_http_responses_total{method="POST",route="/v1/completions",status="200"}': 2,
        'octavo_http_responses_total{method="POST",route="/v1/completions",status="400"}': 1,
        'octavo_http_responses_total{method="GET",route="other",status="404"}': 1,
    }


def test_a_scan_of_made_up_paths_and_methods_makes_no_labels():
    async def test():
        async with scripted_client(Answer(["a"])) as (client, _):
            for i in range(20):
                await client.request(f"M{i}", f"/made/up/{i}")
                await client.get(f"/v1/models/m{i}")
            return values((await client.get("/metrics")).text)

    found = run(test())
    responses = [name for name in found if name.startswith("octavo_http_responses_total")]
    assert len(responses) <= 3, responses
