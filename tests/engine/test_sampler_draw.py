"""The sampler's tensor functions against values worked out by hand and against Transformers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from octavo.engine.draw import draw_by_id, draw_by_order, gather_logprobs, leading_ids, order_keys
from octavo.kernels.reference.sampling import uniform
from octavo.outputs import Logprob

MASK = 2**64 - 1


def splitmix64(state: int) -> int:
    """The finaliser as published, in Python integers."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def by_id(probs, uniforms, min_p=0.0):
    rows = torch.tensor(probs, dtype=torch.float32).expand(len(uniforms), -1).clone()
    points = torch.tensor(uniforms, dtype=torch.float64)
    return draw_by_id(rows, torch.full((len(uniforms),), min_p), points).tolist()


def by_order(logits, uniforms, *, top_k=None, top_p=1.0, min_p=0.0, width=None):
    size = len(logits)
    rows = torch.tensor(logits, dtype=torch.float32).expand(len(uniforms), -1).contiguous()
    count = len(uniforms)
    return draw_by_order(
        rows,
        torch.softmax(rows, dim=1),
        torch.full((count,), top_k or size),
        torch.full((count,), top_p, dtype=torch.float64),
        torch.full((count,), min_p),
        torch.tensor(uniforms, dtype=torch.float64),
        width or size,
    ).tolist()


@pytest.mark.parametrize("seed", [0, 1, 42, -1, 2**63 - 1, -(2**63)])
def test_uniform_is_splitmix64(seed):
    gamma = 0x9E3779B97F4A7C15
    expected = [
        (splitmix64((splitmix64((seed + gamma) & MASK) + (position + 1) * gamma) & MASK) >> 11) / 2**53
        for position in range(5)
    ]
    assert uniform(torch.full((5,), seed), torch.arange(5)).tolist() == expected


def test_uniform_is_flat_over_seeds_and_over_positions():
    for points in (
        uniform(torch.arange(100_000), torch.zeros(100_000, dtype=torch.int64)),
        uniform(torch.zeros(100_000, dtype=torch.int64), torch.arange(100_000)),
    ):
        counts = torch.histc(points, bins=100, min=0.0, max=1.0)
        # Chi-square with 99 degrees of freedom: 148 is the 99.9 % point.
        assert float(((counts - 1000) ** 2 / 1000).sum()) < 148
        # Neighbours are not correlated.
        assert abs(float(torch.corrcoef(torch.stack([points[1:], points[:-1]]))[0, 1])) < 0.01


def test_draw_by_id_inverts_the_distribution():
    points = [0.0, 0.05, 0.15, 0.35, 0.7, 1 - 2**-53]
    assert by_id([0.1, 0.2, 0.3, 0.4], points) == [0, 0, 1, 2, 3, 3]


def test_draw_by_id_never_takes_an_impossible_token():
    assert by_id([0.0, 0.5, 0.0, 0.5, 0.0], [0.0, 0.4999, 0.5, 1 - 2**-53]) == [1, 1, 3, 3]


def test_draw_by_id_with_min_p():
    # 0.3 x 0.4 = 0.12 cuts token 0; what is left is 2/9, 3/9, 4/9.
    assert by_id([0.1, 0.2, 0.3, 0.4], [0.0, 0.22, 0.23, 0.55, 0.56], min_p=0.3) == [1, 1, 2, 2, 3]


@pytest.mark.parametrize("size", [1, 127, 128, 129, 1000])
def test_draw_by_id_finds_each_token_in_every_block(size):
    points = [(i + 0.5) / size for i in range(size)]
    assert by_id([1 / size] * size, points) == list(range(size))


def test_draw_by_id_at_the_edges_of_blocks():
    """Block sums and the sums inside a block round differently; no draw may fall between the two."""
    weights = torch.exp(8 * torch.randn(128 * 40, generator=torch.Generator().manual_seed(0)))
    weights[::128] = 0  # where a draw that overshoots its block would land
    ends = weights.view(40, 128).sum(dim=1, dtype=torch.float64).cumsum(dim=0)
    edges = (ends / ends[-1]).tolist()
    points = (
        [math.nextafter(edge, 0.0) for edge in edges] + [edge for edge in edges if edge < 1] + [1 - 2**-53]
    )
    chosen = by_id(weights.tolist(), points)
    assert max(chosen) < len(weights)
    assert min(weights[chosen].tolist()) > 0


@given(st.floats(min_value=1e-300, max_value=1e300))
def test_a_total_times_a_uniform_is_less_than_the_total(total):
    assert total * (1 - 2**-53) < total


LOGITS = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]  # in order: 1, 3, 2, 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 1, 3, 2, 0]),
        ({"top_k": 2}, [1, 1, 1, 3, 3]),
        ({"top_k": 1}, [1, 1, 1, 1, 1]),
        ({"top_p": 0.6}, [1, 1, 1, 3, 3]),  # 0.4 is not enough, 0.7 is
        ({"top_p": 0.8}, [1, 1, 3, 3, 2]),  # 0.9: tokens 1, 3, 2
        ({"top_p": 0.1}, [1, 1, 1, 1, 1]),
        ({"min_p": 0.6}, [1, 1, 1, 3, 3]),  # 0.24 cuts 0.2 and 0.1
        ({"top_k": 3, "top_p": 0.5}, [1, 1, 1, 3, 3]),  # 0.4 / 0.9 is not enough: 0.7 / 0.9 is
        ({"top_k": 2, "top_p": 0.5}, [1, 1, 1, 1, 1]),  # 0.4 / 0.7 is enough
        ({"min_p": 0.6, "top_p": 0.5}, [1, 1, 1, 1, 1]),  # likewise, after min_p
    ],
    ids=str,
)
def test_draw_by_order(options, expected):
    # Of the whole: [0, .4) -> 1, [.4, .7) -> 3, [.7, .9) -> 2, [.9, 1) -> 0.
    # Of {1, 3}: [0, .571) -> 1. Of {1, 3, 2}: [0, .444) -> 1, [.444, .778) -> 3.
    assert by_order(LOGITS, [0.0, 0.39, 0.56, 0.72, 0.95], **options) == expected


