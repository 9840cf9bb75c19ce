"""The harness: what is timed, in which order, and that nothing is lost or done twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import fmean

import pytest
import torch
from bench_doubles import PLAN, SAMPLES, TableTarget, table_drafter, table_pair

import deltatree
from deltatree import Pair
from deltatree.bench import Record, Sample, read_records, run_bench, summarise, summary
from deltatree.bench.records import records_file
from deltatree.decode.auto import Experience
from deltatree.decode.costs import RoundCosts
from deltatree.errors import OptionError, PromptError, RecordError
from deltatree.transitions import TransitionTree

NUM_ARMS = 4
NUM_RECORDS = 4 * NUM_ARMS  # three samples, one of them with two turns
CHILD = Path(__file__).parent / "bench_child.py"


def key_and_text(records: list[Record]) -> dict:
    return {record.key: (record.token_ids, record.acceptance_lengths, record.verdict) for record in records}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One whole run in a folder."""
    out = tmp_path_factory.mktemp("run")
    run = run_bench(table_pair(), SAMPLES, replace(PLAN, stage_samples=1), out, command="deltatree bench")
    return out, run


def test_every_arm_decodes_every_turn_once_and_losslessly(finished):
    _, run = finished
    assert len(run.records) == len(key_and_text(run.records)) == NUM_RECORDS
    assert {record.verdict for record in run.records} == {"identical"}
    assert all(len(record.token_ids) == PLAN.max_new_tokens for record in run.records)
    tree = [record for record in run.records if record.method == "ddtree"]
    assert max(record.acceptance_length for record in tree) > 1.5  # else these tests look at nothing
    for record in run.records:
        assert sum(record.acceptance_lengths) >= record.decoded_tokens  # the last round may be cut
        assert record.accepted_by_depth[:1] in ([], [sum(length > 1 for length in record.acceptance_lengths)])


def test_speedups_recomputed_from_the_raw_records_equal_the_summary(finished):
    out, run = finished
    groups = summarise(run.info, run.records)["groups"]
    rows = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    for group in groups:
        mine = [r for r in rows if (r["method"], r["budget"]) == (group["method"], group["budget"])]
        mine = [r for r in mine if group["dataset"] in (r["dataset"], "all")]
        for base, name in (("ar", "speedup"), ("dflash", "speedup_over_dflash")):
            by_request = {(r["dataset"], r["sample"], r["turn"]): r for r in rows if r["method"] == base}
            theirs = [by_request[r["dataset"], r["sample"], r["turn"]] for r in mine]
            speed = [[(r["tokens"] - 1) / r["decode_seconds"] for r in side] for side in (mine, theirs)]
            pooled = [sum(r["tokens"] - 1 for r in s) / sum(r["decode_seconds"] for r in s) for s in (mine, theirs)]
            assert group[name]["token_weighted"] == pytest.approx(pooled[0] / pooled[1])
            assert group[name]["per_request"] == pytest.approx(fmean(a / b for a, b in zip(*speed, strict=True)))
        lengths = [r["acceptance_lengths"] for r in mine]
        assert group["acceptance_length"]["token_weighted"] == pytest.approx(fmean(chain.from_iterable(lengths)))
        assert group["acceptance_length"]["per_request"] == pytest.approx(fmean(map(fmean, lengths)))


def test_the_second_turn_follows_plain_decodings_answer_in_every_arm(finished):
    _, run = finished
    second = [record for record in run.records if record.turn == 1]
    assert len(second) == NUM_ARMS
    assert {record.prompt_length for record in second} == {len("<u>Hello.<a><u>And now?<a>") + PLAN.max_new_tokens}


def test_B59_each_sample_starts_with_another_arm_after_all_were_warmed_up():
    calls = []
    pair = table_pair()
    inner = pair.rounds

    def rounds(prompt_ids, options):
        calls.append((options.method, options.budget))
        return inner(prompt_ids, options)

    pair.rounds = rounds
    run_bench(pair, SAMPLES[:2], replace(PLAN, noise_samples=0))
    warm_up, first, second = calls[:NUM_ARMS], calls[NUM_ARMS : 2 * NUM_ARMS], calls[2 * NUM_ARMS :]
    assert len(set(warm_up)) == NUM_ARMS and first == warm_up
    assert second == first[1:] + first[:1]


def test_B59_slow_first_calls_of_every_width_are_not_counted():
    run = run_bench(table_pair(TableTarget({"first": 0.25})), SAMPLES[:2], replace(PLAN, noise_samples=0))
    assert max(record.decode_seconds for record in run.records) < 0.2


