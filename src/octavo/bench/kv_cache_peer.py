"""Transformers on the same weights, with its cache and without: the peer of `octavo bench kv-cache`."""

from __future__ import annotations

import importlib
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.bench.hf_folder import write_hf_folder
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.bench.kv_cache_engine import Models

NAME = "Transformers"


class Peer:
    """The model that `models` has, in Transformers, with its attention `sdpa`.

    `has_our_weights` is False where they are random: its answers are then others.
    """

    def __init__(self, models: Models) -> None:
        # Loaded here and by name: nothing of Octavo needs it, and it takes seconds.
        try:
            self._library: Any = importlib.import_module("transformers")
        except ImportError as error:
            raise ConfigError(
                "--peers transformers: it is not installed; pip install transformers, or pass --peers none"
            ) from error
        import torch

        self._torch = torch
        self.device = models.device
        dtype = models.loaded.dtype
        self.has_our_weights = models.options.get("load_format") != "dummy"
        auto, source = self._library.AutoModelForCausalLM, models.source
        if not self.has_our_weights:
            config = self._library.AutoConfig.from_pretrained(source.path)
            with torch.device(self.device):
                model = auto.from_config(config, dtype=dtype)
        elif source.kind == "gguf":
            with tempfile.TemporaryDirectory() as folder:
                write_hf_folder(source, Path(folder))
                model = auto.from_pretrained(folder, dtype=dtype)
        else:
            model = auto.from_pretrained(source.path, dtype=dtype)
        self.model = model.eval().to(self.device)
        self.model.generation_config.eos_token_id = None

    def run(
        self, prompts: Sequence[Sequence[int]], num_new: Sequence[int], *, use_cache: bool = True
    ) -> tuple[list[list[int]], list[float], int]:
        """Greedy answers of exactly `num_new` tokens, as `generate` gives them: one left-padded batch that
        runs until its longest answer is done.

        Returns the tokens of each, when each step of the batch was done (seconds), and the bytes of the cache
        at the end, 0 without one.
        """
        torch = self._torch
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        times: list[float] = []

        def stamp(token_ids: Any, scores: Any, **_: Any) -> Any:
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
            return torch.zeros(len(prompts), dtype=torch.bool, device=self.device)

        ids, mask = ids.to(self.device), mask.to(self.device)
        started = time.perf_counter()
        out = self.model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=max(num_new),
            min_new_tokens=max(num_new),
            pad_token_id=0,
            use_cache=use_cache,
            return_dict_in_generate=True,
            stopping_criteria=self._library.StoppingCriteriaList([stamp]),
        )
        rows = zip(out.sequences.tolist(), num_new, strict=True)
        cache = out.past_key_values if use_cache else None
        return [row[width : width + count] for row, count in rows], times, _cache_bytes(cache)


def _cache_bytes(cache: Any) -> int:
    if cache is None:
        return 0
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
