"""How decode attention gets at keys and values."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

NOTHING: tl.constexpr = tl.constexpr(-1.0e30)  # the highest score of no keys: finite, so that it subtracts


@triton.jit
def look_up(
    table_row, start, first, last, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, INSIDE: tl.constexpr
):  # fmt: skip
    """Block ids of the tile of keys at `start`: one, or one per key. Only those of keys first .. last - 1."""
    if INSIDE:
        blocks = tl.load(table_row + start // BLOCK_SIZE, mask=start < last, other=0)
    else:
        keys = start + tl.arange(0, BLOCK_N)
        needed = (keys >= first) & (keys < last)
        blocks = tl.load(table_row + keys.to(tl.uint32) // BLOCK_SIZE, mask=needed, other=0)
    return blocks


@triton.jit
def load_quickly(
    addresses, seen, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, COMPUTE: tl.constexpr,
    ASSEMBLY: tl.constexpr, PIN: tl.constexpr,
):  # fmt: skip
    """A tile (..., BLOCK_D) of keys or values in the dtype COMPUTE, 0 where not `seen` (..., 1).

    With ASSEMBLY, which NVIDIA's GPUs take, int8 becomes float16 without a conversion per number: with its
    sign flipped it is the last byte of 1024 + 128 + x. PIN: convert quantised values as they lie in memory.
    Left to itself the compiler takes the tile apart for the matrix unit first, and reads values from shared
    memory byte by byte for that. Its layout pass moves nothing across assembly that may have side effects.
    """
    if HEAD_DIM == BLOCK_D:
        tile = tl.load(addresses, mask=seen, other=0.0)
    else:
        dims = tl.arange(0, BLOCK_D)
        tile = tl.load(addresses, mask=seen & (dims < HEAD_DIM)[None, :], other=0.0)
    if ASSEMBLY and tile.dtype == tl.int8:
        tile = tl.inline_asm_elementwise(
            """{
            .reg .b32 unsigned, offset;
            xor.b32 unsigned, $2, 0x80808080;
            mov.b32 offset, 0x64806480;
            prmt.b32 $0, unsigned, 0x64646464, 0x4140;
            prmt.b32 $1, unsigned, 0x64646464, 0x4342;
            sub.f16x2 $0, $0, offset;
            sub.f16x2 $1, $1, offset;
            }""",
            "=&r,=&r,r", [tile], dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        tile = tile.to(COMPUTE)
    if ASSEMBLY and PIN:
        tile = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [tile], dtype=tile.dtype, is_pure=False, pack=2
        )
    return tile


@triton.jit
def logarithms(scales, ASSEMBLY: tl.constexpr):
    """log2 of each scale of a value, at least -100.

    It joins the value's score, so that weights are at most 1 and keep their precision in 16 bits; from what
    the denominator adds it is taken out again. A token that is all 0 may have the scale 0, and counts there.
    """
    scales = tl.maximum(scales, 2.0**-100, propagate_nan=tl.PropagateNan.ALL)
    if ASSEMBLY:  # one instruction, for a dozen that are right below 2^-126, too
        result = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [scales], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        result = tl.log2(scales)
    return result
