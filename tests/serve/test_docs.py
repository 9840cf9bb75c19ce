"""The examples of docs/serve.md run against a server."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import deltatree

PAGE = Path(__file__).parents[2] / "docs" / "serve.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_python_examples_run(start, pair, monkeypatch, capsys):
    pytest.importorskip("openai")
    pytest.importorskip("llguidance")
    server = start(model_name="deltatree")
    monkeypatch.setattr(deltatree, "load", lambda source: pair, raising=False)
    names: dict = {}
    for block in blocks("python"):
        exec(block.replace("http://127.0.0.1:8000", server.url), names)
    assert capsys.readouterr().out.strip()
    names["app"].state.engine.close()


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_curl_examples_run(start):
    server = start(model_name="deltatree")
    for block in blocks("bash"):
        done = subprocess.run(
            ["bash", "-c", block.replace("http://127.0.0.1:8000", server.url)], capture_output=True, text=True
        )
        assert done.returncode == 0 and '"text":' in done.stdout, done.stdout + done.stderr


def test_every_option_of_the_page_exists():
    from typer.main import get_command_from_info
    from typer.models import CommandInfo

    from deltatree.cli.serve import serve

    command = get_command_from_info(
        CommandInfo(name="serve", callback=serve), pretty_exceptions_short=False, rich_markup_mode=None
    )
    known = {name for parameter in command.params for name in parameter.opts}
    text = PAGE.read_text(encoding="utf-8").replace("curl --silent", "")
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) <= known
