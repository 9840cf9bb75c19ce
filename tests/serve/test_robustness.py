"""What goes wrong outside: bad requests, full queues, clients that leave, shutdown. The server lives on."""

from __future__ import annotations

import gc
import json
import logging
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from serving import Server, chat_body, make_pair

from deltatree.drafter.scripted import RandomDrafter
from deltatree.errors import OptionError
from deltatree.serve import ServeOptions, create_app
from deltatree.state import TreeState

CHAT = "/v1/chat/completions"
DEEP = b'{"model": "tiny", "messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"
USER = [{"role": "user", "content": "a"}]

BAD = [
    (b"", "body"), (b"{", "JSON"), (b"\xff\xfe{}", ""), (b"[]", ""), (b"null", ""), (DEEP, ""),
    ({}, "required"), ({"model": "tiny", "messages": []}, "messages"), ({"model": 7, "messages": USER}, "model"),
    ({"model": "tiny", "messages": [{"role": "king", "content": "a"}]}, "role"),
    ({"model": "tiny", "messages": [{"role": "user", "content": 7}]}, "content"),
    ({"model": "tiny", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "content"),
    (b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}', "Unicode"),
    (b'{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "\\ud800": 1}', ""),
    (b'{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "temperature": NaN}', "temperature"),
    (b'{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "seed": 1' + b"0" * 5000 + b"}", ""),
    (chat_body(temperature=-1), "temperature"), (chat_body(temperature="hot"), "temperature"), (chat_body(top_p=0), "top_p"),
    (chat_body(max_tokens=0), "max_tokens"), (chat_body(max_tokens=10**9), "context"), (chat_body(max_tokens=1.5), "max_tokens"),
    (chat_body(max_tokens=True), "max_tokens"), (chat_body(n=0), "n:"), (chat_body(n=100), "answers"),
    (chat_body(n=1 << 70), "n:"), (chat_body(seed=-1), "seed"),
    (chat_body(seed=1 << 70), "seed"), (chat_body(stop=[""]), "stop"), (chat_body(stop=7), "stop"), (chat_body(stream="yes"), "stream"),
    (chat_body(logit_bias={"a": 1}), "logit_bias"), (chat_body(logit_bias={"99999": 1}), "vocabulary"),
    (chat_body(logit_bias={"1": 1000}), "logit_bias"), (chat_body(logprobs=True), "log-probabilities"),
    (chat_body(functions=[]), "functions"), (chat_body(unknown=1), "unknown"), (chat_body(min_tokens=9, max_tokens=3), "min_new_tokens"),
    (chat_body(tools=[{"type": "function"}]), "function"), (chat_body(stop_token_ids=[99999]), "vocabulary"),
    (chat_body("x" * 20_000), "context"), (chat_body(grammar="start: ((("), "grammar"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(BAD)))
def test_a_bad_request_is_one_sentence(server, case):
    body, about = BAD[case]
    status, _headers, data = server.send("POST", CHAT, body)
    assert status == 400, (status, data[:300])
    error = json.loads(data)["error"]
    assert about.lower() in error["message"].lower() and error["type"] == "invalid_request_error"
    assert "Traceback" not in error["message"] and len(error["message"]) < 500 and "\n" not in error["message"]


def test_the_server_lives_on_after_bad_requests(server):
    assert server.chat(max_tokens=2)[0] == 200 and server.send("GET", "/health")[0] == 200


def test_other_refusals(server):
    assert server.post(CHAT, {"model": "other", "messages": USER})[0] == 404
    assert server.send("POST", CHAT, b'{"model": "\\ud800", "messages": [{"role": "user", "content": "a"}]}')[0] == 404
    assert server.complete(prompt="")[0] == server.complete(prompt=[])[0] == server.complete(prompt=[9999])[0] == 400
    assert server.complete(echo=True)[0] == server.complete(best_of=3)[0] == server.complete(logprobs=2)[0] == 400
    assert server.send("GET", CHAT)[0] == 405 and server.send("GET", "/nowhere")[0] == 404
    assert server.send("POST", CHAT, b"x" * (4 << 20) + b"x")[0] == 413
    assert server.chat(max_tokens=2)[0] == 200


def test_a_chunked_body_has_the_same_limit(start):
    small = start(max_body_bytes=2000)
    with socket.create_connection(("127.0.0.1", small.port), timeout=10) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for _ in range(5):
            connection.sendall(b"3e8\r\n" + b" " * 1000 + b"\r\n")
        connection.sendall(b"0\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 413")
    assert small.chat(max_tokens=1)[0] == 200


def test_the_key_is_asked_for(start):
    locked = start(api_key="open sesame")
    assert locked.chat(max_tokens=1)[0] == 401
    body = json.dumps(chat_body(max_tokens=1)).encode()
    assert locked.send("POST", CHAT, body, {"Authorization": "Bearer wrong"})[0] == 401
    assert locked.send("POST", CHAT, body, {"Authorization": "Bearer open sesame"})[0] == 200
    assert locked.send("GET", "/health")[0] == 200


class SlowDrafter(RandomDrafter):
    """Takes its time, so that a test can act in between; `gate` holds it."""

    def __init__(self, vocab_size: int, seconds: float = 0.05) -> None:
        super().__init__(vocab_size)
        script, self.rounds = self.script, 0

        def slow(committed: int, bonus: int):
            self.rounds += 1
            time.sleep(seconds)
            return script(committed, bonus)

        self.script = slow


@pytest.fixture
def slow_pair(pair):
    from byte_tokenizer import VOCAB

    from deltatree import Pair

    return Pair(pair.target, pair.tokenizer, SlowDrafter(VOCAB), frozenset())


def open_stream(server: Server, **fields) -> socket.socket:
    body = json.dumps(chat_body(stream=True, **fields)).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def wait_for(condition, seconds: float = 10) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()


def test_a_full_queue_says_when_to_come_back(start, slow_pair):
    server = start(slow_pair, max_queue=2)
    first = open_stream(server, max_tokens=2000, ignore_eos=True)
    assert wait_for(lambda: server.engine.running is not None)
    waiting = [open_stream(server, max_tokens=2) for _ in range(2)]
    assert wait_for(lambda: server.engine.num_waiting == 2)
    status, headers, data = server.send("POST", CHAT, chat_body(max_tokens=2))
    assert status == 429 and int({k.lower(): v for k, v in headers.items()}["retry-after"]) >= 1
    assert b"try again" in data
    waiting[0].close()  # whoever leaves makes room
    assert wait_for(lambda: server.engine.num_waiting == 1)
    first.close()
    assert waiting[1].recv(12) == b"HTTP/1.1 200"
    waiting[1].close()
    assert server.is_idle()


def test_when_the_client_leaves_decoding_ends(start, slow_pair):
    server = start(slow_pair)
    stream = open_stream(server, max_tokens=2000, ignore_eos=True)
    assert b"200" in stream.recv(20)
    stream.close()
    assert server.is_idle(5)
    body = json.dumps(chat_body(max_tokens=2000, ignore_eos=True)).encode()  # and without a stream
    plain = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    plain.sendall(
        f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    assert wait_for(lambda: server.engine.running is not None)
    plain.close()
    assert server.is_idle(5)
    assert server.chat(max_tokens=2)[0] == 200


def test_a_request_has_a_time_limit(start, slow_pair):
    server = start(slow_pair, timeout_seconds=1.5)
    status, got = server.chat(max_tokens=2000, ignore_eos=True)
    assert status == 504 and "too long" in got["error"]["message"]
    status, _, data = server.send("POST", CHAT, chat_body(max_tokens=2000, ignore_eos=True, stream=True))
    assert status == 200 and b"too long" in data.strip().split(b"\n")[-1]
    assert server.is_idle(5)
    assert server.chat(max_tokens=2)[0] == 200


def test_shutdown_lets_running_requests_finish(slow_pair):
    server = Server(slow_pair)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.chat, max_tokens=12, ignore_eos=True)
        assert wait_for(lambda: server.engine.running is not None)
        server.stop()
        status, got = answer.result(20)
    assert status == 200 and got["usage"]["completion_tokens"] == 12
    assert not server.engine.is_alive


def test_what_fails_inside_stays_inside(start, pair, caplog):
    broken = make_pair()

    def explode(tree, state):
        raise RuntimeError("secret detail")

    verify, broken.target.verify = broken.target.verify, explode
    server = start(broken)
    with caplog.at_level(logging.CRITICAL):
        status, got = server.chat(max_tokens=4, temperature=0)  # a sampled text may end before it is verified
    assert status == 500 and "secret" not in json.dumps(got)
    broken.target.verify = verify
    assert server.chat(max_tokens=4, temperature=0)[1]["choices"][0]["message"]["content"] is not None


def test_prompts_are_logged_only_when_asked(start, caplog):
    with caplog.at_level(logging.DEBUG):
        start().chat("a very private matter", max_tokens=1)
    assert "private" not in caplog.text
    with caplog.at_level(logging.DEBUG):
        start(log_prompts=True).chat("a very public matter", max_tokens=1)
    assert "a very public matter" in caplog.text


@pytest.mark.parametrize(
    "wrong", [dict(port=70000), dict(max_queue=0), dict(timeout_seconds=0), dict(model_name=" "), dict(api_key="")]
)
def test_options_are_checked(wrong):
    with pytest.raises(OptionError):
        ServeOptions(**wrong)


def test_a_method_without_its_drafter_is_refused_at_start(pair):
    from deltatree import Pair

    with pytest.raises(OptionError, match="needs a drafter"):
        create_app(Pair(pair.target, pair.tokenizer), ServeOptions())


@pytest.mark.parametrize("clients", [2, 4, 8])
def test_B51_simultaneous_requests_are_as_alone(start, clients):
    """Distinct prompts and caps at once, one of them at temperature 1; the answers wait for each other."""
    server = start(max_queue=16)
    words = ("plum", "fig", "pear", "kiwi", "lime", "date", "nut", "rye")
    asks = [dict(text=f"repeat {word}", max_tokens=4 + 3 * i, temperature=0) for i, word in enumerate(words[:clients])]
    asks[1] |= dict(temperature=1, seed=5)
    together = threading.Barrier(clients)
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(lambda ask: (together.wait(), server.chat(**ask))[1], asks))
    for ask, (status, answer) in zip(asks, answers, strict=True):
        alone = server.chat(**ask)[1]
        assert status == 200 and answer["choices"] == alone["choices"]
    page = Path(__file__).parents[2] / "docs" / "serve.md"
    assert "one request at a time" in page.read_text(encoding="utf-8")  # the real concurrency is stated


