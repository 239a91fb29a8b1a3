"""A server and the official client: a stream, an answer in a format, a forced tool call.

Needs, in a clone: pip install -e '.[serve]' openai
"""

import contextlib
import json
import subprocess
import sys

from openai import OpenAI
from pydantic import BaseModel

MODEL = "smollm2-135m"


class City(BaseModel):
    name: str
    country: str


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
        },
    },
}


@contextlib.contextmanager
def server(*arguments):
    """`octavo serve` on a free port, as it would run on a machine of its own."""
    command = (sys.executable, "-m", "octavo", "serve", *arguments, "--port", "0")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        ready = next(line for line in process.stdout if "ready" in line)
        yield ready.split()[-1]
    finally:
        process.terminate()
        process.communicate()


def ask(text, **fields):
    messages = [{"role": "user", "content": text}]
    return {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 100, **fields}


def main() -> None:
    with server(MODEL) as url, OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        for chunk in client.chat.completions.create(**ask("What is the capital of France?"), stream=True):
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        print()

        answer = client.chat.completions.parse(**ask("Describe Paris as JSON."), response_format=City)
        print(answer.choices[0].message.parsed)

        question = ask(
            "What is the weather in Paris, in celsius?", tools=[WEATHER], parallel_tool_calls=False
        )
        choice = client.chat.completions.create(**question, tool_choice="required").choices[0]
        call = choice.message.tool_calls[0].function
        print(choice.finish_reason, call.name, json.loads(call.arguments))


if __name__ == "__main__":
    main()
