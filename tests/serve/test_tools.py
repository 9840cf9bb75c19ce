"""Tool calls: rendered by the template, read from the text in both dialects, whole or streamed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from serving import make_pair

from deltatree import Pair
from deltatree.drafter.scripted import NoDrafter
from deltatree.serve.tools import ToolCallReader

PARAMETERS = {"add": {"properties": {"a": {"type": "integer"}, "note": {"type": "string"}, "deep": {"type": "object"}}}}
JSON_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "note": "2"}}\n</tool_call>'
XML_CALL = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=note>\n2\n</parameter>\n</function>\n</tool_call>"


def read(text: str, step: int) -> tuple[str, list]:
    reader, shown, calls = ToolCallReader(PARAMETERS), "", []
    for at in range(0, len(text), step):
        piece, found = reader.push(text[at : at + step])
        shown, calls = shown + piece, calls + found
    piece, found = reader.finish()
    return shown + piece, [(call.name, json.loads(call.arguments)) for call in calls + found]


@pytest.mark.parametrize("step", [1, 3, 7, 1000])
@pytest.mark.parametrize("call", [JSON_CALL, XML_CALL])
def test_calls_are_read_in_both_dialects(call, step):
    wanted = ("add", {"a": 1, "note": "2"})
    assert read(call, step) == ("", [wanted])
    assert read(f"Let me add.\n\n{call}", step) == ("Let me add.", [wanted])
    assert read(f"{call}\n{call}\n", step) == ("", [wanted, wanted])
    assert read(call.removesuffix("</tool_call>"), step) == ("", [wanted])  # ended without closing it


@pytest.mark.parametrize("step", [1, 5, 1000])
@pytest.mark.parametrize(
    "text",
    [
        "a < b and <tool",
        "<tool_call>nonsense</tool_call> more",
        '<tool_call>{"name": 3}</tool_call>',
        "plain \n",
        "",
        '<tool_call>{"na',
    ],
)
def test_what_is_no_call_is_text(text, step):
    assert read(text, step) == (text, [])


def test_values_have_their_schemas_types():
    text = '<tool_call><function=add><parameter=a>\n[1, {"b": null}]\n</parameter><parameter=note>\ntwo\nlines\n</parameter><parameter=deep>{"x": True}</parameter></function></tool_call>'
    assert read(text, 1000)[1] == [("add", {"a": [1, {"b": None}], "note": "two\nlines", "deep": '{"x": True}'})]
    assert read("<tool_call><function=now></function></tool_call>", 1000)[1] == [("now", {})]


@pytest.fixture(scope="module")
def calling(pair):
    """A pair whose target says whatever stands in `text`."""
    tokenizer, said = pair.tokenizer, {}
    base = make_pair().target

    class Says(type(base)):
        def verify(self, tree, state):
            found = super().verify(tree, state)
            return self._say(found, state.length)

        def prefill(self, token_ids, state):
            return self._say(super().prefill(token_ids, state), state.length - 1)

        def _say(self, found, position):
            script = said["ids"]
            index = position - said["prompt"] + 1
            logits = torch.zeros(found.logits.shape)
            logits[:, script[index] if 0 <= index < len(script) else tokenizer.eos_token_id] = 50
            return replace(found, logits=logits)

    base.__class__ = Says
    return Pair(base, tokenizer, NoDrafter(base.vocab_size), pair.stop_ids), said


@pytest.mark.parametrize("call", [JSON_CALL, XML_CALL])
def test_calls_reach_the_client(start, calling, call):
    openai = pytest.importorskip("openai")
    pair, said = calling
    server = start(pair)
    tools = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": PARAMETERS["add"]}}]
    messages = [{"role": "user", "content": "add them"}]
    said["ids"] = pair.tokenizer.encode("Well.\n" + call)
    said["prompt"] = len(pair.encode(messages, tools=tools))
    assert said["prompt"] > len(pair.encode(messages)) + 50  # the template has them
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    ask = dict(model="tiny", messages=messages, tools=tools, temperature=0, max_tokens=400)
    got = client.chat.completions.create(**ask).choices[0]
    assert got.finish_reason == "tool_calls" and got.message.content == "Well."
    assert [(c.function.name, json.loads(c.function.arguments)) for c in got.message.tool_calls] == [
        ("add", {"a": 1, "note": "2"})
    ]
    deltas = [chunk.choices[0] for chunk in client.chat.completions.create(stream=True, **ask)]
    assert "".join(d.delta.content or "" for d in deltas) == "Well." and deltas[-1].finish_reason == "tool_calls"
    assert [c.function.name for d in deltas for c in d.delta.tool_calls or []] == ["add"]
    # the answer goes back as the client holds it, with the tool's result
    follow_up = [
        *messages,
        got.message.model_dump(),
        {"role": "tool", "tool_call_id": got.message.tool_calls[0].id, "content": "3"},
    ]
    said["prompt"] = 10**9
    assert client.chat.completions.create(**(ask | {"messages": follow_up, "max_tokens": 2})).usage.prompt_tokens > 0
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        client.chat.completions.create(tool_choice={"type": "function", "function": {"name": "add"}}, **ask)
