"""What `generate` and `chat` have in common: opening the engine, and showing numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from octavo.cli.options import EngineOptions
from octavo.errors import RequestError

if TYPE_CHECKING:
    from octavo.llm import LLM
    from octavo.outputs import RequestOutput


def open_llm(model: str, engine: EngineOptions) -> LLM:
    """The engine for `model`; on a terminal a spinner shows that it is loading."""
    # Imported here so that `--help` and usage errors do not wait for torch.
    engine.config(model)
    with contextlib.ExitStack() as around:
        around.enter_context(interrupted_for_sure())
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.text import Text

            around.enter_context(Console(stderr=True).status(Text(f"loading {model}")))
        from octavo import LLM

        return LLM(model, **engine.llm_kwargs())


@contextlib.contextmanager
def interrupted_for_sure() -> Iterator[None]:
    """An interruption inside ends in KeyboardInterrupt, whatever a library that it cuts short makes of it: an
    import that swallows it leaves half a module, and what needs that fails later and in another way.
    """
    numbers: list[int] = []

    def note(number: int, frame: Any) -> None:
        numbers.append(number)
        sys.unraisablehook = lambda _: None  # what is left half made complains when it is thrown away
        signal.default_int_handler(number, frame)

    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_ours or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield
    except Exception as error:
        if numbers:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if numbers:
        raise KeyboardInterrupt


def read_stdin(read: Callable[[], str]) -> str:
    """What `read` returns of standard input; RequestError when it is not UTF-8."""
    try:
        text = read()
        text.encode()  # some locales let bytes that are no text through, as lone surrogates
    except UnicodeError as error:
        raise RequestError("standard input is not UTF-8 text; convert it, for example with iconv") from error
    return text


def describe_timing(output: RequestOutput) -> str:
    """One line: tokens in and out, cache hit, time to first token, tokens a second after it."""
    prompt = len(output.prompt_token_ids)
    generated = sum(len(completion.token_ids) for completion in output.outputs)
    parts = [f"{prompt} prompt tokens ({output.num_cached_tokens} cached)", f"{generated} generated"]
    metrics = output.metrics
    if metrics.ttft_s is not None:
        parts.append(f"first token after {metrics.ttft_s:.2f} s")
    if metrics.tpot_s:
        parts.append(f"then {1 / metrics.tpot_s:.1f} tokens/s each")
    if any(completion.finish_reason == "length" for completion in output.outputs):
        parts.append("cut at the most tokens allowed")
    return ", ".join(parts)


def output_as_json(output: RequestOutput) -> dict[str, Any]:
    """A `RequestOutput` as plain JSON values."""
    return {
        "prompt": output.prompt,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "outputs": [
            {
                "index": completion.index,
                "text": completion.text,
                "token_ids": list(completion.token_ids),
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
            }
            for completion in output.outputs
        ],
        "metrics": dataclasses.asdict(output.metrics),
        "error": output.error,
    }
