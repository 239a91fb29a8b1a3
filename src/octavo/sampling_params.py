"""How one request wants its tokens chosen: the options, their defaults, and what is refused.

The names and meanings are vLLM's. Everything is checked when the object is built, so a bad value is reported
where it was written; what depends on the model (ids outside its vocabulary) is checked by `validate_for`.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, Never, Self

from octavo.errors import RequestError, nearest, shown
from octavo.structured_output import StructuredOutput

MAX_LOGPROBS = 1024
"""Most alternatives per token that `logprobs` and `prompt_logprobs` may ask for; -1 asks for every token."""

GREEDY_TEMPERATURE = 1e-5
"""Below this temperature a row is greedy (vLLM's threshold): dividing logits by less overflows float32."""


@dataclass(frozen=True, init=False, repr=False)
class SamplingParams:
    """Sampling options of one request. Frozen; compared by value; keyword arguments only.

    Selection:
        temperature: 0 (default) or below 1e-5 takes the most likely token; else logits are divided by it.
        top_k: keep the k most likely tokens; 0 or -1 keeps all. Equal logits: the lower id comes first.
        top_p: of those, keep the shortest prefix, most likely first, whose probability reaches top_p; (0, 1].
        min_p: keep tokens at least min_p times as likely as the most likely one; [0, 1].
        seed: 64-bit integer; the same seed, prompt and options give the same tokens in any batch. None or -1:
            a seed is drawn for the request.
        n: number of continuations; each has its own draw. With temperature 0 they are equal.
    Changes to the logits, before temperature:
        repetition_penalty: [1e-6, 1e6]; logits of tokens in prompt or output are divided by it where
            positive, multiplied where negative.
        presence_penalty, frequency_penalty: [-2, 2]; subtracted once, or once per occurrence, for tokens of
            the output.
        logit_bias: token id -> value in [-100, 100], added to that logit.
        allowed_token_ids: only these can be chosen.
        structured_output: a StructuredOutput; only tokens that continue text of that form can be chosen, and
            the output ends when it is complete. It outranks min_tokens; max_tokens may still cut it short.
    Ending:
        max_tokens: at most this many output tokens; None means as many as the context holds.
        min_tokens: end-of-sequence and stop_token_ids cannot be chosen before this many output tokens.
        stop: string or strings that end the output; stop_token_ids: token ids that do.
        ignore_eos: do not stop at the end-of-sequence token.
    What is returned:
        logprobs, prompt_logprobs: alternatives per token, 0..1024, or -1 for all; None for no
            log-probabilities. They come from the raw logits, before any option above.
        skip_special_tokens, include_stop_str_in_output: shape of the text.

    Raises:
        RequestError: an unknown option (with the nearest name), a wrong type, a value out of range, or two
            values that contradict each other.
    """

    n: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    max_tokens: int | None
    min_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    logit_bias: dict[int, float] = field(hash=False)
    allowed_token_ids: tuple[int, ...] | None
    structured_output: StructuredOutput | None
    logprobs: int | None
    prompt_logprobs: int | None
    skip_special_tokens: bool
    include_stop_str_in_output: bool

    # Written out, not generated: callers may pass a string or a list where a tuple is kept, and an unknown
    # name gets the same kind of error as a bad value.
    def __init__(
        self,
        *positional: Never,
        n: int = 1,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        seed: int | None = None,
        max_tokens: int | None = 256,
        min_tokens: int = 0,
        stop: str | Sequence[str] | None = (),
        stop_token_ids: Sequence[int] | None = (),
        ignore_eos: bool = False,
        logit_bias: Mapping[int, float] | None = None,
        allowed_token_ids: Sequence[int] | None = None,
        structured_output: StructuredOutput | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        skip_special_tokens: bool = True,
        include_stop_str_in_output: bool = False,
        **unknown: Never,
    ) -> None:
        if positional:
            raise RequestError(
                "SamplingParams takes its options by name, as in SamplingParams(temperature=0.5); "
                f"got {shown(positional[0])} by position"
            )
        if unknown:
            name = next(iter(unknown))
            hint = nearest(name, (f.name for f in fields(self)))
            raise RequestError(f"SamplingParams has no option {shown(name)}{hint}")
        top_k = _integer("top_k", top_k, -1)
        if seed is not None:
            seed = _integer("seed", seed, -(2**63), 2**63 - 1)
        values: dict[str, object] = {
            "n": _integer("n", n, 1),
            "temperature": _number("temperature", temperature, low=0.0),
            "top_k": max(top_k, 0),
            "top_p": _number("top_p", top_p, above=0.0, high=1.0),
            "min_p": _number("min_p", min_p, low=0.0, high=1.0),
            "repetition_penalty": _number("repetition_penalty", repetition_penalty, low=1e-6, high=1e6),
            "presence_penalty": _number("presence_penalty", presence_penalty, low=-2.0, high=2.0),
            "frequency_penalty": _number("frequency_penalty", frequency_penalty, low=-2.0, high=2.0),
            "seed": None if seed == -1 else seed,
            "max_tokens": None if max_tokens is None else _integer("max_tokens", max_tokens, 1),
            "min_tokens": _integer("min_tokens", min_tokens, 0),
            "stop": _strings("stop", stop),
            "stop_token_ids": (
                () if stop_token_ids is None else _token_ids("stop_token_ids", stop_token_ids)
            ),
            "ignore_eos": _flag("ignore_eos", ignore_eos),
            "logit_bias": _bias(logit_bias),
            "allowed_token_ids": (
                None if allowed_token_ids is None else _token_ids("allowed_token_ids", allowed_token_ids)
            ),
            "structured_output": structured_output,
            "logprobs": _num_logprobs("logprobs", logprobs),
            "prompt_logprobs": _num_logprobs("prompt_logprobs", prompt_logprobs),
            "skip_special_tokens": _flag("skip_special_tokens", skip_special_tokens),
            "include_stop_str_in_output": _flag("include_stop_str_in_output", include_stop_str_in_output),
        }
        vars(self).update(values)
        self._check_together()

    def _check_together(self) -> None:
        if not isinstance(self.structured_output, StructuredOutput | None):
            raise RequestError(
                "structured_output must be a StructuredOutput, as in "
                f"StructuredOutput(json_object=True), got {shown(self.structured_output)}"
            )
        if self.structured_output is not None and self.ignore_eos:
            raise RequestError(
                "ignore_eos=True contradicts structured_output: a complete output ends; drop one of them"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens}); change one of them"
            )
        if self.allowed_token_ids == ():
            raise RequestError(
                "allowed_token_ids is empty, so no token could be chosen; give ids, or None for all"
            )
        if (
            self.min_tokens > 0
            and self.allowed_token_ids is not None
            and set(self.allowed_token_ids) <= set(self.stop_token_ids)
        ):
            raise RequestError(
                f"min_tokens ({self.min_tokens}) forbids stop_token_ids, which are all of allowed_token_ids;"
                " no token could be chosen"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken and no random number is drawn."""
        return self.temperature < GREEDY_TEMPERATURE

    def validate_for(self, vocab_size: int, max_model_len: int) -> None:
        """Check what depends on the model.

        Raises:
            RequestError: an id in logit_bias, allowed_token_ids or stop_token_ids is not below `vocab_size`,
                or min_tokens cannot be reached within `max_model_len` tokens.
        """
        named: tuple[tuple[str, Iterable[int]], ...] = (
            ("logit_bias", self.logit_bias),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("stop_token_ids", self.stop_token_ids),
        )
        for name, ids in named:
            outside = [i for i in ids if i >= vocab_size]
            if outside:
                raise RequestError(
                    f"{name} names token id {outside[0]}, outside the vocabulary (0 to {vocab_size - 1})"
                )
        if self.min_tokens >= max_model_len:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) cannot be reached: a prompt and its output have at most"
                f" {max_model_len} tokens together (max_model_len)"
            )

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any], **overrides: Any) -> Self:
        """The options a model's generation_config.json recommends, then `overrides` by their own names.

        Read: temperature, top_k, top_p, min_p, repetition_penalty, max_new_tokens (as max_tokens), and
        do_sample: false means temperature 0; true without a temperature means temperature 1. Absent or null
        values keep this class's defaults. End-of-sequence ids are the engine's business: see `eos_token_ids`.

        Raises:
            RequestError: a value in the file, which is then named, or an override is out of range.
        """
        if not isinstance(config, Mapping):
            raise RequestError(f"config must be a dict, as in generation_config.json, got {shown(config)}")
        try:
            return cls(**(cls._options_of(config) | overrides))
        except RequestError as error:
            try:
                advised = cls._options_of(config)
                cls(**{name: value for name, value in advised.items() if name not in overrides})
            except RequestError as own:
                raise RequestError(f"the model's generation_config.json: {own}") from error
            raise

    @staticmethod
    def _options_of(config: Mapping[str, Any]) -> dict[str, Any]:
        options: dict[str, Any] = {
            name: config[key] for key, name in _GENERATION_CONFIG_NAMES.items() if config.get(key) is not None
        }
        if config.get("do_sample") is not None:
            if _flag("do_sample", config["do_sample"]):
                options.setdefault("temperature", 1.0)
            else:
                options["temperature"] = 0.0
        return options

    def __repr__(self) -> str:
        changed = (
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if getattr(self, f.name) != getattr(_DEFAULT, f.name)
        )
        return f"SamplingParams({', '.join(changed)})"


_GENERATION_CONFIG_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def eos_token_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The end-of-sequence ids of a generation_config.json or config.json: an int, a list, or nothing.

    Raises:
        RequestError: the value is neither.
    """
    value = config.get("eos_token_id")
    if value is None:
        return ()
    return _token_ids("eos_token_id", value if isinstance(value, list | tuple) else [value])


def _integer(name: str, value: object, low: int, high: int | None = None) -> int:
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, Integral)):
        raise RequestError(f"{name} must be an integer, got {shown(value)} ({type(value).__name__})")
    number = operator.index(value)
    limit = 2**63 - 1 if high is None else high
    if not low <= number <= limit:
        bounds = f"at least {low}" if number < low and high is None else f"between {low} and {limit}"
        raise RequestError(f"{name} must be {bounds}, got {shown(number)}")
    return number


