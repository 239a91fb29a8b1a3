"""SmolLM2 at temperature 1 writes what the schema accepts, whatever the seed."""

import json
import re
from collections import Counter
from collections.abc import Iterator

import jsonschema_rs
import pytest
from helpers.schemas import SUPPORTED

from octavo import LLM, SamplingParams, StructuredOutput

pytestmark = pytest.mark.model

SEEDS = range(1)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2-135m", max_model_len=512, max_num_seqs=64) as llm:
        yield llm


def test_every_schema_is_held_to_for_every_seed(llm: LLM):
    named = [(name, seed) for name in SUPPORTED for seed in SEEDS]
    conversations = [
        [{"role": "user", "content": f"Give me an example of {name} as short JSON."}] for name, _ in named
    ]
    params = [
        SamplingParams(
            temperature=1.0,
            seed=seed,
            max_tokens=56,
            structured_output=StructuredOutput(json_schema=SUPPORTED[name]),
        )
        for name, seed in named
    ]
    outputs = llm.chat(conversations, params, use_tqdm=False)
    ended = Counter[str]()
    for (name, _), output in zip(named, outputs, strict=True):
        done = output.outputs[0]
        assert output.error is None, (name, output.error)
        ended[str(done.finish_reason)] += 1
        if done.finish_reason == "stop":
            validator = jsonschema_rs.validator_for(SUPPORTED[name], validate_formats=True)
            assert validator.is_valid(json.loads(done.text)), (name, done.text)
    assert set(ended) <= {"stop", "length"}
    assert ended["stop"] >= 0.5 * len(named), ended


def test_patterns_and_grammars(llm: LLM):
    pattern = r"[A-Z][a-z]{2,10}, ([A-Z][a-z]{2,10} )?\d{4}"
    dates = llm.generate(
        ["The treaty was signed in"] * 4,
        [
            SamplingParams(temperature=1.0, seed=seed, structured_output=StructuredOutput(regex=pattern))
            for seed in range(4)
        ],
        use_tqdm=False,
    )
    assert all(re.fullmatch(pattern, output.text) for output in dates)
    grammar = """
        start: sum
        sum: term (" + " term)*
        term: NUMBER | "(" sum ")"
        NUMBER: /[1-9][0-9]{0,2}/
    """
    sums = llm.generate(
        "A sum:",
        SamplingParams(
            temperature=1.0, seed=1, n=4, max_tokens=60, structured_output=StructuredOutput(lark=grammar)
        ),
        use_tqdm=False,
    )[0]
    for done in sums.outputs:
        if done.finish_reason == "stop":
            assert set(done.text) <= set("0123456789+() ")
            eval(done.text)


def test_neighbours_keep_their_bits(llm: LLM):
    free = [SamplingParams(temperature=1.0, seed=seed, max_tokens=24) for seed in range(3)]
    held = SamplingParams(
        temperature=1.0, seed=7, structured_output=StructuredOutput(json_schema=SUPPORTED["closed object"])
    )
    prompts = ["Once upon a time", "The sea is", "Dear Sir,"]
    alone = llm.generate(prompts, free, use_tqdm=False)
    alone_held = llm.generate("JSON:", held, use_tqdm=False)[0]
    together = llm.generate([*prompts, "JSON:"], [*free, held], use_tqdm=False)
    assert [output.token_ids for output in together] == [output.token_ids for output in [*alone, alone_held]]
