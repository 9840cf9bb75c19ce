"""Requests made from the server's own OpenAPI document: none may end in a 5xx."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = Path(sys.executable).parent / "schemathesis"


@pytest.mark.skipif(not COMMAND.exists(), reason="schemathesis is not installed")
def test_no_request_makes_the_server_fail(server, tmp_path):
    done = subprocess.run(
        [COMMAND, "run", server.url + "/openapi.json", "-c", "not_a_server_error", "-n", "40", "--phases", "fuzzing",
         "--seed", "7", "--request-timeout", "60", "--no-color"],
        capture_output=True, text=True, timeout=240, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert server.is_idle(30) and server.send("GET", "/health")[0] == 200
