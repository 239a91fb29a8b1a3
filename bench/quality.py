"""What short forms of weights and of the KV cache cost in quality, against the model and the cache in full.

    python bench/quality.py                   on the CPU
    python bench/quality.py --device cuda --json FILE

writes bench/results/<this machine>/quality.json or FILE: perplexity, KL divergence, the share of greedy
choices that stay, and the error of the logits. The text, bench/texts/python-language-reference.txt, has some
30,000 tokens; they go teacher forced, in sequences of 2,048 and chunks of 256, through the paged cache as in
the engine. The CPU has no kernels for caches of one byte; there the reference twins in plain torch round them
as a GPU does.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from octavo.bench.report import Row, hardware_slug, write_result
from octavo.cache.storage import KVCache
from octavo.kernels import backend
from octavo.layers.attention_metadata import AttentionMetadata
from octavo.models.registry import LoadedModel, load_model
from octavo.models.shapes import kv_cache_spec
from octavo.models.source import resolve_model
from octavo.text.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parent.parent
MODEL = "smollm2-135m"
BLOCK_SIZE = 16
SEQUENCE = 2048
CHUNK = 256
MAX_PERPLEXITY_RATIO = 1.02
MIN_AGREEMENT = 93.0


@dataclass(frozen=True)
class Form:
    """How the weights and the KV cache are held; None is the model's own dtype."""

    weights: str | None = None
    kv_cache: str | None = None


FORMS = {
    "cpu": {
        "float16 weights": Form(weights="float16"),
        "int8 weights": Form(weights="int8"),
        "float16 KV": Form(kv_cache="float16"),
        "fp8 KV": Form(kv_cache="fp8"),
        "int8 KV": Form(kv_cache="int8"),
    },
    "cuda": {"fp8 KV": Form(kv_cache="fp8"), "int8 KV": Form(kv_cache="int8")},
}


