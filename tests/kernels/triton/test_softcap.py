"""Soft-capped scores keep the precision of float32, however large the cap is."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels import flash_attn_varlen_func

pytestmark = pytest.mark.usefixtures("triton_room")


@pytest.mark.parametrize("softcap", [1.0, 30.0, 1e3, 1e6, 1e30])
@pytest.mark.parametrize("num_rows", [3, 20], ids=["decode", "prefill"])
def test_precision_does_not_depend_on_the_cap(num_rows: int, softcap: float) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(num_rows, 2, 16, generator=generator)
    k, v = torch.randn(2, 20, 1, 16, generator=generator)
    cu_q, cu_k = (torch.tensor([0, length], dtype=torch.int32) for length in (num_rows, 20))
    out, lse = flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, num_rows, 20, softcap=softcap, softmax_scale=1.0, return_softmax_lse=True
    )
    scores = torch.einsum("ihd,jgd->hij", q.double(), k.double())  # about -15 to 15
    capped = softcap * torch.tanh(scores / softcap)
    exact = torch.einsum("hij,jgd->ihd", capped.softmax(-1), v.double())
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=5e-6)
    torch.testing.assert_close(lse.double(), capped.logsumexp(-1), rtol=0, atol=5e-6)
