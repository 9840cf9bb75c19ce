"""Corrected scores and their learning are the policy's own, and a tree over two kinds of scores is its tree."""

import math
import random

import pytest
import torch

from deltatree.kernels.calibration import Seen, corrected, learn_calibration
from deltatree.kernels.tree_build import TreeBuffers, build_tree
from deltatree.kernels.walk import Walked
from deltatree.tree import Calibrated
from deltatree.tree.accept import Acceptance

VOCAB = 30


def draft_of(draw, depth):
    """Log-probabilities of which no two paths come near each other."""
    logits = torch.tensor([[draw.gauss(0, 2.5) for _ in range(VOCAB)] for _ in range(depth)])
    return logits.log_softmax(-1)


def candidates_of(log_probs, k):
    values, ids = log_probs.sort(dim=-1, descending=True)
    return values[:, :k], ids[:, :k]


def some_walk(draw, tree, depth):
    """A path from the root to some node, and what the target chose there."""
    node, path = draw.randrange(len(tree)), []
    while node >= 0:
        path, node = [node, *path], int(tree.parents[node])
    path = path[: depth + 1]
    bonus = draw.randrange(VOCAB)
    emitted = [*tree.token_ids[path[1:]].tolist(), bonus]
    walked, padding = Walked.empty(depth, "cpu"), [0] * (depth + 1 - len(path))
    walked.record.copy_(torch.tensor([len(path), bonus, *path, *padding, *emitted, *padding]))
    return Acceptance(path, bonus), walked


@pytest.mark.parametrize("depth, budget", [(1, 3), (4, 7), (8, 15), (15, 28)])
def test_rounds_learn_and_build_what_the_policy_does(depth, budget):
    draw, policy, seen = random.Random(depth), Calibrated(), Seen.empty(depth, "cpu")
    for _ in range(30):
        log_probs = draft_of(draw, depth)
        tree = policy(log_probs, root=5, budget=budget)
        values, ids = candidates_of(log_probs, budget)
        out = build_tree(corrected(values, seen), ids, 5, budget=budget, out=TreeBuffers.empty(budget + 1, 4, "cpu"))
        count = len(tree)
        assert int(out.num_nodes) == count
        for name in ("token_ids", "parents", "depths"):
            assert torch.equal(getattr(out, name)[:count], getattr(tree, name)), name
        accepted, walked = some_walk(draw, tree, depth)
        policy.observe(tree, accepted, None)
        learn_calibration(values, ids, walked, seen)
        for place in range(2):
            for counted, known in ((seen.hits, policy._hits), (seen.expected, policy._expected)):
                padded = known[place] + [0.0] * (depth - len(known[place]))
                torch.testing.assert_close(counted[place], torch.tensor(padded[:depth]), atol=1e-5, rtol=1e-5)


def test_scores_stay_ordered_and_below_zero_whatever_was_seen():
    draw = random.Random(3)
    for _ in range(40):
        seen = Seen(
            torch.tensor([[draw.random() * 40 for _ in range(5)] for _ in range(2)]),
            torch.tensor([[draw.random() ** 4 * 40 for _ in range(5)] for _ in range(2)]),
        )
        values, _ = candidates_of(draft_of(draw, 5), 12)
        rows = corrected(values, seen)
        assert rows.isfinite().all() and (rows <= 0).all() and (rows.diff(dim=-1) <= 0).all()


def test_a_certain_or_impossible_first_choice_is_left_as_it_is():
    values = torch.tensor([[0.0, -math.inf, -math.inf], [math.log(0.5), math.log(0.25), -math.inf]])
    rows = corrected(values, Seen.empty(2, "cpu"))
    assert torch.equal(rows[0, 0], values[0]) and not rows.isnan().any()
    torch.testing.assert_close(rows[0, 1], values[1])  # nothing was seen: the spine is believed
    torch.testing.assert_close(rows[1], values + math.log(0.8))


def test_two_equal_kinds_of_scores_give_the_best_first_tree():
    draw = random.Random(9)
    for budget in (1, 6, 40):
        values, ids = candidates_of(draft_of(draw, 6), budget)
        once, twice = (build_tree(v, ids, 1, budget=budget) for v in (values, torch.stack([values, values])))
        for name in ("token_ids", "parents", "depths", "scores", "ancestors", "rows", "num_nodes"):
            assert torch.equal(getattr(once, name), getattr(twice, name)), name
