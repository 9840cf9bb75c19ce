"""What clients get: the objects and stream chunks of OpenAI's API."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass, field

from deltatree.pair_api import Generation
from deltatree.serve.tools import ToolCall, ToolCallReader


@dataclass
class Reply:
    """One request's answers as they grow.

    kind: "chat" or "text"    readers: one a choice if the request has tools, else none
    """

    kind: str
    model: str
    num_choices: int
    num_prompts: int = 1
    parameters: dict[str, dict] | None = None  # of the tools' functions, by name
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    generations: dict[int, Generation] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.id = self.id or f"{'chatcmpl' if self.kind == 'chat' else 'cmpl'}-{uuid.uuid4().hex}"
        with_tools = self.parameters is not None
        self.readers = [ToolCallReader(self.parameters) if with_tools else None for _ in range(self.num_choices)]
        self.texts = [""] * self.num_choices
        self.calls: list[list[dict]] = [[] for _ in range(self.num_choices)]

    def add(self, choice: int, text: str) -> list[dict]:
        """A piece of text; returns the deltas that it makes."""
        reader = self.readers[choice]
        return self._deltas(choice, *((text, []) if reader is None else reader.push(text)))

    def finish(self, choice: int, generation: Generation) -> list[dict]:
        """The end of an answer; returns the last deltas."""
        self.generations[choice] = generation
        reader = self.readers[choice]
        return [] if reader is None else self._deltas(choice, *reader.finish())

    def finish_reason(self, choice: int) -> str:
        return "tool_calls" if self.calls[choice] else self.generations[choice].stop_reason

    def usage(self) -> dict:
        """Every prompt counts once; every answer counts what its text needed, its end token included."""
        each = self.num_choices // self.num_prompts
        done = [self.generations[i] for i in sorted(self.generations)]
        prompt = sum(g.prompt_length for g in done[::each])
        completion = sum(len(g.token_ids) for g in done)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(g.reused_length for g in done[::each])},
            "deltatree": {
                "method": done[0].method,
                "rounds": sum(g.rounds for g in done),
                "drafted": sum(sum(g.budgets) for g in done),
                "accepted": sum(sum(g.acceptance_lengths) - g.rounds for g in done),
            },
        }

    def whole(self) -> dict:
        choices = []
        for i in range(self.num_choices):
            choice = {"index": i, "finish_reason": self.finish_reason(i), "logprobs": None}
            if self.kind == "chat":
                message = {"role": "assistant", "content": self.texts[i] or (None if self.calls[i] else "")}
                if self.calls[i]:
                    message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in self.calls[i]]
                choices.append(choice | {"message": message})
            else:
                choices.append(choice | {"text": self.texts[i]})
        return self._object("chat.completion" if self.kind == "chat" else "text_completion", choices) | {
            "usage": self.usage()
        }

    def opening(self, choice: int) -> dict | None:
        return self.chunk(choice, {"role": "assistant", "content": ""}) if self.kind == "chat" else None

    def chunk(self, choice: int, delta: dict, finish_reason: str | None = None) -> dict:
        entry = {"index": choice, "finish_reason": finish_reason, "logprobs": None}
        entry |= {"delta": delta} if self.kind == "chat" else {"text": delta.get("content", "")}
        return self._object("chat.completion.chunk" if self.kind == "chat" else "text_completion", [entry])

    def usage_chunk(self) -> dict:
        name = "chat.completion.chunk" if self.kind == "chat" else "text_completion"
        return self._object(name, []) | {"usage": self.usage()}

    def _deltas(self, choice: int, text: str, calls: list[ToolCall]) -> list[dict]:
        self.texts[choice] += text
        deltas = [{"content": text}] if text else []
        for call in calls:
            entry = {
                "index": len(self.calls[choice]),
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            self.calls[choice].append(entry)
            deltas.append({"tool_calls": [entry]})
        return deltas

    def _object(self, name: str, choices: list[dict]) -> dict:
        return {"id": self.id, "object": name, "created": self.created, "model": self.model, "choices": choices}


def event(data: dict | str) -> str:
    """One server-sent event."""
    return f"data: {data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)}\n\n"
