"""Expected figures: tokens by the profile, seconds as given, the same places for all methods."""

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from deltatree.projection import expected
from deltatree.projection.expected import RoundSeconds, Text, add_expected, seconds_of_rows, simulate
from deltatree.projection.profiles import PROFILES, Profile
from deltatree.tree import Calibrated, walk

TIMES = RoundSeconds(
    0.003, 0.0075, {1: 0.0037, 9: 0.0074, 17: 0.0093, 65: 0.0115}, choice=0.0004, buckets=(1, 4, 9, 17, 65)
)
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "profiles.py"


def test_seconds_between_measured_sizes_lie_on_lines_and_captured_ones_are_filled():
    assert TIMES.tree(9) == TIMES.tree(5) == 0.0074 and TIMES.tree(18) == TIMES.tree(65)
    assert 0.0037 < TIMES.tree(2) == TIMES.tree(4) < 0.0074
    assert TIMES.spine(9, 8) == pytest.approx(0.0075)
    beyond = RoundSeconds(1.0, 2.0, {9: 2.0, 17: 3.0})
    assert beyond.tree(25) == pytest.approx(4.0) and beyond.tree(2) == 2.0


@pytest.mark.parametrize("name", ["chat", "own-domain"])
def test_a_chain_emits_what_its_profile_says_at_the_seconds_given(name):
    text = Text(PROFILES[name])
    plain = simulate(0, text, TIMES, lives=1)
    found = simulate(8, text, TIMES, is_chain=True, lives=2, generations=20)
    assert plain.tokens_per_second == pytest.approx(1 / 0.003) and plain.acceptance_length == 1
    assert found.acceptance_length == pytest.approx(PROFILES[name].chain_length, rel=0.05)
    assert found.milliseconds_per_round == pytest.approx(7.5) and found.nodes_per_round == 8
    assert found.over(plain) == pytest.approx(found.tokens_per_second * 0.003)
    assert 0 < found.over_error() < 0.05 and found.over_error(found) == pytest.approx(0, abs=1e-9)


def test_trees_emit_more_the_larger_they_are_and_places_are_drafted_once():
    text = Text(PROFILES["chat"])
    lengths = [simulate(size, text, TIMES, lives=1).acceptance_length for size in (4, 16, 64)]
    assert lengths == sorted(lengths) and lengths[2] > 1.1 * lengths[0]
    here = text.place(5)
    assert text.place(5) is here and here.path[0] == 0 and (np.diff(here.path) > 0).all()


def test_auto_pays_for_looking_and_keeps_up_with_the_best_fixed_choice():
    text = Text(PROFILES["own-domain"])
    arms = [simulate(size, text, TIMES, lives=1, generations=24) for size in (0, 8, 16, 64)]
    auto = simulate("auto", text, TIMES, lives=1, generations=24)
    assert min(auto.over(arm) for arm in arms) > 0.96 and auto.milliseconds_per_round > 7.4


def in_words(here, root=500):
    """A place's drafts over a whole vocabulary, [D, 40], and the target's choices."""
    log_probs = torch.full((len(here.ranks), 40), -16.0)
    words = torch.arange(3) * 5 + torch.arange(len(here.ranks))[:, None] + 3
    log_probs.scatter_(1, words, here.log_probs)
    return log_probs, [*(1 if rank < 0 else int(words[depth, rank]) for depth, rank in enumerate(here.ranks)), 2]


@pytest.mark.parametrize("is_taught", [True, False])
def test_calibrated_trees_are_the_policys_as_it_learns_in_every_text(is_taught, monkeypatch):
    """Counted here with a target's choices over a whole vocabulary."""
    text, policy, found = Text(PROFILES["chat"]), Calibrated(), []
    if not is_taught:
        monkeypatch.setattr(Calibrated, "observe", lambda *lesson: None)
    for number in range(3):
        place = number * (expected._FAR + 60)
        end = place + 60
        policy.begin([])
        while place < end:
            log_probs, choices = in_words(text.place(place))
            tree = policy(log_probs, root=500, budget=12)
            accepted = walk(tree, lambda node, path: choices[len(path) - 1])  # noqa: B023
            policy.observe(tree, accepted, log_probs)
            place += accepted.length
            found += [accepted.length] if number else []
    arm = simulate(12, text, TIMES, tree="calibrated", lives=1, generations=2, num_tokens=60)
    assert arm.num_rounds == len(found) and arm.acceptance_length == sum(found) / len(found)


def test_a_calibrated_tree_brings_more_where_the_drafter_knows_no_siblings():
    text = Text(PROFILES["chat"])
    best, calibrated = (
        simulate(15, text, TIMES, tree=tree, lives=2, generations=20) for tree in ("best-first", "calibrated")
    )
    assert best.milliseconds_per_round == pytest.approx(calibrated.milliseconds_per_round)
    assert calibrated.over(best) - 2 * calibrated.over_error(best) > 1


def test_auto_chooses_among_calibrated_nodes_too():
    text = Text(PROFILES["chat"])
    arms = [simulate(size, text, TIMES, tree="calibrated", lives=1) for size in (0, 8, 16, 64)]
    auto = simulate("auto", text, TIMES, tree="calibrated", lives=1)
    assert min(auto.over(arm) for arm in arms) > 0.96
    assert simulate("auto", text, TIMES, lives=1).acceptance_length != auto.acceptance_length


