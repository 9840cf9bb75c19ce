"""The Triton transition tree is the reference one, and teaches a generation the same."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from kernel_cases import DEVICE, ON_GPU, is_tree, needs_kernels
from transition_cases import agrees, candidates, draft, known_of, policy_of, verified

from deltatree.kernels.transition_tree import build_transition_tree, learn_transitions
from deltatree.kernels.transition_tree import reference as truth
from deltatree.kernels.transition_tree import triton as twin
from deltatree.kernels.transition_tree.triton import learning_scratch_for, scratch_for
from deltatree.kernels.tree_build import TreeBuffers

pytestmark = needs_kernels
FIELDS = ("token_ids", "parents", "depths", "ancestors", "rows", "num_nodes")


def rubbish(nodes: int) -> TreeBuffers:
    out = TreeBuffers.empty(nodes, 4, DEVICE)
    for field in fields(out):
        getattr(out, field.name).fill_(77)
    return out


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """The interpreter takes few large programs sooner."""
    if not ON_GPU:
        monkeypatch.setattr(twin, "GROUP", 64)


def grown(case, known, budget, chain=False, reach=None):
    """By the twin, with every buffer filled with rubbish first."""
    values, ids = candidates(case.log_probs, DEVICE)
    out, scratch = rubbish(budget + 1), scratch_for(values, budget, reach).fill_(torch.nan)
    root = torch.tensor([case.root], device=DEVICE)
    options = {"budget": budget, "chain": chain, "out": out, "scratch": scratch, "reach": reach}
    assert build_transition_tree(values, ids, root, known, **options, backend="triton") is out
    return out


def check_tree(case, budget, chain=False) -> bool:
    """Whether the tree is the reference's to the last node; if not, only nodes within rounding may change places."""
    known = known_of(case, DEVICE)
    out = grown(case, known, budget, chain)
    expected = truth.build_transition_tree(
        *candidates(case.log_probs, DEVICE), case.root, known, budget=budget, chain=chain
    )
    same = all(torch.equal(getattr(out, name), getattr(expected, name)) for name in FIELDS)
    torch.testing.assert_close(out.scores, expected.scores, atol=2e-5, rtol=1e-5)
    assert agrees(out, expected)
    return same


@pytest.mark.parametrize("chain", [False, True])
def test_the_tree_is_the_reference_one(chain):
    budgets = ((1, 7, 15) if chain else (1, 16, 64, 129, 256)) if ON_GPU else (1, 20)
    cases = [(seed, budget) for seed in range(30 if ON_GPU else 4) for budget in budgets]
    depths = None if ON_GPU else 5
    same = [check_tree(draft(seed, depths=depths), budget, chain) for seed, budget in cases]
    assert sum(same) > 0.8 * len(cases)


def test_a_large_tree():
    """Many nodes of poor rank, whose lists of children are made when they are taken out."""
    assert check_tree(draft(5, vocab=90, depths=6), 300 if ON_GPU else 80)


@pytest.mark.parametrize("reach", [1, 2, 64] if ON_GPU else [1])
def test_which_lists_are_made_beforehand_changes_nothing(reach, monkeypatch):
    """And how many a program makes."""
    case = draft(8, vocab=70, depths=4)
    known = known_of(case, DEVICE)
    usual = grown(case, known, 24)
    monkeypatch.setattr(twin, "GROUP", 2)
    other = grown(case, known, 24, reach=reach)
    for name in (*FIELDS, "scores"):
        assert torch.equal(getattr(usual, name), getattr(other, name)), name


def test_what_scores_alike_is_ordered_alike():
    case = draft(0, vocab=9, depths=3)
    case = case._replace(log_probs=torch.zeros(3, 9).log_softmax(-1), table=type(case.table).empty(9, num_buckets=2))
    for budget in (3, 12, 40):
        assert is_tree(
            grown(case, known_of(case, DEVICE), budget), policy_of(case)(case.log_probs, root=case.root, budget=budget)
        )


def test_no_budget_no_depth_and_impossible_candidates():
    case = draft(1, vocab=8, depths=2)
    known = known_of(case, DEVICE)
    assert int(grown(case, known, 0).num_nodes) == 1
    out = grown(case._replace(log_probs=case.log_probs[:0]), known, 5)
    assert int(out.num_nodes) == 1 and bool((out.scores[1:] == -torch.inf).all())
    case = case._replace(log_probs=case.log_probs.masked_fill(torch.arange(8) > 1, -torch.inf).log_softmax(-1))
    assert int(grown(case, known, 9).num_nodes) == 7 and check_tree(case, 9)


@pytest.mark.parametrize("seed", range(40 if ON_GPU else 4))
def test_a_verified_tree_teaches_the_same(seed):
    """Drafted and plain rounds, tables with room and without; counts exactly, strengths to rounding."""
    case = draft(seed, vocab=20, depths=5)
    knowns = known_of(case, DEVICE), known_of(case, DEVICE)
    if seed % 4 == 3:
        for known in knowns:
            known.weights[1] = 0
    for turn in range(4):
        log_probs = draft(turn, vocab=20, depths=5).log_probs
        budget = 0 if turn == 2 else 9
        tree = policy_of(case)(log_probs, root=turn, budget=budget)
        logits, accepted = verified(tree, 20, 10 * seed + turn)
        padded = [torch.cat([x, torch.zeros(3, dtype=x.dtype)]).to(DEVICE) for x in (tree.token_ids, tree.parents)]
        picks = torch.cat([logits.argmax(-1), torch.tensor([5, 5, 5])]).to(DEVICE)
        path = torch.tensor([*accepted.path, *[0] * (6 - len(accepted.path))], dtype=torch.int32, device=DEVICE)
        counts = {
            "num_nodes": torch.tensor([len(tree)], dtype=torch.int32, device=DEVICE),
            "path": path,
            "steps": torch.tensor([len(accepted.path)], dtype=torch.int32, device=DEVICE),
            "drafted": candidates(log_probs, DEVICE) if budget else None,
        }
        truth.learn_transitions(*padded, picks, **counts, known=knowns[0])
        scratch = learning_scratch_for(padded[0]).fill_(torch.nan)
        learn_transitions(*padded, picks, **counts, known=knowns[1], scratch=scratch, backend="triton")
        for name in ("keys", "counts", "followed"):
            assert torch.equal(getattr(knowns[0].table, name), getattr(knowns[1].table, name)), name
        assert int(knowns[0].before) == int(knowns[1].before)
        torch.testing.assert_close(knowns[0].strengths, knowns[1].strengths, atol=1e-5, rtol=0)
        torch.testing.assert_close(knowns[0].curvature, knowns[1].curvature, atol=1e-4, rtol=1e-5)
