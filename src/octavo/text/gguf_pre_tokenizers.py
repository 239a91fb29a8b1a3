"""How `tokenizer.ggml.pre` says text is split before BPE.

The names are llama.cpp's; the patterns are those of the models' own `tokenizer.json`, which llama.cpp
follows.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA3 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
)
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_TAIL}"
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CASED}*{_SMALL}+|[^\r\n\p{{L}}\p{{N}}]?{_CASED}+{_SMALL}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CASED}*{_SMALL}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_CASED}+{_SMALL}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TAIL}"
)


@dataclass(frozen=True)
class PreTokenizer:
    """Patterns applied one after the other, each to the pieces the one before left; then bytes."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """A piece that is a token as a whole is not taken apart."""
    adds_bos: bool = False
    """Where the file does not say."""
    nfc: bool = False
    """The model was trained on NFC text."""

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The `tokenizers` object."""
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, to_bytes])


_RULES = {
    ("gpt-2", "phi-2", "mpt", "olmo", "exaone4", "trillion", "granite-docling", "mellum"): PreTokenizer(
        (_GPT2,)
    ),
    # Digits stand alone, then GPT-2's rule.
    (
        "smollm",
        "starcoder",
        "refact",
        "command-r",
        "codeshell",
        "exaone",
        "minerva-7b",
        "mellum2",
    ): PreTokenizer((r"\p{N}", _GPT2)),
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"): PreTokenizer(
        (_LLAMA3,), ignore_merges=True, adds_bos=True
    ),
    ("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"): PreTokenizer((_LLAMA3,)),
    ("qwen2",): PreTokenizer((_QWEN2,), nfc=True),
    ("deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"): PreTokenizer((_QWEN2,)),
    ("qwen35",): PreTokenizer((_QWEN35,), nfc=True),
    ("tekken",): PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True),
    ("gpt-4o", "llama4"): PreTokenizer((_GPT4O,)),
    ("deepseek-v3",): PreTokenizer((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
    # What llama.cpp does for files that name no rule.
    ("default",): PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: rule for names, rule in _RULES.items() for name in names}
