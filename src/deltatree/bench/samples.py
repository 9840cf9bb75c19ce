"""Data sets: named ones through the `datasets` library, or JSON lines from a file.

Prompts, templates and selection of the named sets are those of the published DDTree evaluation: the template is part of
the user message, a set that is larger than the sample is shuffled with seed 0, then the first n are taken.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deltatree.errors import OptionError, RecordError

DEMO = "demo"
"""The name of the few prompts inside this package."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One conversation of a data set: the user's turns, the answers still to be decoded."""

    id: str
    dataset: str
    turns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NamedSet:
    """Where a published set lies on the hub, and how a row becomes the user's turns."""

    load: tuple[str, ...]  # hub id and configuration
    split: str
    texts: Callable[[dict], list[str]]  # the raw task texts of a row
    template: str = "{text}"  # around each text
    files: tuple[str, ...] = ()  # data files, where the hub id alone does not do

    def turns(self, texts: list[str]) -> tuple[str, ...]:
        return tuple(self.template.replace("{text}", text) for text in texts)


def _column(name: str) -> Callable[[dict], list[str]]:
    return lambda row: [row[name]]


def _alpaca(row: dict) -> list[str]:
    return [f"{row['instruction']}\n\nInput:\n{row['input']}" if row["input"] else row["instruction"]]


def _livecodebench(row: dict) -> list[str]:
    if row.get("starter_code"):
        form, code = "Use the following code structure:", row["starter_code"]
    else:
        form, code = "Write your code in the following format:", "# YOUR CODE HERE"
    return [f"### Question:\n{row['question_content']}\n\n### Format: {form}\n```python\n{code}\n```"]


_BOXED = "{text}\nPlease reason step by step, and put your final answer within \\boxed{}."
_PROGRAMMER = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
    "correct Python program that matches the specification and passes all tests. You will NOT return anything except "
    "for the program\n\n{text}\n\n### Answer: (use the provided format with backticks)"
)
_LIVECODEBENCH = "https://huggingface.co/datasets/livecodebench/code_generation_lite/resolve/main/test{}.jsonl"

NAMED: dict[str, NamedSet] = {
    "gsm8k": NamedSet(("openai/gsm8k", "main"), "test", _column("question"), _BOXED),
    "math500": NamedSet(("HuggingFaceH4/MATH-500",), "test", _column("problem"), _BOXED),
    "aime24": NamedSet(("HuggingFaceH4/aime_2024",), "train", _column("problem"), _BOXED),
    "aime25": NamedSet(("MathArena/aime_2025",), "train", _column("problem"), _BOXED),
    "humaneval": NamedSet(
        ("openai/openai_humaneval",),
        "test",
        _column("prompt"),
        "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{text}\n```",
    ),
    "mbpp": NamedSet(("google-research-datasets/mbpp", "sanitized"), "test", _column("prompt")),
    "mt-bench": NamedSet(("HuggingFaceH4/mt_bench_prompts",), "train", lambda row: list(row["prompt"])),
    "alpaca": NamedSet(("tatsu-lab/alpaca",), "train", _alpaca),
    "swe-bench": NamedSet(
        ("princeton-nlp/SWE-bench_Lite",),
        "test",
        _column("problem_statement"),
        "Problem Statement:\n{text}\nPlease fix the issue described above.",
    ),
    "livecodebench": NamedSet(
        ("json",), "test", _livecodebench, _PROGRAMMER, tuple(_LIVECODEBENCH.format(n) for n in ("", *range(2, 7)))
    ),
}


