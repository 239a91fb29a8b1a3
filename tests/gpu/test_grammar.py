"""Structured output on the GPU: the CPU's tokens, and not one wait more than a step has without it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.grammar import NUM_PADDED, smollm2_tokenizer

from octavo.engine.grammar import GrammarCompiler
from octavo.engine.request import Request, Sequence
from octavo.engine.sampler import Sampler
from octavo.sampling_params import SamplingParams
from octavo.structured_output import StructuredOutput

VOCAB_SIZE = 49152 + NUM_PADDED
FORMS = [
    StructuredOutput(
        json_schema={"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    ),
    StructuredOutput(regex="[a-z]{5,20}, [0-9]+"),
    StructuredOutput(json_object=True),
]


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(smollm2_tokenizer(), VOCAB_SIZE, [2])
    yield compiler
    compiler.close()


def sequences(compiler: GrammarCompiler, *, every: bool) -> list[Sequence]:
    """One of each form; free ones between them unless `every` is to have one."""
    found = []
    for i, form in enumerate(FORMS):
        held = SamplingParams(structured_output=form, min_tokens=4, max_tokens=40, logit_bias={30: 3.0})
        for params in (held,) if every else (held, SamplingParams(max_tokens=40)):
            grammar = compiler.compile(form) if params is held else None
            request = Request("r", [0], params, seeds=[i], first_seq_id=i, arrival=i, grammar=grammar)
            found += request.sequences
    return found


@pytest.mark.parametrize("every", [True, False], ids=["every row", "some rows"])
def test_the_tokens_are_those_of_the_cpu(compiler: GrammarCompiler, every: bool) -> None:
    ours, right = sequences(compiler, every=every), sequences(compiler, every=every)
    on_gpu, on_cpu = Sampler(VOCAB_SIZE), Sampler(VOCAB_SIZE)
    noise = torch.Generator().manual_seed(0)
    for _ in range(12):
        logits = 3 * torch.randn(len(ours), VOCAB_SIZE, generator=noise)
        got, expected = on_gpu.sample(logits.cuda(), ours), on_cpu.sample(logits, right)
        assert got.errors == expected.errors == {}
        assert got.token_ids == expected.token_ids
        for seqs, output in ((ours, got), (right, expected)):
            for seq, token_id in zip(seqs, output.token_ids, strict=True):
                seq.token_ids.append(token_id)
                if seq.grammar is not None and token_id not in (2,):
                    seq.grammar.accept(token_id)


def test_a_step_waits_for_nothing_but_its_tokens(compiler: GrammarCompiler) -> None:
    sampler = Sampler(VOCAB_SIZE)
    rows = sequences(compiler, every=False)
    logits = torch.randn(len(rows), VOCAB_SIZE, device="cuda")
    for _ in range(3):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as waits:
                warnings.simplefilter("always")
                output = sampler.sample(logits, rows)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert output.errors == {}
        places = [
            f"{Path(one.filename).name}:{one.lineno}" for one in waits if "synchronizing" in str(one.message)
        ]
        assert places == []  # the one wait is for an event, which torch does not count
