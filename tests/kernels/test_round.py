"""The operations of a round between two forwards, in plain PyTorch: candidates, tree, its record, walk."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import draft_case, is_tree

from deltatree.decode.acceptance import LOGIT_LIMIT, LOGIT_SCALE, Drafts
from deltatree.kernels.candidates import top_candidates
from deltatree.kernels.draft_record import draft_record
from deltatree.kernels.tree_build import TreeBuffers, build_tree
from deltatree.kernels.walk import Walked, walk
from deltatree.tree import DraftTree, accept, best_first
from deltatree.tree import top_candidates as candidates_on_host


def test_the_tree_built_level_by_level_is_the_one_from_the_heap():
    """2,000 inputs, two thirds of them full of ties."""
    for seed in range(2000):
        log_probs, budget = draft_case(seed)
        built = build_tree(*candidates_on_host(log_probs, budget), 9, budget=budget, kernel=4)
        assert is_tree(built, best_first(log_probs, root=9, budget=budget)), seed


def test_scores_are_log_probabilities_of_paths_best_first():
    log_probs, _ = draft_case(3)
    built = build_tree(*candidates_on_host(log_probs, 100), 9, budget=100)
    scores, parents, depths = built.scores, built.parents, built.depths
    assert scores[0] == 0 and bool((scores[1:] <= scores[:-1]).all())
    own = log_probs[depths[1:] - 1, built.token_ids[1:]]
    assert torch.equal(scores[1:], scores[parents[1:]] + own)


def test_removed_tokens_come_last_and_still_make_a_tree():
    log_probs = torch.full((3, 5), -torch.inf)
    log_probs[:, 2] = 0.0
    tree = best_first(log_probs, root=0, budget=6)
    assert tree.token_ids.tolist()[:4] == [0, 2, 2, 2] and len(tree) == 7
    assert is_tree(build_tree(*candidates_on_host(log_probs, 6), 0, budget=6), tree)


@pytest.mark.parametrize("vocab", [1, 5, 400])
@pytest.mark.parametrize("k", [1, 4, 100])
def test_candidates_of_logits_are_those_of_their_log_probabilities(vocab, k):
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(k)).mul(8).round() / 8
    values, ids = top_candidates(logits, k)
    expected = candidates_on_host(logits.log_softmax(-1), k)
    assert torch.equal(values, expected[0]) and torch.equal(ids, expected[1])


def test_the_walk_is_the_one_on_the_host():
    for seed in range(200):
        log_probs, budget = draft_case(seed, max_budget=60)
        log_probs = log_probs[:, :3]
        tree = best_first(log_probs, root=1, budget=budget)
        target_ids = torch.randint(3, (len(tree),), generator=torch.Generator().manual_seed(seed))
        expected = accept(tree, target_ids)
        walked = walk(
            tree.token_ids, tree.parents, target_ids, num_nodes=torch.tensor([len(tree)]), max_depth=tree.max_depth
        )
        steps = int(walked.steps)
        assert walked.path[:steps].tolist() == expected.path and int(walked.bonus) == expected.bonus
        assert walked.token_ids[:steps].tolist() == [*tree.token_ids[expected.path[1:]].tolist(), expected.bonus]
        assert not walked.path[steps:].any() and not walked.token_ids[steps:].any()


def test_padding_is_never_walked_onto_and_the_first_of_two_equal_children_is_taken():
    tree = DraftTree.from_parents([5, 0, 7, 7, 0, 0], [-1, 0, 0, 0, 0, 0])
    out = Walked.empty(3, "cpu")
    choices = torch.tensor([0, 9, 9, 9, 9, 9])
    assert walk(tree.token_ids, tree.parents, choices, num_nodes=torch.tensor([1]), max_depth=3, out=out) is out
    assert out.record.tolist() == [1, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    choices[0] = 7
    walk(tree.token_ids, tree.parents, choices, num_nodes=torch.tensor([6]), max_depth=3, out=out)
    assert out.record.tolist() == [2, 9, 0, 2, 0, 0, 7, 9, 0, 0]


def test_the_record_holds_what_the_host_would_find():
    for seed in range(100):
        log_probs, budget = draft_case(seed, max_budget=80)
        built = build_tree(*candidates_on_host(log_probs, budget), 9, budget=budget)
        fields = built.scores, built.parents, built.depths
        options = dict(max_depth=len(log_probs), limit=LOGIT_LIMIT, scale=LOGIT_SCALE)
        out = torch.full((5, budget + 1), torch.nan, dtype=torch.float64)
        assert draft_record(*fields, num_nodes=built.num_nodes, **options, out=out) is out
        assert not out.isnan().any() and (out[0] == built.num_nodes).all()
        kept = int(out[0, 0])
        expected = Drafts.of(*(field[:kept].numpy() for field in (built.parents, built.depths, built.scores.double())))
        assert out[1, :kept].numpy() == pytest.approx(expected.logits, abs=1e-12)
        for row, field in zip(out[2:], (expected.parents, expected.depths, expected.kinds), strict=True):
            assert (row[:kept].numpy() == field).all()


def test_what_is_out_of_range_is_refused():
    values, ids = torch.zeros(3, 4), torch.zeros(3, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="budget=512"):
        build_tree(values, ids, 0, budget=512)
    with pytest.raises(ValueError, match="32 depths"):
        build_tree(torch.zeros(32, 4), torch.zeros(32, 4), 0, budget=5)
    with pytest.raises(ValueError, match="6 nodes, these hold 4"):
        build_tree(values, ids, 0, budget=5, out=TreeBuffers.empty(4, 4, "cpu"))
    with pytest.raises(ValueError, match="k=0"):
        top_candidates(values, 0)
