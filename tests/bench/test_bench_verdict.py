"""Losslessness: rounding is told from a wrong state, and the noise that excuses is measured, not assumed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bench_doubles import PLAN, SAMPLES, TableTarget, table_pair

from deltatree.bench import run_bench, summarise, verdict_lines
from deltatree.bench.verdict import PlainText, first_divergence, judge


def run(**changes):
    return run_bench(table_pair(TableTarget(**changes)), SAMPLES, PLAN)


def drafted(bench_run) -> list:
    return [record for record in bench_run.records if record.method != "ar"]


def test_without_noise_every_text_is_identical_and_the_noise_is_nothing():
    done = run()
    assert done.info["noise"] == {"measured": 0.0, "bound": 0.0, "positions": PLAN.max_new_tokens - 1}
    assert done.num_diverged == 0


def test_a_flip_inside_the_measured_noise_is_a_near_tie_with_its_place_tokens_and_gap():
    done = run(tie=0.001, tree_error=0.002)
    assert done.info["noise"]["measured"] == pytest.approx(0.004, rel=0.01)
    ties = [record for record in drafted(done) if record.verdict == "near_tie"]
    assert ties and done.num_diverged == 0
    plain = {(r.dataset, r.sample, r.turn): r for r in done.records if r.method == "ar"}
    for record in ties:
        where, truth = record.divergence, plain[record.dataset, record.sample, record.turn].token_ids
        assert record.token_ids[: where.position] == truth[: where.position]
        assert (where.token, where.plain_token) == (record.token_ids[where.position], truth[where.position])
        assert where.gap == pytest.approx(0.001, rel=0.01)
    summary = summarise(done.info, done.records)
    assert summary["verdicts"]["near_tie"] == len(ties) == len(summary["divergences"])
    assert any(line.startswith("near_tie: ") and "gap 0.001" in line for line in verdict_lines(summary))


def test_a_flip_outside_the_noise_diverges():
    pair = table_pair(TableTarget(tie=0.5))
    plain = PlainText(pair.target, pair.encode("1+1?"), [7, 8, 9])
    best = plain.best(1)[1].tolist()
    plain.token_ids[1] = best[0]
    flipped = first_divergence(plain, [7, best[1], 9])
    assert (flipped.position, flipped.token, flipped.plain_token) == (1, best[1], best[0])
    assert flipped.gap == pytest.approx(0.5)
    assert judge(flipped, noise=0.4) == "diverged" and judge(flipped, noise=0.6) == "near_tie"
    assert judge(None, noise=0.0) == "identical"


def test_an_error_larger_than_rounding_excuses_nothing():
    """A broken tree forward makes the measured noise as large as its own mistakes."""
    done = run(tie=0.2, tree_error=0.3)
    assert done.info["noise"]["measured"] > 0.5 and done.info["noise"]["bound"] == 0.01
    assert done.num_diverged > 0
    assert any("more than rounding explains" in line for line in verdict_lines(summarise(done.info, done.records)))


def test_a_text_that_ends_too_soon_diverges():
    plain = PlainText(TableTarget(), [1], [7, 8, 9])
    cut = first_divergence(plain, [7, 8])
    assert (cut.position, cut.token, cut.plain_token, cut.gap) == (2, -1, 9, None)
    assert judge(cut, noise=1e9) == "diverged"


def test_sampled_texts_have_no_verdict():
    done = run_bench(table_pair(), SAMPLES[:2], replace(PLAN, temperature=1.0))
    assert {record.verdict for record in done.records} == {"sampled"}
    assert done.info["noise"]["measured"] is None
