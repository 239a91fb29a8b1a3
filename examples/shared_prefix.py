"""Ask several questions about one text: its keys and values are computed once."""

from octavo import LLM, SamplingParams

text = (
    "Octavo folds the KV cache into blocks of sixteen tokens, as a sheet is folded into sixteen pages. " * 8
)
questions = ["What is folded?", "How many pages are there?", "What is a block?"]

with LLM("smollm2-135m") as llm:
    for question in questions:
        output = llm.generate(text + question, SamplingParams(max_tokens=8), use_tqdm=False)[0]
        num_tokens = len(output.prompt_token_ids)
        print(f"{question} {output.num_cached_tokens} of {num_tokens} prompt tokens came from the cache")