@pytest.mark.parametrize("budget", [8, "auto"])
def test_a_generations_seconds_are_freed_of_the_luck_of_its_places_and_of_nothing_else(budget, monkeypatch):
    """Over draws of the text the figures scatter much less than they did, around the same mean."""
    profile = PROFILES["own-domain"]
    found = {}
    for freed in (True, False):
        if not freed:
            monkeypatch.setattr(expected, "_freed", lambda seconds, luck: seconds)
        arms = [simulate(budget, Text(profile, seed=seed), TIMES, lives=1) for seed in range(6)]
        found[freed] = np.array([arm.tokens_per_second for arm in arms])
        assert np.mean([arm.over_error() for arm in arms]) < (0.012 if freed else 1.0)
    assert found[True].std() < 0.5 * found[False].std()
    assert found[True].mean() == pytest.approx(
        found[False].mean(), rel=3 * found[False].std() / found[False].mean() / 6**0.5
    )


def rows_of(profile):
    took = [("ar", 0, 3.0), ("dflash", 8, 7.5), ("ddtree", 8, 7.4), ("ddtree", 64, 11.5), ("ddtree", "auto", 7.6)]
    labels = {0: "plain", 64: "DDTree 64", "auto": "DDTree auto"}
    return [
        {
            "method": method, "budget": budget, "label": labels.get(budget, method), "milliseconds_per_round": ms,
            "profile": profile.name, "all_right": list(profile.all_right), "max_new_tokens": 40, "tokens_per_second": 1.0,
        }
        for method, budget, ms in took
    ]  # fmt: skip


def test_rows_get_what_their_milliseconds_come_to():
    profile = Profile("mine", (0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1))
    rows = rows_of(profile)
    seconds = seconds_of_rows(rows, more={1: 0.004, 32: 9.0, 257: 0.02})
    assert seconds.trees == {1: 0.004, 9: 0.0074, 65: 0.0115, 257: 0.02}
    add_expected(rows, profile, {"best-first": seconds}, lives=1, generations=8)
    plain, chain, *_, auto = rows
    assert plain["expected_speedup"] == chain["expected_speedup_over_dflash"] == 1
    assert max(row["expected_share_of_best_fixed"] for row in rows[:-1]) == 1
    assert chain["expected_milliseconds_per_round"] == pytest.approx(7.5)
    assert auto["expected_rounds"] > 8 and auto["tokens_per_second"] == 1.0


def test_every_tree_has_its_own_milliseconds():
    profile = PROFILES["chat"]
    rows = rows_of(profile)
    rows += [
        row | {"tree": "calibrated", "milliseconds_per_round": 2 * row["milliseconds_per_round"]} for row in rows[2:4]
    ]
    seconds = {tree: seconds_of_rows(rows, tree) for tree in ("best-first", "calibrated")}
    assert seconds["best-first"].trees == {9: 0.0074, 65: 0.0115}
    assert seconds["calibrated"].trees == {9: 0.0148, 65: 0.023} and seconds["calibrated"].chain == 0.0075
    add_expected(rows, profile, seconds, lives=1, generations=4)
    assert [row["expected_milliseconds_per_round"] for row in rows[-2:]] == pytest.approx([14.8, 23.0])
    assert rows[-1]["expected_acceptance_length"] > rows[3]["expected_acceptance_length"]


@pytest.mark.skipif(not SCRIPT.is_file(), reason="benchmarks are not part of an installed package")
def test_rows_that_were_measured_before_are_read_and_a_missing_profile_borrows_times(tmp_path, monkeypatch, capsys):
    measured, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    measured.write_text("\n".join(json.dumps(row) for row in rows_of(PROFILES["chat"])))
    arguments = ["--from", str(measured), "--out", str(out), "--lives", "1", "--also", "very-strong"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 10 and rows[0]["tokens_per_second"] == 1.0
    assert "tokens_per_second" not in rows[5] and rows[5]["times_of_profile"] == "chat"
    assert rows[6]["expected_acceptance_length"] > 7


@pytest.mark.skipif(not SCRIPT.is_file(), reason="benchmarks are not part of an installed package")
def test_a_tree_that_was_not_measured_borrows_times_and_given_budgets_are_every_trees(tmp_path, monkeypatch, capsys):
    measured, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    measured.write_text("\n".join(json.dumps(row) for row in rows_of(PROFILES["chat"])))
    arguments = ["--from", str(measured), "--out", str(out), "--lives", "1", "--fixed", "15=7.4"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments, "--trees", "best-first", "calibrated"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["budget"] for row in rows[2:]] == 2 * [8, 64, 15, "auto"]
    assert [row["label"] for row in rows[-3:]] == [f"DDTree {budget} calibrated" for budget in (64, 15, "auto")]
    assert rows[8]["budget"] == 15 and rows[8]["expected_milliseconds_per_round"] == pytest.approx(7.4)
    assert rows[8]["times_of_tree"] == "best-first" and "tokens_per_second" not in rows[8]
