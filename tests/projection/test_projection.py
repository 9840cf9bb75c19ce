"""`deltatree plan`: the replay drafter keeps to its profile, and the rows say what they are."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from deltatree.decode.auto import Experience
from deltatree.errors import DeltatreeError
from deltatree.models.protocol import Verified
from deltatree.projection.profiles import AFTER_SIBLING, AMONG_THREE, PROFILES, SECOND, Profile, parse_profile
from deltatree.projection.replay import ReplayDrafter, planted
from deltatree.projection.run import NOTE, ProjectionPlan, project
from deltatree.projection.shapes import target_and_drafter

VOCAB, ROUNDS = 1000, 6000


def rounds_of(profile):
    """First misses and candidate places over many rounds: [ROUNDS, depth] booleans and places."""
    truth = list(range(50, 50 + profile.depth))
    right, places, claims = [], [], []
    for number in range(ROUNDS):
        tokens, chances = planted(profile, truth, VOCAB, f"0 {number}")
        places.append([row.index(t) if t in row else 9 for row, t in zip(tokens, truth, strict=True)])
        right.append([place == 0 for place in places[-1]])
        claims.append([row[0] for row in chances])
        assert all(a >= b >= c >= 0 for a, b, c in chances) and all(len(set(row)) == 3 for row in tokens)
    return np.array(right), np.array(places), np.array(claims)


@pytest.mark.parametrize("name", PROFILES)
def test_the_first_d_tokens_are_all_right_as_often_as_the_profile_says(name):
    right, _, _ = rounds_of(PROFILES[name])
    assert np.logical_and.accumulate(right, axis=1).mean(0) == pytest.approx(PROFILES[name].all_right, abs=0.025)


def test_at_the_first_miss_and_after_it_the_published_rates_hold():
    right, places, claims = rounds_of(PROFILES["chat"])
    before = np.concatenate([np.ones((ROUNDS, 1), bool), np.logical_and.accumulate(right, axis=1)[:, :-1]], axis=1)
    first_miss = before & ~right
    assert (places[first_miss] == 1).mean() == pytest.approx(SECOND, abs=0.02)
    assert (places[first_miss] <= 2).mean() == pytest.approx(AMONG_THREE, abs=0.02)
    assert right[~before].mean() == pytest.approx(AFTER_SIBLING, abs=0.02)
    for low, high in ((0.2, 0.4), (0.6, 0.8), (0.8, 1.0)):  # claims are calibrated where all before was right
        chosen = before & (claims >= low) & (claims < high)
        assert right[chosen].mean() == pytest.approx(claims[chosen].mean(), abs=0.04)


def test_published_profiles_are_those_that_were_published():
    assert PROFILES["chat"].chain_length == pytest.approx(3.36, abs=0.01)
    assert PROFILES["own-domain"].chain_length == pytest.approx(6.43, abs=0.01)
    assert np.prod(PROFILES["chat"].given_right) == pytest.approx(0.096)
    assert parse_profile("0.8, 0.5").all_right == (0.8, 0.5) and parse_profile("chat").is_published


def test_proposals_are_log_probabilities_and_depend_on_the_place_alone():
    drafter = ReplayDrafter(PROFILES["chat"], 97, torch.device("cpu"), text=[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    first, again = (drafter.start().propose(torch.zeros(2, 0), bonus=3) for _ in range(2))
    assert first.shape == (8, 97) and torch.equal(first, again)
    assert (first.exp().sum(-1) <= 1.01).all() and first.isfinite().all()


@pytest.fixture(scope="module")
def tiny():
    return target_and_drafter("tiny", 9, device="cpu")


def test_every_method_is_projected_on_the_same_texts(tiny):
    target, drafter = tiny
    seen = []
    plan = ProjectionPlan(budgets=(6, "auto"), max_new_tokens=24, repeats=2, context_length=20)
    rows = project(
        target, PROFILES["own-domain"], plan, timed=drafter, names=("tiny", "random"),
        on_pass=lambda done, total, arm: seen.append((done, total)),
    )  # fmt: skip
    assert [row["label"] for row in rows] == ["plain", "DFlash", "DDTree 6", "DDTree auto"]
    assert seen[-1] == (12, 12) and [done for done, _ in seen] == list(range(1, 13))
    plain, chain, tree, auto = rows
    assert plain["speedup"] == 1 and chain["speedup_over_dflash"] == 1 and plain["acceptance_length"] == 1
    assert chain["acceptance_length"] > 3 and chain["nodes_per_round"] == 8 and tree["nodes_per_round"] == 6
    assert all(row["departures"] == 0 for row in rows)  # float32: the text is plain decoding's
    assert all(row["projection"] and row["note"] == NOTE and len(row["seconds"]) == 2 for row in rows)
    assert auto["tokens"] == plain["tokens"] == [23, 23]


def test_every_budget_runs_once_with_each_tree_and_auto_learns_for_each_alone(tiny, monkeypatch):
    from deltatree.projection import run

    target, drafter = tiny
    made = []
    monkeypatch.setattr(run, "Experience", lambda costs: made.append(Experience(costs)) or made[-1])
    plan = ProjectionPlan(
        budgets=(6, "auto"), trees=("best-first", "calibrated"), max_new_tokens=16, repeats=1, context_length=20,
        expected_texts=2,
    )  # fmt: skip
    rows = project(target, PROFILES["own-domain"], plan, timed=drafter)
    trees = ["DDTree 6", "DDTree auto"]
    assert [row["label"] for row in rows] == ["plain", "DFlash", *trees, *(f"{label} calibrated" for label in trees)]
    assert [row["tree"] for row in rows] == [None] * 2 + ["best-first"] * 2 + ["calibrated"] * 2
    assert all(row["departures"] == 0 and row["expected_acceptance_length"] >= 1 for row in rows)
    first, second = made
    assert first.costs is not second.costs and min(one.num_drafted for one in made) > 0


def test_where_the_text_departs_the_drafter_is_told_how_it_goes_on(tiny):
    """A target that is of another mind on trees stands for a near tie in low precision."""
    target, drafter = tiny

    class Fickle:
        def __init__(self):
            self.num_trees = 0

        def __getattr__(self, name):
            return getattr(target, name)

        def verify(self, tree, state):
            verified = target.verify(tree, state)
            self.num_trees += len(tree) > 1
            if len(tree) > 1 and self.num_trees % 4 == 0:
                flipped = verified.logits.clone()
                flipped[0] = -flipped[0]
                return Verified(flipped, verified.features)
            return verified

    plan = ProjectionPlan(budgets=(6,), max_new_tokens=40, repeats=1, context_length=10)
    rows = project(Fickle(), PROFILES["very-strong"], plan, timed=drafter)
    assert rows[0]["departures"] == 0 < rows[2]["departures"]
    assert rows[2]["acceptance_length"] > 3  # it knows the new text, too


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "exactly one of --shape and --target"),
        (["--shape", "tiny", "--target", "shipped"], "exactly one of"),
        (["--shape", "huge"], "shape 'huge' is not known; possible are qwen3.6-35b-a3b"),
        (["--shape", "tiny", "--acceptance", "fair"], "profile 'fair' is not known; possible are own-domain"),
        (["--shape", "tiny", "--acceptance", "0.5,0.6"], "never rise"),
        (["--shape", "tiny", "--acceptance", "1.5"], "never rise"),
        (["--shape", "tiny", "--budgets", "many"], "budget 'many'"),
        (["--shape", "tiny", "--tree", "widest"], "tree 'widest' is not known"),
        (["--shape", "tiny", "--tree", "best-first,transitions"], "random text teaches it nothing"),
        (["--shape", "tiny", "--tree", "chain"], "tree 'chain' is DFlash"),
        (["--shape", "tiny", "--repeats", "0"], "repeats=0 is not possible"),
        (["--shape", "tiny", "--out", "absent/rows.jsonl"], "does not exist"),
        (["--shape", "tiny", "--context", "5000"], "do not fit into the target's context"),
    ],
)
def test_what_cannot_be_projected_is_refused(arguments, sentence, tmp_path, monkeypatch):
    from deltatree.cli import app

    monkeypatch.chdir(tmp_path)
    refused = CliRunner().invoke(app, ["plan", *arguments])
    assert isinstance(refused.exception, DeltatreeError) and sentence in str(refused.exception)


def test_the_command_prints_a_table_that_says_what_it_is_or_json_lines(tmp_path):
    from deltatree.cli import app

    common = ["plan", "--shape", "tiny", "--device", "cpu", "--max-new-tokens", "8", "--repeats", "1", "--context", "9"]
    common += ["--tree", "calibrated", "--budgets", "4", "--acceptance", "0.9,0.8,0.7"]
    done = CliRunner().invoke(app, [*common, "--out", str(tmp_path / "rows.jsonl")])
    assert done.exit_code == 0, done.output
    text = " ".join(done.output.split())
    assert "PROJECTION" in text and "more experts than real text" in text and "DDTree 4" in text and "as given" in text
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["method"] for row in rows] == ["ar", "dflash", "ddtree"]
    printed = CliRunner().invoke(app, [*common, "--json"])
    assert [json.loads(line)["label"] for line in printed.stdout.splitlines() if line.startswith("{")] == [
        "plain", "DFlash", "DDTree 4 calibrated"
    ]  # fmt: skip


def test_a_profile_must_fall():
    with pytest.raises(DeltatreeError, match="never rise"):
        Profile("mine", ())
