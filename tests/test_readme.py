"""Every example of the README runs, word for word."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_python_examples_run():
    scope: dict = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), scope)
    assert scope["out"].acceptance_length > 1
    assert scope["tokens"].shape[1] > scope["inputs"]["input_ids"].shape[1]


@pytest.mark.parametrize("line", [line for block in blocks("bash") for line in block.splitlines()])
def test_the_commands_run(line, tmp_path_factory):
    """In one folder, since `chart` draws what `bench` measured. The installing lines are what runs this test."""
    if line.startswith("pip install"):
        assert line.endswith(("deltatree demo", "pytest -n 2 --dist loadfile"))
        return
    folder = tmp_path_factory.getbasetemp() / "readme"
    folder.mkdir(exist_ok=True)
    if line.startswith("scripts/"):
        (folder / "gsm8k.jsonl").write_text("".join((ROOT / "results/prompts/gsm8k.jsonl").open().readlines()[:1]))
        command = [str(ROOT / "scripts/bench-ddtree.sh"), *shlex.split(line, comments=True)[1:]]
        command[command.index("20")], command[command.index("128")] = "1", "16"  # the same line, smaller
    else:
        command = [sys.executable, "-m", *shlex.split(line, comments=True)]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=os.environ | {"PATH": path})
    assert done.returncode == 0, done.stderr
