"""The kernels without a matrix product: norm, rotary, activations, cache write.

A task is a few rows or tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from numba import float32

from octavo.kernels.cpu.compiled import compile_kernel, source_digest
from octavo.kernels.cpu.host import vector_shape
from octavo.kernels.cpu.ir import (
    ITEM_BYTES,
    bits_to_float,
    fma,
    lanes_sum,
    load,
    load_i64,
    splat,
    store,
    take,
)
from octavo.kernels.cpu.math import exp


@functools.cache
def norm_kernel(x_dtype: str, weight_dtype: str) -> int:
    """Address of the kernel of `octavo.kernels.cpu.norm`."""
    return compile_kernel(_norm(x_dtype, weight_dtype, vector_shape().lanes, source_digest()))


@functools.cache
def rotary_kernel(dtype: str, pairs: str) -> int:
    """Address of the kernel of `octavo.kernels.cpu.rotary`; pairs "halves" or "interleaved"."""
    make = _rotary_interleaved if pairs == "interleaved" else _rotary_halves
    return compile_kernel(make(dtype, vector_shape().lanes, source_digest()))


@functools.cache
def silu_kernel(dtype: str) -> int:
    """Address of the kernel of `octavo.kernels.cpu.activation`."""
    return compile_kernel(_silu(dtype, vector_shape().lanes, source_digest()))


@functools.cache
def gelu_kernel(dtype: str) -> int:
    """Address of the kernel of `octavo.kernels.cpu.activation` for GPT-2's activation."""
    return compile_kernel(_gelu(dtype, vector_shape().lanes, source_digest()))


@functools.cache
def kv_write_kernel(dtype: str, cache_dtype: str) -> int:
    """Address of the kernel of `octavo.kernels.cpu.kv_write`."""
    return compile_kernel(_kv_write(dtype, cache_dtype, vector_shape().lanes, source_digest()))


def _norm(dtype: str, weight_dtype: str, lanes: int, digest: str) -> Callable[[int], None]:
    item = ITEM_BYTES[dtype]
    weight_item = ITEM_BYTES[weight_dtype]

    def norm(block: int) -> None:
        digest  # noqa: B018  # part of the cache key
        rows = load_i64(block, 2)
        depth = load_i64(block, 3)
        x = load_i64(block, 4)
        x_row = load_i64(block, 5)
        weight = load_i64(block, 6)
        out = load_i64(block, 7)
        residual = load_i64(block, 8)  # 0: none
        residual_row = load_i64(block, 9)
        new_residual = load_i64(block, 10)
        eps = bits_to_float(load_i64(block, 11))
        rows_per_task = load_i64(block, 12)
        whole = depth // lanes * lanes
        while True:
            first = take(block, 0) * rows_per_task
            if first >= rows:
                break
            for row in range(first, min(first + rows_per_task, rows)):
                source = x + row * x_row
                if residual != 0:
                    other = residual + row * residual_row
                    source = new_residual + row * depth * item
                    for c in range(0, whole, lanes):
                        value = load(x + row * x_row + c * item, dtype, lanes)
                        store(source + c * item, value + load(other + c * item, dtype, lanes), dtype)
                    for c in range(whole, depth):
                        value = load(x + row * x_row + c * item, dtype, 1)
                        store(source + c * item, value + load(other + c * item, dtype, 1), dtype)
                squares = splat(bits_to_float(0), lanes)
                tail = splat(bits_to_float(0), 1)
                for c in range(0, whole, lanes):
                    value = load(source + c * item, dtype, lanes)
                    squares = fma(value, value, squares)
                for c in range(whole, depth):
                    value = load(source + c * item, dtype, 1)
                    tail = fma(value, value, tail)
                mean = (lanes_sum(squares) + lanes_sum(tail)) / float32(depth)
                factor = float32(1.0) / float32(math.sqrt(mean + eps))
                to = out + row * depth * item
                for c in range(0, whole, lanes):
                    value = load(source + c * item, dtype, lanes) * splat(factor, lanes)
                    store(to + c * item, value * load(weight + c * weight_item, weight_dtype, lanes), dtype)
                for c in range(whole, depth):
                    value = load(source + c * item, dtype, 1) * splat(factor, 1)
                    store(to + c * item, value * load(weight + c * weight_item, weight_dtype, 1), dtype)

    return norm


