"""The tree policies against brute force."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltatree.tree import best_first, chain, no_draft, path_to, top_candidates


def token_paths(tree):
    """Every drafted node as the tokens from the root's child down to it."""
    return [tuple(tree.token_ids[path_to(tree, node)[1:]].tolist()) for node in range(1, len(tree))]


def all_prefixes(log_probs):
    """Every prefix with its log-probability, best first."""
    depth, vocab = log_probs.shape
    rows = log_probs.double().tolist()
    for length in range(1, depth + 1):
        for tokens in itertools.product(range(vocab), repeat=length):
            yield tokens, sum(rows[d][t] for d, t in enumerate(tokens))


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 10_000), depth=st.integers(1, 4), vocab=st.integers(1, 4), budget=st.integers(0, 60))
def test_best_first_is_the_best_set_of_prefixes(seed, depth, vocab, budget):
    log_probs = torch.randn(depth, vocab, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)
    tree = best_first(log_probs, root=9, budget=budget)
    scores = dict(all_prefixes(log_probs))
    expected = sorted(scores, key=lambda tokens: -scores[tokens])[:budget]
    paths = token_paths(tree)
    assert len(paths) == len(set(paths)) == min(budget, len(scores))  # the budget, or all there is
    assert sorted(scores[p] for p in paths) == pytest.approx(sorted(scores[p] for p in expected))
    assert [scores[p] for p in paths] == pytest.approx(sorted((scores[p] for p in paths), reverse=True))  # best first
    assert int(tree.token_ids[0]) == 9


def test_ties_go_to_the_lower_token_id_and_the_earlier_rank():
    flat = torch.zeros(2, 4).log_softmax(-1)
    assert token_paths(best_first(flat, root=0, budget=6)) == [(0,), (1,), (2,), (3,), (0, 0), (0, 1)]
    assert token_paths(chain(flat, root=0, budget=9)) == [(0,), (0, 0)]


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 10_000), vocab=st.integers(1, 30), k=st.integers(1, 40), levels=st.integers(1, 4))
def test_top_candidates_equal_a_full_stable_sort(seed, vocab, k, levels):
    values = torch.randint(0, levels, (3, vocab), generator=torch.Generator().manual_seed(seed)).float()
    expected = values.sort(dim=-1, descending=True, stable=True)
    got_values, got_ids = top_candidates(values, k)
    assert torch.equal(got_values, expected.values[:, :k])
    assert torch.equal(got_ids, expected.indices[:, :k])


@pytest.mark.parametrize("block", [1, 2, 8])
@pytest.mark.parametrize("budget", [0, 1, 2, 7, 8, 64, 1000])
def test_B18_edges_of_budget_and_block(block, budget):
    log_probs = torch.randn(block - 1, 131).log_softmax(-1)
    tree = best_first(log_probs, root=1, budget=budget)
    assert tree.num_drafted == (0 if block == 1 else min(budget, sum(131**d for d in range(1, block))))
    assert chain(log_probs, root=1, budget=budget).num_drafted == min(budget, block - 1)
    assert len(no_draft(log_probs, root=1, budget=budget)) == 1


def test_B18_fewer_nodes_than_the_budget():
    assert best_first(torch.randn(1, 5).log_softmax(-1), root=0, budget=64).num_drafted == 5


def test_a_tree_that_is_as_wide_as_it_gets_holds_the_whole_chain():
    log_probs = torch.randn(3, 4).log_softmax(-1)
    everything = set(token_paths(best_first(log_probs, root=0, budget=1000)))
    assert set(token_paths(chain(log_probs, root=0, budget=1000))) <= everything