def test_many_clients_some_of_whom_leave(start):
    """Every finished answer is the one that the same request gets alone; nothing stays behind."""
    server, rng = start(max_queue=64), random.Random(0)
    before = {id(held) for held in gc.get_objects() if isinstance(held, TreeState)}
    requests = [
        dict(
            text="".join(rng.choices("abcdefgh ", k=rng.randrange(1, 60))),
            max_tokens=rng.randrange(1, 24),
            **rng.choice([dict(temperature=0), dict(temperature=1, seed=rng.randrange(99)), dict(temperature=0, repetition_penalty=1.3),
                          dict(temperature=0.8, seed=3, top_p=0.9, stop=["e"]), dict(temperature=0, stop=["a", "th"])]),
        )
        for _ in range(45)
    ]  # fmt: skip

    def send(index: int):
        if index % 3 == 2:
            stream = open_stream(server, **requests[index])
            if index % 2:
                stream.recv(200)  # leaves while it is being answered
            else:
                time.sleep(random.Random(index).random() * 0.3)
            stream.close()
            return None
        return server.chat(**requests[index])

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(send, range(len(requests))))
    assert server.is_idle()
    assert threading.active_count() < 60
    gc.collect()
    states = [held for held in gc.get_objects() if isinstance(held, TreeState) and id(held) not in before]
    assert len(states) <= 1  # this server's conversation
    for request, answer in zip(requests, answers, strict=True):
        if answer is not None:
            assert answer[0] == 200
            alone = server.chat(**request)[1]
            assert (
                answer[1]["choices"] == alone["choices"]
                and answer[1]["usage"]["completion_tokens"] == alone["usage"]["completion_tokens"]
            )
