"""Benchmarks of whole stages run on a tiny shape without a GPU, and their lines are what they say."""

import inspect
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent.parent / "benchmarks"


def test_no_benchmark_is_taken_for_a_package_that_transformers_looks_for():
    """A script's folder comes first among the places that imports are looked for in."""
    from transformers.utils import import_utils

    looked_for = set(re.findall(r'_is_package_available\(\s*"(\w+)', inspect.getsource(import_utils)))
    assert "kernels" in looked_for
    assert not (looked_for | sys.stdlib_module_names) & {file.stem for file in FOLDER.glob("*.py")}


@pytest.fixture
def lines_of(monkeypatch, capsys):
    if not FOLDER.is_dir():
        pytest.skip("benchmarks are not part of an installed package")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(name: str, *arguments: str) -> list[dict]:
        monkeypatch.setattr(sys, "argv", [name, "--shape", "tiny", *arguments])
        runpy.run_path(str(FOLDER / name), run_name="__main__")
        return [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]

    return run


def test_a_round_is_timed_whole_and_in_two_halves(lines_of, tmp_path):
    plain, drafted, split = lines_of(
        "rounds.py", "--budgets", "0,4", "--rounds", "4", "--context", "9", "--acceptance", "0.95,0.9,0.8",
        "--out", str(tmp_path / "rows.jsonl"),
    )  # fmt: skip
    assert [line["kind"] for line in (plain, drafted, split)] == ["whole", "whole", "split"]
    assert plain["acceptance_length"] == 1 and plain["round_ms_p90"] >= plain["round_ms"] > 0
    assert drafted["acceptance_length"] == split["acceptance_length"] > 2  # the right tokens were planted
    assert not any(line["departed"] for line in (plain, drafted, split))
    assert split["round_ms"] > split["choice_ms"] > 0
    assert split["host_us"]["verify"] > 1e3 * split["choice_ms"] and plain["host_us"]["round"] > 0
    assert not {"busy_ms", "pauses_us", "launch_us", "choice_ms"} & drafted.keys()
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 3


def test_a_table_is_timed(lines_of):
    (line,) = lines_of("self_text.py", "--tokens", "1", "--batch", "2")
    assert line["tokens"] == 512 and line["batch"] == 2 and line["tokens_per_second"] > 0
    assert 0 < line["entries"] <= 1022 and line["table_bytes"] < 64e6
