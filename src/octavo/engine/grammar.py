"""Structured output: which tokens may come next, by llguidance. No torch.

    StructuredOutput -> GrammarCompiler -> a Grammar per sequence -> fill_masks -> sampler
                                                 ^--- accept(token id) --- scheduler

A schema comes from outside and may be made to hurt: some take all memory, or the whole stack. So each is
first tried in a process of its own, under limits, and refused if it ends that one. What passed is compiled
here, in a thread beside the step loop, and kept for the next request that asks for the same.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from octavo.engine.grammar_check import Vocabulary
from octavo.engine.grammar_trial import LIMITS, GrammarTrial
from octavo.errors import EngineError, OverloadedError, RequestError
from octavo.structured_output import JSON_FORM, StructuredOutput
from octavo.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

MAX_KEPT: Final = 32
"""Compiled grammars, and refusals, that are remembered; a large one takes some 40 MB."""
MAX_KEPT_CHARS: Final = 524_288
"""How long their texts may be together."""
MAX_PENDING: Final = 128
"""Grammars that may wait to be compiled; one takes a few milliseconds, at worst two seconds."""

_STACK_BYTES = 16 * 2**20
_MAX_MASK_THREADS = 16
_MAX_SERIAL_CPUS = 4
_MAX_FORCED_CHARS = 512
_MAX_ERROR_CHARS = 300
_MEANINGS = {
    "NoExtensionBias": "no text satisfies it, or only one that never ends",
    "increase limits.": "it is too large; make it simpler",
}
_NO_MESSAGE = re.compile(r"\s*$|\s*\d* *\||\s*\^|<")


class Grammar:
    """Where one sequence stands in what its output must be. Not thread-safe."""

    __slots__ = ("_library", "_matcher")

    def __init__(self, library: _Library, matcher: LLMatcher) -> None:
        self._library = library
        self._matcher = matcher

    def fork(self) -> Grammar:
        """Another sequence at the same place."""
        return Grammar(self._library, self._matcher.deep_copy())

    def accept(self, token_id: int) -> bool:
        """Take in a token that was drawn; True when the output is complete and nothing can follow."""
        self._matcher.consume_token(token_id)
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str | None:
        """Why the sequence cannot go on: the grammar broke a limit on the way."""
        return _shortened(self._matcher.get_error()) if self._matcher.is_error() else None

    @property
    def num_mask_words(self) -> int:
        """Words of 32 bits that a mask takes."""
        return self._library.num_mask_words


def fill_masks(grammars: Seq[Grammar], masks: npt.NDArray[np.int32]) -> None:
    """Write into `masks[i]` which tokens `grammars[i]` allows next; bit t of its bytes stands for token t.

    An end-of-sequence token is allowed exactly where the output may end. The row of a grammar that has an
    error afterwards means nothing. Where there are processors for it, several rows are filled at once.

    Args:
        grammars: of one engine. masks: (len(grammars), num_mask_words), C-contiguous, overwritten.
    """
    assert masks.shape == (len(grammars), grammars[0].num_mask_words), masks.shape
    assert masks.flags.c_contiguous
    address, num_bytes = masks.ctypes.data, masks.shape[1] * masks.itemsize
    executor = grammars[0]._library.executor
    if executor is not None:
        rows = [(grammar._matcher, row) for row, grammar in enumerate(grammars)]
        executor.unsafe_compute_mask_ptr(rows, address, num_bytes, len(masks))
    else:
        for row, grammar in enumerate(grammars):
            grammar._matcher.unsafe_compute_mask_ptr(address + row * num_bytes, num_bytes)


class GrammarCompiler:
    """The grammars of one model. Imports llguidance, and reads the vocabulary, when the first one comes.

    tokenizer: None when the model has none; then every grammar is refused. eos_token_ids: all that end an
    output; those outside `vocab_size` are left out.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Seq[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = [token_id for token_id in eos_token_ids if token_id < vocab_size]
        self._compiled: OrderedDict[StructuredOutput, Future[Grammar]] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None
        self._library: Future[_Library] | None = None
        self._is_closed = False

    def compile(self, output: StructuredOutput) -> Grammar:
        """The grammar at its beginning; waits for its compilation, unless `start` was called well before.

        Raises RequestError when it cannot be used; the message says why. EngineError when that could not be
        found out; the next call tries again.
        """
        return self.start(output).result().fork()

    def start(self, output: StructuredOutput) -> Future[Grammar]:
        """Have it compiled. The result is the grammar at its beginning, to `fork`, or what `compile` raises.

        Raises OverloadedError when too many wait already.
        """
        known = self._compiled.get(output)
        if known is not None and not _has_broken(known):
            self._compiled.move_to_end(output)
            return known
        self.prepare()
        assert self._pool is not None
        num_pending = sum(not compiled.done() for compiled in self._compiled.values())
        if num_pending >= MAX_PENDING:
            raise OverloadedError(
                f"{num_pending} grammars wait to be compiled, as many as may; try again later"
            )
        job = [output]
        future = self._pool.submit(self._compile, job)
        # One that is given up stays in the pool's queue until its turn comes, but not with its text.
        future.add_done_callback(lambda _: job.clear())
        self._compiled[output] = future
        self._compiled.move_to_end(output)
        self._forget_oldest()
        return future

    def give_up(self, output: StructuredOutput) -> None:
        """Nobody waits for it any more: it is not compiled, unless that has begun."""
        future = self._compiled.get(output)
        if future is not None and future.cancel():
            del self._compiled[output]

    def _forget_oldest(self) -> None:
        done = [kept for kept, compiled in self._compiled.items() if compiled.done()]
        num_kept, num_chars = len(done), sum(map(_num_chars, done))
        for oldest in done:
            if num_kept <= MAX_KEPT and num_chars <= MAX_KEPT_CHARS:
                break
            del self._compiled[oldest]
            num_kept -= 1
            num_chars -= _num_chars(oldest)

    def prepare(self) -> None:
        """Have the vocabulary read, so that the first request need not wait for it."""
        if self._is_closed:
            raise EngineError("the engine is closed; make a new LLM")
        if self._pool is not None:
            return
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="octavo-grammar")
        usual = threading.stack_size(_STACK_BYTES)
        try:
            self._library = self._pool.submit(self._load)
        finally:
            threading.stack_size(usual)

    def close(self) -> None:
        """End the process and the thread that compile; what is under way is given up."""
        self._is_closed = True
        if self._pool is None:
            return
        self._end_trial()  # before: what is being tried need not be waited for
        self._pool.shutdown(cancel_futures=True)
        self._end_trial()  # after: the vocabulary may have been read in between
        self._compiled.clear()

    def _end_trial(self) -> None:
        library = self._library
        if library is not None and library.done() and not library.cancelled() and not library.exception():
            library.result().trial.close()

    def _load(self) -> _Library:
        library = _Library(self._tokenizer, self._vocab_size, self._eos_token_ids)
        with contextlib.suppress(EngineError):  # the first grammar will try it again
            library.trial.start()
        return library

    def _compile(self, job: list[StructuredOutput]) -> Grammar:
        assert self._library is not None
        library = self._library.result()
        return Grammar(library, library.compile(job[0]))


