"""The sampling kernels against their reference twin: few tokens, small tiles, every way a row can take."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.kernels import backend, sample
from octavo.kernels.reference.sampling import uniform
from octavo.kernels.triton import sampling as triton_sampling
from octavo.kernels.triton import tuning

pytestmark = pytest.mark.usefixtures("triton_room")

ROWS = 6


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 groups a tile, and lists so short that most filtered rows are searched as a whole somewhere."""
    monkeypatch.setattr(triton_sampling, "TILE", 256)
    launch(monkeypatch, candidates=32, few=16, columns=64)


def launch(monkeypatch: pytest.MonkeyPatch, **parameters: int) -> None:
    for name, value in parameters.items():
        monkeypatch.setitem(triton_sampling.DEFAULTS, name, value)
    tuning.forget()


def random_logits(size: int, *, dtype: torch.dtype = torch.float32, ties: bool = False) -> Tensor:
    logits = torch.randn(ROWS, size, generator=torch.Generator().manual_seed(size)) * 3
    return (logits.round() if ties else logits).to(dtype)


def options_of(filters: str, *, seed: int = 0) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    options = {
        "temperature": torch.tensor([0.0, 1.0, 0.7, 1.0, 2.0, 1e-30]),
        "seeds": torch.arange(ROWS) + 100 * seed,
        "positions": torch.arange(ROWS) * 3,
    }
    if "k" in filters:
        options["top_k"] = torch.tensor([5, 5, 0, 2, 50, 700], dtype=torch.int32)
    if "p" in filters:
        options["top_p"] = torch.rand(ROWS, generator=rng)
    if "m" in filters:
        options["min_p"] = torch.rand(ROWS, generator=rng) * 0.1
    return options


