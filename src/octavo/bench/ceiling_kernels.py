# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Two Triton kernels that do nothing but move memory, as fast as this GPU can. Needs Triton to import."""

import triton
import triton.language as tl


@triton.jit
def read(source, sums, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Each program reads STEPS * BLOCK int32 and stores their exclusive or."""
    base = source + tl.program_id(0).to(tl.int64) * STEPS * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for step in range(STEPS):
        total ^= tl.load(base + step * BLOCK)
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))
