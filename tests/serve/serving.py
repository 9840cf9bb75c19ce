"""A server over a tiny random hybrid, on a free port of this machine alone."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time

from byte_tokenizer import VOCAB, byte_tokenizer
from tiny import tiny_model

from deltatree import GenerateOptions, Pair, ReferenceTarget
from deltatree.drafter.scripted import RandomDrafter


class Server:
    """A running server: `pair`, `engine`, and a plain HTTP client."""

    def __init__(self, pair: Pair, **options) -> None:
        import uvicorn

        from deltatree.serve import ServeOptions, create_app

        defaults = GenerateOptions(max_new_tokens=24, budget=12)
        self.pair = pair
        app = create_app(
            pair, ServeOptions(**{"model_name": "tiny", "defaults": defaults, "grace_seconds": 5} | options)
        )
        self.app, self.engine = app, app.state.engine
        config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", timeout_graceful_shutdown=5)
        self.uvicorn = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.uvicorn.run, daemon=True)
        self.thread.start()
        until = time.monotonic() + 30
        while not self.uvicorn.started and time.monotonic() < until:
            time.sleep(0.01)
        self.port = self.uvicorn.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self.uvicorn.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()

    def send(self, method: str, path: str, body=None, headers=(), timeout=60) -> tuple[int, dict, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        with contextlib.closing(connection):
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json"} | dict(headers))
            response = connection.getresponse()
            return response.status, dict(response.headers), response.read()

    def post(self, path: str, body, **more) -> tuple[int, dict]:
        status, _, data = self.send("POST", path, body, **more)
        return status, json.loads(data)

    def chat(self, text: str = "hello", **fields) -> tuple[int, dict]:
        return self.post("/v1/chat/completions", chat_body(text, **fields))

    def complete(self, prompt="once", **fields) -> tuple[int, dict]:
        return self.post("/v1/completions", {"model": "tiny", "prompt": prompt} | fields)

    def is_idle(self, seconds: float = 10) -> bool:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.engine.running is None and not self.engine.num_waiting:
                return True
            time.sleep(0.01)
        return False


def chat_body(text: str = "hello", **fields) -> dict:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}]} | fields


def make_pair(drafter=None) -> Pair:
    tokenizer = byte_tokenizer()
    target = ReferenceTarget(tiny_model("qwen3_5_text", vocab_size=VOCAB))
    return Pair(target, tokenizer, drafter or RandomDrafter(VOCAB), frozenset({tokenizer.eos_token_id}))
