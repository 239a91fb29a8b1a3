from __future__ import annotations

import itertools
import json
import timeit
from collections.abc import Callable
from functools import cache
from time import process_time

import pytest
from helpers.tokenizers_by_hand import (
    SENTENCEPIECE_TOKENS,
    Source,
    byte_level,
    sentencepiece_like,
    smollm2_path,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from octavo.errors import ModelError
from octavo.text.detokenizer import Detokenizer
from octavo.text.recipe import TokenizerRecipe
from octavo.text.tokenizer import Tokenizer, load_tokenizer

# Ids and bytes as in Qwen2's and Qwen3's vocabulary: the third character lies in two tokens.
QWEN_TOKENS = {
    55336: b"Swift",
    76952: b" \xe7\xa4",
    122: b"\xbe",
    23836: "区".encode(),
    99491: "非常".encode(),
    105266: "活跃".encode(),
}


@cache
def qwen_like() -> Tokenizer:
    return Tokenizer(TokenizerRecipe(byte_level(QWEN_TOKENS), "test"))


@cache
def smollm2() -> Tokenizer:
    return load_tokenizer(Source("gguf", smollm2_path()))


@cache
def byte_level_with_added() -> Tokenizer:
    # One added token with characters outside the byte alphabet, one special, one with a byte-alphabet letter.
    backend = byte_level(
        {0: b"he", 1: b"\xf0\x9f", 2: b"\x8e\x89!"}, special=["<|end|>"], added=["<｜x｜>", "é"]
    )
    return Tokenizer(TokenizerRecipe(backend, "test"))


@cache
def llama2_like() -> Tokenizer:
    return Tokenizer(TokenizerRecipe(sentencepiece_like(), "test"))


@cache
def strips_two_spaces() -> Tokenizer:
    backend = Backend(models.WordLevel({"▁": 0, "▁▁": 1, "a": 2, "": 3, "b▁": 4, "▁c": 5}, unk_token="a"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)]
    )
    return Tokenizer(TokenizerRecipe(backend, "test"))


@cache
def metaspace() -> Tokenizer:
    backend = Backend(models.WordLevel({"▁a": 0, "b": 1, "▁": 2, "▁▁c": 3, "d▁e": 4}, unk_token="b"))
    backend.decoder = decoders.Metaspace()
    return Tokenizer(TokenizerRecipe(backend, "test"))


@cache
def without_decoder() -> Tokenizer:
    backend = Backend(models.WordLevel({"a": 0, "b": 1, "": 2, "<e>": 3}, unk_token="b"))
    backend.add_special_tokens(["<e>"])
    return Tokenizer(TokenizerRecipe(backend, "test"))


ALL: dict[str, Callable[[], Tokenizer]] = {
    factory.__name__: factory
    for factory in (
        qwen_like,
        smollm2,
        byte_level_with_added,
        llama2_like,
        strips_two_spaces,
        metaspace,
        without_decoder,
    )
}


def cut(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(min(at, len(ids)) for at in cuts), len(ids)]
    return [ids[start:end] for start, end in itertools.pairwise(edges)]


def test_a_character_in_two_tokens_is_held_until_it_is_whole() -> None:
    # mlx-swift-examples#252
    ids = [55336, 76952, 122, 23836, 99491, 105266]
    stream = Detokenizer(qwen_like())
    pieces = [stream.push([token_id]) for token_id in ids]
    assert pieces == ["Swift", " ", "社", "区", "非常", "活跃"]
    assert stream.finish() == ""
    assert "".join(pieces) == qwen_like().decode(ids) == "Swift 社区非常活跃"


def test_a_broken_tail_is_flushed_once() -> None:
    stream = Detokenizer(qwen_like())
    assert stream.push([55336, 76952]) == "Swift "
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"
    assert stream.finish() == ""
    assert qwen_like().decode([55336, 76952]) == "Swift \N{REPLACEMENT CHARACTER}"


def test_a_broken_middle_is_shown_as_soon_as_it_is_certain() -> None:
    stream = Detokenizer(qwen_like())
    assert stream.push([76952]) == " "
    assert stream.push([55336]) == "\N{REPLACEMENT CHARACTER}Swift"


