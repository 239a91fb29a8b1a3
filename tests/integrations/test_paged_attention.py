"""The paged cache's two conventions by themselves, with the padded rows that only CUDA graphs bring."""

import numpy as np
import pytest
import torch
from helpers import triton_here
from torch.nn.functional import scaled_dot_product_attention

from octavo.errors import UnsupportedKernelConfig
from octavo.integrations.transformers import paged
from octavo.kernels import backend, checks

INT32 = {"dtype": torch.int32}
NONE = {"scaling": 0.25, "sliding_window": None, "softcap": None, "sinks": None}


class Layer(torch.nn.Module):
    def __init__(self, layer_idx=0):
        super().__init__()
        self.layer_idx = layer_idx


def prefix_sums(lens, total):
    """Of `total` sequences, those past `lens` being the empty ones of a padded graph."""
    return torch.tensor([0, *np.cumsum(lens), *[sum(lens)] * (total - len(lens))], **INT32)


def expected(q, k, v):
    """(Q, H, D) of one sequence: q (H, Q, D), k and v (KVH, K, D), causal from the bottom right."""
    num_queries, num_keys = q.shape[1], k.shape[1]
    sees = torch.ones(num_queries, num_keys).tril(num_keys - num_queries).bool()
    groups = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    return scaled_dot_product_attention(q, k, v, sees, scale=0.25).transpose(0, 1)


@pytest.fixture
def on_a_gpu(monkeypatch):
    """The Triton kernels, interpreted, and no check of values, which a GPU does not have."""
    if not triton_here.interpreted():
        pytest.skip("kernels run on a GPU here")
    monkeypatch.setattr(checks, "ragged", lambda *args: None)
    monkeypatch.setattr(checks, "slots", lambda *args: None)
    with backend.use("triton"), np.errstate(all="ignore"):
        yield


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("lens_q", [[5], [5, 2, 9], [1, 12]])
def test_padded_rows_of_a_varlen_graph_harm_no_real_row(lens_q):
    """One sequence of few rows in a graph of many: which kernel has it is decided by its own length."""
    torch.manual_seed(0)
    lens_k = [n + 3 * i for i, n in enumerate(lens_q)]
    rows, keys = 24, sum(lens_k)
    total = 1 if len(lens_q) == 1 else rows
    q, k, v = (torch.randn(1, heads, n, 16) for heads, n in ((6, rows), (2, keys + 9), (2, keys + 9)))
    k[:, :, keys:], v[:, :, keys:] = float("nan"), float("nan")
    starts_q, starts_k = prefix_sums(lens_q, total), prefix_sums(lens_k, total)
    lengths = {"cu_seq_lens_k": starts_k, "max_length_q": rows, "max_length_k": 64}
    out = paged.attend(Layer(), q, k, v, starts_q, **NONE, **lengths)[0]
    for b in range(len(lens_q)):
        rows_of, keys_of = slice(*starts_q[b : b + 2]), slice(*starts_k[b : b + 2])
        want = expected(q[0][:, rows_of], k[0][:, keys_of], v[0][:, keys_of])
        torch.testing.assert_close(out[rows_of], want, rtol=1e-5, atol=1e-5)