def test_equal_logits_are_taken_by_lower_id_first():
    # vllm and Transformers keep whichever of the tied tokens their sort puts first.
    points = [i / 64 for i in range(64)]
    assert set(by_order([1.0, 2.0, 1.0, 1.0, 2.0], points, top_k=3)) == {0, 1, 4}
    assert set(by_order([0.0, -0.0, 0.0, -0.0], points, top_k=2)) == {0, 1}
    assert set(by_order([0.0] * 4, points, top_p=0.5)) == {0, 1}


@pytest.mark.parametrize(
    "options", [{"top_p": 0.3}, {"top_p": 0.95}, {"min_p": 0.01, "top_p": 0.9}, {"top_k": 7}]
)
def test_number_of_candidates_changes_nothing(options):
    torch.manual_seed(0)
    points = [i / 500 for i in range(500)]
    for scale in (0.1, 1.0, 5.0):
        logits = (torch.randn(300) * scale).tolist()
        expected = by_order(logits, points, **options)
        for width in (7, 32, 299):
            assert by_order(logits, points, width=width, **options) == expected


@pytest.mark.parametrize("seed", range(25))
def test_kept_tokens_are_those_of_transformers(seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 16, generator=generator)
    temperature, top_p, min_p = (0.4 + 1.2 * torch.rand(3, generator=generator)).tolist()
    top_k = int(torch.randint(1, 17, (), generator=generator))
    top_p, min_p = min(top_p, 1.0), min_p / 8
    scores = TemperatureLogitsWarper(temperature)(None, logits)
    for warper in (MinPLogitsWarper(min_p), TopKLogitsWarper(top_k), TopPLogitsWarper(top_p)):
        scores = warper(None, scores)
    expected = set(scores[0].isfinite().nonzero()[:, 0].tolist())
    points = [(i + 0.5) / 4096 for i in range(4096)]
    scaled = (logits / temperature)[0].tolist()
    assert set(by_order(scaled, points, top_k=top_k, top_p=top_p, min_p=min_p)) == expected


def test_order_keys_sort_by_logit_then_by_id():
    values = [0.0, -math.inf, 3.5, -0.0, -1.0, 3.5, 1e-45, -1e-45, 3e38, -3e38]
    keys = order_keys(torch.tensor([values]))
    expected = [8, 2, 5, 6, 0, 3, 7, 4, 9, 1]
    assert leading_ids(keys, 10).tolist() == [expected]
    assert leading_ids(keys, 1).tolist() == [[8]]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.data())
def test_leading_ids_are_a_stable_sort(values, data):
    width = data.draw(st.integers(0, len(values)))
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))[:width]
    assert leading_ids(order_keys(torch.tensor([values], dtype=torch.float32)), width).tolist() == [expected]


def test_gather_logprobs():
    logits = torch.tensor([LOGITS, LOGITS])
    found = gather_logprobs(logits, torch.tensor([0, 3]), [2, 3])
    assert [list(entry) for entry in found] == [[0, 1, 3], [3, 1, 2]]
    assert [(token, value.rank) for token, value in found[0].items()] == [(0, 4), (1, 1), (3, 2)]
    assert [(token, value.rank) for token, value in found[1].items()] == [(3, 2), (1, 1), (2, 3)]
    assert found[0][0].logprob == pytest.approx(math.log(0.1), abs=1e-6)
    assert found[0][1].logprob == pytest.approx(math.log(0.4), abs=1e-6)


def test_gather_logprobs_of_the_chosen_token_alone():
    [entry] = gather_logprobs(torch.zeros(1, 2), torch.tensor([1]), [0])
    assert entry == {1: Logprob(pytest.approx(-math.log(2)), 2)}


@pytest.mark.parametrize("size", [1000, 49152])
def test_torch_treats_a_row_the_same_in_any_batch(size):
    """What the whole design rests on; a torch release that changes it must be noticed here."""
    torch.manual_seed(size)
    logits = torch.randn(37, size) * 4
    probs = torch.softmax(logits, dim=1)
    logprobs = torch.log_softmax(logits, dim=1)
    padded = torch.nn.functional.pad(probs, (0, -size % 128))
    sums = padded.view(37, -1, 128).sum(dim=2, dtype=torch.float64)
    running = probs[:, :500].double().cumsum(dim=1)
    for first, last in [(0, 1), (5, 6), (36, 37), (3, 10), (20, 37)]:
        part = logits[first:last].clone()
        assert torch.equal(torch.softmax(part, dim=1), probs[first:last])
        assert torch.equal(torch.log_softmax(part, dim=1), logprobs[first:last])
        blocks = padded[first:last].clone().view(last - first, -1, 128)
        assert torch.equal(blocks.sum(dim=2, dtype=torch.float64), sums[first:last])
        assert torch.equal(probs[first:last, :500].clone().double().cumsum(dim=1), running[first:last])
        assert torch.equal(sums[first:last].clone().cumsum(dim=1), sums.cumsum(dim=1)[first:last])
