"""An engine with SmolLM2's vocabulary, the real sampler, and logits made of the tokens so far."""

from __future__ import annotations

import functools
import hashlib

import torch
from helpers.tokenizers_by_hand import Source, smollm2_path

from octavo.cache.manager import KVCacheManager
from octavo.config import EngineConfig
from octavo.engine.core import Engine
from octavo.engine.request import Request, Sequence
from octavo.engine.sampler import PendingSample, Sampler
from octavo.engine.schedule import Schedule
from octavo.engine.scheduler import Scheduler
from octavo.sampling_params import SamplingParams
from octavo.structured_output import StructuredOutput
from octavo.text.tokenizer import Tokenizer, load_tokenizer

NUM_PADDED = 64
"""Ids of the model beyond its tokenizer's."""


@functools.cache
def smollm2_tokenizer() -> Tokenizer:
    return load_tokenizer(Source("gguf", smollm2_path()))


@functools.cache
def _leaning() -> torch.Tensor:
    """What makes random text end: punctuation, digits and white space come often."""
    tokenizer = smollm2_tokenizer()
    often = set(b'"{}[],:.-0123456789 ')
    leaning = torch.zeros(tokenizer.vocab_size + NUM_PADDED)
    for token_id in range(tokenizer.vocab_size):
        data = tokenizer.token_bytes(token_id)
        if data.isspace():
            leaning[token_id] = 5.0
        elif data and set(data) <= often:
            leaning[token_id] = 9.0
        elif len(data) == 1:
            leaning[token_id] = 6.0
    leaning[[*tokenizer.eos_token_ids, *tokenizer.encode("null", add_special_tokens=False)]] = 11.0
    return leaning


class PrefixRunner:
    """Stands in for model and cache: any change of an earlier token changes all logits. Draws for real."""

    def __init__(self, vocab_size: int, *, with_kernel: bool = False) -> None:
        self.vocab_size = vocab_size
        self.sampler = Sampler(vocab_size, with_kernel=with_kernel)

    def launch(self, plan: Schedule) -> PendingSample:
        rows = [self.logits(seq) for seq in plan.sampled]
        logits = torch.stack(rows) if rows else torch.empty(0, self.vocab_size)
        return self.sampler.launch(logits, plan.sampled)

    def logits(self, seq: Sequence) -> torch.Tensor:
        assert not seq.num_pending
        digest = hashlib.blake2b(repr(seq.token_ids).encode(), digest_size=8).digest()
        noise = torch.Generator().manual_seed(int.from_bytes(digest, "big") % 2**63)
        return 2 * torch.randn(self.vocab_size, generator=noise) + _leaning()

    def close(self) -> None:
        pass


def make_grammar_engine(
    *,
    num_blocks: int = 1024,
    max_num_seqs: int = 64,
    max_model_len: int = 600,
    overlap: bool = False,
    with_kernel: bool = False,
    eos_token_ids: tuple[int, ...] | None = None,
) -> Engine:
    tokenizer = smollm2_tokenizer()
    vocab_size = tokenizer.vocab_size + NUM_PADDED
    scheduler = Scheduler(
        KVCacheManager(num_blocks, 4),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(64, max_num_seqs),
        max_model_len=max_model_len,
    )
    return Engine(
        EngineConfig(model="scripted", overlap=overlap),
        scheduler,
        PrefixRunner(vocab_size, with_kernel=with_kernel),  # type: ignore[arg-type]  # the runner's interface
        vocab_size=vocab_size,
        eos_token_ids=tuple(sorted(tokenizer.eos_token_ids)) if eos_token_ids is None else eos_token_ids,
        tokenizer=tokenizer,
    )


def structured(output: StructuredOutput, **options: object) -> SamplingParams:
    return SamplingParams(structured_output=output, **{"temperature": 1.0, "max_tokens": 400, **options})  # type: ignore[arg-type]


def drain(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
        engine.scheduler.check()


def run_all(engine: Engine, requests: list[tuple[list[int], SamplingParams]]) -> list[Request]:
    added = [engine.add_request(prompt, params) for prompt, params in requests]
    drain(engine)
    return added
