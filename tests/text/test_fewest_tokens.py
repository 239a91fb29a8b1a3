"""What can be said of a text's tokens before it is tokenised: never more than there are."""

import sys
import unicodedata

import pytest
from helpers.tokenizers_by_hand import Source, sentencepiece_like, smollm2_path, spelled
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from octavo.text import fewest_tokens
from octavo.text.fewest_tokens import FewestTokens
from octavo.text.tokenizer import load_tokenizer

CORPUS = [
    "the cat sat on the mat, the dog did not. ",
    "été à la plage — d'accord ",
    "東京と大阪 ",
    "    \n\n" * 3,
]


def trained(vocab_size=400, *, normalizer=None, split=None, alphabet=None):
    backend = Backend(models.BPE())
    backend.normalizer = normalizer
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    backend.pre_tokenizer = byte_level if split is None else pre_tokenizers.Sequence([split, byte_level])
    letters = pre_tokenizers.ByteLevel.alphabet() if alphabet is None else alphabet
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=letters, special_tokens=["<|end|>"], show_progress=False
    )
    backend.train_from_iterator([one * 20 for one in CORPUS], trainer)
    return backend


SPLIT = pre_tokenizers.Split(Regex(r"\s+"), "isolated")
BACKENDS = {
    "plain": trained(),
    "nfc": trained(normalizer=normalizers.NFC(), split=SPLIT),
    "no patterns at all": trained(700, split=pre_tokenizers.Split(Regex("never in any text"), "isolated")),
    "few bytes": trained(300, alphabet=list("abcdefghij")),
}
PARTS = [
    "the ",
    "cat",
    " ",
    "\n",
    "<|end|>",
    "é",
    "e\u0301",
    "京",
    "\u0338",
    "\0",
    "aaaa",
    "zzz",
    " the cat sat",
]


@pytest.mark.parametrize("name", BACKENDS)
@given(parts=st.lists(st.sampled_from(PARTS) | st.text(max_size=3), max_size=60), times=st.integers(1, 30))
@settings(max_examples=150, deadline=None)
def test_it_is_never_more_than_there_are(name, parts, times):
    backend = BACKENDS[name]
    text = "".join(parts) * times
    bound = FewestTokens.of(backend)
    assert bound is not None
    text = text.encode("utf-8", "replace").decode()
    assert bound.count(text) <= len(backend.encode(text).ids)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_text_of_one_token_again_and_again_has_no_fewer(name):
    """The tightest texts there are."""
    backend = BACKENDS[name]
    bound = FewestTokens.of(backend)
    decode = {one: byte for byte, one in enumerate(map(spelled, (bytes([i]) for i in range(256))))}
    for token in backend.get_vocab():
        try:
            text = bytes(decode[char] for char in token).decode() * 50
        except (KeyError, UnicodeDecodeError):
            continue
        assert bound.count(text) <= len(backend.encode(text).ids), token


def test_words_and_runs_are_counted_well():
    tokenizer = load_tokenizer(Source("gguf", smollm2_path()))
    for text in ("hello " * 1000, "a" * 4000, "The quick brown fox jumps over the lazy dog. " * 100):
        num_tokens = len(tokenizer.encode(text, add_special_tokens=False))
        assert num_tokens / 2 <= tokenizer.fewest_tokens(text) <= num_tokens


def test_each_reason_counts():
    bound = FewestTokens([b"ab", b"abab", b"aaa", b"c", b"d", b" c"], b"", is_nfc=False)
    assert bound.count("") == 0
    assert bound.count("aaaaaaa") == 3  # at most three in one
    assert bound.count("cdcdcd") == 6  # no entry has two of them side by side
    assert bound.count("abababab") == 2
    assert bound.count("ab" * 2**20) == 2**19  # more than one part
    assert FewestTokens([b"a"], b"", is_nfc=False).count("a" * (2**20 + 1)) == 2**20 + 1
    assert bound.count("c" * 2**20 + "d") == 2**20 + 1
    assert FewestTokens([b"ab", b"\0"], b"\0", is_nfc=False).count("a\0b" * 6) == 6
    assert FewestTokens([b"ab"], b"\0", is_nfc=False).count("\0" * 9) == 0


