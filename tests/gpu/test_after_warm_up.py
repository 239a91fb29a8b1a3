"""After warm-up nothing compiles, and a captured step serves other lengths. `octavo doctor` asks it, too."""

from typing import Any

import pytest
import torch

from octavo.kernels import backend, flash_attn_varlen_func, gpu_checks

DEVICE = torch.device("cuda", 0)


# Each compiles some forty kernels of its own where none is on disk.
MODELS: dict[str, dict[str, Any]] = {
    "SmolLM2": {"num_heads": 9, "num_kv_heads": 3, "hidden_size": 576, "block_size": 64, "qk_norm": False},
    "windows": {"window_sizes": ((-1, -1), (1023, 0)), "softcap": 30.0, "sinks": True},
    "fp8": {"cache_dtype": torch.float8_e4m3fn, "scales": "token"},
    "invariant": {"batch_invariant": True},
}


@pytest.mark.parametrize("model", MODELS)
def test_nothing_compiles_after_warm_up(model: str) -> None:
    _, late = gpu_checks.late_compiles(DEVICE, steps=60, **MODELS[model])
    assert [(made.kernel, made.key) for made in late] == []


def test_a_captured_step_serves_other_lengths() -> None:
    assert gpu_checks.replay_error(DEVICE) <= 2.0**-7


@pytest.mark.parametrize("bucket", [16, 64, 256, 1024])
def test_a_captured_step_serves_other_prompts(bucket: int) -> None:
    """Captured on padding alone: a sequence of all rows that has no keys, and others without rows."""
    batch, longest, size = 33, 4096, 16
    q = torch.randn(bucket, 16, 128, device=DEVICE, dtype=torch.bfloat16)
    k, v = torch.randn(2, 512, size, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    table = torch.randint(512, (batch, longest // size), device=DEVICE, dtype=torch.int32)
    sums = torch.zeros(2, batch + 1, device=DEVICE, dtype=torch.int32)

    def attend() -> torch.Tensor:
        return flash_attn_varlen_func(
            q, k, v, sums[0], sums[1], bucket, longest, causal=True, block_table=table
        )

    def fill(lens: list[tuple[int, int]]) -> None:
        lens = [*lens, (bucket - sum(rows for rows, _ in lens), 0)]
        lens += [(0, 0)] * (batch - len(lens))
        sums[:, 1:] = torch.tensor(lens, device=DEVICE).T.cumsum(1)

    fill([])
    stream = torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(stream):
        attend()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = attend()
    decoding = [(1, 500 + i) for i in range(5)]
    for lens in (
        [(bucket, bucket)],
        [(9, 4000)],
        [*decoding, (bucket - 8, 3000)],
        decoding,
        [(3, 3), (7, 40)],
    ):
        fill(lens)
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize(DEVICE)
        with backend.use("reference"):
            assert backend.worst_error(out, attend()) <= 2.0**-7
