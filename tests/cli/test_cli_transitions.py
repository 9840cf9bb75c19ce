"""`deltatree transitions` and the options that read its tables."""

import json

import pytest
from checkpoints import save_target


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["transitions"], "Missing argument"),
        (["transitions", "./nowhere"], "neither an existing folder nor a hub id"),
        (["transitions", "shipped", "--tokens", "0"], "tokens=0 is not possible"),
        (["transitions", "shipped", "--batch", "-1"], "batch=-1 is not possible"),
        (["transitions", "shipped", "--out", "."], "is a folder"),
        (["generate", "--prompt", "x", "--tree", "transitions", "--transitions", "absent"], "absent does not exist"),
        (["generate", "--prompt", "x", "--transitions", ""], "give auto, none, or a table's file"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments, sentence, tmp_path, run_here, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run_here(*arguments)
    assert done.returncode == 2
    assert sentence in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == "" and list(tmp_path.iterdir()) == []


def test_a_table_is_written_told_and_refused_by_other_targets(tmp_path, run_here):
    target, table = save_target(tmp_path / "target"), tmp_path / "table.safetensors"
    done = run_here("transitions", target, "--tokens", "400", "--batch", "2", "--out", table)
    assert done.returncode == 0, done.stderr
    assert table.is_file() and str(table) in done.stdout and "n-grams" in done.stdout
    assert "400 tokens" in done.stderr
    done = run_here("generate", "--prompt", "Ann has 3.", "--tree", "transitions", "--transitions", table)
    assert done.returncode == 2 and "vocabulary of 131, the target has 4096" in done.stderr


def test_the_shipped_pair_writes_the_same_with_its_transitions(run_here):
    def generate(*extra):
        done = run_here(
            "generate", "--prompt", "Ann has 3 apples and eats 1.", "--max-new-tokens", "24", "--json", *extra
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["token_ids"]

    plain = generate("--method", "ar")
    assert generate("--tree", "transitions", "--budget", "16") == plain
    assert generate("--tree", "transitions-chain") == plain
    assert generate("--tree", "transitions", "--transitions", "none") == plain
