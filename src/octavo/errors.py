"""Every exception a user of Octavo can meet.

::

    OctavoError
    ├── ConfigError             an engine option is unknown, contradictory or out of range
    ├── RequestError            one prompt or its sampling parameters cannot be served
    ├── CapacityError           the KV cache cannot hold what was asked, now or ever
    │   └── OverloadedError     the server's queue is full; the same request can be served later
    ├── RequestTimeoutError     a request took longer than the server allows
    ├── ModelError              no model at that path, or an architecture or rope type we do not know
    ├── WeightsError            a checkpoint is missing, truncated, corrupt, or does not match the model
    ├── KernelArgumentError     a tensor handed to a kernel has the wrong shape, dtype, device or stride
    ├── UnsupportedKernelConfig a valid request for something no kernel here does
    └── EngineError             the engine is closed, or a step failed
        └── EngineDeadError     the server's engine has gone, and does not come back by itself

Each message names the argument, what was expected, what came, and the way out.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable


class OctavoError(Exception):
    """Root of every error Octavo raises on purpose."""


class ConfigError(OctavoError, ValueError):
    """An engine option is unknown, contradictory or out of range."""


class RequestError(OctavoError, ValueError):
    """One prompt or its sampling parameters cannot be served; neighbours are unharmed."""


class CapacityError(OctavoError):
    """The KV cache cannot hold what was asked."""


class OverloadedError(CapacityError):
    """The server's queue is full. `retry_after_s`: a guess, in seconds, of when it has room again."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestTimeoutError(OctavoError, TimeoutError):
    """A request took longer than the server allows; what it had generated is lost."""


class ModelError(OctavoError, ValueError):
    """No model at that path, or an architecture or rope type Octavo does not know."""


class WeightsError(OctavoError, ValueError):
    """A checkpoint is missing, truncated, corrupt, or does not match the model."""


class KernelArgumentError(OctavoError, ValueError):
    """A tensor handed to a kernel has the wrong shape, dtype, device or stride."""


class UnsupportedKernelConfig(OctavoError, NotImplementedError):
    """A valid request for something no kernel here does; raised before any launch."""


class EngineError(OctavoError, RuntimeError):
    """The engine is closed, or one of its steps failed."""


class EngineDeadError(EngineError):
    """The server's engine has gone; asking again is of no use before the server is started again."""


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 200

    def repr_int(self, x: int, level: int) -> str:
        try:
            return super().repr_int(x, level)
        except ValueError:  # Python prints no int of more than 4300 digits
            return f"an int of {x.bit_length()} bits"


_short = _Short()


def shown(value: object) -> str:
    """`repr(value)` for a message: at most 303 characters, whatever the value is."""
    text = _short.repr(value)
    return text if len(text) <= 300 else f"{text[:300]}..."


# What people type for it elsewhere, where the letters alone would lead to another name or to none.
_OTHER_NAMES = {
    **dict.fromkeys(("gpu", "nvidia"), "cuda"),
    **dict.fromkeys(("half", "fp16"), "float16"),
    **dict.fromkeys(("float8", "float8_e4m3", "e4m3"), "fp8"),
}


def nearest(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the known name closest to `name`, in any case, or an empty string."""
    by_key = {one.lower(): one for one in known}
    key = name.lower()
    if _OTHER_NAMES.get(key) in by_key:
        key = _OTHER_NAMES[key]
    matches = difflib.get_close_matches(key, by_key, n=1, cutoff=0.5)
    return f" (did you mean {by_key[matches[0]]!r}?)" if matches else ""
