"""Whatever is drawn, a completed output is what its schema accepts; what cannot be held to is refused."""

import json
from collections import Counter
from collections.abc import Iterator

import jsonschema_rs
import pytest
from helpers.grammar import make_grammar_engine, run_all, structured
from helpers.schemas import SUPPORTED, UNSUPPORTED

from octavo.engine.core import Engine
from octavo.errors import RequestError
from octavo.outputs import CompletionOutput
from octavo.sampling_params import SamplingParams
from octavo.structured_output import StructuredOutput

SEEDS = range(4)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = make_grammar_engine()
    yield engine
    engine.close()


def check(name: str, completion: CompletionOutput) -> None:
    assert completion.finish_reason in ("stop", "length"), (name, completion)
    if completion.finish_reason == "stop":
        value = json.loads(completion.text)
        validator = jsonschema_rs.validator_for(SUPPORTED[name], validate_formats=True)
        assert validator.is_valid(value), (name, completion.text)


def test_random_text_is_what_its_schema_accepts(engine: Engine):
    named = [(name, seed) for name in SUPPORTED for seed in SEEDS]
    requests: list[tuple[list[int], SamplingParams]] = [
        ([1, 2, seed], structured(StructuredOutput(json_schema=SUPPORTED[name]), seed=seed, max_tokens=90))
        for name, seed in named
    ]
    ended = Counter[str]()
    for (name, _), request in zip(named, run_all(engine, requests), strict=True):
        assert request.output is not None
        check(name, request.output.outputs[0])
        if request.output.outputs[0].finish_reason == "stop":
            ended[name] += 1
    assert set(ended) == set(SUPPORTED), "each schema was completed at least once"


def test_any_json_object(engine: Engine):
    params = structured(StructuredOutput(json_object=True), n=8, max_tokens=200, seed=5)
    [request] = run_all(engine, [([3], params)])
    assert request.output is not None
    values = [json.loads(done.text) for done in request.output.outputs if done.finish_reason == "stop"]
    assert len(values) >= 3
    assert all(isinstance(value, dict) for value in values)


@pytest.mark.parametrize("named", UNSUPPORTED)
def test_what_cannot_be_held_to_is_refused_by_name(engine: Engine, named: str):
    with pytest.raises(RequestError) as caught:
        engine.add_request([1], structured(StructuredOutput(json_schema=UNSUPPORTED[named])))
    message = str(caught.value)
    assert message.startswith("structured_output: json_schema cannot be used: ")
    assert named in message
    assert "\n" not in message
    assert len(message) < 400
    assert not engine.has_work
