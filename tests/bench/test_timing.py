from octavo.bench.timing import interleaved, peak_rss_bytes, private_bytes, rss_bytes, seconds


def test_variants_run_in_turn():
    order = []
    medians = interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3)
    assert order == ["a", "b"] * 3
    assert set(medians) == {"a", "b"}
    assert all(value >= 0 for value in medians.values())


def test_seconds_measures_one_call():
    calls = []
    assert seconds(lambda: calls.append(1)) >= 0
    assert calls == [1]


def test_memory_is_told_in_bytes():
    assert rss_bytes() > 10 * 2**20
    # The kernel updates the two counters at different moments, so they are compared loosely.
    assert peak_rss_bytes() > rss_bytes() // 2
    assert 0 < private_bytes() < rss_bytes()
