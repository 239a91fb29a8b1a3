"""Structured output in an engine: the same answer in any company, and how it ends."""

import json
from typing import Any

import pytest
import torch
from helpers.grammar import PrefixRunner, drain, make_grammar_engine, run_all, smollm2_tokenizer, structured

from octavo.engine.core import Engine
from octavo.outputs import CompletionOutput
from octavo.sampling_params import SamplingParams
from octavo.structured_output import StructuredOutput

EOS = 2
PERSON = StructuredOutput(
    json_schema={
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)
ANSWER = StructuredOutput(regex="(yes|no)(, because [a-z ]{1,20}\\.)?")


@pytest.fixture
def engine(request: pytest.FixtureRequest):
    engine = make_grammar_engine(**getattr(request, "param", {}))
    yield engine
    assert not engine.requests
    assert engine.cache.num_owned == 0
    engine.close()


def one(engine: Engine, output: StructuredOutput, **options: Any) -> CompletionOutput:
    [request] = run_all(engine, [([7, 8, 9], structured(output, **options))])
    assert request.output is not None
    return request.output.outputs[0]


def ids(text: str) -> list[int]:
    return smollm2_tokenizer().encode(text, add_special_tokens=False)


MIXED = [
    ([1, 2, 3], structured(PERSON, seed=1)),
    ([4], SamplingParams(temperature=1.0, seed=2, max_tokens=60)),
    ([5, 6], structured(ANSWER, seed=3, n=3)),
    ([7] * 30, structured(PERSON, seed=4, temperature=0.0)),
    ([8, 9], SamplingParams(max_tokens=40, repetition_penalty=1.5)),
    ([10], structured(PERSON, seed=5, top_p=0.9, top_k=50, presence_penalty=0.5, logit_bias={70: 5})),
    ([11], structured(StructuredOutput(regex="[a-z]{30,60}"), seed=6, min_p=0.01)),
]


def outcomes(requests: list[tuple[list[int], SamplingParams]], **options: Any) -> list[list[tuple[Any, ...]]]:
    engine = make_grammar_engine(**options)
    done = run_all(engine, requests)
    if options.get("num_blocks", 1000) < 100:
        assert engine.scheduler.num_preemptions > 0
    engine.close()
    return [
        [(one.token_ids, one.finish_reason, one.text) for one in request.output.outputs]
        for request in done
        if request.output is not None
    ]


@pytest.fixture(scope="module")
def alone() -> list[list[tuple[Any, ...]]]:
    return [outcomes([request])[0] for request in MIXED]


def test_alone_it_is_well_formed(alone: list[list[tuple[Any, ...]]]):
    for place in (0, 3, 5):
        [(_, reason, text)] = alone[place]
        assert reason == "stop"
        assert set(json.loads(text)) == {"name", "age"}
    assert len(alone[2]) == 3
    assert len({tuple(token_ids) for token_ids, _, _ in alone[2]}) > 1


@pytest.mark.parametrize(
    "options",
    [{}, {"num_blocks": 24}, {"max_num_seqs": 3}, {"with_kernel": True}],
    ids=["together", "preempted", "a few at a time", "by the kernel"],
)
def test_the_answer_is_the_same_in_any_company(alone: list[list[tuple[Any, ...]]], options: dict[str, Any]):
    together = outcomes(MIXED, **options)
    # By the kernel, what top_p and min_p keep is drawn in another order.
    places = (0, 1, 2, 3, 4) if "with_kernel" in options else range(len(MIXED))
    assert [together[place] for place in places] == [alone[place] for place in places]


def test_the_answer_is_the_same_with_overlap(alone: list[list[tuple[Any, ...]]]):
    constrained = [place for place, (_, params) in enumerate(MIXED) if params.structured_output]
    together = outcomes([MIXED[place] for place in constrained], overlap=True)
    assert together == [alone[place] for place in constrained]


def test_max_tokens_may_cut_it_short_but_not_what_is_complete(engine: Engine):
    exact = StructuredOutput(regex="(yes|no), because")
    whole = one(engine, exact, seed=1)
    assert whole.finish_reason == "stop"
    assert whole.stop_reason is None
    assert whole.token_ids[-1] != EOS, "it ends with its last token, not one later"
    size = len(whole.token_ids)
    assert one(engine, exact, seed=1, max_tokens=size) == whole
    cut = one(engine, exact, seed=1, max_tokens=size - 1)
    assert (cut.finish_reason, cut.token_ids) == ("length", whole.token_ids[:-1])
    assert cut.text == smollm2_tokenizer().decode(cut.token_ids)


def test_an_end_that_the_model_longs_for_waits_until_it_is_allowed(engine: Engine):
    ended = one(engine, StructuredOutput(regex="[ab]{3,}"), logit_bias={EOS: 100})
    assert (ended.finish_reason, ended.token_ids[-1]) == ("stop", EOS)
    assert len(ended.text) >= 3
    assert len(smollm2_tokenizer().decode(ended.token_ids[:-2])) < 3, "and comes as soon as it may"


def test_a_bias_chooses_among_what_is_allowed(engine: Engine):
    yes, no = ids("yes")[0], ids("no")[0]
    yes_or_no = StructuredOutput(regex="yes|no")
    assert one(engine, yes_or_no, logit_bias={yes: 100, 70: 100}).text == "yes"
    assert one(engine, yes_or_no, logit_bias={no: 100, 71: 100}).text == "no"


def test_allowed_token_ids_narrow_it_further(engine: Engine):
    a, b = ids("a")[0], ids("b")[0]
    output = one(engine, StructuredOutput(regex="[a-z]{5}"), allowed_token_ids=[a, b, 500])
    assert len(output.text) == 5
    assert set(output.token_ids) <= {a, b}


def test_options_that_leave_no_token_end_that_request_alone(engine: Engine):
    a = ids("a")[0]
    nothing = structured(StructuredOutput(regex="b+"), allowed_token_ids=[a])
    bad, good = run_all(engine, [([1], nothing), ([1, 2, 3], structured(PERSON, seed=1))])
    assert bad.output is not None
    assert bad.output.outputs[0].finish_reason == "error"
    assert bad.output.error is not None
    assert bad.output.error.startswith("the options leave no token to choose: allowed_token_ids")
    assert bad.output.blames_options
    assert good.output is not None
    assert good.output.outputs[0].finish_reason == "stop"


def test_min_tokens_hold_until_nothing_else_is_allowed(engine: Engine):
    bias = {EOS: 100}
    held = one(engine, StructuredOutput(regex="a*"), min_tokens=6, logit_bias=bias)
    assert (held.finish_reason, len(held.token_ids)) == ("stop", 7)
    assert EOS not in held.token_ids[:-1]
    complete = one(engine, StructuredOutput(regex="yes|no"), min_tokens=50)
    assert complete.text in ("yes", "no")
    assert complete.finish_reason == "stop"
    # Here the last token may be followed by nothing but an end, which the output has not reached.
    after_stop = one(engine, StructuredOutput(regex="(a|b)c?"), min_tokens=50, seed=3)
    assert after_stop.finish_reason == "stop"
    assert after_stop.text in ("ac", "bc")


def test_a_stop_string_ends_it_early(engine: Engine):
    stopped = one(engine, StructuredOutput(regex="[a-z]{5}, [a-z]{50}"), stop=[", "], seed=1)
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", ", ")
    assert len(stopped.text) == 5
    shown = one(
        engine,
        StructuredOutput(regex="[a-z]{5}, [a-z]{50}"),
        stop=[", "],
        seed=1,
        include_stop_str_in_output=True,
    )
    assert shown.text == stopped.text + ", "


def test_a_stop_token_ends_it_where_the_grammar_allows_the_token(engine: Engine):
    comma = ids(",")[0]
    stopped = one(engine, StructuredOutput(regex="[a-z]{3},[a-z]{50}"), stop_token_ids=[comma, 70], seed=1)
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", comma)
    assert len(stopped.text) == 3


def test_the_empty_text_is_an_answer_too(engine: Engine):
    for min_tokens in (0, 5):  # nothing but an end is allowed, so there is nothing to hold out for
        empty = one(engine, StructuredOutput(regex=""), min_tokens=min_tokens)
        assert (empty.text, empty.token_ids, empty.finish_reason) == ("", [EOS], "stop")


def test_streamed_pieces_are_the_text(engine: Engine):
    request = engine.add_request([1, 2, 3], structured(PERSON, seed=1), stream=True)
    drain(engine)
    assert request.output is not None
    whole = request.output.outputs[0]
    assert "".join(chunk.text for chunk in request.chunks) == whole.text
    assert json.loads(whole.text)
    assert request.chunks[-1].finish_reason == "stop"


def test_log_probabilities_are_the_models_own(engine: Engine):
    request = engine.add_request([7], structured(ANSWER, logprobs=1, temperature=0.0))
    runner = engine.runner
    assert isinstance(runner, PrefixRunner)
    raw = torch.log_softmax(runner.logits(request.sequences[0]), dim=0)
    drain(engine)
    assert request.output is not None
    first = request.output.outputs[0]
    assert first.logprobs is not None
    entry = first.logprobs[0]
    assert entry[first.token_ids[0]].logprob == pytest.approx(raw[first.token_ids[0]].item(), abs=1e-4)
    assert entry[first.token_ids[0]].rank > 1, "the model would have said something else"
    assert set(entry) == {first.token_ids[0], int(raw.argmax())}


@pytest.mark.parametrize("with_kernel", [False, True])
def test_a_grammar_that_grows_too_large_on_the_way_ends_its_request_alone(with_kernel: bool):
    engine = make_grammar_engine(with_kernel=with_kernel)
    grammar = StructuredOutput(lark='start: ("a"{1,1000}){1,1000}')
    too_large = structured(grammar, max_tokens=200, min_tokens=200, logprobs=0)
    bad, good = run_all(engine, [([1], too_large), ([1, 2, 3], structured(PERSON, seed=1, logprobs=0))])
    assert bad.output is not None
    assert bad.output.error is not None
    assert bad.output.error.startswith("the options ask for too much: structured_output: ")
    assert bad.output.blames_options
    assert "limit" in bad.output.error or "max is" in bad.output.error
    assert bad.output.outputs[0].finish_reason == "error"
    assert set(bad.output.outputs[0].text) == {"a"}
    assert good.output is not None
    assert good.output.outputs[0].finish_reason == "stop"
    assert engine.cache.num_owned == 0
    engine.close()


@pytest.mark.parametrize("engine", [{"eos_token_ids": ()}], indirect=True)
def test_a_model_without_an_end_of_sequence_token(engine: Engine):
    done = one(engine, PERSON, seed=1)
    assert done.finish_reason == "stop"
    assert set(json.loads(done.text)) == {"name", "age"}
    assert one(engine, StructuredOutput(regex="a+"), max_tokens=9).finish_reason == "length"