def load_samples(datasets: str, count: int) -> list[Sample]:
    """The first `count` samples of each data set; all of a set that has fewer.

    datasets: one or several, separated by commas. Each is
        a name of NAMED        fetched from the hub, template and selection as published
        NAME=FILE.jsonl        the same set from a file of raw task texts, template and selection as published
        FILE.jsonl             a file as it is: no template, no shuffle
        demo                   the few prompts inside this package
    Raises OptionError, RecordError.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise OptionError(f"samples={count!r} is not possible; give a whole number of at least 1")
    samples = [sample for source in datasets.split(",") for sample in _load(source.strip(), count)]
    keys = [(sample.dataset, sample.id) for sample in samples]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise RecordError(f"sample {twice[1]!r} of data set {twice[0]!r} comes twice; name each data set and id once")
    return samples


def _load(source: str, count: int) -> list[Sample]:
    name, equals, file = source.partition("=")
    if equals and name in NAMED:
        return _selected([_templated(name, row.id, list(row.turns)) for row in read_samples(Path(file), name)], count)
    if source in NAMED:
        return _selected(
            [_templated(source, str(i), NAMED[source].texts(row)) for i, row in enumerate(_fetch(source))], count
        )
    if source == DEMO:
        return read_samples(Path(__file__).parent / "prompts" / "demo.jsonl")[:count]
    if source.endswith(".jsonl") or "/" in source or Path(source).is_file():
        return read_samples(Path(source))[:count]
    raise OptionError(
        f"data set {source!r} is not known; possible are {', '.join([*NAMED, DEMO])}, a file FILE.jsonl, or NAME=FILE.jsonl"
    )


def _templated(name: str, sample_id: str, texts: list[str]) -> Sample:
    return Sample(sample_id, name, NAMED[name].turns(texts))


def _selected(samples: list[Sample], count: int) -> list[Sample]:
    """Shuffled with seed 0 as `datasets` does it, unless all are taken."""
    if len(samples) <= count:
        return samples
    import numpy as np

    return [samples[i] for i in np.random.default_rng(0).permutation(len(samples))[:count]]


def _fetch(name: str) -> list[dict]:
    way_out = f"name a file instead: --dataset {name}=FILE.jsonl, one object with `turns` a line"
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise RecordError(
            f"data set {name!r} is fetched with the `datasets` package, which is not installed "
            f"(pip install 'deltatree[datasets]'); or {way_out}"
        ) from error
    named = NAMED[name]
    extra = {"data_files": {named.split: list(named.files)}} if named.files else {}
    try:
        return list(load_dataset(*named.load, split=named.split, **extra))
    except Exception as error:  # the library raises many kinds; the user needs one sentence
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RecordError(
            f"data set {name!r} could not be downloaded ({reason}); check the network, or {way_out}"
        ) from error


def read_samples(file: Path, dataset: str | None = None) -> list[Sample]:
    """Samples of a JSON-lines file: objects with `turns` (texts) or `prompt` (a text), perhaps `id` and `dataset`.

    dataset: a name for all of them; without it the row's own, or the file's stem. Raises RecordError with file and line.
    """
    try:
        lines = file.read_bytes().decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise RecordError(f"{file} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except OSError as error:
        raise RecordError(f"data set file {file} cannot be read ({error.strerror}); check the path") from error
    samples: dict[str, Sample] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        sample = _sample(line, f"{file}, line {number}", str(number), dataset, file.stem)
        if sample.id in samples:
            raise RecordError(f"{file}, line {number}: id {sample.id!r} was used before; give every sample its own")
        samples[sample.id] = sample
    if not samples:
        raise RecordError(f"{file} holds no samples; expected one JSON object with `turns` or `prompt` a line")
    return list(samples.values())


def _sample(line: str, where: str, number: str, dataset: str | None, stem: str) -> Sample:
    expected = 'expected an object like {"turns": ["first question", "second"]} or {"prompt": "question"}'
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise RecordError(f"{where} is not JSON ({error.msg} at column {error.colno}); {expected}") from error
    if not isinstance(row, dict):
        raise RecordError(f"{where} holds a JSON {type(row).__name__}; {expected}")
    turns = row["turns"] if "turns" in row else [row.get("prompt")]
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise RecordError(f"{where} has no usable `turns` or `prompt`; {expected}")
    return Sample(str(row.get("id", number)), dataset or str(row.get("dataset", stem)), tuple(turns))
