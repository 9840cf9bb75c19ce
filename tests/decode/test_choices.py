"""The choice between draft and verify is quick, and yet the one that its plain formulation makes, ties included."""

import math

import numpy as np
import pytest

from deltatree.decode.acceptance import BELOW, BELOW_BESIDE, BESIDE, MAX_DEPTH, SPINE, Drafts
from deltatree.decode.auto import AutoBudget, Experience, Habits
from deltatree.decode.costs import RoundCosts
from deltatree.tree import best_first

BUCKETS = (1, 2, 4, 8, 9, 12, 16, 24, 32, 48, 64)


def random_tree(draw, num_nodes, depth, *, step):
    """Parents, depths and scores of any tree, best nodes first. step: scores are multiples of it, so that many are equal"""
    parents, depths, scores = [-1], [0], [0.0]
    for _ in range(num_nodes - 1):
        parent = draw.choice([node for node in range(len(depths)) if depths[node] < depth])
        parents.append(int(parent))
        depths.append(depths[parent] + 1)
        scores.append(scores[parent] - step * int(draw.integers(0, 9)))
    return np.array(parents), np.array(depths), np.array(scores)


def plain_kinds(parents):
    """Kind of every node, node by node."""
    kinds = [SPINE]
    for node in range(1, len(parents)):
        is_first = parents[node] not in parents[1:node]
        on_spine = kinds[parents[node]] == SPINE
        kinds.append((SPINE if is_first else BESIDE) if on_spine else (BELOW if is_first else BELOW_BESIDE))
    return np.array(kinds)


def plain_chances(model, parents, depths, scores):
    """[N] probability that a node and its ancestors are accepted."""
    kinds, given = plain_kinds(parents.tolist()), np.minimum(scores - scores[parents], -1e-9)
    logits = np.clip(given - np.log(-np.expm1(given)), -9, 9) / 4
    level = model.bias[kinds] + model.depth_bias[kinds, np.minimum(depths, MAX_DEPTH)] + model.slope[kinds] * logits
    chances = 1 / (1 + np.exp(-level))
    chances[0] = 1
    for node in range(1, len(parents)):
        chances[node] *= chances[parents[node]]
    return kinds, chances


def plain_seconds(costs, sizes, context):
    if not costs.captured:
        return costs.drafted(sizes, context)
    curve = costs._drafted[max(math.ceil(math.log2(max(context, 1) / 1024)), 0)]
    places = np.minimum(np.searchsorted(costs.node_counts, sizes), costs.node_counts.size - 1)
    return costs.pace_factor * np.maximum.accumulate(np.exp(curve))[places]


