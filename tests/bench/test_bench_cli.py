"""`deltatree bench`: options to a run, a run to files, refusals before anything loads."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module

import pytest
import typer
from bench_doubles import TableTarget, table_pair, write_samples
from typer.testing import CliRunner

from deltatree.bench import BenchPlan
from deltatree.errors import DeltatreeError

commands = import_module("deltatree.cli.bench")  # the package's attribute of that name is the command
app = typer.Typer()
app.command()(commands.bench)
app.command()(commands.chart)


def bench(tmp_path, **changes):
    options = {
        "dataset": write_samples(tmp_path / "mine.jsonl"), "out": tmp_path / "out", "samples": 2, "max-new-tokens": 16,
        "budgets": "2,6", "stage-samples": 1,
    }  # fmt: skip
    options |= {name.replace("_", "-"): value for name, value in changes.items()}
    return CliRunner().invoke(app, ["bench", *(f"--{name}={value}" for name, value in options.items())])


@pytest.fixture
def no_chart(monkeypatch):
    monkeypatch.setattr("deltatree.chart.draw_chart", lambda folders, out: [])


@pytest.fixture
def loads(monkeypatch):
    """The pair that the command line loads."""
    box = {"pair": table_pair()}
    monkeypatch.setattr(commands, "load_pair", lambda *args: box["pair"])
    return box


def test_a_run_writes_records_summary_and_chart_and_prints_tables(tmp_path, loads):
    done = bench(tmp_path)
    assert done.exit_code == 0, done.output
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "records.jsonl", "run.json", "summary.json", "chart.png", "chart.svg"
    }  # fmt: skip
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["verdicts"] == {"identical": 6, "near_tie": 0, "diverged": 0, "sampled": 0}
    assert [group["label"] for group in summary["groups"]] == ["plain", "DFlash", "DDTree 2", "DDTree 6"]
    assert "sums, 2 requests" in done.output and "against plain decoding: 6 identical" in done.output
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert {"command", "versions", "device", "dtype", "target", "drafter", "plan"} <= set(run)
    drawn = CliRunner().invoke(app, ["chart", str(tmp_path / "out"), "--out", str(tmp_path / "again.svg")])
    assert drawn.exit_code == 0 and (tmp_path / "again.png").exists()


def test_a_diverged_text_makes_the_exit_code_1(tmp_path, loads, no_chart):
    loads["pair"] = table_pair(TableTarget(tie=0.2, tree_error=0.3))
    done = bench(tmp_path)
    assert done.exit_code == 1
    assert "diverged: sums a turn 1, " in done.output


def test_plain_decoding_alone_needs_no_drafter(tmp_path, loads, no_chart):
    loads["pair"].drafter = None
    assert bench(tmp_path, methods="ar").exit_code == 0
    assert "need a drafter" in str(bench(tmp_path, out=tmp_path / "more").exception)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(dataset="gsm9k"), "data set 'gsm9k' is not known"),
        (dict(methods="ar,medusa"), "method 'medusa' is not known; possible are ar, dflash, ddtree"),
        (dict(budgets="16,many"), "budget 'many' is not a whole number"),
        (dict(budgets="16,-4"), "budget '-4' is not a whole number"),
        (dict(budgets="16,,64"), "has an empty entry"),
        (dict(samples=0), "samples=0"),
        (dict(max_new_tokens=0), "max_new_tokens=0"),
        (dict(tree="bushy"), "tree 'bushy' is not known"),
        (dict(temperature=-1), "temperature=-1"),
        (dict(stage_samples=-1), "stage_samples=-1"),
        (dict(out="/proc/nowhere"), "cannot write /proc/nowhere"),
    ],
)
def test_mistakes_are_refused_before_the_pair_loads(tmp_path, monkeypatch, changes, message):
    monkeypatch.setattr(commands, "load_pair", lambda *args: pytest.fail("the pair was loaded"))
    refused = bench(tmp_path, **changes)
    assert isinstance(refused.exception, DeltatreeError)
    assert message in str(refused.exception)
    assert not (tmp_path / "out").exists()


def test_another_runs_folder_is_refused_before_the_pair_loads(tmp_path, loads, no_chart, monkeypatch):
    assert bench(tmp_path).exit_code == 0
    monkeypatch.setattr(commands, "load_pair", lambda *args: pytest.fail("the pair was loaded"))
    refused = bench(tmp_path, temperature=0.5)
    assert "it differs in plan.temperature (0.0 there, 0.5 now)" in str(refused.exception)


def test_a_run_says_what_its_prompts_went_through(tmp_path, loads, no_chart):
    from deltatree.verify.chain import fla_chain

    assert bench(tmp_path).exit_code == 0
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert run.pop("prefill") == "own"
    (tmp_path / "out" / "run.json").write_text(json.dumps(run))  # as before it could be chosen
    assert bench(tmp_path).exit_code == 0
    loads["pair"].target.chain_rule = fla_chain
    assert 'it differs in prefill ("own" there, "fla" now)' in str(bench(tmp_path).exception)


def test_auto_is_a_budget_among_others(tmp_path, loads, no_chart):
    from deltatree.bench.plan import parse_budgets

    assert [arm.budget for arm in BenchPlan(budgets=parse_budgets("16,auto")).arms(7)] == [0, 7, 16, "auto"]
    done = bench(tmp_path, budgets="6,auto")
    assert done.exit_code == 0 and "DDTree auto" in done.output
    records = [json.loads(line) for line in (tmp_path / "out" / "records.jsonl").read_text().splitlines()]
    for record in records:
        assert len(record["budgets"]) == record["rounds"] and sum(record["budgets"]) == record["num_drafted"]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    auto = next(group for group in summary["groups"] if group["budget"] == "auto")
    assert sum(auto["budget_histogram"].values()) == auto["num_rounds"]


def test_the_command_and_the_chart_load_no_model_library():
    code = "import sys, deltatree.cli.bench as c; assert not {'torch', 'matplotlib'} & set(sys.modules); import deltatree.chart"
    code += "; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
