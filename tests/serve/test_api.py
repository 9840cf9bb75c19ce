"""The endpoints as OpenAI's own client and plain HTTP see them."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
from serving import chat_body, make_pair

from deltatree import GenerateOptions
from deltatree.drafter import RightDrafter
from deltatree.text import detokenize

openai = pytest.importorskip("openai")


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60)


def ask(client, text="hello", **fields):
    return client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": text}], **fields)


def test_chat_is_what_the_pair_generates(client, server):
    got = ask(client, temperature=0, max_tokens=20)
    prompt_ids = server.pair.encode([{"role": "user", "content": "hello"}])
    alone = server.pair.collect(prompt_ids, GenerateOptions(max_new_tokens=20, budget=12))
    assert got.choices[0].message.content == alone.text and got.choices[0].finish_reason == alone.stop_reason
    assert got.usage.prompt_tokens == len(prompt_ids) and got.usage.completion_tokens == len(alone.token_ids)
    assert got.usage.total_tokens == got.usage.prompt_tokens + got.usage.completion_tokens
    assert ask(client, temperature=0, max_completion_tokens=20).choices[0].message.content == alone.text


@pytest.mark.parametrize(
    "fields", [dict(temperature=0), dict(temperature=1, seed=5), dict(temperature=1.3, seed=6, top_p=0.9)]
)
def test_streamed_pieces_joined_are_the_answer(client, fields):
    whole = ask(client, max_tokens=24, **fields).choices[0]
    with ask(client, max_tokens=24, stream=True, stream_options={"include_usage": True}, **fields) as stream:
        chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.finish_reason
    assert chunks[-1].usage.completion_tokens > 0 and not chunks[-1].choices
    assert len({c.id for c in chunks}) == 1


def test_completion_and_its_stream(client, server):
    got = client.completions.create(model="tiny", prompt="once", max_tokens=16, temperature=0)
    prompt_ids = server.pair.encode("once", raw=True)
    assert got.choices[0].text == server.pair.collect(prompt_ids, GenerateOptions(max_new_tokens=16)).text
    pieces = client.completions.create(model="tiny", prompt="once", max_tokens=16, temperature=0, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == got.choices[0].text
    assert (
        client.completions.create(model="tiny", prompt=prompt_ids, max_tokens=16, temperature=0).choices[0].text
        == got.choices[0].text
    )
    several = client.completions.create(model="tiny", prompt=["once", "twice"], max_tokens=4, temperature=0, n=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == several.choices[1].text == got.choices[0].text[: len(several.choices[0].text)]
    assert several.usage.prompt_tokens == len(prompt_ids) + len(server.pair.encode("twice", raw=True))


def test_stop_strings_end_the_text_and_the_bill(client):
    whole = ask(client, temperature=0, max_tokens=24).choices[0].message.content
    stop = whole[9:11]
    got = ask(client, temperature=0, max_tokens=24, stop=[stop, "\u4e2d"])
    assert got.choices[0].message.content == whole[: whole.index(stop)] and got.choices[0].finish_reason == "stop"
    assert got.usage.completion_tokens < 24
    streamed = "".join(
        c.choices[0].delta.content or "" for c in ask(client, temperature=0, max_tokens=24, stop=stop, stream=True)
    )
    assert streamed == got.choices[0].message.content


def test_B25_logprobs_are_refused_not_invented(client):
    for fields in (dict(logprobs=True), dict(logprobs=True, top_logprobs=2)):
        with pytest.raises(openai.BadRequestError, match="log-probabilities"):
            ask(client, **fields)
    with pytest.raises(openai.BadRequestError, match="log-probabilities"):
        client.completions.create(model="tiny", prompt="once", logprobs=2)


@pytest.mark.parametrize("cap", [*range(1, 10), 16])
def test_B22_B23_the_cap_is_exact_and_the_bill_adds_up(start, server, cap):
    """A drafter that is always right, whole and streamed: tokens delivered, billed and counted are one number."""
    prompt_ids = server.pair.encode("once", raw=True)
    plain = server.pair.collect(prompt_ids, GenerateOptions(max_new_tokens=20, method="ar", ignore_eos=True))
    right = start(make_pair(RightDrafter(prompt_ids + plain.token_ids, server.pair.target.vocab_size)))
    how = dict(max_tokens=cap, temperature=0, ignore_eos=True)
    status, got = right.complete(prompt_ids, **how)
    assert status == 200 and got["usage"]["completion_tokens"] == cap
    assert got["usage"]["total_tokens"] == len(prompt_ids) + cap
    assert got["choices"][0]["text"] == detokenize(server.pair.tokenizer, plain.token_ids[:cap])
    stop = detokenize(server.pair.tokenizer, plain.token_ids[2:4])
    status, cut = right.complete(prompt_ids, stop=[stop], **how)
    assert status == 200 and cut["choices"][0]["text"] == got["choices"][0]["text"].split(stop)[0]
    assert cut["usage"]["completion_tokens"] == min(cap, 2) or stop not in got["choices"][0]["text"]
    figures = right.send("GET", "/metrics")[2].decode()
    billed = got["usage"]["completion_tokens"] + cut["usage"]["completion_tokens"]
    assert f"deltatree_completion_tokens_total {float(billed)}" in figures


def test_B47_every_answer_says_how_it_came_about(server, start):
    first, second = (server.complete("once", max_tokens=16, temperature=0)[1]["usage"]["deltatree"] for _ in range(2))
    assert first == second and first["method"] == "ddtree" and first["drafted"] > first["accepted"] >= 0
    plain = start(defaults=GenerateOptions(max_new_tokens=24, method="ar")).complete(
        "once", max_tokens=16, temperature=0
    )[1]["usage"]["deltatree"]
    assert plain == {"method": "ar", "rounds": 15, "drafted": 0, "accepted": 0}


def test_seeds_repeat_and_answers_of_one_request_differ(client):
    first = ask(client, temperature=1, seed=9, max_tokens=16, n=3)
    again = ask(client, temperature=1, seed=9, max_tokens=16, n=3)
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices] and len(set(texts)) == 3
    assert texts[0] == ask(client, temperature=1, seed=9, max_tokens=16).choices[0].message.content
    streams: dict[int, str] = {}
    for chunk in ask(client, temperature=1, seed=9, max_tokens=16, n=3, stream=True):
        for choice in chunk.choices:
            streams[choice.index] = streams.get(choice.index, "") + (choice.delta.content or "")
    assert [streams[i] for i in range(3)] == texts


def test_bias_and_penalties_reach_the_decoder(client):
    free = ask(client, temperature=0, max_tokens=8).choices[0].message.content
    wanted = {str(ord("z") - 33): 100}  # the byte "z" in the tokenizer's alphabet
    assert ask(client, temperature=0, max_tokens=8, logit_bias=wanted).choices[0].message.content == "z" * 8
    held = ask(
        client,
        temperature=0,
        max_tokens=8,
        presence_penalty=2,
        frequency_penalty=2,
        extra_body={"repetition_penalty": 1.5},
    )
    assert held.choices[0].message.content and isinstance(free, str)


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_clients_errors_have_their_classes(client):
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "a"}])
    with pytest.raises(openai.BadRequestError, match="temperature"):
        ask(client, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        ask(client, tool_choice="required")


def test_json_schema(client):
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    shape = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    got = ask(
        client,
        temperature=0,
        max_tokens=60,
        response_format=shape,
        logit_bias={"220": -100, "197": -100, "198": -100, "201": -100},
    )
    if got.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(got.choices[0].message.content)["ok"], bool)
    with pytest.raises(openai.BadRequestError, match="json_schema cannot be used"):
        ask(
            client,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}},
        )


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_curl(server):
    def curl(*arguments):
        command = ["curl", "--silent", "--show-error", "--noproxy", "*", "--max-time", "60", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    body = json.dumps(chat_body(max_tokens=8, temperature=0))
    post = ("-H", "Content-Type: application/json", "-d")
    whole = json.loads(curl(server.url + "/v1/chat/completions", *post, body))["choices"][0]["message"]["content"]
    lines = curl(
        server.url + "/v1/chat/completions",
        "-N",
        *post,
        json.dumps(chat_body(max_tokens=8, temperature=0, stream=True)),
    )
    events = [line.removeprefix("data: ") for line in lines.split("\n") if line]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(e)["choices"][0]["delta"].get("content", "") for e in events[:-1]) == whole
    assert "deltatree_requests_total" in curl(server.url + "/metrics")
    assert json.loads(curl(server.url + "/health"))["status"] == "ok"


def test_metrics_count_what_clients_got(start):
    server = start()
    status, got = server.chat(max_tokens=12, temperature=0)
    assert status == 200
    server.chat(max_tokens=12, temperature=0, logprobs=True)
    lines = server.send("GET", "/metrics")[2].decode().splitlines()
    figures = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert float(figures["deltatree_completion_tokens_total"]) == got["usage"]["completion_tokens"]
    assert float(figures["deltatree_prompt_tokens_total"]) == got["usage"]["prompt_tokens"]
    assert float(figures['deltatree_generations_total{ended="finished"}']) == 1
    assert float(figures['deltatree_requests_total{path="/v1/chat/completions",status="400"}']) == 1
    assert float(figures["deltatree_acceptance_length_count"]) == 1 and float(figures["deltatree_rounds_total"]) > 0
    assert float(figures["deltatree_queue_waiting"]) == 0