def _rotary_halves(dtype: str, lanes: int, digest: str) -> Callable[[int], None]:
    item = ITEM_BYTES[dtype]

    def rotary(block: int) -> None:
        digest  # noqa: B018  # part of the cache key
        num_tokens = load_i64(block, 2)
        angles = load_i64(block, 3)
        angles_row = load_i64(block, 4)
        positions = load_i64(block, 5)
        tokens_per_task = load_i64(block, 6)
        half = load_i64(block, 7)
        dim = load_i64(block, 8)
        slots = load_i64(block, 9)  # 0: none, token t of an output is its row t
        block_size = load_i64(block, 10)
        num_parts = load_i64(block, 11)
        whole = half // lanes * lanes
        while True:
            first = take(block, 0) * tokens_per_task
            if first >= num_tokens:
                break
            for token in range(first, min(first + tokens_per_task, num_tokens)):
                cos = angles + load_i64(positions, token) * angles_row
                sin = cos + half * 4
                for part in range(num_parts):  # q, k and, with slots, v, which is only copied
                    at = 12 + 8 * part
                    num_heads = load_i64(block, at)
                    source = load_i64(block, at + 1) + token * load_i64(block, at + 2)
                    source_head = load_i64(block, at + 3)
                    out = load_i64(block, at + 4)
                    out_head = load_i64(block, at + 7)
                    if part == 0 or slots == 0:
                        out += token * load_i64(block, at + 6)
                    else:
                        slot = load_i64(slots, token)
                        if slot < 0:
                            continue
                        out += slot // block_size * load_i64(block, at + 5)
                        out += slot % block_size * load_i64(block, at + 6)
                    turned = 0
                    if part < 2:
                        turned = 2 * half
                        for head in range(num_heads):
                            x = source + head * source_head
                            to = out + head * out_head
                            x_high = x + half * item
                            to_high = to + half * item
                            for i in range(0, whole, lanes):
                                a = load(x + i * item, dtype, lanes)
                                b = load(x_high + i * item, dtype, lanes)
                                c = load(cos + i * 4, "float32", lanes)
                                s = load(sin + i * 4, "float32", lanes)
                                store(to + i * item, a * c - b * s, dtype)
                                store(to_high + i * item, b * c + a * s, dtype)
                            for i in range(whole, half):
                                a1 = load(x + i * item, dtype, 1)
                                b1 = load(x_high + i * item, dtype, 1)
                                c1 = load(cos + i * 4, "float32", 1)
                                s1 = load(sin + i * 4, "float32", 1)
                                store(to + i * item, a1 * c1 - b1 * s1, dtype)
                                store(to_high + i * item, b1 * c1 + a1 * s1, dtype)
                    if out != source:  # else they are where they belong
                        whole_rest = turned + (dim - turned) // lanes * lanes
                        for head in range(num_heads):
                            x = source + head * source_head
                            to = out + head * out_head
                            for i in range(turned, whole_rest, lanes):
                                store(to + i * item, load(x + i * item, dtype, lanes), dtype)
                            for i in range(whole_rest, dim):
                                store(to + i * item, load(x + i * item, dtype, 1), dtype)

    return rotary


def _rotary_interleaved(dtype: str, lanes: int, digest: str) -> Callable[[int], None]:
    item = ITEM_BYTES[dtype]

    def rotary(block: int) -> None:
        digest  # noqa: B018  # part of the cache key
        num_tokens = load_i64(block, 2)
        angles = load_i64(block, 3)
        angles_row = load_i64(block, 4)
        positions = load_i64(block, 5)
        tokens_per_task = load_i64(block, 6)
        half = load_i64(block, 7)
        dim = load_i64(block, 8)
        slots = load_i64(block, 9)  # 0: none, token t of an output is its row t
        block_size = load_i64(block, 10)
        num_parts = load_i64(block, 11)
        while True:
            first = take(block, 0) * tokens_per_task
            if first >= num_tokens:
                break
            for token in range(first, min(first + tokens_per_task, num_tokens)):
                cos = angles + load_i64(positions, token) * angles_row
                sin = cos + half * 4
                for part in range(num_parts):  # q, k and, with slots, v, which is only copied
                    at = 12 + 8 * part
                    num_heads = load_i64(block, at)
                    source = load_i64(block, at + 1) + token * load_i64(block, at + 2)
                    source_head = load_i64(block, at + 3)
                    out = load_i64(block, at + 4)
                    out_head = load_i64(block, at + 7)
                    if part == 0 or slots == 0:
                        out += token * load_i64(block, at + 6)
                    else:
                        slot = load_i64(slots, token)
                        if slot < 0:
                            continue
                        out += slot // block_size * load_i64(block, at + 5)
                        out += slot % block_size * load_i64(block, at + 6)
                    turned = 0
                    if part < 2:
                        turned = 2 * half
                        for head in range(num_heads):
                            x = source + head * source_head
                            to = out + head * out_head
                            for i in range(half):
                                a = load(x + 2 * i * item, dtype, 1)
                                b = load(x + (2 * i + 1) * item, dtype, 1)
                                c = load(cos + i * 4, "float32", 1)
                                s = load(sin + i * 4, "float32", 1)
                                store(to + 2 * i * item, a * c - b * s, dtype)
                                store(to + (2 * i + 1) * item, b * c + a * s, dtype)
                    if out != source:  # else they are where they belong
                        whole_rest = turned + (dim - turned) // lanes * lanes
                        for head in range(num_heads):
                            x = source + head * source_head
                            to = out + head * out_head
                            for i in range(turned, whole_rest, lanes):
                                store(to + i * item, load(x + i * item, dtype, lanes), dtype)
                            for i in range(whole_rest, dim):
                                store(to + i * item, load(x + i * item, dtype, 1), dtype)

    return rotary


