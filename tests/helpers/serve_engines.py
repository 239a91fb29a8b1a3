"""Engines to put into a real engine process, which imports this: scripted, with faults on demand."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from helpers.core import make_engine

from octavo.config import EngineConfig
from octavo.engine.core import Engine
from octavo.errors import ModelError
from octavo.serve.messages import ModelCard, Stage

RAISES = 5
"""A prompt that begins with this id makes its steps raise."""


def card_of(engine: Engine) -> ModelCard:
    return ModelCard(
        name="scripted",
        max_model_len=engine.scheduler.max_model_len,
        vocab_size=engine.vocab_size,
        eos_token_ids=engine.eos_token_ids,
        defaults={},
        num_blocks=engine.cache.num_blocks,
        block_size=engine.cache.block_size,
        kv_cache_dtype="float32",
        device="cpu",
        dtype="float32",
        max_num_seqs=engine.scheduler.max_num_rows,
    )


def scripted(
    config: EngineConfig, tell: Callable[[Stage], None], *, folder: Path | None = None
) -> tuple[Engine, ModelCard]:
    """A scripted engine. While `folder` holds a file ``hang``, its steps hang; ``exit`` ends the process."""
    engine = make_engine(poison={RAISES: "raise"}, max_model_len=2000, num_blocks=600)

    def during_step() -> None:
        time.sleep(0.001)
        while folder is not None and (folder / "hang").exists():
            time.sleep(0.005)
        if folder is not None and (folder / "exit").exists():
            os._exit(3)

    engine.runner.during_step = during_step  # type: ignore[attr-defined]  # the scripted runner has it
    tell(Stage("weights", 0.5))
    return engine, card_of(engine)


def unloadable(config: EngineConfig, tell: Callable[[Stage], None]) -> tuple[Engine, ModelCard]:
    raise ModelError("model: there is none")


def crashing(config: EngineConfig, tell: Callable[[Stage], None]) -> tuple[Engine, ModelCard]:
    raise ZeroDivisionError("oh")


def endless(config: EngineConfig, tell: Callable[[Stage], None]) -> tuple[Engine, ModelCard]:
    """Loads for ever."""
    tell(Stage("imports", 0.1))
    while True:
        time.sleep(0.05)
