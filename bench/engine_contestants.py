"""One engine in one process, driven through pipes: `python bench/engine_contestants.py KIND OPTIONS`.

KIND is octavo, vllm or nano_vllm; OPTIONS is a JSON object::

    {"model": folder, "share": of the GPU's memory, "max_model_len": int, "engine": {option: value}}

The first line written is what there is to know of the engine, such as ``{"version": str}``. Then each line
read is a pass, ``{"prompts": [[id]], "num_new": [int], "salts": [str] or null}``: all requests at once,
sampled at temperature 0.6, EOS ignored, nothing detokenised. Each line written is its result,
``{"seconds": float}`` or ``{"error": str}``. Prompts of different salts share nothing in a prefix cache.
Weights are random.

Logs go to standard error, whatever the engine prints to. The end of standard input ends the process. Nothing
of Octavo is imported for a peer.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import sys
import time
import types
from collections.abc import Callable
from typing import Any

TEMPERATURE = 0.6

Ids = list[int]
Generate = Callable[[list[Ids], Ids, list[str] | None], list[int]]
"""All prompts, how many tokens each is answered with, their salts; returns how many tokens each got."""


def octavo(
    model: str, share: float, max_model_len: int, engine: dict[str, Any]
) -> tuple[Generate, dict[str, Any]]:
    from octavo import LLM, SamplingParams
    from octavo.bench.report import gpu_name

    logging.basicConfig(level=logging.INFO)  # as much as the peers tell
    import torch  # behind octavo, as in a program that has no other use of it

    has_gpu = torch.cuda.is_available()
    if has_gpu and not {"num_blocks", "kv_cache_memory"} & engine.keys():
        engine = {"gpu_memory": share, **engine}
    llm = LLM(model, **{"load_format": "dummy", "max_model_len": max_model_len, **engine})

    def generate(prompts: list[Ids], num_new: Ids, salts: list[str] | None) -> list[int]:
        assert salts is None, "generate() takes one salt for all of its prompts"
        params = [SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=n) for n in num_new]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
        return [len(output.token_ids) for output in outputs]

    facts = {
        "version": importlib.metadata.version("octavo"),
        "gpu": gpu_name() if has_gpu else "",
        "weights_nbytes": llm.weights_nbytes,
    }
    return generate, facts


def vllm(
    model: str, share: float, max_model_len: int, engine: dict[str, Any]
) -> tuple[Generate, dict[str, Any]]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=max_model_len,
        gpu_memory_utilization=share,
        **engine,
    )

    def generate(prompts: list[Ids], num_new: Ids, salts: list[str] | None) -> list[int]:
        inputs: list[dict[str, Any]] = [{"prompt_token_ids": ids} for ids in prompts]
        for request, salt in zip(inputs, salts or (), strict=salts is not None):
            request["cache_salt"] = salt
        params = [
            SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=n, detokenize=False)
            for n in num_new
        ]
        outputs = llm.generate(inputs, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return generate, {"version": importlib.metadata.version("vllm")}


def nano_vllm(
    model: str, share: float, max_model_len: int, engine: dict[str, Any]
) -> tuple[Generate, dict[str, Any]]:
    """nano-vllm, which knows neither random weights nor a model without a tokenizer: given both from here."""
    import torch

    facts: dict[str, Any] = {}  # it is run from a checkout, and tells no version
    try:
        import flash_attn  # noqa: F401
    except ImportError:
        sys.modules["flash_attn"] = flash_attention_of_vllm()
        facts["attention"] = "FlashAttention 3 as vLLM has it"

    from nanovllm import LLM, SamplingParams
    from nanovllm.engine import llm_engine, model_runner

    def fill(module: Any, path: str) -> None:
        for parameter in module.parameters():
            parameter.data.normal_(std=0.02)

    class NoTokenizer:
        eos_token_id = -1

        @classmethod
        def from_pretrained(cls, *_: Any, **__: Any) -> NoTokenizer:
            return cls()

        def decode(self, ids: Ids) -> str:
            return ""

    llm_engine.AutoTokenizer = NoTokenizer
    model_runner.load_model = fill
    free, total = torch.cuda.mem_get_info()
    # It takes what others hold for its own use of the memory.
    share = min(share + (total - free) / total, 0.97)
    llm = LLM(model, max_model_len=max_model_len, gpu_memory_utilization=share, **engine)

    def generate(prompts: list[Ids], num_new: Ids, salts: list[str] | None) -> list[int]:
        assert salts is None, "nano-vllm has no salts"
        params = [SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=n) for n in num_new]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [len(output["token_ids"]) for output in outputs]

    return generate, facts


def flash_attention_of_vllm() -> types.ModuleType:
    """The two functions of the package flash_attn that nano-vllm calls, by the one inside vLLM's wheel."""
    import functools

    import torch
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    @functools.cache
    def one_query_each(batch: int, device: Any) -> Any:
        return torch.arange(batch + 1, dtype=torch.int32, device=device)

    def varlen(
        q: Any, k: Any, v: Any, *, cu_seqlens_k: Any, block_table: Any = None, **rest: Any
    ) -> Any:  # paged keys are told by their lengths, packed ones by their bounds
        lens = {"cu_seqlens_k": cu_seqlens_k}
        if block_table is not None:
            lens = {"seqused_k": cu_seqlens_k.diff(), "block_table": block_table}
        return flash_attn_varlen_func(q, k, v, fa_version=3, **lens, **rest)

    def with_kvcache(
        q: Any, k_cache: Any, v_cache: Any, *, cache_seqlens: Any, block_table: Any, **rest: Any
    ) -> Any:
        out = flash_attn_varlen_func(
            q.squeeze(1),
            k_cache,
            v_cache,
            max_seqlen_q=1,
            cu_seqlens_q=one_query_each(len(q), q.device),
            max_seqlen_k=block_table.shape[1] * k_cache.shape[1],
            seqused_k=cache_seqlens,
            block_table=block_table,
            fa_version=3,
            **rest,
        )
        return out.unsqueeze(1)

    module = types.ModuleType("flash_attn")
    vars(module).update(flash_attn_varlen_func=varlen, flash_attn_with_kvcache=with_kvcache)
    return module


KINDS = {"octavo": octavo, "vllm": vllm, "nano_vllm": nano_vllm}


def main() -> None:
    # The engine and its processes get neither end of the pipes: an empty input, and the log as output.
    passes = os.fdopen(os.dup(0), "r")
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    generate, facts = KINDS[sys.argv[1]](**json.loads(sys.argv[2]))
    results.write(json.dumps(facts) + "\n")
    for line in passes:
        asked = json.loads(line)
        began = time.perf_counter()
        try:
            num_tokens = generate(asked["prompts"], asked["num_new"], asked["salts"])
            result: dict[str, Any] = {"seconds": time.perf_counter() - began}
            if num_tokens != asked["num_new"]:
                result = {"error": f"{sum(num_tokens)} tokens came, {sum(asked['num_new'])} were asked for"}
        except Exception as error:
            logging.exception("a pass failed")
            result = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        results.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
