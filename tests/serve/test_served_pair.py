"""The shipped pair behind the server: real text, the official client, a conversation of several turns."""

from __future__ import annotations

import pytest
from serving import Server

import deltatree
from deltatree import GenerateOptions
from deltatree.decode import Conversation
from deltatree.files import shipped_folder

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.skipif(not shipped_folder("target").exists(), reason="no shipped pair here")

FOX = [{"role": "user", "content": "Tell me a story about a fox."}]


@pytest.fixture(scope="module")
def shipped():
    server = Server(deltatree.load("shipped", device="cpu"), model_name="deltatree")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def client(shipped):
    return openai.OpenAI(base_url=shipped.url + "/v1", api_key="none", max_retries=0, timeout=60)


@pytest.mark.parametrize(
    "fields",
    [
        dict(temperature=0),
        dict(temperature=1, seed=3),
        dict(temperature=0, stop=[" t", "a"]),
        dict(temperature=0.7, seed=1, top_p=0.9),
    ],
)
def test_streams_and_answers_are_one_text(client, fields):
    ask = dict(model="deltatree", messages=FOX, max_tokens=40, **fields)
    whole, again = (client.chat.completions.create(**ask).choices[0].message.content for _ in range(2))
    streamed = "".join(c.choices[0].delta.content or "" for c in client.chat.completions.create(stream=True, **ask))
    assert whole == again == streamed


def test_turns_of_one_conversation_continue_and_say_the_same(client, shipped):
    messages, cached = list(FOX), []
    for _ in range(3):
        got = client.chat.completions.create(model="deltatree", messages=messages, max_tokens=40, temperature=0)
        prompt_ids = shipped.pair.encode(messages)
        cold = shipped.pair.collect(prompt_ids, GenerateOptions(max_new_tokens=40, budget=12))
        assert got.choices[0].message.content == cold.text
        assert got.usage.completion_tokens == len(cold.token_ids)
        cached.append(got.usage.prompt_tokens_details.cached_tokens)
        messages += [{"role": "assistant", "content": cold.text}, {"role": "user", "content": "And then?"}]
    assert cached[0] == 0 and 0 < cached[1] < cached[2]


def test_a_continued_prefill_costs_what_is_new(shipped):
    pair, held = shipped.pair, Conversation()
    prompt_ids = pair.encode("word " * 400)
    first = pair.collect(prompt_ids, GenerateOptions(max_new_tokens=8), conversation=held)
    follow = prompt_ids + first.token_ids + pair.encode("And then?")
    cold = pair.collect(follow, GenerateOptions(max_new_tokens=8))
    warm = pair.collect(follow, GenerateOptions(max_new_tokens=8), conversation=held)
    assert warm.token_ids == cold.token_ids and warm.reused_length > 400
    assert warm.prefill_seconds < cold.prefill_seconds
