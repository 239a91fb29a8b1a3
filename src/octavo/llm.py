"""The friendly door: load a model, generate, chat, stream. `LLM` has an engine; it is not one.

with LLM("smollm2-135m") as llm:
    print(llm.generate("The capital of France is", SamplingParams(max_tokens=8))[0].text)
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from octavo.cache.sizing import parse_memory, parse_share
from octavo.collector import no_collections
from octavo.config import EngineConfig
from octavo.engine.build import build_engine
from octavo.engine.core import Engine
from octavo.engine.request import Request
from octavo.engine.stats import EngineStats
from octavo.errors import CapacityError, EngineError, ModelError, RequestError
from octavo.kernels.cpu.threads import configure as configure_threads
from octavo.models.config import load_config
from octavo.models.device import resolve_device
from octavo.models.registry import load_model
from octavo.models.source import resolve_model
from octavo.outputs import RequestOutput, StreamChunk
from octavo.sampling_params import SamplingParams
from octavo.text.chat import render_chat
from octavo.text.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger("octavo")

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or ``{"prompt": text}`` / ``{"prompt_token_ids": ids}``."""

Message = Mapping[str, Any]

_BYTES = (bytes, bytearray, memoryview)  # sequences of small ints that nobody means as token ids


class LLM:
    """A model with its paged KV cache, ready to generate.

    `model` is a local Hugging Face folder, a GGUF file, a repository id or a built-in name; `options` are the
    fields of `EngineConfig`. `progress(stage, done, total)` is called while the weights load.

    Not thread safe. Use it as a context manager, or call `close`.

    Raises ConfigError, ModelError, WeightsError or CapacityError.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        progress: Callable[[str, int, int], None] | None = None,
        **options: Any,
    ) -> None:
        with no_collections():
            self._load(model, progress, options)

    def _load(
        self,
        model: str | os.PathLike[str],
        progress: Callable[[str, int, int], None] | None,
        options: dict[str, Any],
    ) -> None:
        began = time.perf_counter()
        if (age_s := _process_age_s()) is not None:
            logger.info("imports done, %.1f s after the process began", age_s)
        config = EngineConfig.from_options(model, **options)
        device = resolve_device(config.device)
        logger.info("device %s in %.1f s", device, time.perf_counter() - began)
        config.on_device(device.type)  # refuses what this device has no use for
        if config.kv_cache_memory is not None:  # said before the weights load, not after
            config = config.replace(kv_cache_memory=parse_memory(config.kv_cache_memory))
        if config.gpu_memory is not None:
            parse_share(config.gpu_memory, 2**62)
        source = resolve_model(
            config.model, config.revision, files="config" if config.load_format == "dummy" else "all"
        )
        tokenizer_began = time.perf_counter()
        tokenizer: Tokenizer | None
        try:
            tokenizer = load_tokenizer(source)
        except ModelError as error:
            if config.load_format != "dummy":
                load_config(source)  # an architecture that is not known is the better reason
                raise
            self._why_no_tokenizer = str(error)
            tokenizer = None  # random weights have nothing to say: token ids in, token ids out
        logger.info("tokenizer in %.1f s", time.perf_counter() - tokenizer_began)
        if device.type == "cpu":
            configure_threads(config.num_threads)
        loaded = load_model(
            source,
            dtype=config.dtype,
            device=device,
            load_format=config.load_format,
            quantization=config.quantization,
            deterministic=config.deterministic,
            seed=config.seed,
            max_model_len=config.max_model_len,
            progress=progress,
        )
        self.generation_config = loaded.generation_config
        self.weights_nbytes = loaded.weights_nbytes
        self.engine: Engine = build_engine(config, loaded, tokenizer)
        logger.info("ready in %.1f s", time.perf_counter() - began)

    @property
    def config(self) -> EngineConfig:
        """The options, with everything that was left open filled in."""
        return self.engine.config

    @property
    def tokenizer(self) -> Tokenizer:
        if self.engine.tokenizer is None:
            raise ModelError(
                f"model {self.config.model!r} has no tokenizer; give prompts as token ids "
                f"({self._why_no_tokenizer})"
            )
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends; used wherever no params are given."""
        return SamplingParams.from_generation_config(self.generation_config)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int = 0,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Continue one prompt or many; outputs come in the order of the prompts.

        sampling_params: one for all, one per prompt, or None for the model's own defaults.
        use_tqdm: show a progress bar. priority: lower runs first. cache_salt: prompts share cached K/V only
        under the same salt.

        Every prompt is checked before any runs: the first bad one raises RequestError or CapacityError naming
        its index, and nothing is generated. A sequence whose logits went bad ends with
        ``finish_reason == "error"`` and `RequestOutput.error`; its neighbours are unharmed.
        """
        batch = _as_batch(prompts)
        return self._generate(batch, self._encode, sampling_params, use_tqdm, priority, cache_salt)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        use_tqdm: bool = True,
        priority: int = 0,
        cache_salt: str = "",
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or many through the model's chat template.

        `tools` and `template_kwargs` (``enable_thinking=False``, say) go to the template. Otherwise as
        `generate`.
        """

        def encode(conversation: Sequence[Message]) -> tuple[str, Sequence[int]]:
            return self._encode_chat(conversation, tools, add_generation_prompt, template_kwargs)

        if not isinstance(messages, list | tuple):
            raise RequestError(
                f"messages must be a list of messages, or a list of such lists, got {type(messages).__name__}"
            )
        is_batch = bool(messages) and isinstance(messages[0], list | tuple)
        batch: Sequence[Any] = messages if is_batch else [messages]
        return self._generate(batch, encode, sampling_params, use_tqdm, priority, cache_salt)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Stream:
        """Continue one prompt and iterate over its pieces as they appear; see `Stream`."""
        text, token_ids = self._encode(prompt)
        return self._stream(text, token_ids, sampling_params, priority, cache_salt)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        priority: int = 0,
        cache_salt: str = "",
        **template_kwargs: Any,
    ) -> Stream:
        """Answer one conversation and iterate over the pieces as they appear; see `chat` and `Stream`."""
        text, token_ids = self._encode_chat(messages, tools, add_generation_prompt, template_kwargs)
        return self._stream(text, token_ids, sampling_params, priority, cache_salt)

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def close(self) -> None:
        """Abort what still runs, give the memory back and refuse what comes. Closing twice is a no-op."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # Parts

    def _generate(
        self,
        batch: Sequence[Any],
        encode: Callable[[Any], tuple[str | None, Sequence[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        show_progress: bool,
        priority: int,
        cache_salt: str,
    ) -> list[RequestOutput]:
        params = self._params_for(sampling_params, len(batch))
        requests: list[Request] = []
        try:
            for i, item in enumerate(batch):
                try:
                    text, token_ids = encode(item)
                    requests.append(
                        self.engine.add_request(
                            token_ids, params[i], prompt=text, priority=priority, cache_salt=cache_salt
                        )
                    )
                except (RequestError, CapacityError) as error:
                    if len(batch) > 1:
                        raise type(error)(f"prompts[{i}]: {error}") from error
                    raise
            return self._run(requests, show_progress)
        except BaseException:  # Ctrl-C included: leave nothing running behind
            for request in requests:
                self.engine.abort(request.request_id)
            raise

    def _run(self, requests: list[Request], show_progress: bool) -> list[RequestOutput]:
        num_left = len(requests)
        mine = set(map(id, requests))  # streams may be running beside these
        with _progress_bar(num_left, show_progress) as advance:
            while num_left:
                changed = self.engine.step()
                if not changed and not self.engine.has_work:
                    raise EngineError("requests are left, but the engine has none; was it closed meanwhile?")
                for request in changed:
                    if request.output is not None and id(request) in mine:
                        num_left -= 1
                        advance(request.output)
        return [request.output for request in requests if request.output is not None]

    def _stream(
        self,
        text: str | None,
        token_ids: Sequence[int],
        params: SamplingParams | None,
        priority: int,
        cache_salt: str,
    ) -> Stream:
        request = self.engine.add_request(
            token_ids,
            self._params_for(params, 1)[0],
            prompt=text,
            priority=priority,
            cache_salt=cache_salt,
            stream=True,
        )
        return Stream(self.engine, request)

    def _params_for(
        self, params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> Sequence[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * num_prompts
        if not isinstance(params, Sequence):
            raise RequestError(f"sampling_params must be SamplingParams or a list of them, got {params!r}")
        for i, item in enumerate(params):
            if not isinstance(item, SamplingParams):
                raise RequestError(f"sampling_params[{i}] must be SamplingParams, got {item!r}")
        if len(params) != num_prompts:
            raise RequestError(
                f"sampling_params has {len(params)} entries for {num_prompts} prompts; give one for all "
                "or one each"
            )
        return params

    def _encode(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        content: Any = prompt
        if isinstance(prompt, Mapping):
            if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
                raise RequestError(
                    "a prompt given as a dict needs exactly one of 'prompt' and 'prompt_token_ids', "
                    f"got the keys {list(prompt)[:4]}"
                )
            ((key, content),) = prompt.items()
            if isinstance(content, str) != (key == "prompt"):
                raise RequestError(
                    f"'prompt' must be text and 'prompt_token_ids' a list of ints, got {key!r}: "
                    f"{type(content).__name__}"
                )
        if isinstance(content, str):
            return content, self.tokenizer.encode(content)
        if isinstance(content, Sequence) and not isinstance(content, _BYTES):
            return None, content
        raise RequestError(f"a prompt must be text or a list of token ids, got {type(content).__name__}")

    def _encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any],
    ) -> tuple[str, Sequence[int]]:
        text = render_chat(
            self.tokenizer,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            **template_kwargs,
        )
        # The template writes the special tokens itself, BOS included.
        return text, self.tokenizer.encode(text, add_special_tokens=False)


class Stream:
    """The pieces of one request as they appear; iterating drives the engine.

    Closing it (or leaving the ``with`` block, or dropping it) before the end aborts the request at once.
    `output` is the finished `RequestOutput`, None until then.
    """

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine = engine
        self._request = request

    @property
    def output(self) -> RequestOutput | None:
        return self._request.output

    def __iter__(self) -> Iterator[StreamChunk]:
        return self

    def __next__(self) -> StreamChunk:
        chunks = self._request.chunks
        while not chunks:
            if self._request.output is not None:
                raise StopIteration
            if not self._engine.step() and not self._engine.has_work and not chunks:
                raise StopIteration  # dropped or aborted elsewhere
        return chunks.popleft()

    def close(self) -> None:
        self._engine.abort(self._request.request_id)
        self._request.chunks.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self._engine.drop(self._request.request_id)


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A list of prompts; a lone string, dict or list of ids is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, _BYTES):
        raise RequestError(
            f"prompts must be text, token ids or a list of those, got {type(prompts).__name__}"
        )
    if prompts and not isinstance(prompts[0], (str, Mapping, Sequence)):
        return [prompts]  # type: ignore[list-item]  # a flat list of ids; what is no int is refused by the engine
    return prompts  # type: ignore[return-value]  # told apart above


@contextmanager
def _progress_bar(num_requests: int, is_shown: bool) -> Iterator[Callable[[RequestOutput], None]]:
    """A bar over finished requests with tokens in and out; `advance(output)` moves it on by one."""
    if not is_shown:
        yield lambda output: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[speed]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("generating", total=num_requests, speed="")
        num_in = num_out = 0

        def advance(output: RequestOutput) -> None:
            nonlocal num_in, num_out
            num_in += len(output.prompt_token_ids)
            num_out += sum(len(completion.token_ids) for completion in output.outputs)
            elapsed = progress.tasks[0].elapsed or 1e-9
            speed = f"{num_in / elapsed:.0f} tok/s in, {num_out / elapsed:.1f} tok/s out"
            progress.update(task, advance=1, speed=speed)

        yield advance


def _process_age_s() -> float | None:
    """Seconds since this process began; None where the system does not say."""
    try:
        ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):  # not Linux, or one of its own kind
        return None
