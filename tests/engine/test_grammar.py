"""Grammars by themselves: what a mask allows, where an output ends, which tokenizers can be used."""

import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
import pytest
import regex
import torch
from helpers.grammar import NUM_PADDED, smollm2_tokenizer
from helpers.text import letters_tokenizer
from helpers.tokenizers_by_hand import byte_level, sentencepiece_like

from octavo.engine import grammar as grammars
from octavo.engine.grammar import Grammar, GrammarCompiler, fill_masks
from octavo.engine.grammar_masks import BITS, GrammarMasks, forbidden_in_rows, forbidden_tokens
from octavo.engine.grammar_trial import GrammarTrial
from octavo.engine.request import Request
from octavo.errors import EngineError, OverloadedError, RequestError
from octavo.sampling_params import SamplingParams
from octavo.structured_output import StructuredOutput, lark_json
from octavo.text.recipe import TokenizerRecipe
from octavo.text.tokenizer import Tokenizer

SMOLLM2_EOS = 2
VOCAB_SIZE = 49152 + NUM_PADDED


@pytest.fixture(scope="module")
def smollm2() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(smollm2_tokenizer(), VOCAB_SIZE, [SMOLLM2_EOS])
    yield compiler
    compiler.close()


def allowed(grammar: Grammar) -> set[int]:
    masks = np.empty((1, grammar.num_mask_words), dtype=np.int32)
    fill_masks([grammar], masks)
    assert grammar.error is None
    return set(np.nonzero(np.unpackbits(masks.view(np.uint8), bitorder="little"))[0].tolist())


def texts(grammar: Grammar) -> set[str]:
    return {smollm2_tokenizer().token_text(token_id) for token_id in allowed(grammar)}


def accept(grammar: Grammar, text: str) -> bool:
    """Token by token; whether the last one completed it. Each must be allowed."""
    complete = False
    for token_id in smollm2_tokenizer().encode(text, add_special_tokens=False):
        assert not complete
        assert token_id in allowed(grammar)
        complete = grammar.accept(token_id)
    return complete


def test_a_mask_allows_what_the_pattern_continues_with(smollm2: GrammarCompiler):
    pattern = r"[A-Z][a-z]+ [0-9]+(th|st)?"
    tokenizer, written = smollm2_tokenizer(), ""
    grammar = smollm2.compile(StructuredOutput(regex=pattern))
    pieces = [tokenizer.pieces(skip_special_tokens=True).piece(i) for i in range(tokenizer.vocab_size)]
    for token in ("J", "uly", " ", "4", "th"):
        expected = {
            token_id
            for token_id, piece in enumerate(pieces)
            if isinstance(piece, bytes)
            and regex.fullmatch(pattern, written + piece.decode(errors="replace"), partial=True)
        }
        assert allowed(grammar) - {SMOLLM2_EOS} == expected
        written += token
        accept(grammar, token)
    assert allowed(grammar) == {SMOLLM2_EOS}


def test_an_output_may_end_where_the_pattern_does_and_must_where_nothing_follows(smollm2: GrammarCompiler):
    grammar = smollm2.compile(StructuredOutput(regex="(yes|no)(!)?"))
    assert SMOLLM2_EOS not in allowed(grammar)
    assert not accept(grammar, "yes")
    assert SMOLLM2_EOS in allowed(grammar)
    assert texts(grammar) == {"!", "<|im_end|>"}
    assert accept(grammar, "!"), "complete"
    assert allowed(grammar) == {SMOLLM2_EOS}


def test_each_sequence_has_a_place_of_its_own(smollm2: GrammarCompiler):
    first = smollm2.compile(StructuredOutput(regex="[ab]{3}"))
    assert not accept(first, "a")
    second = first.fork()
    assert accept(second, "ba")
    assert not accept(first, "b")
    assert accept(first, "b")
    assert not accept(smollm2.compile(StructuredOutput(regex="[ab]{3}")), "b")


def test_ids_beyond_the_tokenizer_and_special_tokens_are_never_allowed(smollm2: GrammarCompiler):
    grammar = smollm2.compile(StructuredOutput(regex="(?s:.*)"))
    tokenizer = smollm2_tokenizer()
    special = {i for i in range(tokenizer.vocab_size) if tokenizer.decode([i]) == ""}
    assert len(special) == 17, "the tokens that SmolLM2 marks as special"
    assert allowed(grammar) & special == {SMOLLM2_EOS}
    assert max(allowed(grammar)) < tokenizer.vocab_size
    assert len(allowed(grammar)) > 48_000


