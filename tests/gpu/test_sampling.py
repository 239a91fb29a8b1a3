"""Sampling on the GPU: which tokens can be drawn, how often, and that a row is on its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.kernels import backend
from octavo.kernels.sampling import sample
from octavo.kernels.triton.monitor import forbid_compiles

VOCAB = 151_936


def logits_of(num_rows: int, size: int = VOCAB, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    rng = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(num_rows, size, generator=rng, device="cuda") * 4).to(dtype)


def arguments(num_rows: int, **options: float | Tensor) -> dict[str, Tensor]:
    """One value for all rows, or a tensor of one per row; seeds and positions differ by row."""
    dtypes = {
        "temperature": torch.float32,
        "top_k": torch.int32,
        "top_p": torch.float32,
        "min_p": torch.float32,
    }
    given = {"temperature": 1.0, **options}
    found = {
        name: value.cuda() if isinstance(value, Tensor) else torch.full((num_rows,), value, device="cuda")
        for name, value in given.items()
    }
    found = {name: value.to(dtypes[name]) for name, value in found.items()}
    found["seeds"] = torch.arange(num_rows, device="cuda") * 7919 + 3
    found["positions"] = torch.arange(num_rows, device="cuda") % 5
    return found


def kept_by(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """(R, V): min_p, then exactly top_k, then top_p of what is left; of equal logits the lower id first."""
    order = logits.double().sort(dim=1, descending=True, stable=True).indices
    probs = torch.softmax(logits.double() / temperature, dim=1).gather(1, order)
    keep = probs >= min_p * probs[:, :1]
    if top_k:
        keep[:, top_k:] = False
    left = probs * keep
    before = left.cumsum(dim=1) - left
    keep &= before < top_p * left.sum(dim=1, keepdim=True)
    return torch.zeros_like(keep).scatter(1, order, keep)


@pytest.mark.parametrize("size", [1, 17, 1000, 32_000, VOCAB])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 3, 256])
def test_greedy_is_argmax_and_a_tie_goes_to_the_lower_id(
    num_rows: int, dtype: torch.dtype, size: int
) -> None:
    logits = logits_of(num_rows, size, dtype=dtype)
    if size > 100:
        logits[:, 77] = logits[:, 33] = logits.amax(dim=1) + 1
    ids, logprobs = sample(logits, **arguments(num_rows, temperature=0.0), return_logprobs=True)
    best = logits.amax(dim=1, keepdim=True)
    assert torch.equal(ids, (logits == best).int().argmax(dim=1))
    exact = torch.log_softmax(logits.double(), dim=1).gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), exact, rtol=1e-5, atol=2e-5)


FILTERS = [
    {"top_k": 1},
    {"top_k": 40},
    {"top_p": 0.9},
    {"top_p": 1e-6},
    {"min_p": 0.1},
    {"top_k": 50, "top_p": 0.95},
    {"top_k": 1000, "top_p": 0.5, "min_p": 0.01},
    {"top_k": VOCAB + 5},
    {},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.7, 1.5])
@pytest.mark.parametrize("num_rows", [1, 64])
def test_only_what_the_filters_keep_is_drawn(num_rows: int, temperature: float, filters: dict) -> None:
    logits = logits_of(num_rows)
    logits[:, 10:60] = logits.amax(dim=1, keepdim=True) - 1  # ties across the cut
    allowed = kept_by(
        logits, temperature, filters.get("top_k", 0), filters.get("top_p", 1.0), filters.get("min_p", 0.0)
    )
    options = arguments(num_rows, temperature=temperature, **filters)
    for position in range(20):
        options["positions"].fill_(position)
        ids, logprobs = sample(logits, **options, return_logprobs=True)
        assert allowed.gather(1, ids[:, None]).all()
        exact = torch.log_softmax(logits.double(), dim=1).gather(1, ids[:, None])[:, 0]
        torch.testing.assert_close(logprobs.double(), exact, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 20}, {"top_p": 0.7}, {"min_p": 0.2, "top_p": 0.9}], ids=str
)
def test_tokens_come_as_often_as_their_probability_says(filters: dict) -> None:
    """40,000 draws of one distribution; the chi-square of 63 cells exceeds 130 once in 10^6."""
    row = logits_of(1, 64, seed=2) / 3
    num = 40_000
    ids = sample(row.expand(num, -1), **arguments(num, temperature=1.0, **filters))
    keep = kept_by(row, 1.0, filters.get("top_k", 0), filters.get("top_p", 1.0), filters.get("min_p", 0.0))[0]
    probs = torch.softmax(row[0].double(), dim=0) * keep
    expected = probs / probs.sum() * num
    counts = torch.bincount(ids, minlength=64).double()
    assert (counts[~keep] == 0).all()
    chi_square = ((counts - expected)[keep].square() / expected[keep]).sum()
    assert chi_square < 130


def test_a_row_is_the_same_alone_in_any_batch_and_again() -> None:
    logits = logits_of(200)
    options = arguments(
        200,
        temperature=torch.rand(200) * 2,
        top_k=torch.randint(0, 100, (200,)),
        top_p=torch.rand(200) * 0.9 + 0.1,
        min_p=torch.rand(200) * 0.1,
    )
    together = sample(logits, **options)
    for _ in range(20):
        assert torch.equal(sample(logits, **options), together)
    for rows in ([0], [199], [5, 3], list(range(30, 130))):
        part = {name: value[rows] for name, value in options.items()}
        assert torch.equal(sample(logits[rows], **part), together[rows])
    wide = torch.full((200, VOCAB + 100), 50.0, device="cuda")
    wide[:, :VOCAB] = logits
    assert torch.equal(sample(wide[:, :VOCAB], **options), together)


def test_the_same_tokens_as_the_reference() -> None:
    """A draw that falls on a border between two tokens may go either way; in 512 draws that is rare."""
    logits = logits_of(512, 32_000)
    options = arguments(512, temperature=0.9, top_k=50, top_p=0.9)
    ours = sample(logits, **options)
    with backend.use("reference"):
        right = sample(logits.cpu(), **{name: value.cpu() for name, value in options.items()})
    assert (ours.cpu() != right).sum() <= 1


def test_rows_without_a_distribution_have_no_token() -> None:
    """flashinfer-ai/flashinfer#2455."""
    logits = logits_of(5)
    alone = sample(logits[:1], **{k: v[:1] for k, v in arguments(5, top_k=40, top_p=0.9).items()})
    logits[1] = float("nan")
    logits[2] = float("-inf")
    logits[3, 7] = float("inf")
    logits[4, VOCAB - 1] = float("nan")
    for temperature in (1.0, 0.0):
        options = arguments(5, temperature=temperature, top_k=40, top_p=0.9)
        ids, logprobs = sample(logits, **options, return_logprobs=True)
        assert ids[1:].tolist() == [-1, -1, -1, -1]
        assert torch.isnan(logprobs[1:]).all()
        if temperature:
            assert torch.equal(ids[:1], alone)


def test_a_captured_draw_follows_its_inputs_and_compiles_nothing() -> None:
    logits, options = logits_of(48), arguments(48, temperature=0.8, top_k=50, top_p=0.9)
    sample(logits, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), forbid_compiles():
        ids = sample(logits, **options)
    for seed in (1, 2, 2):
        logits.copy_(logits_of(48, seed=seed))
        options["positions"].add_(1)
        options["top_k"].copy_(torch.randint(0, 200, (48,)))
        graph.replay()
        assert torch.equal(ids.clone(), sample(logits, **options))
    with forbid_compiles():
        sample(logits_of(47), **{name: value[:47] for name, value in options.items()})
