"""Data sets: published selection and templates, files as they are, and sentences for what cannot be used."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
from bench_doubles import SAMPLES, write_samples

from deltatree.bench import load_samples
from deltatree.bench.samples import NAMED
from deltatree.errors import OptionError, RecordError


def test_a_file_is_taken_as_it_is(tmp_path):
    file = write_samples(tmp_path / "mine.jsonl")
    assert load_samples(str(file), 2) == SAMPLES[:2]
    assert load_samples(str(file), 99) == SAMPLES
    file.write_text('{"prompt": "one\u2028line"}\n\n{"turns": ["two", "three"], "id": 7}\n', encoding="utf-8")
    first, second = load_samples(str(file), 9)
    assert (first.id, first.dataset, first.turns) == ("1", "mine", ("one\u2028line",))
    assert (second.id, second.turns) == ("7", ("two", "three"))


def test_a_named_set_from_a_file_gets_the_published_template_and_selection(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"id": str(i), "turns": [f"Task {i} {{x}}"]}) for i in range(10)))
    chosen = load_samples(f"gsm8k={file}", 3)
    assert [sample.id for sample in chosen] == ["4", "6", "2"]  # as `datasets` shuffles ten rows with seed 0
    assert chosen[0].turns == ("Task 4 {x}\nPlease reason step by step, and put your final answer within \\boxed{}.",)
    assert [sample.id for sample in load_samples(f"mbpp={file}", 10)] == [str(i) for i in range(10)]


def test_every_named_set_turns_its_hub_rows_into_user_messages(monkeypatch):
    row = {
        "question": "Q", "problem": "Q", "prompt": "Q", "instruction": "Q", "input": "I", "problem_statement": "Q",
        "question_content": "Q", "starter_code": "",
    }  # fmt: skip
    asked = {}

    def load_dataset(*load, split, data_files=None):
        asked[load] = data_files
        return [row | {"prompt": ["Q", "R"]} if load[0].endswith("mt_bench_prompts") else row]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    loaded = {name: load_samples(name, 5)[0] for name in NAMED}
    assert set(loaded) == {
        "gsm8k", "math500", "humaneval", "mbpp", "mt-bench", "alpaca", "aime24", "aime25", "livecodebench", "swe-bench"
    }  # fmt: skip
    assert loaded["mt-bench"].turns == ("Q", "R")
    assert loaded["alpaca"].turns == ("Q\n\nInput:\nI",)
    assert loaded["humaneval"].turns[0].endswith("```python\nQ\n```")
    assert loaded["swe-bench"].turns == ("Problem Statement:\nQ\nPlease fix the issue described above.",)
    assert "# YOUR CODE HERE" in loaded["livecodebench"].turns[0] and len(asked[("json",)]["test"]) == 6


def test_the_shipped_prompts_are_there():
    assert {sample.dataset for sample in load_samples("demo", 99)} == {"gsm8k", "humaneval", "mt-bench", "math500"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "x"}\n[1, 2]', r"rows.jsonl, line 2 holds a JSON list; expected an object like"),
        ('{"prompt": "x"}\nnot json', r"rows.jsonl, line 2 is not JSON .* expected an object like"),
        ('{"question": "x"}', r"line 1 has no usable `turns` or `prompt`; expected"),
        ('{"turns": []}', r"line 1 has no usable"),
        ('{"turns": ["x", 3]}', r"line 1 has no usable"),
        ('{"prompt": "x", "id": 1}\n{"prompt": "y", "id": "1"}', r"line 2: id '1' was used before"),
        ("\n", r"holds no samples"),
    ],
)
def test_unusable_lines_are_named_with_file_and_number(tmp_path, text, message):
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    with pytest.raises(RecordError, match=message):
        load_samples(str(file), 5)


def test_what_cannot_be_loaded_says_what_can(tmp_path, monkeypatch):
    with pytest.raises(OptionError, match=r"'gsm9k' is not known; possible are gsm8k, .*NAME=FILE.jsonl"):
        load_samples("gsm9k", 5)
    with pytest.raises(OptionError, match="samples=0"):
        load_samples("demo", 0)
    with pytest.raises(RecordError, match="cannot be read"):
        load_samples(str(tmp_path / "absent.jsonl"), 5)
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    with pytest.raises(RecordError, match="not UTF-8"):
        load_samples(str(tmp_path / "latin.jsonl"), 5)
    with pytest.raises(RecordError, match="comes twice"):
        load_samples("demo,demo", 1)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RecordError, match=r"'gsm8k' is fetched with .* --dataset gsm8k=FILE.jsonl"):
        load_samples("gsm8k", 5)

    def no_network(*args, **kwargs):
        raise ConnectionError("no route to host")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=no_network))
    with pytest.raises(RecordError, match=r"could not be downloaded \(no route to host\).*gsm8k=FILE.jsonl"):
        load_samples("gsm8k", 5)
