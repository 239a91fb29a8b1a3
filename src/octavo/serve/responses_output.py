"""The output items of /v1/responses as they grow, and the events that tell of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.serve.answer import new_id
from octavo.serve.tools import Event

EventBody = dict[str, Any]


class OutputBuilder:
    """Reasoning, messages and function calls, one after the other.

    `items` is what there is so far. Every method returns the events that tell of the change, each a dict with
    its `type`; numbers in sequence are put on where they are sent.
    """

    def __init__(self) -> None:
        self.items: list[EventBody] = []
        self._open: EventBody | None = None

    def add(self, event: Event, logprobs: Sequence[Any] = ()) -> list[EventBody]:
        """A piece of the answer; `logprobs` are those of a message's tokens."""
        match event.kind:
            case "content":
                events = self._begin("message")
                part = self._item["content"][0]
                part["text"] += event.text
                part["logprobs"] += logprobs
                delta = self._about("response.output_text.delta", delta=event.text, logprobs=list(logprobs))
            case "reasoning":
                events = self._begin("reasoning")
                self._item["content"][0]["text"] += event.text
                delta = self._about("response.reasoning_text.delta", delta=event.text)
            case "tool_name":
                return self._begin("function_call", event.text)
            case "tool_arguments":
                events = []
                self._item["arguments"] += event.text
                delta = self._about("response.function_call_arguments.delta", delta=event.text)
        return [*events, delta]

    def add_logprobs(self, logprobs: Sequence[Any]) -> None:
        """Of a message's tokens without text, such as the one that ended it: told when the message ends."""
        if self._open is not None and self._open["type"] == "message":
            self._open["content"][0]["logprobs"] += logprobs

    def finish(self, *, is_cut: bool) -> list[EventBody]:
        """The end of the last item; `is_cut`: at the limit of tokens, so that it is incomplete."""
        return self._end("incomplete" if is_cut else "completed")

    @property
    def _item(self) -> EventBody:
        assert self._open is not None
        return self._open

    def _begin(self, kind: str, name: str = "") -> list[EventBody]:
        if kind != "function_call" and self._open is not None and self._open["type"] == kind:
            return []
        events = self._end("completed")
        item = _empty_item(kind, name)
        self._open = item
        self.items.append(item)
        added = {"type": "response.output_item.added", "output_index": len(self.items) - 1}
        if kind == "function_call":
            return [*events, {**added, "item": dict(item)}]
        part = item["content"][0]
        events.append({**added, "item": {**item, "content": []}})
        return [*events, self._about("response.content_part.added", part=_copy(part))]

    def _end(self, status: str) -> list[EventBody]:
        item = self._open
        if item is None:
            return []
        events: list[EventBody] = []
        item["status"] = status
        if item["type"] == "function_call":
            events.append(
                self._about(
                    "response.function_call_arguments.done", name=item["name"], arguments=item["arguments"]
                )
            )
        else:
            part = item["content"][0]
            if item["type"] == "message":
                done = {"text": part["text"], "logprobs": part["logprobs"]}
                events.append(self._about("response.output_text.done", **done))
            else:
                events.append(self._about("response.reasoning_text.done", text=part["text"]))
            events.append(self._about("response.content_part.done", part=_copy(part)))
        events.append(
            {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}
        )
        self._open = None
        return events

    def _about(self, type: str, **more: Any) -> EventBody:
        """An event about the open item, or its one content part."""
        event = {"type": type, "item_id": self._item["id"], "output_index": len(self.items) - 1}
        if self._item["type"] != "function_call":
            event["content_index"] = 0
        return {**event, **more}


def _empty_item(kind: str, name: str) -> EventBody:
    if kind == "function_call":
        return {
            "id": new_id("fc"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": new_id("call"),
            "name": name,
            "arguments": "",
        }
    if kind == "reasoning":
        part: EventBody = {"type": "reasoning_text", "text": ""}
        return {
            "id": new_id("rs"),
            "type": "reasoning",
            "status": "in_progress",
            "summary": [],
            "content": [part],
        }
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {
        "id": new_id("msg"),
        "type": "message",
        "status": "in_progress",
        "role": "assistant",
        "content": [part],
    }


def _copy(part: EventBody) -> EventBody:
    return {key: list(value) if isinstance(value, list) else value for key, value in part.items()}