def test_the_text_of_a_special_token_is_spelled_with_others(smollm2: GrammarCompiler):
    grammar = smollm2.compile(StructuredOutput(json_schema={"const": "<|im_end|>é"}))
    spelled, tokenizer = b"", smollm2_tokenizer()
    complete = False
    while not complete:
        token_id = min(allowed(grammar))
        assert token_id != SMOLLM2_EOS
        spelled += tokenizer.token_bytes(token_id)
        complete = grammar.accept(token_id)
    assert spelled.decode() == '"<|im_end|>é"'


def test_every_end_of_sequence_token_ends():
    compiler = GrammarCompiler(smollm2_tokenizer(), VOCAB_SIZE, [0, 2, VOCAB_SIZE - 1, VOCAB_SIZE])
    grammar = compiler.compile(StructuredOutput(regex="a*"))
    ends = {0, 2, VOCAB_SIZE - 1}
    assert ends < allowed(grammar)
    assert texts(grammar) == {"<|endoftext|>", "<|im_end|>", "", "a", "aa", "aaaa"}
    compiler.close()


def test_without_an_end_of_sequence_token_a_complete_output_still_ends():
    compiler = GrammarCompiler(smollm2_tokenizer(), VOCAB_SIZE, [])
    grammar = compiler.compile(StructuredOutput(regex="ab?"))
    assert not accept(grammar, "a")
    tokens = [i for i in allowed(grammar) if i < VOCAB_SIZE]
    assert [smollm2_tokenizer().token_text(i) for i in tokens] == ["b"]
    assert grammar.accept(tokens[0])
    compiler.close()


@pytest.mark.parametrize("num_cpus", [1, 8])
def test_many_masks_at_once_are_the_masks_one_by_one(monkeypatch: pytest.MonkeyPatch, num_cpus: int):
    monkeypatch.setattr(grammars, "_num_cpus", lambda: num_cpus)
    compiler = GrammarCompiler(smollm2_tokenizer(), VOCAB_SIZE, [2])
    start = compiler.compile(StructuredOutput(regex="[a-z]{5} [0-9]{5}"))
    forks = [start.fork() for _ in range(7)]
    for place, fork in enumerate(forks):
        accept(fork, "abcde 12345"[:place])
    masks = np.full((len(forks), start.num_mask_words), 7, dtype=np.int32)
    fill_masks(forks, masks)
    for place, fork in enumerate(forks):
        ids = np.nonzero(np.unpackbits(masks[place].view(np.uint8), bitorder="little"))[0]
        assert set(ids.tolist()) == allowed(fork)
    compiler.close()


def test_white_space_cannot_run_on(smollm2: GrammarCompiler):
    for output in (
        StructuredOutput(json_object=True),
        StructuredOutput(lark=f"start: {lark_json({'type': 'object'})}"),
    ):
        for pad in (" ", "\n" + 40 * " "):
            grammar = smollm2.compile(output)
            assert not accept(grammar, "{" + pad)
            assert texts(grammar)
            assert all(text[0] in '"}' for text in texts(grammar))


def test_lark_json_takes_what_json_schema_takes():
    assert lark_json({}).startswith('%json {"x-guidance":{')
    assert lark_json({}).endswith("}}")
    assert lark_json('{"type": "null"}').endswith('},"type":"null"}')
    with pytest.raises(RequestError, match="holds 'x-guidance'"):
        lark_json({"x-guidance": {}})


def bits_of(token_ids: set[int], num_words: int) -> np.ndarray:
    words = np.zeros(num_words, dtype=np.uint32)
    for token_id in token_ids:
        words[token_id // 32] |= np.uint32(1 << token_id % 32)
    return words.view(np.int32)


def test_both_ways_of_reading_a_mask_read_the_same():
    sets = [{0, 31, 32, 63, 64, 97}, set(range(98)), set(), {7, 8, 95}]
    masks = np.stack([bits_of(token_ids, 4) for token_ids in sets])
    together = forbidden_in_rows(torch.from_numpy(masks), BITS, 98)
    for row, token_ids in enumerate(sets):
        expected = [token_id not in token_ids for token_id in range(98)]
        assert forbidden_tokens(masks[row], 98).tolist() == expected
        assert together[row].tolist() == expected


@pytest.mark.parametrize("places", [(0, 1, 2), (0, 2), (1,)])
def test_a_gpu_covers_the_same_logits(smollm2: GrammarCompiler, places: tuple[int, ...]):
    form = StructuredOutput(regex="[a-z]{3}")
    start = smollm2.compile(form)
    held = SamplingParams(structured_output=form)
    sequences = []
    for row in range(3):
        is_held = row in places
        params = held if is_held else SamplingParams()
        grammar = start if is_held else None
        request = Request("r", [0], params, seeds=[0], first_seq_id=0, arrival=0, grammar=grammar)
        sequences += request.sequences
        for _ in range(row):
            if sequences[row].grammar is not None:
                accept(sequences[row].grammar, "a")
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    masks = GrammarMasks(sequences, VOCAB_SIZE, torch.device("cpu"))
    assert masks.rows == list(places)
    expected, got = logits.clone(), logits.clone()
    assert masks.apply(expected) == {}
    words = torch.empty((len(places), start.num_mask_words), dtype=torch.int32)
    fill_masks([seq.grammar for seq in sequences if seq.grammar is not None], words.numpy())
    masks._cover_together(got, words)
    assert torch.equal(got, expected)
    for row in range(3):
        assert bool(expected[row].isinf().any()) == (row in places)


def test_a_sentencepiece_vocabulary():
    tokenizer = Tokenizer(TokenizerRecipe(sentencepiece_like(), "test", {"eos_token": "</s>"}))
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size + 5, [2])
    grammar = compiler.compile(StructuredOutput(regex=" the (in|中é\n)"))
    token_ids: list[int] = []
    while not token_ids or not grammar.accept(token_ids[-1]):
        token_ids.append(max(allowed(grammar) - {2}))
    assert b"".join(map(tokenizer.token_bytes, token_ids)).decode() == " the 中é\n"
    compiler.close()


