"""Answer several prompts at once."""

from octavo import LLM, SamplingParams

prompts = ["The capital of France is", "Water boils at", "The opposite of hot is"]

with LLM("smollm2-135m") as llm:
    for output in llm.generate(prompts, SamplingParams(max_tokens=12), use_tqdm=False):
        print(f"{output.prompt!r} -> {output.text!r}")
