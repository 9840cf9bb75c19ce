"""Tool calls in the text of the Qwen families, in both of their dialects.

<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
<tool_call><function=add><parameter=a>1</parameter></function></tool_call>
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)\s*>(.*?)(?:</function>\s*)?\Z", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)\s*>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str  # JSON


class ToolCallReader:
    """Splits text that streams in into what is for the user and calls. What only looks like a call is text.

    parameters: JSON schemas of the functions' parameters by function name, for values that are not text
    """

    def __init__(self, parameters: dict[str, dict]) -> None:
        self.parameters = parameters
        self.num_calls = 0
        self._text = ""  # not yet handed out

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Text for the user, and calls that are complete."""
        self._text += text
        shown, calls = "", []
        while (start := self._text.find(OPEN)) >= 0 and (end := self._text.find(CLOSE, start)) >= 0:
            call = self._parse(self._text[start + len(OPEN) : end])
            before, whole = self._text[:start], self._text[start : end + len(CLOSE)]
            self._text = self._text[end + len(CLOSE) :]
            if call is None:
                shown += before + whole
            else:
                shown += before.rstrip()
                calls.append(call)
                self.num_calls += 1
        if start < 0:  # what may become an opening mark waits, and the white space before it
            keep = next((n for n in range(len(OPEN) - 1, 0, -1) if self._text.endswith(OPEN[:n])), 0)
            certain = self._text[: len(self._text) - keep].rstrip()
            if certain:
                shown += certain
                self._text = self._text[len(certain) :]
        elif before := self._text[:start].rstrip():
            shown += before
            self._text = self._text[len(before) :]
        return shown, calls

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The rest, when no text follows: a call that was not closed counts if it can be read."""
        rest, self._text = self._text, ""
        if OPEN in rest:
            before, _, inside = rest.partition(OPEN)
            call = self._parse(inside)
            if call is not None:
                self.num_calls += 1
                return before.rstrip(), [call]
        return ("" if self.num_calls and not rest.strip() else rest), []

    def _parse(self, inside: str) -> ToolCall | None:
        if found := _FUNCTION.match(inside):
            name, body = found.groups()
            types = self.parameters.get(name, {}).get("properties", {})
            values = {key: _typed(value, types.get(key)) for key, value in _PARAMETER.findall(body)}
            return ToolCall(name, json.dumps(values, ensure_ascii=False))
        try:
            call = json.loads(inside)
            arguments = call.get("arguments", {})
            name = call["name"]
        except (ValueError, KeyError, AttributeError, RecursionError):
            return None
        if not isinstance(name, str) or not name:
            return None
        if isinstance(arguments, str):  # some checkpoints write the arguments as a text of JSON
            return ToolCall(name, arguments)
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _typed(value: str, schema) -> object:
    """A parameter's text as its schema wants it; text where there is none."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind is None or kind == "string":
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        lowered = value.strip().lower()  # Python's words for JSON's
        return {"true": True, "false": False, "none": None}.get(lowered, value)
