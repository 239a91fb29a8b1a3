"""A few small calls of every kernel, for compute-sanitizer: run as a script by test_sanitizer.py.

The first argument names the tool.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.attention_cases import Case, prepare

from octavo.kernels import backend, rms_norm, rotate_and_write_kv_cache, silu_and_mul
from octavo.kernels.sampling import sample
from octavo.kernels.triton import prefill_hopper


def main() -> None:
    decode = Case((1, 3, 0, 1), (1, 33, 3, 700), heads=(4, 2), head_dim=64)
    long = Case((9, 70), (40, 300), heads=(4, 2), head_dim=64)
    with backend.use("triton"):
        for case in (decode, long, replace(long, block_size=0), replace(long, dtype=torch.float32)):
            for batch_invariant in (False, True):
                prepare(case, "cuda").run(batch_invariant=batch_invariant)
        for case in (decode, long):
            prepare(replace(case, cache_dtype=torch.float8_e4m3fn, scales="token"), "cuda").run()
        if sys.argv[1] != "racecheck":  # which does not follow what the Hopper kernel's copy engine waits for
            asked = []
            for splits in (1, 3):
                prefill_hopper.splits_for = lambda *_, splits=splits: asked.append(splits) or splits
                prepare(replace(long, lens_q=(9, 130)), "cuda").run()  # 96 rows are too few for it
            assert asked == ([1, 3] if torch.cuda.get_device_capability() == (9, 0) else [])
        fused = torch.randn(40, 8, 64, device="cuda").bfloat16()
        q, k, v = fused.split([4, 2, 2], dim=1)
        caches = [torch.zeros(5, 16, 2, 64, device="cuda").bfloat16() for _ in range(2)]
        table, order = torch.randn(64, 64, device="cuda"), torch.arange(40, device="cuda")
        weight = torch.ones(64, device="cuda").bfloat16()
        norm = {"q_weight": weight, "k_weight": weight, "eps": 1e-6}
        rotate_and_write_kv_cache(q, k, v, table, order, *caches, order, **norm)
        x = fused.flatten(1)
        rms_norm(x, torch.ones(512, device="cuda").bfloat16(), 1e-6, residual=x)
        silu_and_mul(x)
        for num_rows in (1, 5):
            rows = torch.arange(num_rows, device="cuda")
            temperature = torch.ones(num_rows, device="cuda")
            sample(
                torch.randn(num_rows, 5000, device="cuda"), temperature=temperature,
                top_k=torch.full_like(rows, 40, dtype=torch.int32), top_p=temperature * 0.9,
                seeds=rows, positions=rows, return_logprobs=True,
            )  # fmt: skip
    torch.cuda.synchronize()
    print("done", flush=True)


if __name__ == "__main__":
    main()
