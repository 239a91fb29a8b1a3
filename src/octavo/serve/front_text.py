"""The front's own tokenizer, loaded beside the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

from octavo.config import EngineConfig
from octavo.errors import ModelError
from octavo.models.source import resolve_model
from octavo.text.tokenizer import Tokenizer, load_tokenizer


def front_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """The model's tokenizer; None for random weights that have none."""
    source = resolve_model(config.model, config.revision, files="config")
    try:
        return load_tokenizer(source)
    except ModelError:
        if config.load_format != "dummy":
            raise
        return None


def loading(
    work: Callable[[], Tokenizer | None], loop: asyncio.AbstractEventLoop
) -> asyncio.Future[Tokenizer | None]:
    """What `work()` returns or raises, in a thread that does not keep the interpreter from its end: it may be
    downloading.
    """
    loaded: asyncio.Future[Tokenizer | None] = loop.create_future()

    def settle(tokenizer: Tokenizer | None, error: Exception | None) -> None:
        if loaded.done():
            return
        if error is None:
            loaded.set_result(tokenizer)
        else:
            loaded.set_exception(error)

    def load() -> None:
        try:
            tokenizer, error = work(), None
        except Exception as failure:
            tokenizer, error = None, failure
        with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
            loop.call_soon_threadsafe(settle, tokenizer, error)

    threading.Thread(target=load, name="octavo-tokenizer", daemon=True).start()
    return loaded