def test_a_byte_level_vocabulary_with_special_and_added_tokens():
    backend = byte_level({0: b"ab", 1: b"abc"}, special=["<end>"], added=["<call>"])
    tokenizer = Tokenizer(TokenizerRecipe(backend, "test", {"eos_token": "<end>"}))
    assert tokenizer.eos_token_id is not None
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id])
    grammar = compiler.compile(StructuredOutput(regex="<(call|end)>|abc"))
    names = {tokenizer.token_text(token_id) for token_id in allowed(grammar)}
    assert names == {"<", "<call>", "a", "ab", "abc"}, "an added token is text, a special one is not"
    by_name = compiler.compile(StructuredOutput(lark="start: <end> /x/"))
    assert allowed(by_name) == {tokenizer.eos_token_id}
    compiler.close()


def test_tokenizers_that_cannot_be_used_are_refused():
    with pytest.raises(RequestError, match="needs a tokenizer and this model has none"):
        GrammarCompiler(None, 10, [1]).compile(StructuredOutput(json_object=True))
    apart = GrammarCompiler(letters_tokenizer(50), 50, [49])
    if letters_tokenizer(50).pieces(skip_special_tokens=True).rule.separator:
        with pytest.raises(RequestError, match="puts ' ' between its tokens"):
            apart.compile(StructuredOutput(json_object=True))
    apart.close()


def test_a_missing_llguidance_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    compiler = GrammarCompiler(smollm2_tokenizer(), VOCAB_SIZE, [2])
    with pytest.raises(RequestError, match=r"llguidance: pip install 'octavo\[serve\]'"):
        compiler.compile(StructuredOutput(json_object=True))
    compiler.close()


def test_a_grammar_is_compiled_once_and_so_is_a_refusal(
    smollm2: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
):
    good = smollm2.start(StructuredOutput(regex="a{3}"))
    bad = smollm2.start(StructuredOutput(regex="a{3"))
    assert isinstance(good, Future)
    assert smollm2.start(StructuredOutput(regex="a{3}")) is good
    assert smollm2.start(StructuredOutput(regex="a{3")) is bad
    assert smollm2.start(StructuredOutput(lark="a{3}")) is not good
    with pytest.raises(RequestError, match=r"regex cannot be used: .*unclosed counted"):
        smollm2.compile(StructuredOutput(regex="a{3"))
    monkeypatch.setattr(grammars, "MAX_KEPT", 2)
    for count in range(4, 8):
        smollm2.compile(StructuredOutput(regex=f"a{{{count}}}"))
    assert smollm2.start(StructuredOutput(regex="a{3}")) is not good, "the oldest was forgotten"
    monkeypatch.setattr(grammars, "MAX_KEPT", 9)
    monkeypatch.setattr(grammars, "MAX_KEPT_CHARS", 20)
    smollm2.compile(StructuredOutput(regex="b{3}"))
    assert smollm2.start(StructuredOutput(regex="b{3}")).done()
    long = smollm2.start(StructuredOutput(regex="bbbbbbbbbbbbbbbbbbb"))
    long.result()
    last = smollm2.start(StructuredOutput(regex="c"))
    assert list(smollm2._compiled.values()) == [long, last], "so was all that is too long together"


class Text(str):
    """One that can be referred to weakly."""