def _silu(dtype: str, lanes: int, digest: str) -> Callable[[int], None]:
    item = ITEM_BYTES[dtype]

    def silu(block: int) -> None:
        digest  # noqa: B018  # part of the cache key
        rows = load_i64(block, 2)
        width = load_i64(block, 3)
        x = load_i64(block, 4)
        x_row = load_i64(block, 5)
        out = load_i64(block, 6)
        rows_per_task = load_i64(block, 7)
        other = load_i64(block, 8)
        other_row = load_i64(block, 9)
        whole = width // lanes * lanes
        one = splat(float32(1.0), lanes)
        zero = splat(float32(0.0), lanes)
        while True:
            first = take(block, 0) * rows_per_task
            if first >= rows:
                break
            for row in range(first, min(first + rows_per_task, rows)):
                gate = x + row * x_row
                up = other + row * other_row
                to = out + row * width * item
                for c in range(0, whole, lanes):
                    g = load(gate + c * item, dtype, lanes)
                    silu_g = g / (one + exp(zero - g))
                    store(to + c * item, silu_g * load(up + c * item, dtype, lanes), dtype)
                for c in range(whole, width):
                    g1 = load(gate + c * item, dtype, 1)
                    silu_g1 = g1 / (splat(float32(1.0), 1) + exp(splat(float32(0.0), 1) - g1))
                    store(to + c * item, silu_g1 * load(up + c * item, dtype, 1), dtype)

    return silu


def _gelu(dtype: str, lanes: int, digest: str) -> Callable[[int], None]:
    item = ITEM_BYTES[dtype]
    # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u))
    outer = -2.0 * math.sqrt(2.0 / math.pi)
    inner = 0.044715 * outer

    def gelu(block: int) -> None:
        digest  # noqa: B018  # part of the cache key
        rows = load_i64(block, 2)
        width = load_i64(block, 3)
        x = load_i64(block, 4)
        x_row = load_i64(block, 5)
        out = load_i64(block, 6)
        rows_per_task = load_i64(block, 7)
        whole = width // lanes * lanes
        while True:
            first = take(block, 0) * rows_per_task
            if first >= rows:
                break
            for row in range(first, min(first + rows_per_task, rows)):
                source = x + row * x_row
                to = out + row * width * item
                for c in range(0, whole, lanes):
                    value = load(source + c * item, dtype, lanes)
                    power = fma(value * value, splat(float32(inner), lanes), splat(float32(outer), lanes))
                    shut = splat(float32(1.0), lanes) + exp(value * power)
                    store(to + c * item, value / shut, dtype)
                for c in range(whole, width):
                    one = load(source + c * item, dtype, 1)
                    power1 = fma(one * one, splat(float32(inner), 1), splat(float32(outer), 1))
                    shut1 = splat(float32(1.0), 1) + exp(one * power1)
                    store(to + c * item, one / shut1, dtype)

    return gelu


def _kv_write(dtype: str, cache_dtype: str, lanes: int, digest: str) -> Callable[[int], None]:
    item = ITEM_BYTES[dtype]
    cache_item = ITEM_BYTES[cache_dtype]

    def kv_write(block: int) -> None:
        digest  # noqa: B018  # part of the cache key
        num_tokens = load_i64(block, 2)
        num_heads = load_i64(block, 3)
        dim = load_i64(block, 4)
        slots = load_i64(block, 5)
        block_size = load_i64(block, 6)
        tokens_per_task = load_i64(block, 7)
        whole = dim // lanes * lanes
        while True:
            first = take(block, 0) * tokens_per_task
            if first >= num_tokens:
                break
            for token in range(first, min(first + tokens_per_task, num_tokens)):
                slot = load_i64(slots, token)
                if slot < 0:
                    continue
                for which in range(2):  # K, then V
                    source = load_i64(block, 8 + 3 * which) + token * load_i64(block, 9 + 3 * which)
                    cache = 14 + 4 * which
                    target = (
                        load_i64(block, cache)
                        + slot // block_size * load_i64(block, cache + 1)
                        + slot % block_size * load_i64(block, cache + 2)
                    )
                    for head in range(num_heads):
                        at = source + head * load_i64(block, 10 + 3 * which)
                        to = target + head * load_i64(block, cache + 3)
                        for c in range(0, whole, lanes):
                            store(to + c * cache_item, load(at + c * item, dtype, lanes), cache_dtype)
                        for c in range(whole, dim):
                            store(to + c * cache_item, load(at + c * item, dtype, 1), cache_dtype)

    return kv_write