def _number(
    name: str,
    value: object,
    *,
    low: float = -math.inf,
    above: float = -math.inf,
    high: float = math.inf,
) -> float:
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, Real)):
        raise RequestError(f"{name} must be a number, got {shown(value)} ({type(value).__name__})")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RequestError(f"{name} must be finite, got {number}")
    if not (low <= number <= high and number > above):
        lower = f"above {above:g}" if above > -math.inf else f"at least {low:g}"
        upper = f" and at most {high:g}" if high < math.inf else ""
        raise RequestError(f"{name} must be {lower}{upper}, got {number:g}")
    return number


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be True or False, got {shown(value)} ({type(value).__name__})")
    return value


def _strings(name: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise RequestError(f"{name} must be a string or a list of strings, got {shown(value)}")
    for item in value:
        try:
            item.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"{name} holds {shown(item)}, which is not valid Unicode and can match nothing; remove it"
            ) from error
    if "" in value:
        raise RequestError(f"{name} holds an empty string, which would end every output at once; remove it")
    return tuple(value)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        with contextlib.suppress(TypeError):  # an array of no dimensions has __iter__ as well
            return tuple(_integer(f"each id in {name}", item, 0) for item in value)
    raise RequestError(f"{name} must be a list of token ids, got {shown(value)} ({type(value).__name__})")


def _bias(value: object) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RequestError(f"logit_bias must be a dict of token id to number, got {shown(value)}")
    return {
        _integer("each key of logit_bias", key, 0): _number(
            f"logit_bias[{shown(key)}]", bias, low=-100.0, high=100.0
        )
        for key, bias in value.items()
    }


def _num_logprobs(name: str, value: object) -> int | None:
    if value is None:
        return None
    return _integer(f"{name} (-1 for all)", value, -1, MAX_LOGPROBS)


_DEFAULT = SamplingParams()
