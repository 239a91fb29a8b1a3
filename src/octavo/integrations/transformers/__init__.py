"""Octavo's attention inside Hugging Face Transformers, without a line of model code.

::

    import octavo.integrations.transformers

    octavo.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="octavo")
    model.generate(...)  # or model.generate_batch(...), continuous batching over the paged cache

`docs/transformers.md` says what is computed by which kernel, what falls back, and what it costs.
"""

from __future__ import annotations

from typing import Any

_OLDEST = (5, 17)
_WAY_OUT = "pip install 'octavo[transformers]', or 'transformers>=5.17'"

try:
    import transformers
except ImportError as error:
    raise ImportError(f"octavo.integrations.transformers needs Transformers: {_WAY_OUT} ({error})") from error

if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < _OLDEST:
    raise ImportError(
        f"octavo.integrations.transformers needs Transformers 5.17 or newer and found "
        f"{transformers.__version__}: {_WAY_OUT}"
    )

from octavo.integrations.transformers import continuous  # noqa: E402  (it needs Transformers)
from octavo.integrations.transformers.attention import attention, paged_attention  # noqa: E402
from octavo.integrations.transformers.fusing import Fused, fuse, unfuse  # noqa: E402
from octavo.integrations.transformers.masks import octavo_mask  # noqa: E402

__all__ = ["Fused", "attention", "fuse", "octavo_mask", "paged_attention", "register", "unfuse"]


def register() -> None:
    """Make `octavo` and `paged|octavo` known as attention implementations. Calling it again changes nothing.

    Three things happen: the attention functions go into Transformers' `AttentionInterface`, the mask function
    into its `AttentionMaskInterface`, and its continuous batching is told that `octavo` reads lengths and
    block tables, as flash attention does, and needs no mask.
    """
    interface: Any = transformers.AttentionInterface
    interface.register("octavo", attention)
    interface.register("paged|octavo", paged_attention)
    masks: Any = transformers.AttentionMaskInterface
    masks.register("octavo", octavo_mask)
    continuous.admit()
