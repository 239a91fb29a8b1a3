"""What the front and the engine process say to each other, and its form on the wire.

::

    front -> engine    Submit  Abort  Watch  Stop
    engine -> front    Stage*  Ready | Died      while loading
                       Accepted  Refused  News  Observed  Died

Every `Submit` is answered by `Accepted` or `Refused`, and every accepted request ends in exactly one `Item`
whose `output` is set, aborted ones included; one that is aborted before either answer has that `Item` alone.
One `News` holds everything that a step brought, so that a step costs one message. While there are requests
and no steps (grammars are compiled), empty ones say that the loop turns.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from octavo.outputs import Logprob, RequestOutput, StreamChunk

if TYPE_CHECKING:
    from octavo.engine.stats import EngineStats
    from octavo.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Submit:
    """A prompt to be continued. The prompt's text stays with the front, which puts it into the output."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    stream: bool = False


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request now; unknown and finished ids are ignored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Watch:
    """Send `Observed` from now on, beginning with a full one; or stop sending."""

    is_on: bool


@dataclass(frozen=True, slots=True)
class Stop:
    """Abort what is left and exit."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of loading is done: `name` (``imports``, ``weights``, ``cache``), and how long it took."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the front needs to know of the loaded model.

    `name` is what the engine was asked for; clients use `ServeSettings.served_model_names`. `defaults` is
    the model's generation config, for `SamplingParams.from_generation_config`. `max_num_seqs` bounds `n`.
    """

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    defaults: Mapping[str, Any]
    num_blocks: int
    block_size: int
    kv_cache_dtype: str
    device: str
    dtype: str
    max_num_seqs: int
    weights_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine takes requests."""

    model: ModelCard


@dataclass(frozen=True, slots=True)
class Accepted:
    """These requests are in the engine's queue; nothing about them can be refused any more."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that cannot be served. `kind` is the name of a class of `octavo.errors`."""

    request_id: str
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Item:
    """News of one request: the pieces since the last news (streamed requests only), and how it ended.

    The last piece carries no `output` of its own here; `Generation` puts it back. `output` holds neither the
    prompt nor its ids, which the front has, nor log probabilities that came with the pieces.
    """

    request_id: str
    chunks: list[StreamChunk]
    output: RequestOutput | None


@dataclass(frozen=True, slots=True)
class Tokens:
    """One more token of each of these streams, of its first continuation: its text (which may be empty) and
    id. In columns, as that is nearly all there is to tell, and an object for each would cost more than all
    the rest of it.
    """

    request_ids: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class News:
    """Everything one step brought; also sent without a step after an abort (then `num_tokens` is 0).

    A request is in `items` or `tokens` or neither. `started`: requests that left the queue for the first
    time. `step_s`: wall time of the step. `num_tokens`: tokens it computed, prompt and output together.
    """

    items: list[Item]
    stats: EngineStats
    step_s: float
    num_tokens: int
    started: tuple[str, ...] = ()
    tokens: Tokens = field(default_factory=Tokens)


@dataclass(frozen=True, slots=True)
class Observed:
    """A payload of the observer, as it goes to the page. `is_full`: a snapshot, not a change to the last."""

    payload: bytes = field(repr=False)
    is_full: bool


@dataclass(frozen=True, slots=True)
class Died:
    """The engine process gives up. `kind` is the name of a class of `octavo.errors`."""

    message: str
    kind: str = "EngineError"


ToEngine = Submit | Abort | Watch | Stop
ToFront = Stage | Ready | Accepted | Refused | News | Observed | Died


def encode(message: ToEngine | ToFront) -> bytes:
    """The message as bytes, for `decode` at the other end; both ends are this program."""
    # Pickle calls Python code for every slotted dataclass and none for tuples and lists, and there is one
    # piece per running request and step.
    if isinstance(message, News):
        items = [
            (item.request_id, [_packed(chunk) for chunk in item.chunks], *_packed_output(item.output))
            for item in message.items
        ]
        tokens = message.tokens
        columns = (tokens.request_ids, tokens.texts, tokens.token_ids)
        fields = (items, columns, message.stats, message.step_s, message.num_tokens, message.started)
        return pickle.dumps(fields, pickle.HIGHEST_PROTOCOL)
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def decode(data: bytes | bytearray) -> Any:
    """What `encode` was given."""
    message = pickle.loads(data)
    if not isinstance(message, tuple):
        return message
    packed, columns, stats, step_s, num_tokens, started = message
    items = [
        Item(id_, [_unpacked(chunk) for chunk in chunks], _unpacked_output(output, prompt_logprobs))
        for id_, chunks, output, prompt_logprobs in packed
    ]
    return News(items, stats, step_s, num_tokens, started, Tokens(*columns))


def _packed(chunk: StreamChunk) -> tuple[Any, ...]:
    logprobs = None if chunk.logprobs is None else [_entries(one) for one in chunk.logprobs]
    ended = chunk.finish_reason, chunk.stop_reason, chunk.error
    return chunk.index, chunk.text, chunk.token_ids, logprobs, *ended


def _unpacked(packed: tuple[Any, ...]) -> StreamChunk:
    index, text, token_ids, logprobs, finish_reason, stop_reason, error = packed
    if logprobs is not None:
        logprobs = [_from_entries(one) for one in logprobs]
    return StreamChunk(index, text, token_ids, finish_reason, stop_reason, logprobs, None, error)


def _packed_output(output: RequestOutput | None) -> tuple[Any, Any]:
    """The output without the log probabilities of its prompt, and those."""
    if output is None or output.prompt_logprobs is None:
        return output, None
    packed = [None if one is None else _entries(one) for one in output.prompt_logprobs]
    return replace(output, prompt_logprobs=None), packed


def _unpacked_output(output: RequestOutput | None, prompt_logprobs: Any) -> RequestOutput | None:
    if output is not None and prompt_logprobs is not None:
        output.prompt_logprobs = [None if one is None else _from_entries(one) for one in prompt_logprobs]
    return output


def _entries(logprobs: dict[int, Logprob]) -> dict[int, tuple[Any, ...]]:
    return {token_id: (one.logprob, one.rank, one.decoded_token) for token_id, one in logprobs.items()}


def _from_entries(entries: dict[int, tuple[Any, ...]]) -> dict[int, Logprob]:
    return {token_id: Logprob(*one) for token_id, one in entries.items()}
