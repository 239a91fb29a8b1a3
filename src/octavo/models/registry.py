"""From a model's name to a model that is ready to run."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from octavo.cache.sizing import available_memory_bytes, format_bytes
from octavo.config import DTYPES, LOAD_FORMATS, QUANTIZATIONS, check_choice
from octavo.errors import CapacityError, ConfigError, ModelError, RequestError
from octavo.gguf_file import GGUFFile
from octavo.models.config import ModelConfig, load_config, load_json
from octavo.models.source import ModelSource, resolve_model
from octavo.models.weights.gguf_config import config_from_gguf
from octavo.sampling_params import eos_token_ids

if TYPE_CHECKING:
    import torch

    from octavo.cache.storage import LayerCache
    from octavo.kernels.linear import Form
    from octavo.layers.attention_metadata import AttentionMetadata
    from octavo.models.weights.checkpoint import Checkpoint, Shape
    from octavo.models.weights.layouts import Part

logger = logging.getLogger("octavo")

__all__ = ["CausalLM", "LoadedModel", "load_model", "resolve_model"]


class CausalLM(Protocol):
    """A model that maps packed tokens to hidden states and hidden states to logits; see `DecoderCausalLM`."""

    config: ModelConfig
    weights_form: Form
    """How its matrices are held; see `octavo.kernels.linear`."""
    layers: list[Any]
    """What a call runs one after the other, each with the cache of the same place."""

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[LayerCache],
        meta: AttentionMetadata,
    ) -> torch.Tensor: ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, eq=False, kw_only=True)
class LoadedModel:
    """A model and what belongs to it.

    `dtype` is that of the activations. `generation_config` holds generation_config.json (for GGUF: the
    special token ids of the metadata). `source` says where tokenizer and chat template are. `model_id`
    tells models apart whose KV must not be mixed: same files, dtype and quantization give the same id.
    """

    model: CausalLM
    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    generation_config: dict[str, Any]
    source: ModelSource
    model_id: str
    weights_nbytes: int


def load_model(
    model: str | ModelSource,
    *,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    load_format: str = "auto",
    quantization: str | None = None,
    deterministic: bool = False,
    seed: int = 0,
    max_model_len: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> LoadedModel:
    """Read the config and the weights of `model`: a source, or a name (see `resolve_model`).

    Args:
        dtype: of activations and KV; "auto" is float32 on the CPU, elsewhere the checkpoint's own, and
            bfloat16 if it has none (GGUF) or does not say.
        device: where the parameters go.
        load_format: "auto" follows what is there; "dummy" makes random weights from `seed`, config only.
        quantization: "float16" or "int8" weight matrices under float32 activations, on the CPU only; None
            keeps them as exact as `dtype`.
        deterministic: the logits of a token have the same bits whatever is computed beside it.
        seed: of the "dummy" weights.
        max_model_len: the longest sequence to be run; the rope table gets no longer. None: all the positions
            the model allows.
        progress: called as progress(name, done, total) after each tensor.

    Raises:
        ConfigError: an option has an unknown value or contradicts another.
        ModelError: no such model, or one that is not supported.
        WeightsError: the checkpoint is missing, truncated, corrupt, or does not match the config.
        CapacityError: the device has too little memory for the weights.
    """
    began = time.perf_counter()
    check_choice("load_format", load_format, LOAD_FORMATS)
    check_choice("dtype", dtype, DTYPES)
    check_choice("quantization", quantization, QUANTIZATIONS)
    source = model
    if not isinstance(source, ModelSource):
        source = resolve_model(source, files="config" if load_format == "dummy" else "all")
    import torch

    from octavo.models.weights.checkpoint import check_tensors
    from octavo.models.weights.dummy import DummyCheckpoint
    from octavo.models.weights.parameters import Parameters

    target = torch.device(device)
    with contextlib.ExitStack() as files:
        gguf = files.enter_context(GGUFFile(source.path)) if source.kind == "gguf" else None
        config = config_from_gguf(gguf) if gguf else load_config(source)
        longest = config.rope.num_positions
        if max_model_len is not None and not 1 <= max_model_len <= longest:
            raise ConfigError(
                f"max_model_len: expected 1 to {longest}, the positions of {source.name!r}, "
                f"got {max_model_len}"
            )
        generation_config = _generation_config(source, gguf)
        activations = _activation_dtype(dtype, target, config, quantization)
        network = importlib.import_module(f"octavo.models.{config.network}")
        expected: dict[str, Shape] = dict(network.tensor_shapes(config))
        head: dict[str, Shape] = {network.HEAD: (config.vocab_size, config.hidden_size)}
        if load_format == "dummy":
            stored = expected if config.tie_word_embeddings else {**expected, **head}
            checkpoint: Checkpoint = DummyCheckpoint(stored, seed)
        else:
            checkpoint = _open_checkpoint(source, gguf, config, load_format, network.stored_parts)
        files.callback(checkpoint.close)
        check_tensors(checkpoint, expected, head)
        parameters = Parameters(
            checkpoint,
            dtype=activations,
            form=_form(quantization, activations, target, deterministic),
            device=target,
            ties_head_by_config=config.tie_word_embeddings,
            progress=progress,
        )
        with _memory_named(source, checkpoint, activations, target):
            built: CausalLM = network.build(config, parameters, max_model_len)
    _give_back_freed_memory()
    logger.info("weights: %s in %.1f s", format_bytes(parameters.nbytes), time.perf_counter() - began)
    return LoadedModel(
        model=built,
        config=config,
        dtype=activations,
        device=target,
        generation_config=generation_config,
        source=source,
        model_id=_model_id(source, config, load_format, seed, str(activations), quantization),
        weights_nbytes=parameters.nbytes,
    )


@contextlib.contextmanager
def _memory_named(
    source: ModelSource, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> Iterator[None]:
    """Turns a device's out-of-memory error into a CapacityError with the numbers."""
    import torch

    try:
        yield
    except (torch.OutOfMemoryError, RuntimeError) as error:
        is_cpu = device.type == "cpu"
        # On a CPU torch has no type of its own for it.
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        needed = sum(math.prod(shape) for shape in checkpoint.shapes.values()) * dtype.itemsize
        if is_cpu:
            left = f"{format_bytes(available_memory_bytes())} are left"
        else:
            free, total = torch.cuda.mem_get_info(device)
            left = (
                f"{device} has {format_bytes(total)}, of which {format_bytes(free)} were left when it ran out"
            )
        raise CapacityError(
            f"the weights of {source.name!r} take {format_bytes(needed)} in {dtype_name(dtype)}, and {left}; "
            "end what else runs there, use a dtype of two bytes, or take a smaller model"
        ) from error


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def _give_back_freed_memory() -> None:
    """Packing leaves holes in glibc's heap, in int8 as large as the model; others have no such call."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def _activation_dtype(
    dtype: str, device: torch.device, config: ModelConfig, quantization: str | None
) -> torch.dtype:
    import torch

    if quantization is not None and device.type != "cpu":
        raise ConfigError(f"quantization: {quantization!r} is a CPU form of weights; the device is {device}")
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else config.dtype or "bfloat16"
    if quantization is not None and dtype != "float32":
        raise ConfigError(
            f"quantization: {quantization!r} works with float32 activations, but dtype is {dtype!r}; "
            "leave dtype out"
        )
    result = getattr(torch, dtype)
    assert isinstance(result, torch.dtype)
    return result


def _form(quantization: str | None, dtype: torch.dtype, device: torch.device, deterministic: bool) -> Form:
    if quantization is not None:
        return "int8" if quantization == "int8" else "float16"
    if device.type == "cpu" and dtype_name(dtype) == "float32":
        return "float32"
    if deterministic and device.type == "cpu":
        raise ConfigError(
            f"deterministic: products of {dtype_name(dtype)} depend on the batch on a CPU; use dtype float32"
        )
    return "invariant" if deterministic else "dense"


def _open_checkpoint(
    source: ModelSource,
    gguf: GGUFFile | None,
    config: ModelConfig,
    load_format: str,
    stored_parts: Callable[[Mapping[str, Shape]], dict[str, Part]],
) -> Checkpoint:
    if gguf:
        if load_format == "safetensors":
            raise ModelError(f"load_format: 'safetensors' was asked for, but {source.path} is a GGUF file")
        from octavo.models.weights.gguf import GGUFCheckpoint

        return GGUFCheckpoint(gguf, config)
    if load_format == "gguf":
        raise ModelError(
            f"load_format: 'gguf' was asked for, but {source.path} is a folder with config.json; "
            "give the path of the .gguf file"
        )
    from octavo.models.weights.layouts import Rearranged
    from octavo.models.weights.safetensors import SafetensorsCheckpoint

    checkpoint = SafetensorsCheckpoint(source.path)
    parts = stored_parts(checkpoint.shapes)
    return Rearranged(checkpoint, parts) if parts else checkpoint


def _generation_config(source: ModelSource, gguf: GGUFFile | None) -> dict[str, Any]:
    path = source.path / "generation_config.json"
    if gguf:
        path = source.path
        names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
        ids = {key: gguf.metadata.get(f"tokenizer.ggml.{name}_token_id") for key, name in names.items()}
        values = {key: value for key, value in ids.items() if value is not None}
    elif path.is_file():
        values = load_json(path)
    else:
        path = source.path / "config.json"
        config = load_json(path)
        keys = ("bos_token_id", "eos_token_id", "pad_token_id")
        values = {key: config[key] for key in keys if config.get(key) is not None}
    try:
        eos_token_ids(values)
    except RequestError as error:
        raise ModelError(f"{path}: {error}") from error
    return values


def _model_id(
    source: ModelSource,
    config: ModelConfig,
    load_format: str,
    seed: int,
    dtype: str,
    quantization: str | None,
) -> str:
    """A short hash of what decides the values in the cache; reads no weights."""
    if load_format == "dummy":
        identity: list[Any] = ["dummy", seed]
    else:
        files = [source.path] if source.kind == "gguf" else sorted(source.path.glob("*.safetensors"))
        identity = [_file_identity(path) for path in files]
    identity += [asdict(config), dtype, quantization]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    return f"{source.path.name}-{digest}"


def _file_identity(path: Path) -> list[Any]:
    stat = path.stat()
    return [str(path), stat.st_size, stat.st_mtime_ns]
