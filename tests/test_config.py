"""What a config says about the device that it meets; the other options are tested through `LLM`."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.errors import ConfigError


def test_a_device_that_was_left_open_is_filled_in() -> None:
    config = EngineConfig(model="m", kv_cache_dtype="fp8", dtype="float32")
    assert config.on_device("cuda") == config.replace(device="cuda")
    config = EngineConfig(model="m", quantization="int8", num_threads=2)
    assert config.on_device("cpu") == config.replace(device="cpu")


@pytest.mark.parametrize(
    ("options", "device", "message"),
    [
        ({"kv_cache_dtype": "fp8"}, "cpu", "kv_cache_dtype='fp8' needs a GPU{}; on a CPU use 'float16'"),
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
