"""Benchmarks of whole stages run on a tiny shape without a GPU, and their lines are what they say."""

import importlib.util
import inspect
import itertools
import json
import re
import runpy
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

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
    assert split["host_us"]["verify"] > 1e3 * split["choice_ms"] and plain["host_us"]["rest"] > 0
    assert not {"busy_ms", "pauses_us", "launch_us", "choice_ms"} & drafted.keys()
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 3


def test_a_table_is_timed(lines_of):
    (line,) = lines_of("self_text.py", "--tokens", "1", "--batch", "2")
    assert line["tokens"] == 512 and line["batch"] == 2 and line["tokens_per_second"] > 0
    assert 0 < line["entries"] <= 1022 and line["table_bytes"] < 64e6


@pytest.fixture
def soak(monkeypatch):
    """The soak as a module, with nothing to run: every request takes a second, and no state drifts."""
    if not FOLDER.is_dir():
        pytest.skip("benchmarks are not part of an installed package")
    spec = importlib.util.spec_from_file_location("soak", FOLDER / "soak.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "soak", module)
    spec.loader.exec_module(module)
    nothing = SimpleNamespace(run_one=lambda: {"how": "whole"}, drift=lambda: 1e-7, faults=[], truth={})
    monkeypatch.setattr(module, "Soak", lambda pair, seed: nothing)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=itertools.count().__next__))
    return module


def soaked(soak, device: str) -> tuple[dict, list[dict]]:
    lines: list[dict] = []
    pair = SimpleNamespace(target=SimpleNamespace(device=torch.device(device)))
    return soak.soak(pair, 10, 0, lines.append), lines


@pytest.mark.parametrize("leak", [0, 1 << 20])
def test_a_soak_judges_what_a_gpu_holds_when_its_cache_is_empty(soak, monkeypatch, leak):
    cached, holds = itertools.count(1 << 30, 8 << 20), itertools.count(1 << 28, leak)
    monkeypatch.setattr(soak, "memory", lambda device: {"allocated": 1 << 28, "reserved": next(cached)})
    monkeypatch.setattr(soak, "held", lambda device: dict.fromkeys(("allocated", "reserved"), next(holds)))
    monkeypatch.setattr(soak, "GROWTH_BYTES", {"cuda": 2 << 20})
    verdict, lines = soaked(soak, "cuda")
    checks = [line for line in lines if "held" in line]
    assert [line["number"] for line in checks] == list(range(14, len(lines), 15)) and len(checks) > 10
    assert all(line["drift"] == 1e-7 for line in checks) and all("reserved" in line for line in lines)
    assert verdict["clean"] == (leak == 0)
    assert verdict["growth_bytes"] == dict.fromkeys(("allocated", "reserved"), 5 * leak)  # five checks a quarter
    assert verdict["held_first"] == checks[0]["held"] and verdict["held_last"] == checks[-1]["held"]
    assert verdict["memory_peak"]["reserved"] == lines[-1]["reserved"]


@pytest.mark.parametrize("leak", [0, 2 << 20])
def test_a_soak_judges_a_processes_own_memory_on_a_cpu(soak, monkeypatch, leak):
    resident = itertools.count(1 << 28, leak)
    monkeypatch.setattr(soak, "memory", lambda device: {"resident": next(resident)})
    verdict, lines = soaked(soak, "cpu")
    assert verdict["clean"] == (leak == 0) and verdict["held_last"] is None
    assert not any("held" in line for line in lines)


def test_what_a_gpu_holds_is_asked_for_after_its_cache_is_emptied(soak, monkeypatch):
    calls = []
    for name in ("synchronize", "empty_cache", "memory_allocated", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda *args, name=name: calls.append(name) or 7)
    assert soak.held(torch.device("cuda")) == {"allocated": 7, "reserved": 7}
    assert calls.index("synchronize") < calls.index("empty_cache") < calls.index("memory_allocated")


def test_a_soak_stands_still_while_a_file_exists(soak, monkeypatch, tmp_path):
    """The clock ticks at each look: two a request and one more around a pause, so that 20 seconds are nine requests."""
    pause, lines, waited = tmp_path / "pause", [], []

    def sleep(seconds):
        waited.append((len(lines), (tmp_path / "pause.waiting").exists()))
        for _ in range(1000):  # which would be the end if they counted
            soak.time.monotonic()
        if len(waited) % 2 == 0:
            pause.unlink()

    def write(record):
        lines.append(record)
        if len(lines) in (2, 5):
            pause.touch()

    monkeypatch.setattr(soak.time, "sleep", sleep, raising=False)
    monkeypatch.setattr(soak, "memory", lambda device: {"resident": 0})
    pair = SimpleNamespace(target=SimpleNamespace(device=torch.device("cpu")))
    verdict = soak.soak(pair, 20 / 60, 0, write, pause=pause)
    assert waited == [(2, True), (2, True), (5, True), (5, True)] and not list(tmp_path.iterdir())
    assert verdict["pauses"] == [{"after_request": number, "seconds": 2001} for number in (1, 4)]
    assert verdict["requests"] == len(lines) == 9 and verdict["minutes"] == pytest.approx(21 / 60, abs=0.02)
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds) and seconds[-1] < 22 and verdict["clean"] and not verdict["stopped"]


@pytest.mark.parametrize("faults", [[], ["another text"]])
@pytest.mark.parametrize("is_paused", [False, True])
def test_a_soak_that_is_told_to_end_leaves_a_whole_verdict(soak, monkeypatch, tmp_path, faults, is_paused):
    """At its third request, or while it waits behind the first one."""
    target = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)
    monkeypatch.setattr(soak.deltatree, "load", lambda *names, **how: SimpleNamespace(target=target))
    monkeypatch.setattr(soak.time, "sleep", lambda seconds: signal.raise_signal(signal.SIGTERM), raising=False)
    arguments = ["soak.py", "--out", str(tmp_path / "out"), "--pause", str(tmp_path / "pause")]
    monkeypatch.setattr(sys, "argv", arguments)
    run, former = soak.Soak(None, 0), signal.getsignal(signal.SIGTERM)
    run.faults += faults
    requests = itertools.count(1)
    monkeypatch.setattr(
        run, "run_one", lambda: {"how": "whole"} if next(requests) < 3 else signal.raise_signal(signal.SIGTERM) or {}
    )
    if is_paused:
        (tmp_path / "pause").touch()
    try:
        code = soak.main()
    finally:
        signal.signal(signal.SIGTERM, former)
    verdict = json.loads((tmp_path / "out" / "verdict.json").read_text())
    lines = (tmp_path / "out" / "requests.jsonl").read_text().splitlines()
    assert verdict["stopped"] and verdict["requests"] == len(lines) == (1 if is_paused else 3)
    assert code == len(faults) and verdict["faults"] == faults and verdict["clean"] == (not faults)
    assert len(verdict["pauses"]) == is_paused and {"growth_bytes", "versions", "memory_peak"} <= verdict.keys()
    assert not (tmp_path / "pause.waiting").exists()
