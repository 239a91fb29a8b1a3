"""Print an answer as it is made."""

from octavo import LLM, SamplingParams

messages = [{"role": "user", "content": "Name three colours of the rainbow."}]

with LLM("smollm2-135m") as llm:
    for chunk in llm.stream_chat(messages, SamplingParams(max_tokens=48)):
        print(chunk.text, end="", flush=True)
    print()