def test_B59_all_that_budget_auto_may_choose_is_captured_before_anything_counts(monkeypatch):
    """Over the trees that are asked for; also where noise and near ties are looked at, which takes states of its own."""
    from deltatree.bench import harness

    pair = deltatree.load("shipped", backend="fast", device="cpu", context_length=400)
    pair.target.node_buckets = (1, 16, 32, 65)
    pair._experience = Experience(RoundCosts((1, 16, 32), captured=True))  # measuring takes seconds
    captured, warm_up, ahead = [], harness._Bench._warm_up, []
    parts = pair.target, pair.drafter
    monkeypatch.setattr(
        harness._Bench, "_warm_up", lambda self: (warm_up(self), captured.append(sum(p.num_captured for p in parts)))
    )
    monkeypatch.setattr(
        harness,
        "capture_choices",
        lambda *args, _really=harness.capture_choices: ahead.append(args[3]) or _really(*args),
    )
    monkeypatch.setattr(harness, "first_divergence", lambda plain, token_ids: plain.best(0) and None)
    plan = replace(PLAN, budgets=(7, "auto"), tree="transitions", max_new_tokens=16, noise_samples=1)
    samples = [Sample(str(number), "demo", (text,)) for number, text in enumerate(("What is 2 + 3?", "Say hello."))]
    run = run_bench(pair, samples, plan)
    assert [type(policy) for policy in ahead] == [TransitionTree]
    assert captured == [sum(p.num_captured for p in parts)]
    assert {record.verdict for record in run.records} == {"identical"}


def test_B59_the_device_is_waited_for_at_both_ends(monkeypatch):
    from deltatree.bench import harness

    order = []
    monkeypatch.setattr(harness._Bench, "_synchronize", lambda self: order.append("wait"))
    pair = table_pair()
    inner = pair.rounds

    def rounds(prompt_ids, options):
        for done in inner(prompt_ids, options):
            order.append("prefill" if not done.num_nodes else "round")
            yield done

    pair.rounds = rounds
    run = run_bench(pair, SAMPLES[:1], replace(PLAN, noise_samples=0, methods=("ar",)))
    assert order[-23:] == ["wait", "prefill", "wait", *["round"] * 19, "wait"]
    group = summarise(run.info, run.records)["groups"][0]
    assert group["tokens_per_second"].keys() == {"token_weighted", "per_request", "median", "quartiles"}


def test_B57_a_tree_that_does_not_pay_is_shown_as_it_is():
    """Verify time that grows with the nodes, as where every node wakes further experts."""

    class Waking(TableTarget):
        def verify(self, tree, state):
            time.sleep(0.004 * len(tree))
            return super().verify(tree, state)

    pair = table_pair(Waking())
    plan = replace(PLAN, budgets=(1, 24), max_new_tokens=16, noise_samples=0, stage_samples=1)
    run = run_bench(pair, SAMPLES[:1], plan)
    groups = {group["label"]: group for group in summarise(run.info, run.records)["groups"]}
    small, large = groups["DDTree 1"], groups["DDTree 24"]
    assert large["speedup"]["token_weighted"] < 0.5 and large["acceptance_length"]["token_weighted"] > 1.5
    stages = [group["stage_milliseconds_per_round"]["verify"] for group in (groups["plain"], small, large)]
    assert stages == sorted(stages) and stages[2] > 4 * stages[1]
    shown = "".join(str(list(summary._cells(group))) for group in (small, large))
    assert f"'{large['speedup']['token_weighted']:.2f}'" in shown


def test_B47_thinking_is_recorded_and_never_mixed(tmp_path):
    runs = {}
    for thinking in (False, True):
        runs[thinking] = run_bench(table_pair(), SAMPLES, replace(PLAN, thinking=thinking), tmp_path / str(thinking))
        assert {record.thinking for record in runs[thinking].records} == {thinking}
        assert summarise(runs[thinking].info, runs[thinking].records)["thinking"] is thinking
    lengths = [{r.key: r.prompt_length for r in run.records} for run in runs.values()]
    assert all(lengths[1][key] == lengths[0][key] + 1 for key in lengths[0] if key[2] == 0)  # the template knows of it
    with pytest.raises(RecordError, match=r"plan.thinking \(false there, true now\)"):
        run_bench(table_pair(), SAMPLES, replace(PLAN, thinking=True), tmp_path / "False")


def test_prefill_never_leaks_into_decoding():
    long = [Sample("long", "one", ("x" * 3000,))]
    run = run_bench(table_pair(TableTarget({"prefill": 0.2})), long, replace(PLAN, stage_samples=1))
    for record in run.records:
        assert record.prefill_seconds > 0.2 > record.decode_seconds
        assert sum(record.stage_seconds.values()) < 0.2


@pytest.mark.parametrize("stage", ["draft", "build", "verify", "accept", "commit"])
def test_a_planted_slow_stage_shows_up_there_and_nowhere_else(stage, monkeypatch):
    delay = 0.04

    def slow(function):
        return lambda *args, **kwargs: time.sleep(delay) or function(*args, **kwargs)

    if stage == "build":
        from deltatree.tree import POLICIES

        monkeypatch.setitem(POLICIES, "best-first", slow(POLICIES["best-first"]))
    if stage == "accept":
        from deltatree.decode.sampling import Sampler

        monkeypatch.setattr(Sampler, "bind", slow(Sampler.bind))
    pair = table_pair(TableTarget({stage: delay}), draft_delay=delay if stage == "draft" else 0)
    plan = replace(PLAN, budgets=(6,), methods=("ddtree",), stage_samples=1, noise_samples=0, max_new_tokens=12)
    record = run_bench(pair, SAMPLES[:1], plan).records[-1]
    planted = record.stage_seconds.pop(stage)
    assert planted >= delay * record.rounds
    assert sum(record.stage_seconds.values()) < 0.5 * planted


