"""The policy that learns: what it builds, what it learns, and what it forgets."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltatree.decode import Ending, Sampler, decode
from deltatree.decode.methods import plan
from deltatree.decode.options import TRANSITION_TREES, TREES, GenerateOptions
from deltatree.drafter import RightDrafter
from deltatree.tree import POLICIES, Acceptance, Calibrated, DraftTree, best_first, path_to, walk
from deltatree.tree.calibrated import BELOW, PRIOR, SPINE


def draft(probabilities, depth=4, vocab=6):
    """The same distribution at every depth, over tokens 0, 1, ...; what is missing is spread over the others."""
    row = torch.full((vocab,), (1 - sum(probabilities)) / (vocab - len(probabilities)))
    row[: len(probabilities)] = torch.tensor(probabilities)
    return row.log().expand(depth, -1)


def play(policy, log_probs, texts, budget=6):
    """Rounds in which the target chooses the tokens of each text, one a visited node."""
    for text in texts:
        tree = policy(log_probs, root=0, budget=budget)
        policy.observe(tree, walk(tree, lambda node, path, text=text: text[len(path) - 1]), torch.empty(len(tree), 0))


def score(policy, log_probs, tree, node):
    """A node's score from its definition, with the policy's own factors."""
    total, place = 0.0, SPINE
    for depth, step in enumerate(path_to(tree, node)[1:]):
        token, row = int(tree.token_ids[step]), log_probs[depth].double()
        best = int(row.argmax())
        first, factor = row[best].exp().item(), policy.factor(place, depth)
        if place == BELOW:
            total += float(row[token]) + math.log(min(factor, 1))
        else:
            corrected = min(first * factor, (1 + first) / 2)
            share = math.log((1 - corrected) / (1 - first))
            total += math.log(corrected) if token == best else min(float(row[token]) + share, math.log(corrected))
        place = place if token == best else BELOW
    return total


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**20), budget=st.integers(1, 60), rounds=st.integers(0, 6))
def test_nodes_come_out_best_first_by_corrected_scores_and_a_prefix_is_a_smaller_tree(seed, budget, rounds):
    generator = torch.Generator().manual_seed(seed)
    policy = Calibrated()
    for _ in range(rounds):
        log_probs = torch.randn(5, 7, generator=generator).mul(2).log_softmax(-1)
        play(policy, log_probs, [torch.randint(7, (6,), generator=generator).tolist()])
    tree = policy(log_probs := torch.randn(5, 7, generator=generator).mul(2).log_softmax(-1), root=3, budget=budget)
    scores = [score(policy, log_probs, tree, node) for node in range(1, len(tree))]
    assert scores == pytest.approx(sorted(scores, reverse=True), abs=1e-6)
    again, told = policy.scored(log_probs, root=3, budget=budget)
    assert torch.equal(again.parents, tree.parents) and told.tolist() == pytest.approx([0, *scores], abs=1e-6)
    assert len({tuple(tree.token_ids[path_to(tree, n)].tolist()) for n in range(len(tree))}) == len(tree) == budget + 1
    smaller = policy(log_probs, root=3, budget=budget // 2)
    for field in ("token_ids", "parents", "depths"):
        assert torch.equal(getattr(tree, field)[: len(smaller)], getattr(smaller, field))


def test_before_it_has_seen_anything_only_branches_are_discounted():
    policy = Calibrated()
    assert policy.factor(SPINE, 0) == 1 and policy.factor(BELOW, 3) == PRIOR
    log_probs = draft([0.5, 0.3])
    assert torch.equal(policy(log_probs, root=1, budget=2).token_ids, best_first(log_probs, root=1, budget=2).token_ids)


def test_a_chain_that_is_always_right_grows_longer():
    policy, log_probs = Calibrated(), draft([0.4, 0.3])
    before = policy(log_probs, root=0, budget=4)
    play(policy, log_probs, [[0, 0, 0, 0, 0]] * 40)
    after = policy(log_probs, root=0, budget=4)
    assert before.max_depth < after.max_depth == 4
    assert policy.factor(SPINE, 0) > 2


def test_a_drafter_that_is_surer_than_right_gets_a_wider_tree():
    policy, log_probs = Calibrated(), draft([0.9, 0.06])
    before = policy(log_probs, root=0, budget=4)
    play(policy, log_probs, [[0, 5, 5, 5, 5], [5, 5, 5, 5, 5], [5, 5, 5, 5, 5]] * 20)
    after = policy(log_probs, root=0, budget=4)
    assert before.max_depth == 4 and after.max_depth <= 2
    assert policy.factor(SPINE, 0) == pytest.approx(1 / 3 / 0.9, abs=0.05)


def test_below_a_sibling_it_learns_apart_from_the_spine():
    policy, log_probs = Calibrated(), draft([0.5, 0.4])
    play(policy, log_probs, [[1, 3, 3, 3, 3]] * 60)  # the sibling is right, what the drafter says behind it never
    assert policy.factor(BELOW, 1) < 0.15 < policy.factor(SPINE, 2)
    tree = policy(log_probs, root=0, budget=6)
    siblings = [node for node in range(1, len(tree)) if tree.parents[node] == 0 and tree.token_ids[node] == 1]
    assert len(siblings) == 1 and siblings[0] not in tree.parents.tolist()
    play(policy, log_probs, [[1, 0, 0, 0, 0]] * 200)
    assert policy.factor(BELOW, 1) > 1


def test_each_depth_leans_on_all_of_them():
    policy, log_probs = Calibrated(), draft([0.5, 0.4])
    play(policy, log_probs, [[5, 5, 5, 5, 5]] * 50)
    assert policy.factor(SPINE, 0) < policy.factor(SPINE, 3) < 1


def test_a_new_generation_forgets():
    policy, log_probs = Calibrated(), draft([0.9, 0.06])
    play(policy, log_probs, [[5, 5, 5, 5, 5]] * 20)
    policy.begin([1, 2])
    assert policy.factor(SPINE, 0) == 1


def test_certain_impossible_and_missing_drafts():
    policy = Calibrated()
    certain = torch.full((3, 4), -torch.inf)
    certain[:, 2] = 0.0
    assert policy(certain, root=0, budget=5).token_ids.tolist()[:4] == [0, 2, 2, 2]
    play(policy, certain, [[1, 1, 1, 1]] * 30)
    assert len(policy(certain, root=0, budget=5)) == 6
    for log_probs, budget in ((certain[:0], 5), (certain, 0)):
        tree = policy(log_probs, root=7, budget=budget)
        policy.observe(tree, Acceptance([0], bonus=1), torch.empty(1, 0))
        assert tree.token_ids.tolist() == [7]


def test_every_name_is_a_policy_and_each_generation_has_its_own():
    assert set(TREES) == set(POLICIES) | set(TRANSITION_TREES)
    drafter = RightDrafter([1, 2, 3], 9)
    first, second = (plan(GenerateOptions(tree="calibrated", budget=8), drafter, 9)[1] for _ in range(2))
    assert isinstance(first, Calibrated) and first is not second


def test_it_learns_while_a_text_is_decoded(hybrid):
    from tiny import VOCAB, plain_greedy

    from deltatree.models import ReferenceTarget

    prompt = [5, 6, 7]
    truth = plain_greedy(hybrid, prompt, 40)
    policy = Calibrated()
    rounds = decode(
        ReferenceTarget(hybrid),
        RightDrafter(prompt + truth, VOCAB),
        prompt,
        build_tree=policy,
        budget=8,
        ending=Ending(40),
        sampler=Sampler(),
    )
    assert [token for r in rounds for token in r.token_ids] == truth
    assert policy.factor(SPINE, 0) == pytest.approx(1.0, abs=0.02)
    assert policy._expected[SPINE] and not sum(policy._expected[BELOW])


def test_a_pruned_tree_is_learnt_from_all_the_same():
    """A grammar may take nodes out of the tree after it was built."""
    policy, log_probs = Calibrated(), draft([0.5, 0.3])
    policy(log_probs, root=0, budget=6)
    pruned = DraftTree.from_parents([0, 1], [-1, 0])
    policy.observe(pruned, Acceptance([0, 1], bonus=0), torch.empty(2, 0))
    assert policy._hits[SPINE][0] == 0 and policy._hits[BELOW][1] == 1