def test_a_text_that_the_normaliser_makes_shorter_is_not_judged():
    bound = FewestTokens.of(BACKENDS["nfc"])
    assert bound.count("é" * 100) > 0
    assert bound.count("e\u0301" * 100) == 0
    assert BACKENDS["plain"].normalizer is None
    assert FewestTokens.of(BACKENDS["plain"]).count("e\u0301" * 100) > 0


def test_a_character_that_may_get_a_meaning_is_not_judged():
    """A library with newer tables than ours might join it to its neighbour."""
    bound = FewestTokens.of(BACKENDS["nfc"])
    unassigned = "\u0378"
    assert unicodedata.category(unassigned) == "Cn"
    assert bound.count("é" * 100 + unassigned) == 0
    assert FewestTokens.of(BACKENDS["plain"]).count("é" * 100 + unassigned) > 0


@pytest.mark.parametrize("name", ["plain", "nfc"])
@pytest.mark.parametrize("text", ["\ud800" * 400, "é" * 70_000 + "\udfff"], ids=["alone", "last"])
def test_what_is_no_unicode_is_left_to_the_tokenizer(name, text):
    assert FewestTokens.of(BACKENDS[name]).count(text) == 0


def test_a_long_text_is_normalised_in_parts(monkeypatch):
    """Each call keeps every other thread waiting, and a single mark makes it a slow one."""
    bound = FewestTokens.of(BACKENDS["nfc"])
    seen = []

    def recorded(form, text):
        seen.append(len(text))
        return is_normalized(form, text)

    is_normalized = unicodedata.is_normalized
    monkeypatch.setattr(unicodedata, "is_normalized", recorded)
    assert bound.count("字" * 500_000 + "x\u0301") > 0
    assert sum(seen) == 500_002
    assert max(seen) <= 2**16


def test_where_a_text_is_cut_nothing_joins_what_is_before():
    seconds = {*map(chr, (*range(0x1161, 0x1176), *range(0x11A8, 0x11C3)))}  # Hangul, which no table has
    for char in map(chr, range(sys.maxunicode + 1)):
        parts = unicodedata.decomposition(char).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            seconds.add(chr(int(parts[1], 16)))
        if fewest_tokens._STARTS_AFRESH.match(char):
            assert unicodedata.combining(char) == 0
    assert {"\u0301", "\u09be"} < seconds
    assert not list(filter(fewest_tokens._STARTS_AFRESH.match, seconds))


@given(
    text=st.text(
        st.sampled_from("aA\n 字각가\u1100\u1161\u11a8éqe\u0301\u0316\u093c\u09be\u09c7"), max_size=20
    )
)
@settings(deadline=None)
def test_the_parts_are_normalised_when_the_whole_is(text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fewest_tokens, "_PART_CHARACTERS", 1)
        assert fewest_tokens._stays_as_it_is(text) == unicodedata.is_normalized("NFC", text)


def with_added(**how):
    backend = trained()
    backend.add_tokens([AddedToken("<x>", **how)])
    return backend


@pytest.mark.parametrize(
    "backend",
    [
        with_added(lstrip=True),
        with_added(rstrip=True),
        trained(split=pre_tokenizers.Split(" ", "removed")),
        trained(split=pre_tokenizers.WhitespaceSplit()),
        trained(normalizer=normalizers.Lowercase()),
        trained(normalizer=normalizers.NFKC()),
        Backend(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")),
        Backend(models.WordLevel({"a": 0}, unk_token="a")),
        Backend(models.BPE(end_of_word_suffix="</w>")),
        sentencepiece_like(),
    ],
    ids=lambda backend: "",
)
def test_where_nothing_surely_holds_nothing_is_said(backend):
    assert FewestTokens.of(backend) is None