class _Library:
    """llguidance with the model's vocabulary."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: list[int]) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise RequestError(
                "structured_output needs the package llguidance: pip install 'octavo[serve]'"
            ) from error
        if tokenizer is None:
            raise RequestError("structured_output needs a tokenizer and this model has none")
        pieces = tokenizer.pieces(skip_special_tokens=True)
        if pieces.rule.separator:
            raise RequestError(
                f"structured_output: the tokenizer of {tokenizer.origin} puts {pieces.rule.separator!r} "
                "between its tokens, so no text can be spelled exactly"
            )
        tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        special = [i for i, token in enumerate(tokens) if token and pieces.piece(i) is None]
        if not eos_token_ids:
            # Where an output may end there is then one more bit, which no row of logits has.
            eos_token_ids = [vocab_size]
            tokens.append(b"")
        special = sorted({*special, *eos_token_ids})
        encode = _Encoder(tokenizer, tokens, special)
        vocabulary: Any = Vocabulary(tokens, special, eos_token_ids, encode)
        self._lltokenizer: LLTokenizer = llguidance.LLTokenizer(vocabulary, eos_token=eos_token_ids)
        self._limits = llguidance.LLParserLimits(**LIMITS)
        self._new_matcher = llguidance.LLMatcher
        num_threads = min(_num_cpus(), _MAX_MASK_THREADS)
        # A mask takes some 20 microseconds: on few cores waiting for another thread costs more.
        self.executor: LLExecutor | None = None
        if num_threads > _MAX_SERIAL_CPUS:
            self.executor = llguidance.LLExecutor(num_threads)
        self.num_mask_words = -(-len(tokens) // 32)
        self.trial = GrammarTrial(tokens, special, eos_token_ids)
        weakref.finalize(self, self.trial.close)

    def compile(self, output: StructuredOutput) -> LLMatcher:
        named = ("json_object",) if output.json_object else ("json_schema", "regex", "lark")
        name = next(name for name in named if getattr(output, name) is not None)
        try:
            grammar = self._grammar_text(output)
        except ValueError as error:
            raise _refusal(name, str(error)) from error
        if (problem := self.trial.error_of(grammar)) is not None:
            raise _refusal(name, problem)
        matcher = self._new_matcher(self._lltokenizer, grammar, log_level=0, limits=self._limits)
        matcher.compute_bitmask()  # what it learns of the tokens goes with its copies
        if matcher.is_error():
            raise _refusal(name, matcher.get_error())
        return matcher

    def _grammar_text(self, output: StructuredOutput) -> str:
        if output.regex is not None:
            return self._new_matcher.grammar_from_regex(output.regex)
        if output.lark is not None:
            return self._new_matcher.grammar_from_lark(output.lark)
        schema = '{"type":"object"}' if output.json_schema is None else output.json_schema
        return self._new_matcher.grammar_from_json_schema(schema, overrides=JSON_FORM)


class _Speller:
    """Bytes to ids and back, special tokens left out."""

    def __init__(self, tokens: list[bytes], special_token_ids: list[int]) -> None:
        special = set(special_token_ids)
        self._tokens = [b"" if i in special else token for i, token in enumerate(tokens)]
        self._ids = {token: i for i, token in enumerate(self._tokens) if token}
        self._max_bytes = max(map(len, self._ids), default=1)

    def spell(self, data: bytes) -> list[int]:
        """The longest token that fits, again and again; ends early at a byte that no token begins with."""
        token_ids: list[int] = []
        start = 0
        while start < len(data):
            for end in range(min(len(data), start + self._max_bytes), start, -1):
                if (token_id := self._ids.get(data[start:end])) is not None:
                    token_ids.append(token_id)
                    start = end
                    break
            else:
                break
        return token_ids

    def spelled(self, token_ids: list[int]) -> bytes | None:
        """What the ids say together; None when one is outside the vocabulary."""
        try:
            return b"".join([self._tokens[token_id] for token_id in token_ids])
        except IndexError:
            return None


class _Encoder:
    """Ids of a text in the middle of another, as the tokenizer splits it. Special tokens are plain text."""

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], special_token_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self._speller = _Speller(tokens, special_token_ids)

    def __call__(self, text: str) -> list[int]:
        text = text[:_MAX_FORCED_CHARS]  # asked for is how what must follow begins
        wanted = text.encode()
        spelled = self._speller.spelled
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        if spelled(token_ids) == wanted:
            return token_ids
        # A sentencepiece tokenizer puts a space in front of a text; behind a byte of its own it does not.
        token_ids = self._tokenizer.encode(f"\x02{text}", add_special_tokens=False)
        for start in range(1, min(4, len(token_ids))):
            if spelled(token_ids[start:]) == wanted:
                return token_ids[start:]
        return self._speller.spell(wanted)


def _has_broken(future: Future[Grammar]) -> bool:
    """Whether it failed for a reason that is not the grammar's."""
    return future.done() and not isinstance(future.exception(), RequestError | None)


def _num_chars(output: StructuredOutput) -> int:
    return len(output.json_schema or output.regex or output.lark or "")


def _num_cpus() -> int:
    """Processors that this process may use."""
    has_affinity = hasattr(os, "sched_getaffinity")  # on Linux
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def _refusal(name: str, problem: str) -> RequestError:
    if problem.startswith("panic"):
        problem = "it is too large; make it simpler"
    elif "oneOf constraints are not supported" in problem:
        problem = "oneOf is supported only where no value can match two of its parts; use anyOf"
    return RequestError(f"structured_output: {name} cannot be used: {_shortened(problem)}")


def _shortened(problem: str) -> str:
    """llguidance's message, without the source lines and the insides of its own that it shows or names."""
    for sign, meaning in _MEANINGS.items():
        if sign in problem:
            return meaning
    lines = [line.strip() for line in problem.splitlines() if not _NO_MESSAGE.match(line)]
    text = "; ".join(lines)
    return text if len(text) <= _MAX_ERROR_CHARS else f"{text[:_MAX_ERROR_CHARS]}..."
