"""What a loader hands to `Tokenizer`: the same fields whether they came from a folder or a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend


@dataclass(frozen=True)
class TokenizerRecipe:
    """A `tokenizers` backend plus what its own file does not say."""

    backend: Backend
    origin: str
    """Named in error messages: a folder or a file."""
    special_tokens: dict[str, str] = field(default_factory=dict)
    """`bos_token`, `eos_token`, `pad_token`, ... as text; chat templates see them under these names."""
    chat_templates: dict[str, str] = field(default_factory=dict)
    """Jinja sources by name; `default` unless another is asked for, `tool_use` when tools are given."""
    add_bos_token: bool | None = None
    """Whether plain prompts get a BOS; None leaves it to the backend's post-processor."""
    add_eos_token: bool | None = None
    extra_eos_token_ids: frozenset[int] = frozenset()
    """Further ids that end a turn (`<|eot_id|>`), beside the EOS."""
