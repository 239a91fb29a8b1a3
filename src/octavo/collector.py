"""The garbage collector, while much is made of which nothing is garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """No garbage collections in here, unless there are none anyway.

    To import torch, or to load a model, is to make some hundred thousand objects that stay. The collector
    looks at all of them again and again meanwhile, which is a fifth of the time.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