def assert_equals_reference(logits: Tensor, options: dict[str, Tensor]) -> None:
    ids, logprobs = sample(logits, **options, return_logprobs=True)
    with backend.use("reference"):
        right_ids, right_logprobs = sample(logits, **options, return_logprobs=True)
    assert ids.tolist() == right_ids.tolist()
    torch.testing.assert_close(logprobs, right_logprobs, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("filters", ["", "k", "p", "m", "kp", "mp", "kpm"])
@pytest.mark.parametrize("size", [1, 111, 700])
def test_chooses_what_the_reference_does(size: int, filters: str) -> None:
    assert_equals_reference(random_logits(size), options_of(filters))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("filters", ["", "kpm"])
def test_sixteen_bit_logits(filters: str, dtype: torch.dtype) -> None:
    assert_equals_reference(random_logits(700, dtype=dtype), options_of(filters, seed=1))


@pytest.mark.parametrize("filters", ["k", "p", "m", "kp"])
@pytest.mark.parametrize("candidates", [32, 1024], ids=["searched", "listed"])
def test_of_equal_logits_the_lower_ids_are_kept(
    filters: str, candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(monkeypatch, candidates=candidates)
    assert_equals_reference(random_logits(600, ties=True), options_of(filters))
    assert_equals_reference(torch.zeros(ROWS, 300), options_of(filters, seed=1))


LISTED = {"candidates": 1024, "few": 16}
WAYS = {"few": {"candidates": 512, "few": 512}, "listed": LISTED, "searched": {"candidates": 16, "few": 8}}


def many_draws(row: Tensor, num: int, **options: Tensor) -> tuple[list[int], list[int]]:
    """Ours and the reference's tokens for `num` seeds; hot, so that the last token kept is drawn, too."""
    options = {"temperature": torch.full((num,), 4.0), **options}
    options |= {"seeds": torch.arange(num), "positions": torch.zeros(num, dtype=torch.int64)}
    logits = row.expand(num, -1)
    ours = sample(logits, **options).tolist()
    with backend.use("reference"):
        return ours, sample(logits, **options).tolist()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ties", [False, True], ids=["spread", "ties"])
def test_cuts_fall_where_those_of_the_reference_do(
    way: str, ties: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other cuts for each seed: some above the tokens that top_k cuts through, some among them."""
    launch(monkeypatch, **WAYS[way])
    num, rng = 24, torch.Generator().manual_seed(0)
    top_k = torch.randint(1, 60, (num,), generator=rng, dtype=torch.int32)
    ours, right = many_draws(
        random_logits(400, ties=ties)[0],
        num,
        top_k=top_k,
        top_p=torch.where(torch.rand(num, generator=rng) < 0.3, 0.995, torch.rand(num, generator=rng)),
    )
    assert ours == right


@pytest.mark.parametrize("way", WAYS)
def test_top_p_alone_keeps_what_that_of_the_reference_does(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch, **WAYS[way])
    num = 16
    ours, right = many_draws(
        random_logits(400)[0] * 4, num, top_p=torch.rand(num, generator=torch.Generator().manual_seed(1))
    )
    assert ours == right


def test_no_more_groups_hold_candidates_than_tokens_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """One logit in each of 12 groups: the k-th largest group maximum is the k-th largest logit, and there is
    no mass beside the maxima.
    """
    launch(monkeypatch, **LISTED)
    row = torch.full((768,), -torch.inf)
    row[torch.arange(0, 768, 256)[:, None] + torch.arange(0, 32, 8)] = torch.linspace(1, 2, 12).view(3, 4)
    top_k = torch.arange(2, 13, dtype=torch.int32).repeat(2)
    ours, right = many_draws(row, len(top_k), top_k=top_k, temperature=torch.full((len(top_k),), 100.0))
    assert ours == right
    for k in range(2, 13):
        allowed = set(row.topk(k).indices.tolist())
        assert {token for token, limit in zip(ours, top_k.tolist(), strict=True) if limit == k} <= allowed
    top_p = torch.linspace(0.05, 0.95, 24)
    ours, right = many_draws(row, len(top_p), top_p=top_p)
    assert ours == right


def test_the_way_a_row_takes_does_not_change_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists short and long, a search of the whole row, other loads: integer sums agree to the bit."""
    logits, options = random_logits(600), options_of("kpm")
    ids, logprobs = sample(logits, **options, return_logprobs=True)
    others = []
    for parameters in ({"candidates": 1024}, {"few": 512}, {"few": 128, "stages": 2, "at_once": 2}):
        launch(monkeypatch, **parameters)
        others.append(sample(logits, **options, return_logprobs=True))
    wide = torch.full((ROWS, 601), 50.0)
    wide[:, :600] = logits
    others.append(sample(wide[:, :600], **options, return_logprobs=True))
    for other in others:
        assert other[0].equal(ids)
        assert other[1].equal(logprobs)


@pytest.mark.parametrize("filters", ["", "kpm"])
def test_a_row_is_the_same_alone_and_in_a_batch(filters: str) -> None:
    logits, options = random_logits(300), options_of(filters)
    together, logprobs = sample(logits, **options, return_logprobs=True)
    for row in range(ROWS):
        one = slice(row, row + 1)
        alone = sample(logits[one], **{name: x[one] for name, x in options.items()}, return_logprobs=True)
        assert alone[0].equal(together[one])
        assert alone[1].equal(logprobs[one])


@pytest.mark.parametrize("filters", ["", "k", "p", "kpm"])
def test_masked_and_bad_rows(filters: str) -> None:
    logits = random_logits(600)
    logits[1, 3] = float("nan")
    logits[2, 599] = float("inf")
    logits[3] = float("-inf")
    logits[4, 20:] = float("-inf")
    logits[5, :590] = float("-inf")
    assert_equals_reference(logits, options_of(filters))


@pytest.mark.parametrize("filters", ["", "kp"])
def test_tokens_come_as_often_as_their_probability_says(filters: str) -> None:
    probs = torch.tensor([0.05, 0.1, 0.15, 0.2, 0.5])
    expected = probs if not filters else torch.tensor([0, 0, 15 / 85, 20 / 85, 50 / 85])
    num = 50
    filter_options = {"top_k": torch.full((num,), 4, dtype=torch.int32), "top_p": torch.full((num,), 0.75)}
    ids = sample(
        probs.log().expand(num, -1),
        temperature=torch.ones(num),
        seeds=torch.arange(num),
        positions=torch.zeros(num, dtype=torch.int64),
        **(filter_options if filters else {}),
    )
    counts = torch.bincount(ids, minlength=5)
    assert (counts[expected == 0] == 0).all()
    difference = (counts - num * expected)[expected > 0]
    assert float((difference**2 / (num * expected[expected > 0])).sum()) < 18.47


def test_extremes_stay_in_range() -> None:
    logits = torch.tensor([[-3e38, 0.0, 3e38], [3e38, 3e38, -3e38]])
    for temperature in (1e-45, 1e-30, 1.0, 3e38):
        ids = sample(
            logits,
            temperature=torch.full((2,), temperature),
            top_p=torch.tensor([0.9, 1e-30]),
            seeds=torch.zeros(2, dtype=torch.int64),
            positions=torch.zeros(2, dtype=torch.int64),
        )
        assert 0 <= ids[0] <= 2
        assert ids[1] == 0


def test_sixteen_bit_logits_weigh_what_their_float32_copies_do() -> None:
    """Also at the edge of two tiles, where draws tell of the last bits of a tile's mass.

    A weight of e^-16 counts for nothing beside a 1 in its group, and in full in a group of its own: the mass
    of the first tile depends on whether the ids 0 and 4 share a group.
    """
    logits = torch.full((512,), -16.0)
    logits[[0, 4, 256, 257]] = 0.0
    seeds = torch.arange(6_000_000)
    points = uniform(seeds, torch.zeros_like(seeds))
    seeds = seeds[(points - 0.5).abs() < 3e-6]
    assert len(seeds) > 20
    options = {"temperature": torch.ones(len(seeds)), "seeds": seeds, "positions": torch.zeros_like(seeds)}
    rows = logits.expand(len(seeds), -1)
    expected = sample(rows, **options)
    assert len(set(expected.tolist())) > 1
    assert sample(rows.bfloat16(), **options).tolist() == expected.tolist()