def test_without_stage_timing_no_proxy_stands_in_the_loop():
    seen = []

    class Watching(TableTarget):
        def verify(self, tree, state):
            seen.append(sys._getframe(1).f_code.co_name)
            return super().verify(tree, state)

    run_bench(table_pair(Watching()), SAMPLES[:1], replace(PLAN, noise_samples=0))
    assert set(seen) == {"verify_within_memory"}


def test_killed_in_the_middle_and_started_again_loses_nothing_and_repeats_nothing(finished, tmp_path):
    out = tmp_path / "run"
    as_here = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}  # a part of a run's identity
    child = subprocess.Popen([sys.executable, CHILD, out, "0.004"], env=as_here)
    deadline = time.monotonic() + 60
    while records_file(out).stat().st_size < 3000 if records_file(out).exists() else True:
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    before = read_records(records_file(out))
    assert 0 < len(before) < NUM_RECORDS
    with open(records_file(out), "ab") as file:
        file.write(b'{"dataset": "sums", "sam')  # as a kill in the middle of a write leaves it

    run = run_bench(table_pair(), SAMPLES, PLAN, out)
    rows = [json.loads(line) for line in records_file(out).read_text().splitlines()]
    assert len(rows) == len(run.records) == NUM_RECORDS
    assert run.records[: len(before)] == before
    assert key_and_text(run.records) == key_and_text(finished[1].records)
    untimed = ("num_requests", "num_tokens", "acceptance_length", "acceptance_by_depth", "verdicts")
    resumed, whole = (summarise(r.info, r.records)["groups"] for r in (run, finished[1]))
    assert [[g[k] for k in untimed] for g in resumed] == [[g[k] for k in untimed] for g in whole]
    untouched = records_file(out).read_bytes()
    assert len(run_bench(table_pair(), SAMPLES, PLAN, out).records) == NUM_RECORDS
    assert records_file(out).read_bytes() == untouched


def test_two_processes_share_the_prompts(finished, tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", CHILD, out, "0"]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=one_thread)
    assert done.returncode == 0, done.stderr
    assert all(f"{rank}:{NUM_RECORDS}" in done.stdout for rank in (0, 1))
    assert [file.name for file in out.glob("records*")] == ["records.jsonl"]
    assert key_and_text(read_records(records_file(out))) == key_and_text(finished[1].records)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dict(plan=replace(PLAN, max_new_tokens=21)), "plan.max_new_tokens (20 there, 21 now)"),
        (dict(samples=SAMPLES[:2]), "samples.sha256"),
        (dict(names=("another", "script")), 'target.id ("table" there, "another" now)'),
    ],
)
def test_another_runs_folder_is_refused_by_what_differs(tmp_path, change, named):
    run_bench(table_pair(), SAMPLES, PLAN, tmp_path)
    before = records_file(tmp_path).read_bytes()
    pair = table_pair(names=change.get("names", ("table", "script")))
    with pytest.raises(RecordError) as refused:
        run_bench(pair, change.get("samples", SAMPLES), change.get("plan", PLAN), tmp_path)
    assert named in str(refused.value)
    assert records_file(tmp_path).read_bytes() == before


def test_prompts_and_drafters_that_do_not_do_are_refused_before_decoding():
    target = TableTarget()
    with pytest.raises(OptionError, match="need a drafter"):
        run_bench(Pair(target, table_pair().tokenizer), SAMPLES, PLAN)
    with pytest.raises(PromptError, match=r"sample 'far' of one, turn 1: the prompt has 5\d+ tokens"):
        run_bench(table_pair(target), [Sample("far", "one", ("x" * 5000,))], PLAN)
    with pytest.raises(PromptError, match="no turns"):
        run_bench(table_pair(target), SAMPLES, replace(PLAN, raw=True))
    assert not target.widths


def test_a_text_that_prefill_ends_has_no_speed():
    target = TableTarget()
    plain = run_bench(table_pair(target), SAMPLES[:1], PLAN).records[0]
    stop_ids = frozenset(plain.token_ids[:1])
    pair = Pair(target, table_pair().tokenizer, table_drafter(target), stop_ids, ("table", "script"))
    run = run_bench(pair, SAMPLES[:1], PLAN)
    assert all(record.stop_reason == "stop" and record.tokens_per_second is None for record in run.records)
    groups = summarise(run.info, run.records)["groups"]
    assert all(group["speedup"] is None and group["tokens_per_second"]["token_weighted"] is None for group in groups)
