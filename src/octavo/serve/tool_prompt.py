"""Tools for models whose chat template does not know them (or writes them in a form that is not read here):
they are described in the system message, and past calls and results become plain text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.serve.tools import CLOSE, OPEN

_INTRODUCTION = """\
# Tools

You may call functions to help with the user's request. These are their signatures, one JSON object per line:
<tools>
{tools}
</tools>

To call a function, answer with a JSON object of its name and arguments within {open}{close} tags:
{open}
{{"name": <function name>, "arguments": <object of arguments>}}
{close}"""


def knows_tools(templates: Mapping[str, str]) -> bool:
    """Whether a model's own template describes tools, in the form that is read here."""
    source = templates.get("tool_use", templates.get("default", ""))
    return OPEN in source


def with_tools_as_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The messages with `tools` in the system message, and nothing in them but text."""
    plain = [_as_text(message) for message in messages]
    if not tools:
        return plain
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    introduction = _INTRODUCTION.format(tools=listed, open=OPEN, close=CLOSE)
    if plain and plain[0]["role"] == "system":
        first = {**plain[0], "content": f"{plain[0]['content']}\n\n{introduction}"}
        return [first, *plain[1:]]
    return [{"role": "system", "content": introduction}, *plain]


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content", "")
    if not isinstance(content, str):
        content = "\n".join(part["text"] for part in content)
    calls = [
        f"{OPEN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CLOSE}"
        for call in message.get("tool_calls", ())
    ]
    role = message["role"]
    if role == "tool":
        # These templates have no place for results but the user's turn.
        role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
    kept = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
    return {**kept, "role": role, "content": "\n".join(filter(None, [content, *calls]))}
