"""Calibrated acceptance: what is predicted is what comes, whatever the drafter believes of itself."""

import numpy as np
import pytest
import torch
from worlds import OftenRight, TextTarget

from deltatree.decode import Ending, Sampler, decode
from deltatree.decode.acceptance import BELOW, BELOW_BESIDE, BESIDE, SPINE, AcceptanceModel, Drafts
from deltatree.tree import best_first_scored, path_to, scores_of


class Student:
    """Best-first trees of one size; notes predicted and observed acceptance by depth before it learns."""

    def __init__(self, model: AcceptanceModel) -> None:
        self.model, self.rounds = model, []

    def __call__(self, log_probs, *, root, budget):
        tree, scores = best_first_scored(log_probs, root=root, budget=budget)
        self.drafts = Drafts.of(tree.parents, tree.depths, scores)
        return tree

    def observe(self, tree, accepted, logits):
        chances = np.array(self.model.of_paths(self.drafts))
        predicted = [chances[self.drafts.depths == depth].sum() for depth in range(1, 6)]
        self.rounds.append((predicted, [accepted.length > depth for depth in range(1, 6)]))
        self.model.learn(self.drafts, accepted.path)


def decode_rounds(student, drafter, count):
    loop = decode(
        drafter.target, drafter, [1, 2, 3], build_tree=student, budget=12, ending=Ending(1 << 30), sampler=Sampler()
    )
    for _ in range(count + 1):
        next(loop)


@pytest.mark.parametrize(
    ("right", "confidence"),
    [
        ((0.6, 0.55, 0.5, 0.5, 0.45), (0.97,) * 5),  # deliberately over-confident
        ((0.9, 0.85, 0.85, 0.8, 0.8), (0.4,) * 5),  # too modest
        ((0.8, 0.7, 0.6, 0.5, 0.4), None),  # honest
    ],
)
def test_predicted_is_observed_by_depth_after_200_rounds(right, confidence):
    student = Student(AcceptanceModel())
    decode_rounds(student, OftenRight(TextTarget(seed=3), right, confidence), 200 + 900)
    predicted, observed = (np.array([row[i] for row in student.rounds[200:]], dtype=float).mean(0) for i in (0, 1))
    assert np.abs(predicted - observed).max() < 0.05, (predicted, observed)


def test_an_over_confident_drafter_is_believed_at_first_and_corrected_within_200_rounds():
    student = Student(AcceptanceModel())
    decode_rounds(student, OftenRight(TextTarget(seed=4), (0.6,) * 5, (0.97,) * 5), 200)
    predicted = np.array([row[0][0] for row in student.rounds])
    observed = np.mean([row[1][0] for row in student.rounds])
    assert predicted[0] > 0.95
    assert abs(predicted[150:].mean() - observed) < 0.05


def test_a_change_of_subject_is_noticed_within_forty_rounds():
    student, target = Student(AcceptanceModel()), TextTarget(seed=5)
    decode_rounds(student, OftenRight(target, (0.9,) * 5), 300)
    decode_rounds(student, OftenRight(target, (0.3,) * 5, (0.9,) * 5), 80)
    assert np.mean([row[0][0] for row in student.rounds[340:]]) < 0.6


def test_kinds_say_where_a_node_stands():
    #      root ── a(spine) ── b(spine), c(beside)     a's sibling d(beside) ── e(below), f(below, beside)
    depths, scores = [0, 1, 2, 2, 1, 2, 2], [0.0, -0.1, -0.2, -2.0, -3.0, -3.1, -5.0]
    drafts = Drafts.of([-1, 0, 1, 1, 0, 4, 4], depths, scores)
    assert drafts.kinds[1:].tolist() == [SPINE, SPINE, BESIDE, BESIDE, BELOW, BELOW_BESIDE]
    assert drafts.spine().tolist() == [0, 1, 2]
    assert drafts.chain(drafts.spine()).parents.tolist() == [-1, 0, 1]
    assert drafts.cut(3).kinds.tolist() == drafts.kinds[:3].tolist()


def test_at_first_the_drafter_is_believed_except_below_branches_and_paths_multiply():
    log_probs = torch.randn(4, 9, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    tree, scores = best_first_scored(log_probs, root=0, budget=30)
    drafts = Drafts.of(tree.parents, tree.depths, scores)
    alone, chances = AcceptanceModel().given_parent(drafts), np.array(AcceptanceModel().of_paths(drafts))
    claimed = (scores - scores[tree.parents]).exp().numpy()
    is_below = drafts.kinds == BELOW
    assert alone[1:][~is_below[1:]] == pytest.approx(claimed[1:][~is_below[1:]], rel=1e-6)
    assert is_below.any() and (alone[is_below & (claimed > 0.2)] < claimed[is_below & (claimed > 0.2)]).all()
    assert chances[1:] == pytest.approx(alone[1:] * chances[tree.parents[1:].numpy()])


def test_scores_are_those_of_the_prefixes_and_a_smaller_tree_is_the_beginning_of_a_larger_one():
    log_probs = torch.randn(3, 7, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    tree, scores = best_first_scored(log_probs, root=2, budget=40)
    for node in range(1, len(tree)):
        path = path_to(tree, node)[1:]
        expected = sum(float(log_probs[d, tree.token_ids[n]].double()) for d, n in enumerate(path))
        assert float(scores[node]) == pytest.approx(expected)
    torch.testing.assert_close(scores_of(tree, log_probs), scores)
    smaller, _ = best_first_scored(log_probs, root=2, budget=9)
    assert torch.equal(smaller.token_ids, tree.token_ids[:10]) and torch.equal(smaller.parents, tree.parents[:10])


def test_a_round_teaches_one_newton_step_over_the_judged_nodes():
    """Term by term as arrays: curvature fades and grows, half a step each, and slopes stay within bounds."""
    draw, model = np.random.default_rng(1), AcceptanceModel()
    fades, priors = (0.94, 0.995, 0.995), (1.0, 6.0, 4.0)
    held = [np.zeros(4), np.zeros(4 * 33), np.zeros(4)]
    for _ in range(60):
        parents = np.array([-1, *(int(draw.integers(0, node)) for node in range(1, 40))])
        depths = np.zeros(40, dtype=np.int64)
        for node in range(1, 40):
            depths[node] = depths[parents[node]] + 1
        drafts = Drafts.of(parents, depths, -3.0 * depths * draw.random())
        path = path_of(parents, int(draw.integers(0, 40)))
        judged = np.array([node for node in range(1, 40) if parents[node] in path])
        chances = model.given_parent(drafts)[judged]
        expected = [model.bias.copy(), model.depth_bias.ravel().copy(), model.slope.copy()]
        kinds, logits = drafts.kinds[judged], drafts.logits[judged]
        cells = kinds * 33 + np.minimum(depths[judged], 32)
        missed = np.isin(judged, path) - chances
        for theta, weight, at, scale, fade, prior in zip(
            expected, held, (kinds, cells, kinds), (1.0, 1.0, logits), fades, priors, strict=True
        ):
            weight *= fade
            weight += np.bincount(at, chances * (1 - chances) * scale**2, theta.size)
            theta += 0.5 * np.bincount(at, missed * scale, theta.size) / (weight + prior)
        model.learn(drafts, path)
        expected[2] = expected[2].clip(0, 8)
        for theta, found in zip(expected, (model.bias, model.depth_bias.ravel(), model.slope), strict=True):
            np.testing.assert_allclose(found, theta, rtol=1e-12, atol=1e-14)


def path_of(parents, node):
    path = [node]
    while path[-1]:
        path.append(int(parents[path[-1]]))
    return path[::-1]