@pytest.mark.parametrize("name", ALL)
@settings(deadline=None)  # other work shares the machine
@given(data=st.data())
def test_any_split_joins_to_the_full_decode(name: str, data: st.DataObject) -> None:
    tokenizer = ALL[name]()
    # Three ids beyond the vocabulary: a model's padded rows may be sampled, and decode to nothing.
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40))
    cuts = data.draw(st.lists(st.integers(0, 40), max_size=10))
    skip = data.draw(st.booleans())
    stream = Detokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [stream.push(part) for part in cut(ids, cuts)] + [stream.finish()]
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(deadline=None)  # other work shares the machine
@given(
    ids=st.lists(
        st.one_of(st.integers(3, 258), st.integers(0, len(SENTENCEPIECE_TOKENS) - 1)), min_size=1, max_size=30
    ),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_byte_fallback_runs_join_to_the_full_decode(ids: list[int], cuts: list[int]) -> None:
    stream = Detokenizer(llama2_like())
    pieces = [stream.push(part) for part in cut(ids, cuts)] + [stream.finish()]
    assert "".join(pieces) == llama2_like().decode(ids)


@pytest.mark.parametrize("name", ALL)
@settings(deadline=None)  # other work shares the machine
@given(data=st.data())
def test_real_text_never_shows_half_a_character(name: str, data: st.DataObject) -> None:
    tokenizer = ALL[name]()
    ids = tokenizer.encode(data.draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=20)))
    whole = tokenizer.decode(ids)
    stream = Detokenizer(tokenizer)
    shown = ""
    for token_id in ids:
        shown += stream.push([token_id])
        assert whole.startswith(shown)
    assert shown + stream.finish() == whole


def test_sentencepiece_spaces() -> None:
    the, a, he = (SENTENCEPIECE_TOKENS.index(token) for token in ("▁the", "▁a", "he"))
    stream = Detokenizer(llama2_like())
    assert [stream.push([token_id]) for token_id in (the, a, he)] == ["the", " a", "he"]
    # Continuing a prompt, a leading space is a space.
    stream = Detokenizer(llama2_like(), prompt_token_ids=[1, the])
    assert [stream.push([token_id]) for token_id in (a, he)] == [" a", "he"]
    # A prompt of nothing but a mark is still the text's beginning.
    stream = Detokenizer(llama2_like(), prompt_token_ids=[1])
    assert stream.push([a]) == "a"


def test_a_byte_run_is_held_until_it_ends() -> None:
    eur = [3 + byte for byte in "€".encode()]
    stream = Detokenizer(llama2_like())
    assert [stream.push([token_id]) for token_id in eur] == ["", "", ""]
    assert stream.push([SENTENCEPIECE_TOKENS.index("he")]) == "€he"
    assert stream.push(eur) == ""
    assert stream.finish() == "€"
    # One bad byte spoils the whole run, as the full decode has it.
    assert (
        stream.push([*eur, 3 + 0xFF, SENTENCEPIECE_TOKENS.index("he")])
        == "\N{REPLACEMENT CHARACTER}" * 4 + "he"
    )


@pytest.mark.parametrize("name", ALL)
@settings(deadline=None)  # other work shares the machine
@given(data=st.data())
def test_with_a_prompt_the_output_continues_its_text(name: str, data: st.DataObject) -> None:
    tokenizer = ALL[name]()
    token_ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12)
    prompt, output = data.draw(token_ids), data.draw(token_ids)
    before = Detokenizer(tokenizer).push(prompt)
    stream = Detokenizer(tokenizer, prompt_token_ids=prompt)
    shown = "".join([stream.push([token_id]) for token_id in output]) + stream.finish()
    assert before + shown == tokenizer.decode(prompt + output)


def test_a_character_begun_by_the_prompt_belongs_to_the_output() -> None:
    stream = Detokenizer(qwen_like(), prompt_token_ids=[55336, 76952])
    assert stream.push([122]) == "社"


def test_special_tokens_are_skipped_or_shown() -> None:
    tokenizer = smollm2()
    ids = tokenizer.encode("Hi<|im_end|>")
    assert Detokenizer(tokenizer).push(ids) == "Hi"
    assert Detokenizer(tokenizer, skip_special_tokens=False).push(ids) == "Hi<|im_end|>"


def test_a_decoder_that_cannot_be_streamed_is_refused() -> None:
    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(
        ModelError, match="somewhere: the tokenizer's decoder step 'WordPiece' cannot be streamed"
    ):
        Tokenizer(TokenizerRecipe(backend, "somewhere"))


def test_the_cost_of_a_token_does_not_grow() -> None:
    tokenizer = smollm2()
    ids = tokenizer.encode("The quick brown fox jumps over the lazy dog, 你好 🎉. " * 20)
    long_stream = Detokenizer(tokenizer)
    long_stream.push(ids * 200)

    def late() -> None:
        for token_id in ids:
            long_stream.push([token_id])

    def early() -> None:
        stream = Detokenizer(tokenizer)
        for token_id in ids:
            stream.push([token_id])

    times = [
        (
            timeit.timeit(early, timer=process_time, number=1),
            timeit.timeit(late, timer=process_time, number=1),
        )
        for _ in range(15)
    ]
    best_early, best_late = (min(column) for column in zip(*times, strict=True))
    assert best_late < 3 * best_early
    assert best_early / len(ids) < 10e-6  # seconds


def test_the_byte_alphabet_is_the_one_of_the_tokenizers_package() -> None:
    from helpers.tokenizers_by_hand import BYTE_CHARACTERS

    from octavo.text.pieces import byte_level_alphabet

    assert byte_level_alphabet() == {char: byte for byte, char in BYTE_CHARACTERS.items()}
    assert json.loads(json.dumps(sorted(byte_level_alphabet().values()))) == list(range(256))
