"""Engine options: one frozen object, checked when it is made, printed well. No torch."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from octavo.errors import ConfigError, nearest

DTYPES: Final = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS: Final = ("auto", "safetensors", "gguf", "dummy")
QUANTIZATIONS: Final = (None, "float16", "int8")
DEVICES: Final = ("auto", "cpu", "cuda")
KV_CACHE_DTYPES: Final = (*DTYPES, "fp8", "int8")
QUANTIZED_KV_CACHE_DTYPES: Final = ("fp8", "int8")

MAX_NUMBER: Final = 2**40
"""No count or length is larger; what fits in memory is smaller still, and said when it does not."""
DEFAULT_MAX_NUM_SEQS: Final = 256
DEFAULT_MAX_NUM_BATCHED_TOKENS: Final = 512
DEFAULT_MAX_NUM_BATCHED_TOKENS_ON_GPU: Final = 16384
DEFAULT_RUN_AHEAD: Final = 3


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything that shapes an engine, under vLLM's names where vLLM has one.

    model: local folder, GGUF file, Hugging Face repo id, or a built-in name.
    dtype: of activations and unquantised weights; ``auto`` is float32 on a CPU, and on a GPU the
        checkpoint's own, or bfloat16 where it has none (GGUF).
    device: ``cpu``, ``cuda``, or ``auto``: cuda where there is one.
    load_format: ``auto`` looks at what is there; ``dummy`` fills seeded random weights.
    quantization: how linear weights are held: None (as `dtype`), ``float16``, ``int8`` (weight only; CPU).
    revision: branch, tag or commit of a repo id.
    max_model_len: longest prompt plus output, in tokens; None takes the model's own limit.
    max_num_seqs: most sequences running at once.
    max_num_batched_tokens: token budget of one step; longer prompts are computed in chunks. None: 512 on a
        CPU; 16384 on a GPU, halved until such steps fit in its memory.
    max_prefill_share: share of that budget prompts may take while other requests are decoding, so that
        a long prompt never makes running requests wait for a whole budget of it.
    enable_prefix_caching: reuse K/V of prompts that start alike.
    block_size: tokens per KV block, a power of two.
    num_blocks / kv_cache_memory: size of the KV cache in blocks, or in bytes (``"2GiB"`` or a number); give
        at most one. With neither it is sized from free memory.
    gpu_memory: most of a GPU's memory this process shall take, weights and steps included: a share (0.9) or a
        size (``"40GiB"``); the cache gets what these leave. None: the cache gets 90 % of what is free then.
    kv_cache_dtype: of the KV cache; ``auto`` is `dtype`. ``fp8`` (e4m3) and ``int8``, with one scale per
        token and head, halve it; they need a GPU.
    seed: of dummy weights and of requests that bring no seed of their own.
    num_threads: CPU threads for a model on the CPU; None takes every core this process may use.
    overlap: launch the next step before the tokens of this one are read, so that the device need not wait for
        the host; None: on a GPU, and not on a CPU, where both are one. The tokens are the same.
    run_ahead: steps launched ahead with `overlap`: one usually, and up to this many while nothing waits and
        all that runs is decoding. A new request waits for these steps, a finished one wastes its share.
    enforce_eager: launch every step kernel by kernel on a GPU, too, and replay none from CUDA graphs.
    cascade_attention: in decode steps from CUDA graphs whose sequences begin with the same blocks of the
        cache, read these once for eight sequences, where that pays. None: on a GPU, unless `enforce_eager` or
        `deterministic` rules it out; True refuses these, and warns where the model or its sizes do.
    deterministic: the bits of a request's logits depend on its own tokens alone, not on what else is in the
        batch, how its prompt is cut or what the cache holds. On a GPU by kernels that add in one order, which
        cost speed (docs/performance.md); on a CPU it holds without, but for `dtype` bfloat16 and float16,
        which are refused with it.
    tensor_parallel_size: 1 is the only value so far.
    trace: file that receives one JSON line per step.
    profile: file that receives where the time of each step went, as a Chrome trace.
    """

    model: str
    dtype: str = "auto"
    device: str = "auto"
    load_format: str = "auto"
    quantization: str | None = None
    revision: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS
    max_num_batched_tokens: int | None = None
    max_prefill_share: float = 0.5
    enable_prefix_caching: bool = True
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory: int | str | None = None
    gpu_memory: float | int | str | None = None
    kv_cache_dtype: str = "auto"
    seed: int = 0
    num_threads: int | None = None
    overlap: bool | None = None
    run_ahead: int = DEFAULT_RUN_AHEAD
    enforce_eager: bool = False
    cascade_attention: bool | None = None
    deterministic: bool = False
    tensor_parallel_size: int = 1
    trace: str | os.PathLike[str] | None = None
    profile: str | os.PathLike[str] | None = None

    @classmethod
    def from_options(cls, model: str | os.PathLike[str], **options: Any) -> EngineConfig:
        """Build from keyword arguments; an unknown name is a ConfigError that suggests the nearest one."""
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise ConfigError(
                    f"unknown engine option {name!r}{nearest(name, known)}; known: {', '.join(known)}"
                )
        if not isinstance(model, str | os.PathLike):
            raise ConfigError(f"model must be a path or a name, got {model!r}")
        return cls(model=os.fspath(model), **options)

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model must be a non-empty path or name, got {self.model!r}")
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        check_choice("load_format", self.load_format, LOAD_FORMATS)
        check_choice("quantization", self.quantization, QUANTIZATIONS)
        check_choice("device", self.device, DEVICES)
        for name in (
            "max_num_seqs",
            "block_size",
            "tensor_parallel_size",
            "run_ahead",
        ):
            self._positive_int(name)
        for name in ("max_model_len", "max_num_batched_tokens", "num_blocks", "num_threads"):
            if getattr(self, name) is not None:
                self._positive_int(name)
        for name in ("enable_prefix_caching", "enforce_eager", "deterministic"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name in ("overlap", "cascade_attention"):
            if not isinstance(getattr(self, name), bool | None):
                raise ConfigError(f"{name} must be True, False or None, got {getattr(self, name)!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"seed must be an int, got {self.seed!r}")
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size must be a power of two, got {self.block_size}; 16 is the default")
        share = self.max_prefill_share
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ConfigError(f"max_prefill_share must be above 0 and at most 1, got {share!r}")
        for name in ("trace", "profile"):
            path = getattr(self, name)
            if path is not None and not (isinstance(path, str | os.PathLike) and os.fspath(path)):
                raise ConfigError(f"{name} must be the path of a file to write, got {path!r}")
        written = [os.path.abspath(path) for path in (self.trace, self.profile) if path is not None]
        if len(written) != len(set(written)):
            raise ConfigError(f"trace and profile would both write {written[0]!r}; name two files")
        if self.num_blocks is not None and self.kv_cache_memory is not None:
            raise ConfigError("num_blocks and kv_cache_memory both size the KV cache; give only one of them")
        if self.gpu_memory is not None and (self.num_blocks is not None or self.kv_cache_memory is not None):
            raise ConfigError(
                "gpu_memory sizes the KV cache by what the rest leaves; num_blocks and kv_cache_memory say "
                "its size: give only one of them"
            )
        for name in ("enforce_eager", "deterministic"):
            if self.cascade_attention and getattr(self, name):
                raise ConfigError(
                    f"cascade_attention and {name} exclude each other: it needs CUDA graphs, and a request's "
                    "bits depend on what stands beside it; give only one of them"
                )
        if self.tensor_parallel_size != 1:
            raise ConfigError(
                f"tensor_parallel_size={self.tensor_parallel_size} is not supported yet; the only value is 1"
            )
        if self.quantization is not None and self.dtype not in ("auto", "float32"):
            raise ConfigError(
                f"quantization={self.quantization!r} computes in float32 and cannot be combined with "
                f"dtype={self.dtype!r}; leave dtype at 'auto'"
            )

    def replace(self, **changes: Any) -> EngineConfig:
        """A new config with some values changed; checked like any other."""
        return replace(self, **changes)

    @property
    def uses_graphs(self) -> bool:
        """Whether small steps are replayed from CUDA graphs; told once the device is settled."""
        return self.device == "cuda" and not self.enforce_eager

    def on_device(self, device: str) -> EngineConfig:
        """This config with `device` settled ("cpu" or "cuda").

        ConfigError names an option that this device has no use for.
        """
        here = "" if self.device == device else f", and device={self.device!r} is {device} here"
        if device == "cpu" and self.kv_cache_dtype in QUANTIZED_KV_CACHE_DTYPES:
            raise ConfigError(
                f"kv_cache_dtype={self.kv_cache_dtype!r} needs a GPU{here}; "
                "on a CPU use 'float16' to halve the cache"
            )
        if device == "cpu" and self.gpu_memory is not None:
            raise ConfigError(f"gpu_memory={self.gpu_memory!r} needs a GPU{here}; use kv_cache_memory")
        if device == "cpu" and self.cascade_attention:
            raise ConfigError(f"cascade_attention needs a GPU{here}; leave it out")
        if device == "cpu" and self.deterministic and self.dtype in ("bfloat16", "float16"):
            raise ConfigError(
                f"deterministic=True cannot be kept with dtype={self.dtype!r} on a CPU{here}, where torch's "
                "products in it depend on the batch; leave dtype at 'auto' (float32); quantization='float16' "
                "halves the weights"
            )
        if device != "cpu" and self.quantization is not None:
            raise ConfigError(
                f"quantization={self.quantization!r} is a form of weights for the CPU{here}; leave it out "
                "(the weights are then held in dtype), or pass device='cpu'"
            )
        if device != "cpu" and self.num_threads is not None:
            raise ConfigError(
                f"num_threads={self.num_threads} is for a model on the CPU{here}; leave it out, or pass "
                "device='cpu'"
            )
        overlap = device != "cpu" if self.overlap is None else self.overlap
        on_device = (
            DEFAULT_MAX_NUM_BATCHED_TOKENS if device == "cpu" else DEFAULT_MAX_NUM_BATCHED_TOKENS_ON_GPU
        )
        return self.replace(
            device=device,
            overlap=overlap,
            max_num_batched_tokens=self.max_num_batched_tokens or on_device,
        )

    def _positive_int(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{name} must be an int of at least 1, got {value!r}")
        if not 1 <= value <= MAX_NUMBER:
            shown = value if abs(value) <= MAX_NUMBER else "a number beyond it"
            raise ConfigError(f"{name} must be from 1 to 2**40, got {shown}")


def check_choice(name: str, value: object, known: tuple[str | None, ...]) -> None:
    """ConfigError, with the nearest choice, unless the option `name` has one of the `known` values."""
    if value not in known:
        hint = nearest(value, [k for k in known if k]) if isinstance(value, str) else ""
        if value == "None" and None in known:
            hint = "; to have none, leave it out"
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, known))}; got {value!r}{hint}")
