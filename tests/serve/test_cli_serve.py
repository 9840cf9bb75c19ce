"""`deltatree serve` as a process: it says where it listens, answers, and leaves at SIGTERM."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys

import pytest
from serving import chat_body, make_pair

SERVE = [sys.executable, "-c", "import typer; from deltatree.cli.serve import serve; typer.run(serve)"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder, pair = tmp_path_factory.mktemp("tiny") / "target", make_pair()
    pair.target.model.save_pretrained(folder)
    pair.tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_it_listens_answers_and_leaves(checkpoint):
    command = [*SERVE, "--target", str(checkpoint), "--method", "ar", "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"DELTATREE_API_KEY": "k"})
    try:
        port = next(
            int(found[1]) for line in process.stderr if (found := re.search(r"http://127\.0\.0\.1:(\d+)", line))
        )
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            headers = {"Content-Type": "application/json", "Authorization": "Bearer k"}
            body = chat_body("a secret", max_tokens=4, temperature=0) | {"model": "target"}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            answer = json.loads(connection.getresponse().read())
        assert answer["usage"]["completion_tokens"] == 4
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(30) in (0, -signal.SIGTERM) and "Traceback" not in rest and "secret" not in rest
    finally:
        process.kill()
        process.wait()


def test_mistakes_are_found_before_anything_loads():
    from deltatree.cli.serve import serve
    from deltatree.errors import OptionError

    for wrong in (dict(port=70000), dict(method="magic"), dict(budget="many"), dict(max_queue=0)):
        with pytest.raises(OptionError):
            serve(target="/nowhere", budget=wrong.pop("budget", "32"), **wrong)
