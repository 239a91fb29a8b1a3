"""What structured output costs beside the model: compiling a schema, and masks and tokens in every step.

python bench/structured_output.py [--quick]     writes bench/results/<this machine>/structured_output.json
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from octavo import LLM, SamplingParams, StructuredOutput
from octavo.bench.report import Row, hardware_slug, write_result
from octavo.engine.grammar import Grammar, GrammarCompiler, fill_masks
from octavo.engine.grammar_masks import GrammarMasks
from octavo.engine.request import Request, Sequence

ROOT = Path(__file__).resolve().parent.parent
MODEL = "smollm2-135m"
BATCHES = (1, 16, 64)
WORDS = ["river", "stone", "quiet", "amber", "window", "paper", "seven", "lantern", "harbour", "moss"]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 80},
        "pages": {"type": "integer", "minimum": 1, "maximum": 2000},
        "rating": {"type": "number", "minimum": 0, "maximum": 5},
        "language": {"enum": ["en", "de", "fr", "es"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 6},
        "author": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "born": {"type": "string", "format": "date"}},
            "required": ["name", "born"],
            "additionalProperties": False,
        },
    },
    "required": ["title", "pages", "rating", "language", "tags", "author"],
    "additionalProperties": False,
}


def example(rng: random.Random) -> str:
    """JSON that SCHEMA accepts."""
    words = [rng.choice(WORDS) for _ in range(12)]
    value = {
        "title": " ".join(words[:5]).capitalize(),
        "pages": rng.randint(1, 2000),
        "rating": round(rng.uniform(0, 5), 1),
        "language": rng.choice(["en", "de", "fr", "es"]),
        "tags": words[5 : 5 + rng.randint(1, 4)],
        "author": {
            "name": " ".join(words[9:]).title(),
            "born": f"19{rng.randint(10, 99)}-03-{rng.randint(10, 28)}",
        },
    }
    return json.dumps(value, indent=rng.choice([None, None, 2]))


def step_rows(llm: LLM, num_sequences: int) -> list[Row]:
    """Microseconds per step and sequence of masks, of laying them over logits, and of accepting tokens."""
    rng = random.Random(num_sequences)
    output = StructuredOutput(json_schema=SCHEMA)
    start = llm.engine.grammars.compile(output)
    tokens = [llm.tokenizer.encode(example(rng), add_special_tokens=False) for _ in range(num_sequences)]
    params = SamplingParams(structured_output=output)
    requests = [
        Request("r", [0], params, seeds=[0], first_seq_id=0, arrival=0, grammar=start) for _ in tokens
    ]
    sequences = [request.sequences[0] for request in requests]
    # Two of each: a mask that is asked for again is cheaper than a new one.
    grammars = [start.fork() for _ in tokens]
    vocab_size = llm.engine.vocab_size
    logits = torch.zeros(num_sequences, vocab_size)
    times: dict[str, list[float]] = {"masks": [], "masks, laid over the logits": [], "tokens accepted": []}
    for drawn in zip(*tokens, strict=False):
        times["masks"].append(_timed(_fill, grammars))
        times["masks, laid over the logits"].append(_timed(_apply, sequences, vocab_size, logits))
        times["tokens accepted"].append(_timed(_accept, grammars, drawn))
        _accept([seq.grammar for seq in sequences if seq.grammar is not None], drawn)
    assert not any(grammar.error for grammar in grammars)
    name = f"batch {num_sequences}"
    rows = []
    for what, seconds in times.items():
        rows.append(
            Row(f"{name}: {what}, median", round(1e3 * statistics.median(seconds), 4), "ms", better="lower")
        )
        seconds.sort()
        rows.append(
            Row(
                f"{name}: {what}, 99 %",
                round(1e3 * seconds[int(0.99 * len(seconds))], 4),
                "ms",
                better="lower",
            )
        )
    return rows


def _fill(grammars: list[Grammar]) -> None:
    masks = torch.empty((len(grammars), grammars[0].num_mask_words), dtype=torch.int32)
    fill_masks(grammars, masks.numpy())


def _apply(sequences: list[Sequence], vocab_size: int, logits: torch.Tensor) -> None:
    # The plan of a batch is kept while its sequences are the same, so only `apply` is a step's.
    GrammarMasks(sequences, vocab_size, logits.device).apply(logits)


def _accept(grammars: list[Grammar], token_ids: tuple[int, ...]) -> None:
    for grammar, token_id in zip(grammars, token_ids, strict=True):
        grammar.accept(token_id)


def _timed(action: Callable[..., object], *arguments: object) -> float:
    began = time.perf_counter()
    action(*arguments)
    return time.perf_counter() - began


def engine_rows(llm: LLM, num_sequences: int, num_tokens: int) -> list[Row]:
    """Milliseconds of a whole decode step, free and constrained, `num_sequences` at a time."""
    schema = {"type": "array", "items": {"type": "string"}, "minItems": 1000}
    step_ms = {}
    for name, output in (("free", None), ("constrained", StructuredOutput(json_schema=schema))):
        params = SamplingParams(
            temperature=1.0,
            seed=1,
            max_tokens=num_tokens,
            ignore_eos=output is None,
            structured_output=output,
        )
        for i in range(num_sequences):
            llm.engine.add_request(llm.tokenizer.encode(f"List number {i}:"), params)
        times = []
        while llm.engine.has_work:
            times.append(_timed(llm.engine.step))
        step_ms[name] = 1e3 * statistics.median(times[2:])
    return [
        Row(f"batch {num_sequences}: step, {name}", round(ms, 3), "ms", better="lower")
        for name, ms in step_ms.items()
    ] + [
        Row(
            f"batch {num_sequences}: step, share of structured output",
            round(100 * (step_ms["constrained"] / step_ms["free"] - 1), 1),
            "%",
            better="lower",
        )
    ]


def compile_rows(llm: LLM) -> list[Row]:
    """Milliseconds until a first grammar, a new one and a known one can be used."""
    engine = llm.engine
    compiler = GrammarCompiler(llm.tokenizer, engine.vocab_size, engine.eos_token_ids)
    rows = []
    first = _timed(compiler.compile, StructuredOutput(json_object=True))
    rows.append(Row("first grammar of a model", round(1e3 * first, 2), "ms", better="lower"))
    new = []
    for length in range(40, 60):
        schema = SCHEMA | {
            "properties": SCHEMA["properties"] | {"title": {"type": "string", "maxLength": length}}
        }
        new.append(_timed(compiler.compile, StructuredOutput(json_schema=schema)))
    rows.append(Row("a new schema", round(1e3 * statistics.median(new), 3), "ms", better="lower"))
    known = [_timed(compiler.compile, StructuredOutput(json_schema=schema)) for _ in range(20)]
    rows.append(Row("a known schema", round(1e3 * statistics.median(known), 3), "ms", better="lower"))
    compiler.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="show numbers, write nothing")
    options = parser.parse_args()
    rows: list[Row] = []
    with LLM(MODEL, max_model_len=512, max_num_seqs=64, enable_prefix_caching=False) as llm:
        rows += compile_rows(llm)
        for num_sequences in BATCHES:
            rows += step_rows(llm, num_sequences)
            rows += engine_rows(llm, num_sequences, 12 if options.quick else 48)
    for row in rows:
        print(f"{row.name:55s} {row.value:10.3f} {row.unit}")
    if not options.quick:
        path = ROOT / "bench" / "results" / hardware_slug() / "structured_output.json"
        write_result(path, rows, command=shlex.join(["python", *sys.argv]))


if __name__ == "__main__":
    main()