class HeldLibrary:
    """Compiles nothing until `let_go`; then each grammar ends with what `ends` holds for it, if anything."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.begun = threading.Event()
        self.tried: list[StructuredOutput] = []
        self.ends: dict[StructuredOutput, Exception] = {}
        self.trial = self

    def compile(self, output: StructuredOutput) -> str:
        self.begun.set()
        assert self.let_go.wait(120)
        self.tried.append(output)
        if output in self.ends:
            raise self.ends[output]
        return "a matcher"

    def close(self) -> None:
        self.let_go.set()


@pytest.fixture
def held() -> Iterator[tuple[GrammarCompiler, HeldLibrary]]:
    compiler = GrammarCompiler(None, 100, ())
    library = HeldLibrary()
    compiler._load = lambda: library  # type: ignore[method-assign, assignment, return-value]
    yield compiler, library
    library.let_go.set()
    compiler.close()


Held = tuple[GrammarCompiler, HeldLibrary]


def test_what_nobody_waits_for_is_not_compiled_and_takes_no_room(held: Held):
    compiler, library = held
    under_way = StructuredOutput(regex="under way")
    first = compiler.start(under_way)
    assert library.begun.wait(120)
    kept = []
    for i in range(1000):
        text = Text(f"left {i}")
        kept.append(weakref.ref(text))
        compiler.start(StructuredOutput(regex=text))
        compiler.give_up(StructuredOutput(regex=str(text)))
        del text
    compiler.give_up(under_way)
    compiler.give_up(StructuredOutput(regex="unknown"))
    assert list(compiler._compiled) == [under_way], "it has begun, so it is ended"
    assert not any(text() for text in kept), "nothing holds what was given up"
    library.let_go.set()
    assert first.result(120)
    compiler.start(StructuredOutput(regex="next")).result(120)
    assert [one.regex for one in library.tried] == ["under way", "next"]


def test_only_so_many_may_wait_to_be_compiled(held: Held, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammars, "MAX_PENDING", 3)
    compiler, library = held
    waiting = [StructuredOutput(regex=f"{i}") for i in range(3)]
    for output in waiting:
        compiler.start(output)
    with pytest.raises(OverloadedError, match="3 grammars wait to be compiled, as many as may"):
        compiler.start(StructuredOutput(regex="one too many"))
    compiler.start(waiting[0])  # known
    compiler.give_up(waiting[2])
    compiler.start(StructuredOutput(regex="in its place"))
    library.let_go.set()


def test_a_failure_that_is_not_the_grammars_is_tried_again_and_a_refusal_is_not(held: Held):
    compiler, library = held
    library.let_go.set()
    output, bad = StructuredOutput(regex="good"), StructuredOutput(regex="bad")
    library.ends = {output: EngineError("the process does not start"), bad: RequestError("cannot be used")}
    for _ in range(2):
        with pytest.raises(EngineError, match="does not start"):
            compiler.compile(output)
        with pytest.raises(RequestError, match="cannot be used"):
            compiler.compile(bad)
    del library.ends[output]
    assert compiler.start(output).result(120)
    assert [one.regex for one in library.tried] == ["good", "bad", "good", "good"]


def test_a_trial_that_does_not_start_at_first_is_started_later(monkeypatch: pytest.MonkeyPatch):
    starts = []

    def start(trial: GrammarTrial) -> None:
        starts.append(trial)
        if len(starts) < 3:
            raise EngineError("the process does not start")
        really_start(trial)

    really_start = GrammarTrial.start
    monkeypatch.setattr(GrammarTrial, "start", start)
    compiler = GrammarCompiler(smollm2_tokenizer(), VOCAB_SIZE, [2])
    with pytest.raises(EngineError, match="does not start"):
        compiler.compile(StructuredOutput(regex="a"))
    compiler.compile(StructuredOutput(regex="a"))
    compiler.close()


def test_after_close_nothing_is_left_and_nothing_is_taken():
    compiler = GrammarCompiler(smollm2_tokenizer(), VOCAB_SIZE, [2])
    compiler.compile(StructuredOutput(regex="a"))
    assert compiler._library is not None
    trial = compiler._library.result().trial
    process = trial._process
    assert process is not None
    assert process.poll() is None
    compiler.close()
    compiler.close()
    assert process.poll() is not None
    with pytest.raises(EngineError, match="closed"):
        compiler.compile(StructuredOutput(regex="a"))


def test_closing_while_the_vocabulary_is_read_leaves_nothing_either():
    compiler = GrammarCompiler(smollm2_tokenizer(), VOCAB_SIZE, [2])
    compiler.prepare()
    compiler.close()
    assert compiler._library is not None
    assert compiler._library.cancelled() or compiler._library.result().trial._process is None


def test_a_compiler_that_nobody_closed_ends_its_process():
    compiler = GrammarCompiler(smollm2_tokenizer(), VOCAB_SIZE, [2])
    compiler.compile(StructuredOutput(regex="a"))
    assert compiler._library is not None
    process = compiler._library.result().trial._process
    assert process is not None
    del compiler
    gc.collect()
    assert process.wait(timeout=120) is not None