def plain_choice(known, context, parents, depths, scores):
    """Nodes, whether they are a chain, their chances; then what that is worth, and every size for all rounds, [2, sizes]."""
    costs = known.costs
    plain = 1 / costs.plain(context)
    rate = max(plain, known.rate()) if known.rounds >= 6 else plain
    kinds, chances = plain_chances(known.acceptance, parents, depths, scores)
    spine, sizes = np.flatnonzero(kinds == SPINE), np.arange(1, len(parents) + 1)
    prices = rate * plain_seconds(costs, sizes, context)
    of_tree, of_chain = chances.cumsum() - prices, chances[spine].cumsum() - prices[: spine.size]
    if costs.captured:
        of_tree[~np.isin(sizes, [*costs.node_counts, len(parents)])] = -np.inf
    is_chain = of_chain.max() >= of_tree.max()
    size = 1 + int((of_chain if is_chain else of_tree).argmax())
    nodes = spine[:size] if is_chain else np.arange(size)
    counts = costs.node_counts
    tokens = [each.cumsum()[np.minimum(counts, each.size) - 1] for each in (chances, chances[spine])]
    return nodes, bool(is_chain and size > 1), chances[nodes], np.stack(tokens)


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("by_steps", [False, True], ids=["whole", "in steps"])
def test_choices_are_those_of_the_plain_formulation(captured, by_steps):
    """Over many rounds that teach, at contexts on both sides of a doubling; with `prepare` and `settle` and without."""
    draw, now, habits, chosen = np.random.default_rng(5), [0.0], Habits(), set()
    known = Experience(RoundCosts(BUCKETS, captured=captured, clock=lambda: now[0]))
    policy = AutoBudget(best_first, known)
    for turn in range(250):
        context = int(draw.choice([5, 900, 1024, 1025, 5000]))
        policy.wants_draft(context, 1)
        policy.habit()
        tree = random_tree(draw, int(draw.integers(1, 80)), int(draw.integers(1, 40)), step=draw.choice([0.01, 0.1, 1]))
        expected, is_chain, chances, always = plain_choice(known, context, *tree)
        if by_steps:
            policy.prepare()
        nodes = policy.choose(Drafts.of(*tree))
        if by_steps:
            policy.settle()
        assert nodes.tolist() == expected.tolist() and policy.choice.is_chain == is_chain
        assert policy.choice.probabilities == chances.tolist() and policy.choice.expected == float(chances.sum())
        seconds = plain_seconds(known.costs, np.array([len(nodes)]), context)[0]
        assert policy.choice.seconds == seconds
        path = sorted(int(node) for node in draw.choice(len(nodes), draw.integers(0, 3)) if node)[:1]
        learn = policy.lesson([0, *path], len(nodes))
        if captured:
            habits.learn(float(chances.sum()), seconds / known.costs.pace_factor, always)
            assert (known.habits.always == habits.always).all()
            assert known.habits.free_tokens == habits.free_tokens and known.habits.free_seconds == habits.free_seconds
        now[0] += draw.choice([0.012, 0.02, 0.04])
        policy.finish()
        learn()
        chosen.add((len(nodes), is_chain))
        if turn == 100:  # a world in which nodes cost nothing, and one in which they cost much
            known.costs.set_curves(0.02, {1: 0.02, 64: 0.02})
        if turn == 150:
            known.costs.set_curves(0.02, {1: 0.02, 64: 0.2})
    assert len(chosen) > 8 and {is_chain for _, is_chain in chosen} == {True, False}


@pytest.mark.parametrize("captured", [True, False])
def test_of_equal_choices_a_chain_goes_first_and_then_the_smaller(captured):
    known = Experience(RoundCosts(BUCKETS, captured=captured, clock=lambda: 0.0))
    known.costs.set_curves(1.0, {1: 1.0, 64: 1.0})
    known.acceptance.depth_bias[:, 2:] = -np.inf  # nothing beyond depth 1 is accepted
    policy = AutoBudget(best_first, known)
    trees = {
        "line": ([-1, 0, 1, 2, 3], [0, 1, 2, 3, 4]),  # both kinds are the same nodes: 2 to 5 of them are worth alike
        "late branch": ([-1, 0, 1, 2, 0], [0, 1, 2, 3, 1]),
        "fork": ([-1, 0, 0, 1, 1], [0, 1, 1, 2, 2]),
    }
    found = {}
    for name, (parents, depths) in trees.items():
        tree = np.array(parents), np.array(depths), -0.5 * np.array(depths)
        policy.wants_draft(50, 1)
        expected, is_chain, *_ = plain_choice(known, 50, *tree)
        nodes = policy.choose(Drafts.of(*tree)).tolist()
        assert nodes == expected.tolist() and policy.choice.is_chain == is_chain
        found[name] = nodes, is_chain
    assert found["line"] == ([0, 1], True)
    assert found["fork"] == ([0, 1, 2, 3] if captured else [0, 1, 2], False)


def test_kinds_of_any_tree_are_those_of_the_plain_formulation():
    draw = np.random.default_rng(2)
    for _ in range(60):
        parents, depths, scores = random_tree(draw, int(draw.integers(1, 60)), 9, step=0.2)
        drafts = Drafts.of(parents, depths, scores)
        assert drafts.kinds.tolist() == plain_kinds(parents.tolist()).tolist()
        assert drafts.spine().tolist() == np.flatnonzero(drafts.kinds == SPINE).tolist()
