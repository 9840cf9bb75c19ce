"""The transition tree in plain PyTorch is the host policy's, and learns what it learns."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import is_tree
from transition_cases import ROUNDING, agrees, candidates, draft, known_of, policy_of, verified

from deltatree.kernels.transition_tree import build_transition_tree, learn_transitions


@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("budget", [0, 1, 5, 16, 64, 150])
def test_the_tree_is_the_hosts(budget, chain):
    exact = 0
    for seed in range(40):
        case = draft(seed)
        tree = policy_of(case, is_chain=chain)(case.log_probs, root=case.root, budget=budget)
        built = build_transition_tree(
            *candidates(case.log_probs), case.root, known_of(case), budget=budget, chain=chain
        )
        assert agrees(built, tree), seed
        exact += is_tree(built, tree)
    assert exact > 30


def test_what_scores_alike_is_ordered_alike():
    """Without counts and with equal marginals everything ties: by depth, parent and rank on both sides."""
    case = draft(0, vocab=9, depths=4)
    case = case._replace(log_probs=torch.zeros(4, 9).log_softmax(-1), table=type(case.table).empty(9, num_buckets=2))
    for budget in (3, 20, 90):
        tree = policy_of(case)(case.log_probs, root=1, budget=budget)
        assert is_tree(build_transition_tree(*candidates(case.log_probs), 1, known_of(case), budget=budget), tree)


def test_impossible_candidates_are_no_nodes():
    case = draft(1, vocab=8, depths=3)
    log_probs = case.log_probs.masked_fill(torch.arange(8) > 1, -torch.inf).log_softmax(-1)
    built = build_transition_tree(*candidates(log_probs), 3, known_of(case), budget=30)
    assert int(built.num_nodes) == 1 + 2 + 4 + 8
    assert is_tree(built, policy_of(case)(log_probs, root=3, budget=30))


def test_sizes_out_of_range_are_refused():
    case = draft(0)
    with pytest.raises(ValueError, match="65 candidates"):
        build_transition_tree(torch.zeros(2, 65), torch.zeros(2, 65).long(), 0, known_of(case), budget=3)
    with pytest.raises(ValueError, match="budget=512"):
        build_transition_tree(*candidates(case.log_probs), 0, known_of(case), budget=512)


def walked(accepted) -> dict:
    path = torch.tensor([*accepted.path, 0, 0])
    return {"path": path, "steps": torch.tensor([len(accepted.path)])}


@pytest.mark.parametrize("counts_picks", [False, True])
def test_many_rounds_teach_what_they_teach_the_host(counts_picks):
    """Counts exactly, strengths and trees to rounding, over drafted and plain rounds."""
    for seed in range(4):
        case = draft(seed, vocab=40, depths=6)
        policy, known = policy_of(case, counts_picks=counts_picks), known_of(case)
        if not counts_picks:
            known.weights[1] = 0
        root = case.root
        for turn in range(25):
            log_probs = draft(100 * seed + turn, vocab=40, depths=6).log_probs
            budget = 0 if turn % 5 == 4 else 12
            tree = policy(log_probs, root=root, budget=budget)
            drafted = candidates(log_probs)
            built = build_transition_tree(*drafted, root, known, budget=budget)
            assert agrees(built, tree)
            logits, accepted = verified(tree, 40, turn)
            policy.observe(tree, accepted, logits)
            learn_transitions(
                tree.token_ids, tree.parents, logits.argmax(-1), num_nodes=torch.tensor([len(tree)]),
                **walked(accepted), known=known, drafted=drafted if budget else None,
            )  # fmt: skip
            root = accepted.bonus
            for name in ("keys", "counts", "followed"):
                assert torch.equal(getattr(known.table, name), getattr(policy._table, name)), name
            assert int(known.before) == policy.before
            torch.testing.assert_close(known.strengths.double(), torch.from_numpy(policy.strengths), atol=1e-5, rtol=0)
        assert (known.strengths.double() - torch.tensor([0.25, 0.35, 0.5])).abs().max() > 100 * ROUNDING


def test_weights_of_zero_count_nothing():
    case = draft(3, vocab=30, depths=4)
    known = known_of(case, refines=False)
    tree = policy_of(case)(case.log_probs, root=case.root, budget=9)
    logits, accepted = verified(tree, 30, 0)
    before = known.table.clone()
    learn_transitions(
        tree.token_ids, tree.parents, logits.argmax(-1), num_nodes=torch.tensor([len(tree)]), **walked(accepted),
        known=known, drafted=candidates(case.log_probs),
    )  # fmt: skip
    assert all(torch.equal(getattr(known.table, n), getattr(before, n)) for n in ("keys", "counts", "followed"))
    assert int(known.before) == int(tree.token_ids[accepted.path[-1]])
