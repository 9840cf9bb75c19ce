"""The examples of docs/budget.md run, and its options exist."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

PAGE = (Path(__file__).parents[1] / "docs" / "budget.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_python_example_runs(capsys):
    (block,) = blocks("python")
    exec(compile(block, "budget.md", "exec"), {})
    assert capsys.readouterr().out.startswith("auto [")


def test_the_commands_run(tmp_path):
    for line in [line for block in blocks("bash") for line in block.splitlines()]:
        command = [sys.executable, "-m", *shlex.split(line)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=os.environ)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "trace.png").stat().st_size > 10_000
