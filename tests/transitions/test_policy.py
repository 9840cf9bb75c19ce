"""The policy against brute force, and what it learns."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltatree.transitions import TransitionTable, TransitionTree
from deltatree.transitions.policy import BESIDE, STRENGTHS
from deltatree.tree import Acceptance, chain, path_to

VOCAB = 4
PROMPT = [3, 1, 2]  # the root comes after it


def some_table(seed, vocab=VOCAB):
    generator = torch.Generator().manual_seed(seed)
    return TransitionTable.count(
        torch.randint(vocab, (20, 30), generator=generator) ** 2 % vocab, vocab, num_buckets=64
    )


def some_log_probs(seed, depth, vocab=VOCAB):
    return torch.randn(depth, vocab, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)


def token_paths(tree):
    return [tuple(tree.token_ids[path_to(tree, node)[1:]].tolist()) for node in range(1, len(tree))]


def conditional(table, log_probs, context, tokens):
    """log p of the last of `tokens` after the others, from the definition. context: the two tokens up to the root."""
    depth = len(tokens) - 1
    before, last = [*context, *tokens[:-1]][-2:]
    spine = all(t == int(log_probs[d].argmax()) for d, t in enumerate(tokens[:-1]))
    strength = STRENGTHS[0 if depth == 0 else 1 if spine else 2]
    ratio = table.scores(torch.tensor([before]), torch.tensor([last]), torch.arange(log_probs.shape[1]))[0]
    scores = (1.0 if spine else BESIDE) * log_probs[depth] + strength * ratio
    return float(scores.double().log_softmax(-1)[tokens[-1]])


def all_prefixes(table, log_probs, context):
    depth, vocab = log_probs.shape
    scores = {(): 0.0}
    for length in range(1, depth + 1):
        for tokens in itertools.product(range(vocab), repeat=length):
            scores[tokens] = scores[tokens[:-1]] + conditional(table, log_probs, context, tokens)
    del scores[()]
    return scores


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), depth=st.integers(1, 4), budget=st.integers(1, 40))
def test_it_builds_the_best_prefixes_best_first(seed, depth, budget):
    table, log_probs = some_table(seed), some_log_probs(seed, depth)
    policy = TransitionTree(table, refines=False)
    policy.begin(PROMPT)
    tree = policy(log_probs, root=1, budget=budget)
    scores = all_prefixes(table, log_probs, (PROMPT[-1], 1))
    expected = sorted(scores, key=lambda tokens: -scores[tokens])[:budget]
    paths = token_paths(tree)
    assert len(paths) == len(set(paths)) == min(budget, len(scores))
    assert [scores[p] for p in paths] == pytest.approx([scores[p] for p in expected], abs=1e-5)
    assert int(tree.token_ids[0]) == 1


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), small=st.integers(1, 40), large=st.integers(1, 200))
def test_a_tree_begins_with_the_tree_of_a_smaller_budget(seed, small, large):
    small, large = sorted((small, large))
    log_probs = some_log_probs(seed, 6, 50)
    policy = TransitionTree(some_table(seed, 50), refines=False)
    policy.begin(PROMPT)
    trees = [policy(log_probs, root=1, budget=budget) for budget in (small, large)]
    assert torch.equal(trees[0].token_ids, trees[1].token_ids[: small + 1])
    assert torch.equal(trees[0].parents, trees[1].parents[: small + 1])


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), budget=st.integers(0, 6))
def test_the_chain_is_the_greedy_descent(seed, budget):
    table, log_probs = some_table(seed), some_log_probs(seed, 4)
    policy = TransitionTree(table, is_chain=True, refines=False)
    policy.begin(PROMPT)
    expected = []
    for _ in range(min(budget, 4)):
        expected.append(max(range(VOCAB), key=lambda t: conditional(table, log_probs, (PROMPT[-1], 1), (*expected, t))))
    tree = policy(log_probs, root=1, budget=budget)
    assert tree.token_ids.tolist() == [1, *expected]
    assert tree.parents.tolist() == list(range(-1, len(expected)))


def test_without_transitions_the_chain_is_the_drafters():
    log_probs = some_log_probs(5, 7, 60)
    policy = TransitionTree(TransitionTable.empty(60, num_buckets=16), is_chain=True, refines=False)
    policy.begin([1])
    assert torch.equal(policy(log_probs, root=2, budget=7).token_ids, chain(log_probs, root=2, budget=7).token_ids)


def test_no_budget_and_no_depth_leave_the_root_alone():
    policy = TransitionTree(some_table(0))
    assert len(policy(some_log_probs(0, 3), root=1, budget=0)) == 1
    assert len(policy(torch.empty(0, VOCAB), root=1, budget=9)) == 1


def chain_of(policy, log_probs, root):
    tree = policy(log_probs, root=root, budget=len(log_probs))
    return tree, tree.token_ids[1:].tolist()


def test_it_learns_the_prompt_the_answer_and_what_the_target_picks():
    vocab, flat = 40, torch.zeros(2, 40).log_softmax(-1)
    base = TransitionTable.empty(vocab, num_buckets=64)
    policy = TransitionTree(base, is_chain=True)
    policy.begin([7, 8, 9, 7, 8, 9, 7])
    tree, drafted = chain_of(policy, flat, 8)
    assert drafted == [9, 7]  # from the prompt
    logits = torch.zeros(3, vocab)
    logits[0, 30] = logits[1, 31] = logits[2, 32] = 1.0  # the target wants 30 after the root
    policy.observe(tree, Acceptance([0], bonus=30), logits)
    for node, picked in ((1, 31), (2, 32)):  # nodes beside the path count, too
        before, last = int(tree.token_ids[node - 1]), int(tree.token_ids[node])
        table = policy._table
        gained = table.scores(torch.tensor([before]), torch.tensor([last]), torch.tensor([picked, 33]))[0]
        assert gained[0] > gained[1]
    policy.observe(policy(flat, root=30, budget=0), Acceptance([0], bonus=8), logits[:1])
    _, drafted = chain_of(policy, flat, 8)
    assert drafted[0] == 9
    assert base.num_entries == 0  # a generation writes into its own copy
    policy.begin([1])
    assert policy._table.num_entries == 0  # and forgets it


@pytest.mark.parametrize(("is_right", "direction"), [(True, 1), (False, -1)])
def test_strengths_follow_what_the_target_accepts(is_right, direction):
    """After token t comes t + 1 in truth; the table says so, or says the opposite; the drafter knows nothing."""
    vocab = 12
    step = 1 if is_right else -1
    text = (torch.arange(vocab)[:, None] + step * torch.arange(40)) % vocab
    policy = TransitionTree(TransitionTable.count(text, vocab, num_buckets=64), refines=False)
    policy.begin([0])
    for root in range(1, 300):
        tree = policy(torch.zeros(3, vocab).log_softmax(-1), root=root % vocab, budget=8)
        tokens, path = tree.token_ids.tolist(), [0]
        while (child := [n for n in range(len(tokens)) if int(tree.parents[n]) == path[-1] and tokens[n] == (tokens[path[-1]] + 1) % vocab]):  # fmt: skip
            path.append(child[0])
        policy.observe(tree, Acceptance(path, bonus=(tokens[path[-1]] + 1) % vocab), torch.zeros(len(tree), vocab))
    assert direction * (policy.strengths[0] - STRENGTHS[0]) > 0.1
    assert ((policy.strengths >= 0) & (policy.strengths <= 1)).all()
    policy.begin([0])
    assert np.array_equal(policy.strengths, STRENGTHS)


def test_impossible_tokens_are_never_drafted_first():
    log_probs = torch.full((2, 6), -math.inf)
    log_probs[:, 2:4] = math.log(0.5)
    policy = TransitionTree(some_table(3, 6))
    policy.begin([1])
    assert set(policy(log_probs, root=0, budget=6).token_ids[1:].tolist()) == {2, 3}
