"""What a config says about the device that it meets; the other options are tested through `LLM`."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.errors import ConfigError


def test_a_device_that_was_left_open_is_filled_in() -> None:
    config = EngineConfig(model="m", kv_cache_dtype="fp8", dtype="float32")
    filled: dict[str, Any] = {"device": "cuda", "overlap": True, "max_num_batched_tokens": 16384}
    assert config.on_device("cuda") == config.replace(**filled)
    config = EngineConfig(model="m", quantization="int8", num_threads=2)
    filled = {"device": "cpu", "overlap": False, "max_num_batched_tokens": 512}
    assert config.on_device("cpu") == config.replace(**filled)
    assert config.replace(max_num_batched_tokens=7).on_device("cpu").max_num_batched_tokens == 7


def test_a_trace_and_a_profile_need_a_file_each() -> None:
    EngineConfig(model="m", trace="a", profile="b")
    with pytest.raises(ConfigError, match=r"trace and profile would both write '/.*/a'; name two files"):
        EngineConfig(model="m", trace="./a", profile="a")


def test_a_share_of_gpu_memory_needs_a_gpu() -> None:
    config = EngineConfig(model="m", gpu_memory=0.9)
    assert config.on_device("cuda").gpu_memory == 0.9
    with pytest.raises(ConfigError, match=r"gpu_memory=0\.9 needs a GPU.*; use kv_cache_memory"):
        config.on_device("cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("overlap", [True, False])
def test_overlap_is_as_one_says(device: str, overlap: bool) -> None:
    assert EngineConfig(model="m", overlap=overlap).on_device(device).overlap is overlap


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("asked", [None, False, True])
def test_common_keys_are_read_once_is_refused_where_it_cannot_be_and_else_left_as_it_was_said(
    device: str, enforce_eager: bool, deterministic: bool, asked: bool | None
) -> None:
    options: dict[str, Any] = {"enforce_eager": enforce_eager, "deterministic": deterministic}
    can = device == "cuda" and not enforce_eager and not deterministic
    if asked and not can:
        with pytest.raises(ConfigError, match=r"cascade_attention (needs a GPU|and .* exclude each other)"):
            EngineConfig(model="m", cascade_attention=asked, **options).on_device(device)
        return
    config = EngineConfig(model="m", cascade_attention=asked, **options).on_device(device)
    assert config.cascade_attention is asked
    assert config.on_device(device) == config


def test_a_config_that_was_filled_in_takes_other_options() -> None:
    config = EngineConfig(model="m").on_device("cuda")
    assert config.replace(enforce_eager=True).on_device("cuda").enforce_eager
    assert config.replace(deterministic=True).on_device("cuda").deterministic
    assert not config.on_device("cpu").uses_graphs


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_graphs_run_on_a_gpu_unless_told_not_to(enforce_eager: bool) -> None:
    config = EngineConfig(model="m", enforce_eager=enforce_eager)
    assert config.on_device("cuda").uses_graphs is not enforce_eager
    assert not config.on_device("cpu").uses_graphs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be from 1"),
        ({"gpu_memory": 0.9, "num_blocks": 5}, "gpu_memory sizes the KV cache by what the rest leaves"),
        ({"enforce_eager": "yes"}, "enforce_eager must be True or False, got 'yes'"),
        ({"deterministic": 1}, "deterministic must be True or False, got 1"),
        ({"overlap": 1}, "overlap must be True, False or None, got 1"),
        ({"run_ahead": 0}, r"run_ahead must be from 1 to 2\*\*40, got 0"),
        ({"run_ahead": True}, "run_ahead must be an int of at least 1, got True"),
        ({"cascade_attention": 1}, "cascade_attention must be True, False or None, got 1"),
        ({"cascade_attention": True, "enforce_eager": True}, "cascade_attention and enforce_eager exclude"),
        ({"quantization": "None"}, r"one of None, 'float16', 'int8'; got 'None'; to have none, leave it out"),
        ({"dtype": "None"}, r"'float16'; got 'None'$"),
        ({"cascade_attention": True, "deterministic": True}, "cascade_attention and deterministic exclude"),
    ],
)
def test_bad_options_of_overlap_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="m", **options)


@pytest.mark.parametrize(
    ("options", "device", "message"),
    [
        ({"kv_cache_dtype": "fp8"}, "cpu", "kv_cache_dtype='fp8' needs a GPU{}; on a CPU use 'float16'"),
        (
            {"deterministic": True, "dtype": "bfloat16"},
            "cpu",
            "deterministic=True cannot be kept with dtype='bfloat16' on a CPU{}, where .*; leave dtype at",
        ),
        ({"cascade_attention": True}, "cpu", "cascade_attention needs a GPU{}; leave it out"),
        ({"kv_cache_dtype": "int8"}, "cpu", "kv_cache_dtype='int8' needs a GPU{}; on a CPU use 'float16'"),
        (
            {"quantization": "int8"},
            "cuda",
            "quantization='int8' is a form of weights for the CPU{}; leave it out .*, or pass device='cpu'",
        ),
        (
            {"num_threads": 2},
            "cuda",
            "num_threads=2 is for a model on the CPU{}; leave it out, or pass device='cpu'",
        ),
    ],
)
def test_what_a_device_has_no_use_for_is_named(options: dict[str, Any], device: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.format(f", and device='auto' is {device} here")):
        EngineConfig(model="m", **options).on_device(device)
    with pytest.raises(ConfigError, match=message.format("")):
        EngineConfig(model="m", device=device, **options).on_device(device)