class TeacherForced:
    """The logits of a text of known tokens, chunk by chunk."""

    def __init__(self, form: Form, device: str) -> None:
        self.loaded: LoadedModel = load_model(MODEL, quantization=form.weights, device=device)
        has_bytes = form.kv_cache in ("fp8", "int8")
        self._room = "reference" if has_bytes and device == "cpu" else "auto"
        spec = kv_cache_spec(
            self.loaded.config,
            dtype=form.kv_cache or str(self.loaded.dtype),
            block_size=BLOCK_SIZE,
            scales="token_head" if has_bytes else "tensor",
        )
        self.cache = KVCache(spec, SEQUENCE // BLOCK_SIZE, device)
        self._table = torch.randperm(SEQUENCE // BLOCK_SIZE, generator=torch.Generator().manual_seed(0))

    def _in_room(self) -> AbstractContextManager[None]:
        return nullcontext() if self._room == "auto" else backend.use(self._room)

    def logits(self, ids: torch.Tensor, past: int) -> torch.Tensor:
        """(len(ids), vocab) float32 of the tokens `ids` (CPU) that stand behind `past` computed ones."""
        device = self.loaded.device
        end = past + len(ids)
        positions = torch.arange(past, end)
        slots = self._table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        meta = AttentionMetadata(
            slot_mapping=slots.to(device),
            cu_seqlens_q=torch.tensor([0, len(ids)], dtype=torch.int32, device=device),
            cu_seqlens_k=torch.tensor([0, end], dtype=torch.int32, device=device),
            block_table=self._table[None].to(device, torch.int32),
            max_seqlen_q=len(ids),
            max_seqlen_k=end,
        )
        with torch.inference_mode(), self._in_room():
            hidden = self.loaded.model(ids.to(device), positions.to(device), self.cache.layers, meta)
            return self.loaded.model.compute_logits(hidden).float()


class Costs:
    """What a form differs by from the exact model, summed over the text in float64."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.nll = self.divergence = self.agreed = self.squared_error = self.squared = self.largest = 0.0

    def add(self, exact: torch.Tensor, found: torch.Tensor, targets: torch.Tensor) -> None:
        """exact, found: (n, vocab) logits. targets: (n,) the tokens that follow."""
        self.num_tokens += len(targets)
        likely, likely_found = exact.log_softmax(-1), found.log_softmax(-1)
        self.nll -= likely_found.gather(1, targets[:, None]).double().sum().item()
        self.divergence += (likely.exp() * (likely - likely_found)).sum().item()
        self.agreed += (exact.argmax(-1) == found.argmax(-1)).sum().item()
        centred = exact - exact.mean(-1, keepdim=True)
        error = found - exact
        self.squared_error += error.square().sum().item()
        self.squared += centred.square().sum().item()
        self.largest = max(self.largest, error.abs().max().item())

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll / self.num_tokens)


def chunks(ids: list[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """(tokens, the tokens that follow them, how many of their sequence are computed), over the whole text."""
    for start in range(0, len(ids) - 1, SEQUENCE):
        for first in range(start, min(start + SEQUENCE, len(ids) - 1), CHUNK):
            last = min(first + CHUNK, start + SEQUENCE, len(ids) - 1)
            yield torch.tensor(ids[first:last]), torch.tensor(ids[first + 1 : last + 1]), first - start


def rows_of(name: str, costs: Costs, exact_name: str, exact: float) -> list[Row]:
    count = costs.num_tokens
    limit = round(MAX_PERPLEXITY_RATIO * exact, 4)
    peers = {exact_name: round(exact, 4)}
    agreement = 100 * costs.agreed / count
    error = 100 * math.sqrt(costs.squared_error / costs.squared)
    return [
        Row(f"perplexity, {name}", round(costs.perplexity, 4), "", "lower", floor=limit, peers=peers),
        Row(f"KL divergence, {name}", float(f"{costs.divergence / count:.3g}"), "nats", "lower"),
        Row(f"greedy choices that stay, {name}", round(agreement, 2), "%", floor=MIN_AGREEMENT),
        Row(f"logit error (RMS, of their spread), {name}", round(error, 3), "%", "lower"),
        Row(f"largest logit error, {name}", round(costs.largest, 4), "", "lower"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=FORMS, default="cpu")
    parser.add_argument("--json", type=Path, help="result file")
    options = parser.parse_args()
    if options.json is None and options.device != "cpu":
        parser.error("--device cuda needs --json FILE; only this machine's CPU names its own result file")
    target = options.json or ROOT / "bench" / "results" / hardware_slug() / "quality.json"

    text = (ROOT / "bench" / "texts" / "python-language-reference.txt").read_text(encoding="utf-8")
    ids = load_tokenizer(resolve_model(MODEL)).encode(text)
    exact = TeacherForced(Form(), options.device)
    exact_name = str(exact.loaded.dtype).removeprefix("torch.")
    rows: list[Row] = []
    for name, form in FORMS[options.device].items():
        model, costs, alone = TeacherForced(form, options.device), Costs(), Costs()
        for tokens, following, past in chunks(ids):
            expected, found = exact.logits(tokens, past), model.logits(tokens, past)
            costs.add(expected, found, following.to(found.device))
            alone.add(expected, expected, following.to(found.device))
        if not rows:
            print(f"{costs.num_tokens} tokens, {exact_name}: perplexity {alone.perplexity:.4f}", flush=True)
            rows.append(Row(f"perplexity, {exact_name}", round(alone.perplexity, 4), "", "lower"))
        new = rows_of(name, costs, exact_name, alone.perplexity)
        print(f"{name}: " + ", ".join(f"{row.value} {row.unit}".strip() for row in new), flush=True)
        rows += new
    is_cpu = options.device == "cpu"
    write_result(
        target,
        rows,
        command="python bench/quality.py" + ("" if is_cpu else " --device cuda"),
        gpu="" if is_cpu else torch.cuda.get_device_name(),
    )


if __name__ == "__main__":
    main()
