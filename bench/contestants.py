"""One engine in one process, asked through its standard input: `python bench/contestants.py KIND OPTIONS`.

KIND is octavo, transformers or llama.cpp; OPTIONS is a JSON object. Each line read is a workload
``{"prompts": [[id]], "num_new": [int]}`` (greedy, no stop token); each line written its result
``{"seconds": float, "token_ids": [[id]] or null, "rss": bytes}``. The first line written says that the
model is loaded.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

NUM_THREADS = 2
MAX_LEN = 1024
BATCH = 16

Answer = Callable[[list[list[int]], list[int]], list[list[int]] | None]


def octavo(model: str, **options: Any) -> Answer:
    from octavo import LLM, SamplingParams

    # The rounds repeat their prompts, which a prefix cache would answer without computing them.
    llm = LLM(
        model,
        num_threads=NUM_THREADS,
        max_model_len=MAX_LEN,
        num_blocks=BATCH * MAX_LEN // 16,
        enable_prefix_caching=False,
        **options,
    )

    def answer(prompts: list[list[int]], num_new: list[int]) -> list[list[int]]:
        params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in num_new]
        return [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]

    return answer


def transformers(folder: str, dtype: str) -> Answer:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(NUM_THREADS)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model.generation_config.eos_token_id = None

    def answer(prompts: list[list[int]], num_new: list[int]) -> list[list[int]]:
        """One left-padded batch that runs until its longest answer is done, as `generate` does."""
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        longest = max(num_new)
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=longest,
            min_new_tokens=longest,
            pad_token_id=0,
        )
        return [row[width : width + n].tolist() for row, n in zip(out, num_new, strict=True)]

    return answer


def llama_cpp(gguf: str) -> Answer:
    """llama.cpp's own server with continuous batching, in this process (the wheel `xllamacpp`)."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = gguf
    params.n_ctx = BATCH * MAX_LEN
    params.n_parallel = BATCH
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = NUM_THREADS
    params.cache_prompt = False
    params.verbosity = 0
    server = xllamacpp.Server(params)

    def one(prompt: list[int], n: int) -> None:
        request = {
            "prompt": prompt,
            "n_predict": n,
            "ignore_eos": True,
            "temperature": 0.0,
            "cache_prompt": False,
        }
        reply = server.handle_completions(request)
        done = reply["usage"]["completion_tokens"]
        if done != n:
            raise SystemExit(f"llama.cpp generated {done} tokens instead of {n}")

    def answer(prompts: list[list[int]], num_new: list[int]) -> None:
        threads = [threading.Thread(target=one, args=job) for job in zip(prompts, num_new, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return answer


def rss_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    # Engines may print; the answers keep the real standard output for themselves.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_THREADS])
    kinds = {"octavo": octavo, "transformers": transformers, "llama.cpp": llama_cpp}
    answer = kinds[sys.argv[1]](**json.loads(sys.argv[2]))
    replies.write(json.dumps({"rss": rss_bytes()}) + "\n")
    for line in sys.stdin:
        workload = json.loads(line)
        started = time.perf_counter()
        token_ids = answer(workload["prompts"], workload["num_new"])
        elapsed = time.perf_counter() - started
        replies.write(json.dumps({"seconds": elapsed, "token_ids": token_ids, "rss": rss_bytes()}) + "\n")


if __name__ == "__main__":
    main()