def decoding_step(lens, total, page_size=4):
    """Caches, a table, and `total` new tokens, of which those past len(lens) are padding."""
    torch.manual_seed(1)
    pages = torch.randperm(20).tolist()
    k_cache, v_cache = (torch.randn(20, page_size, 2, 16) for _ in range(2))
    table = torch.full((total, 6), -1, **INT32)
    table[len(lens) :] = pages.pop()  # left from an earlier step
    for b, n in enumerate(lens):
        needed = -(-n // page_size)
        table[b, :needed] = torch.tensor([pages.pop() for _ in range(needed)], **INT32)
    q, k, v = (torch.randn(1, heads, total, 16) for heads in (6, 2, 2))
    arguments = {
        "cu_seq_lens_k": prefix_sums(lens, total), "max_length_q": 1, "max_length_k": 1,
        "block_table": table, "k_cache": k_cache, "v_cache": v_cache,
    }  # fmt: skip
    return q, k, v, prefix_sums([1] * len(lens), total), arguments


def check_decoding(lens, total):
    q, k, v, starts_q, arguments = decoding_step(lens, total)
    before = arguments["k_cache"].clone()
    out = paged.attend(Layer(), q, k, v, starts_q, **NONE, **arguments)[0]
    written = torch.zeros(20, 4, dtype=torch.bool)
    for b, n in enumerate(lens):
        table = arguments["block_table"][b]
        places = [(int(table[i // 4]), i % 4) for i in range(n)]
        keys, values = (
            torch.stack([arguments[name][place] for place in places], 1) for name in ("k_cache", "v_cache")
        )
        assert torch.equal(keys[:, -1], k[0, :, b])
        assert torch.equal(values[:, -1], v[0, :, b])
        written[places[-1]] = True
        torch.testing.assert_close(
            out[b : b + 1], expected(q[0, :, b : b + 1], keys, values), rtol=1e-5, atol=1e-5
        )
    assert torch.equal(arguments["k_cache"][~written], before[~written])


def test_the_new_token_is_put_into_its_page_and_seen():
    check_decoding([1, 4, 5, 13], 4)


@pytest.mark.usefixtures("on_a_gpu")
def test_padded_rows_of_a_decoding_graph_write_nothing_and_harm_no_real_row():
    check_decoding([1, 4, 5, 13, 8], 8)


@pytest.mark.parametrize(("dim", "v_dim"), [(288, 288), (24, 16)])
def test_head_dimensions_without_a_kernel_are_an_error_that_names_the_way_out(dim, v_dim):
    q, k, v = torch.randn(1, 6, 3, dim), torch.randn(1, 2, 3, dim), torch.randn(1, 2, 3, v_dim)
    lens = {"cu_seq_lens_k": prefix_sums([3], 1), "max_length_q": 3, "max_length_k": 3}
    with pytest.raises(UnsupportedKernelConfig, match=rf"{dim} in queries and {v_dim} in values.*'sdpa'"):
        paged.attend(Layer(), q, k, v, prefix_sums([3], 1), **NONE, **lens)


def test_values_of_another_dtype_are_an_error_in_both_ways():
    q, k, v, starts_q, arguments = decoding_step([4, 5], 2)
    before = arguments["v_cache"].clone()
    lens = {"cu_seq_lens_k": starts_q, "max_length_q": 1, "max_length_k": 1}
    for told in (arguments, lens):
        with pytest.raises(UnsupportedKernelConfig, match=r"keys of torch.float32 and values of .*bfloat16"):
            paged.attend(Layer(), q, k, v.bfloat16(), starts_q, **NONE, **told)
    assert torch.equal(arguments["v_cache"], before)


def test_slots_are_computed_once_in_a_step_and_anew_in_the_next():
    """Seen by what a layer returns after the same tensors have changed under it."""
    paged._steps.clear()
    table, lens = torch.tensor([[3, 7]], **INT32), torch.tensor([0, 5], **INT32)
    first = paged._slots(table, lens, 4, layer=0)
    assert first.tolist() == [7 * 4]
    assert paged._slots(table[:], lens, 4, layer=1) is first
    lens[1] = 6  # a second forward over the same views, as when a graph is captured after its warm-up
    assert paged._slots(table[:], lens, 4, layer=0).tolist() == [7 * 4 + 1]
    assert paged._slots(table[:], lens.clone(), 4, layer=1).tolist() == [7 * 4 + 1]


def test_many_block_tables_are_not_kept_for_ever():
    for _ in range(40):
        table = torch.zeros((1, 2), **INT32)
        paged._slots(table, torch.tensor([0, 1], **INT32), 4, layer=0)
    assert len(paged._steps) <= 17
