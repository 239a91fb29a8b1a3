"""A tokenizer in which every token is one letter, so that texts can be told by looking at ids."""

from __future__ import annotations

import functools
import string

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from octavo.text.recipe import TokenizerRecipe
from octavo.text.tokenizer import Tokenizer


def letters_backend(vocab_size: int) -> Backend:
    """Ids 0, 1, 2 ... are a, b, c ...; at most 52."""
    letters = string.ascii_letters[:vocab_size]
    backend = Backend(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


@functools.cache
def letters_tokenizer(vocab_size: int) -> Tokenizer:
    return Tokenizer(TokenizerRecipe(letters_backend(vocab_size), origin="letters"))
