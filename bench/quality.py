"""What the fast weight forms cost in quality: perplexity, KL divergence and top-1 agreement with float32.

    python bench/quality.py          writes bench/results/<this machine>/quality.json

The text is bench/texts/python-language-reference.txt (more than 3,000 tokens, one sequence, teacher forced),
computed through the paged cache in chunks of 256 as the engine does.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from octavo.bench.report import Row, hardware_slug, write_result
from octavo.cache.spec import KVCacheSpec
from octavo.cache.storage import KVCache
from octavo.layers.attention_metadata import AttentionMetadata
from octavo.models.registry import LoadedModel, load_model
from octavo.models.source import resolve_model
from octavo.text.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parent.parent
MODEL = "smollm2-135m"
BLOCK_SIZE = 16
CHUNK = 256
FORMS = {"float16": "float16", "int8": "int8"}
MAX_PERPLEXITY_RATIO = 1.02
MIN_AGREEMENT = 93.0


def log_probs(ids: list[int], quantization: str | None) -> torch.Tensor:
    """(len(ids) - 1, vocab) float32: natural log probabilities of what follows each token but the last."""
    loaded = load_model(MODEL, quantization=quantization)
    with torch.inference_mode():
        return teacher_forced(loaded, ids)


def teacher_forced(loaded: LoadedModel, ids: list[int]) -> torch.Tensor:
    config = loaded.config
    spec = KVCacheSpec(config.num_layers, config.num_kv_heads, config.head_dim, block_size=BLOCK_SIZE)
    num_blocks = -(-len(ids) // BLOCK_SIZE)
    cache = KVCache(spec, num_blocks)
    table = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    positions = torch.arange(len(ids))
    slots = table[positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    parts = []
    for start in range(0, len(ids) - 1, CHUNK):
        end = min(start + CHUNK, len(ids) - 1)
        meta = AttentionMetadata(
            slot_mapping=slots[start:end],
            cu_seqlens_q=torch.tensor([0, end - start], dtype=torch.int32),
            cu_seqlens_k=torch.tensor([0, end], dtype=torch.int32),
            block_table=table[None],
            max_seqlen_q=end - start,
            max_seqlen_k=end,
        )
        hidden = loaded.model(torch.tensor(ids[start:end]), positions[start:end], cache.layers, meta)
        parts.append(loaded.model.compute_logits(hidden).log_softmax(-1))
    return torch.cat(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = ROOT / "bench" / "results" / hardware_slug() / "quality.json"
    parser.add_argument("--json", type=Path, default=default, help="result file")
    options = parser.parse_args()

    text = (ROOT / "bench" / "texts" / "python-language-reference.txt").read_text(encoding="utf-8")
    ids = load_tokenizer(resolve_model(MODEL)).encode(text)
    targets = torch.tensor(ids[1:])[:, None]
    exact = log_probs(ids, None)
    perplexity = exact.gather(1, targets).mean().neg().exp().item()
    print(f"{len(ids)} tokens, float32: perplexity {perplexity:.4f}", flush=True)
    rows = [Row("perplexity, float32", round(perplexity, 4), "", "lower")]
    for name, quantization in FORMS.items():
        form = log_probs(ids, quantization)
        value = form.gather(1, targets).mean().neg().exp().item()
        divergence = (exact.exp() * (exact - form)).sum(-1).mean().item()
        agreement = 100 * (exact.argmax(-1) == form.argmax(-1)).double().mean().item()
        print(f"{name}: perplexity {value:.4f}, KL {divergence:.2e}, top-1 {agreement:.2f} %", flush=True)
        peers = {"float32": round(perplexity, 4)}
        limit = round(MAX_PERPLEXITY_RATIO * perplexity, 4)
        rows += [
            Row(f"perplexity, {name}", round(value, 4), "", "lower", floor=limit, peers=peers),
            Row(f"KL divergence from float32, {name}", float(f"{divergence:.3g}"), "nats", "lower"),
            Row(f"top-1 agreement with float32, {name}", round(agreement, 2), "%", floor=MIN_AGREEMENT),
        ]
    write_result(options.json, rows, command="python bench/quality.py")


if __name__ == "__main__":
    main()
