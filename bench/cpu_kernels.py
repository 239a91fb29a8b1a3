"""What the compiled CPU kernels reach, next to what torch offers, in one process, turn by turn.

    python bench/cpu_kernels.py [--threads 2] [--repeats 20] [--rows 1,4,16,64,512]

Shapes are SmolLM2-135M's: 30 layers of (960, 576), (576, 576), (3072, 576), (576, 1536) and a head of
(49152, 576). Every figure is the minimum over the repeats; the alternatives of a line take turns, so that a
neighbour on the machine disturbs all of them. `tok/s` counts the matrix products alone. The ceilings are
measured first: a sum over 512 MiB for reading, our own tile on cached data for arithmetic.

NUMBA_CPU_NAME=haswell with NUMBA_CPU_FEATURES as in tests/kernels/cpu/test_hosts.py measures the AVX2 kernels
(torch's own then still use all that the CPU has).
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from octavo.kernels import (
    apply_rotary,
    flash_attn_varlen_func,
    linear,
    pack_weight,
    rms_norm,
    silu_and_mul,
    write_kv_cache,
)
from octavo.kernels.cpu import host, threads

LAYERS = 30
SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)] * LAYERS + [(49152, 576)]
Case = Callable[[], object]


def fastest(cases: dict[str, Case], repeats: int) -> dict[str, float]:
    """Seconds of each case, the minimum over `repeats` rounds in which each case runs once."""
    best = dict.fromkeys(cases, float("inf"))
    for _ in range(repeats + 1):
        for name, case in cases.items():
            start = time.perf_counter()
            case()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def ceilings(repeats: int) -> tuple[float, float]:
    """(bytes per second read, floating point operations per second)."""
    big = torch.ones(1 << 27)
    x, w = torch.randn(96, 512), pack_weight(torch.randn(768, 512), "float32")
    seconds = fastest({"read": big.sum, "multiply": lambda: linear(x, w)}, repeats * 3)
    return big.nbytes / seconds["read"], 2 * 96 * 512 * 768 / seconds["multiply"]


def prepacked(weight: Tensor, rows: int) -> Callable[[Tensor], Tensor]:
    mkldnn = torch.ops.mkldnn
    packed = mkldnn._reorder_linear_weight(weight, rows)
    return lambda x: mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def fbgemm(weight: Tensor) -> Callable[[Tensor], Tensor]:
    packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
    return lambda x: torch.ops.quantized.linear_dynamic_fp16(x, packed)


def ours(weight: Tensor, form: str) -> Callable[[Tensor], Tensor]:
    packed = pack_weight(weight, form)  # type: ignore[arg-type]  # the forms are listed in main
    return lambda x: linear(x, packed)


def model(layers: list[Callable[[Tensor], Tensor]], rows: int, dtype: torch.dtype) -> Case:
    inputs = {depth: torch.randn(rows, depth, dtype=dtype) for depth in (576, 1536)}

    def step() -> None:
        for (_, depth), layer in zip(SHAPES, layers, strict=True):
            layer(inputs[depth])

    return step


def bench_linear(all_rows: list[int], repeats: int, read: float, multiply: float) -> None:
    weights = [torch.randn(shape) * 0.02 for shape in SHAPES]
    items = sum(n * k for n, k in SHAPES)
    halves = [w.bfloat16() for w in weights]
    packed = {form: [ours(w, form) for w in weights] for form in ("float32", "float16", "int8")}
    fixed = {
        "torch float32": [lambda x, w=w: functional.linear(x, w) for w in weights],
        "torch bfloat16": [lambda x, w=w: functional.linear(x, w) for w in halves],
        **{f"octavo {form}": layers for form, layers in packed.items()},
    }
    if "fbgemm" in torch.backends.quantized.supported_engines:
        fixed["FBGEMM float16"] = [fbgemm(w) for w in weights]
    bytes_each = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "int8": 1 + 4 / 64}
    heads = "".join(f"{rows:>10} rows" for rows in all_rows)
    print(f"\n{'matrix products':24}{heads}    first: GB/s (of read); last: GFLOP/s (of our peak)")
    table: dict[str, list[float]] = {}
    for rows in all_rows:
        layers = fixed | {"oneDNN float32 packed": [prepacked(w, rows) for w in weights]}
        cases = {
            name: model(each, rows, torch.bfloat16 if "bfloat16" in name else torch.float32)
            for name, each in layers.items()
        }
        for name, seconds in fastest(cases, max(3, repeats // (1 + rows // 64))).items():
            table.setdefault(name, []).append(rows / seconds)
    for name, rates in table.items():
        size = bytes_each["float32" if "packed" in name else name.split()[1]] * items
        line = f"{name:24}" + "".join(f"{rate:9.0f} tok/s" for rate in rates)
        if all_rows[0] == 1:
            line += f"   {rates[0] * size / 1e9:6.1f} ({rates[0] * size / read:4.0%})"
        flops = 2 * items * rates[-1]
        print(f"{line}   {all_rows[-1]} rows: {flops / 1e9:5.0f} GFLOP/s ({flops / multiply:4.0%})")


def paged(lens_q: list[int], lens_k: list[int], dtype: torch.dtype) -> Case:
    blocks = [-(-length // 16) for length in lens_k]
    table = torch.randperm(len(lens_k) * max(blocks)).view(len(lens_k), -1).int()
    k_cache = torch.randn(table.numel(), 16, 3, 64).to(dtype)
    v_cache = torch.randn(table.numel(), 16, 3, 64).to(dtype)
    q = torch.randn(sum(lens_q), 9, 64)
    cu_q, cu_k = (torch.tensor([0, *lens]).cumsum(0).int() for lens in (lens_q, lens_k))
    return lambda: flash_attn_varlen_func(
        q, k_cache, v_cache, cu_q, cu_k, max(lens_q), max(lens_k), causal=True, block_table=table
    )


def bench_attention(repeats: int) -> None:
    q, k = torch.randn(1, 9, 512, 64), torch.randn(1, 3, 512, 64)
    cases: dict[str, Case] = {
        f"{name}, {str(dtype)[6:]} cache": paged(lens_q, lens_k, dtype)
        for name, lens_q, lens_k in (
            ("decode 16 x 512 keys", [1] * 16, [512] * 16),
            ("decode 1 x 512 keys", [1], [512]),
            ("prefill 512", [512], [512]),
        )
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    }
    cases["prefill 512, torch SDPA on contiguous float32"] = lambda: functional.scaled_dot_product_attention(
        q, k, k, is_causal=True, enable_gqa=True
    )
    print(f"\n{'attention, one layer, 9/3 heads of 64':50} milliseconds")
    for name, seconds in fastest(cases, repeats * 10).items():
        print(f"{name:50} {seconds * 1e3:.3f}")


def bench_overhead(repeats: int) -> None:
    small, weight = torch.randn(1, 64), pack_weight(torch.randn(48, 64), "float32")
    x, gain, gate = torch.randn(1, 576), torch.ones(576), torch.randn(1, 3072)
    q, k = torch.randn(1, 9, 64), torch.randn(1, 3, 64)
    angles, position, slot = torch.randn(64, 64), torch.tensor([5]), torch.tensor([17])
    cache = torch.zeros(4, 16, 3, 64)
    wide = torch.randn(64, 3072)
    cases: dict[str, Case] = {
        "linear 1 x 64 -> 48": lambda: linear(small, weight),
        "rms_norm 1 x 576 with residual": lambda: rms_norm(x, gain, 1e-5, residual=x),
        "silu_and_mul 1 x 3072": lambda: silu_and_mul(gate),
        "apply_rotary 1 token": lambda: apply_rotary(q, k, angles, position),
        "write_kv_cache 1 token": lambda: write_kv_cache(k, k, cache, cache, slot),
        "attention 1 token, 1 key": paged([1], [1], torch.float32),
        "torch add 64 x 3072, then silu_and_mul of it": lambda: silu_and_mul(wide.add(1.0)),
    }
    print(f"\n{'one call, checks included':50} microseconds")
    for name, seconds in fastest(cases, repeats * 200).items():
        print(f"{name:50} {seconds * 1e6:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--rows", default="1,4,16,64,512")
    arguments = parser.parse_args()
    threads.configure(arguments.threads)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    read, multiply = ceilings(arguments.repeats)
    print(f"{platform.machine()}, {host.vector_shape()}, torch {torch.__version__}")
    print(f"{arguments.threads} threads")
    print(f"reads {read / 1e9:.1f} GB/s, multiplies {multiply / 1e9:.0f} GFLOP/s")
    with torch.inference_mode():
        bench_linear([int(rows) for rows in arguments.rows.split(",")], arguments.repeats, read, multiply)
        bench_attention(arguments.repeats)
        bench_overhead(arguments.repeats)


if __name__ == "__main__":
    main()
