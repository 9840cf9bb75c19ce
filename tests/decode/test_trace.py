"""The trace says what happened, and changes nothing."""

import json

import pytest
from worlds import VOCAB, OftenRight, TextTarget

from deltatree.decode import Ending, Sampler, decode
from deltatree.decode.auto import AutoBudget, Experience
from deltatree.decode.costs import RoundCosts
from deltatree.decode.trace import Trace
from deltatree.tree import DraftTree, best_first, no_draft, path_to

PROMPT = [1, 2, 3]


def run(policy, budget, count=120, right=(0.8,) * 6):
    target = TextTarget(lambda nodes, context: 0.01)
    if policy == "auto":
        policy = AutoBudget(best_first, Experience(RoundCosts(clock=target.clock)))
    rows = []
    rounds = list(
        decode(
            target, OftenRight(target, right), PROMPT, build_tree=Trace(rows.append).follow(policy), budget=budget,
            ending=Ending(count), sampler=Sampler(),
        )
    )  # fmt: skip
    assert [token for r in rounds for token in r.token_ids] == target.text[3 : 3 + count]
    return rows, rounds[1:]


@pytest.mark.parametrize(("policy", "budget"), [("auto", 255), (best_first, 12), (no_draft, 0)])
def test_every_round_is_written_with_its_tree_and_what_was_accepted(policy, budget):
    rows, rounds = run(policy, budget)
    assert [row["round"] for row in rows] == list(range(1, len(rounds) + 1))
    context, emitted = len(PROMPT), []
    for row, done in zip(json.loads(json.dumps(rows)), rounds, strict=True):
        tree = DraftTree.from_parents(row["tokens"], row["parents"])
        assert row["context"] == context and row["budget"] == len(tree) - 1 == done.num_nodes - 1
        assert path_to(tree, row["path"][-1]) == row["path"] and len(row["path"]) == done.acceptance_length
        assert len(row["scores"]) == len(tree) and row["scores"][0] == 0
        assert all(row["scores"][node] <= row["scores"][row["parents"][node]] + 1e-4 for node in range(1, len(tree)))
        assert set(row["seconds"]) == {"draft", "build", "verify", "commit"} and min(row["seconds"].values()) >= 0
        context += len(done.token_ids)
        emitted += [*(row["tokens"][node] for node in row["path"][1:]), row["bonus"]]
    assert emitted[: len(emitted)] and max(emitted) < VOCAB


def test_of_budget_auto_it_says_what_was_expected():
    rows, _ = run("auto", 255)
    drafted = [row for row in rows if row["drafted"]]
    assert drafted and all(row["shape"] in ("chain", "tree") for row in drafted)
    for row in drafted:
        assert len(row["probabilities"]) == len(row["tokens"]) and row["probabilities"][0] == 1
        assert row["expected"] == pytest.approx(sum(row["probabilities"]), abs=0.01)
        assert row["expected_seconds"] > 0
    assert all("expected" not in row for row in rows if not row["drafted"])
