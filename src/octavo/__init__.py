"""Octavo: an LLM inference engine around a paged KV cache.

The names below are resolved when first used, so that ``import octavo`` and ``octavo --help`` load no torch.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.errors import (
        CapacityError,
        ConfigError,
        EngineDeadError,
        EngineError,
        KernelArgumentError,
        ModelError,
        OctavoError,
        OverloadedError,
        RequestError,
        RequestTimeoutError,
        UnsupportedKernelConfig,
        WeightsError,
    )
    from octavo.llm import LLM
    from octavo.outputs import CompletionOutput, Logprob, RequestOutput, StreamChunk
    from octavo.sampling_params import SamplingParams
    from octavo.structured_output import StructuredOutput

__version__ = "0.1.0"

# Who imports the library decides what is shown of its log; otherwise Python would print errors by itself.
logging.getLogger(__name__).addHandler(logging.NullHandler())

_HOMES = {
    "LLM": "octavo.llm",
    "SamplingParams": "octavo.sampling_params",
    "StructuredOutput": "octavo.structured_output",
    "EngineConfig": "octavo.config",
    "RequestOutput": "octavo.outputs",
    "CompletionOutput": "octavo.outputs",
    "StreamChunk": "octavo.outputs",
    "Logprob": "octavo.outputs",
    "OctavoError": "octavo.errors",
    "ConfigError": "octavo.errors",
    "OverloadedError": "octavo.errors",
    "RequestError": "octavo.errors",
    "RequestTimeoutError": "octavo.errors",
    "CapacityError": "octavo.errors",
    "ModelError": "octavo.errors",
    "WeightsError": "octavo.errors",
    "KernelArgumentError": "octavo.errors",
    "UnsupportedKernelConfig": "octavo.errors",
    "EngineError": "octavo.errors",
    "EngineDeadError": "octavo.errors",
}

__all__ = [
    "LLM",
    "CapacityError",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "EngineDeadError",
    "EngineError",
    "KernelArgumentError",
    "Logprob",
    "ModelError",
    "OctavoError",
    "OverloadedError",
    "RequestError",
    "RequestOutput",
    "RequestTimeoutError",
    "SamplingParams",
    "StreamChunk",
    "StructuredOutput",
    "UnsupportedKernelConfig",
    "WeightsError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    if home != "octavo.llm":
        return getattr(importlib.import_module(home), name)
    from octavo.collector import no_collections

    with no_collections():  # torch comes with it
        return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return __all__
