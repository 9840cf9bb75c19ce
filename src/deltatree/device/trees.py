"""Which tree a round on the device builds, and what a verified one teaches: steps that can be captured."""

from __future__ import annotations

import torch
from torch import Tensor

from deltatree.kernels.calibration import Seen, corrected, learn_calibration
from deltatree.kernels.candidates import top_candidates
from deltatree.kernels.transition_tree import CANDIDATES, Transitions, build_transition_tree, learn_transitions
from deltatree.kernels.tree_build import TreeBuffers, build_tree
from deltatree.kernels.walk import Walked
from deltatree.transitions.policy import TransitionTree
from deltatree.tree import Calibrated


class MarginalTrees:
    """Trees over the drafter's probabilities alone, best first, and their chain. They learn nothing."""

    key = "marginals"  # tells captured work apart
    registers: tuple[Tensor, ...] = ()  # what a round writes beside trees, and a capture's warm-up must not

    def build(self, logits: Tensor, root: Tensor, tree: TreeBuffers, *, chain: bool) -> None:
        """Write the tree that fills `tree`. logits: [D, vocab] of the drafter; root: [1] int64"""
        budget = len(tree.token_ids) - 1
        values, ids = top_candidates(logits, 1 if chain else budget)
        build_tree(values, ids, root, budget=budget, out=tree)

    def learn(self, tree: TreeBuffers, choices: Tensor, num_nodes: Tensor, walked: Walked, *, drafted: bool) -> None:
        """Take in a verified tree. choices: [count] int64, what the target picks after each of the first `count` nodes

        num_nodes: [1] int32, of them in use    drafted: whether the tree is more than the root
        """

    def pause(self) -> None:
        """Count nothing until the registers are put back."""


class CalibratedTrees:
    """Trees over corrected probabilities, as `tree.Calibrated` builds them, and the chain. Lent to one generation after another."""

    key = "calibrated"

    def __init__(self, depth: int, device: torch.device) -> None:
        self.seen = Seen.empty(depth, device)
        self.registers = (self.seen.hits, self.seen.expected)
        self.first = torch.zeros(depth, 1, device=device), torch.zeros(depth, 1, dtype=torch.int64, device=device)

    def begin(self, policy: Calibrated) -> None:
        """Start a generation: nothing has been seen."""
        for register in self.registers:
            register.zero_()

    def build(self, logits: Tensor, root: Tensor, tree: TreeBuffers, *, chain: bool) -> None:
        """As `MarginalTrees.build`; keeps the first choices, which `learn` looks at again."""
        budget = len(tree.token_ids) - 1
        values, ids = top_candidates(logits, 1 if chain else budget)
        for kept, found in zip(self.first, (values, ids), strict=True):
            kept.copy_(found[:, :1])
        build_tree(values if chain else corrected(values, self.seen), ids, root, budget=budget, out=tree)

    def learn(self, tree: TreeBuffers, choices: Tensor, num_nodes: Tensor, walked: Walked, *, drafted: bool) -> None:
        """As `MarginalTrees.learn`. Writes the registers."""
        if drafted:
            learn_calibration(*self.first, walked, self.seen)

    def pause(self) -> None:
        """Whatever a warm-up counts is taken back with the registers."""


class TransitionTrees:
    """Trees over marginals and the target's transitions, by a table of the generation's own that goes on counting.

    Lent to one generation after another, at addresses that captured work knows; nothing here knows the generation.
    """

    def __init__(self, vocab_size: int, num_buckets: int, depth: int, device: torch.device) -> None:
        self.key = ("transitions", num_buckets)
        self.known = Transitions.empty(vocab_size, num_buckets=num_buckets, device=device)
        self.registers = (self.known.strengths, self.known.curvature, self.known.before, self.known.weights)
        shape = depth, min(CANDIDATES, vocab_size)
        self.candidates = (
            torch.zeros(shape, device=device),
            torch.zeros(shape, dtype=torch.int64, device=device),
        )  # of the last draft

    def begin(self, policy: TransitionTree) -> None:
        """Start a generation with what a policy knows that has begun it on the host."""
        known, fresh = self.known, policy.base.on(self.known.before.device)
        for mine, new in zip(known.table.tensors(), fresh.tensors(), strict=True):
            mine.copy_(new)
        policy.count_prompt(known.table)
        initial = Transitions.empty(1, num_buckets=2, device=known.before.device)
        known.strengths.copy_(initial.strengths)
        known.curvature.copy_(initial.curvature)
        known.before.fill_(policy.before)
        known.weights.copy_(torch.tensor(policy.weights))

    def build(self, logits: Tensor, root: Tensor, tree: TreeBuffers, *, chain: bool) -> None:
        """As `MarginalTrees.build`; keeps the candidates, which `learn` looks at again."""
        top_candidates(logits, CANDIDATES, out=self.candidates)
        budget = len(tree.token_ids) - 1
        build_transition_tree(*self.candidates, root, self.known, budget=budget, chain=chain, out=tree)

    def learn(self, tree: TreeBuffers, choices: Tensor, num_nodes: Tensor, walked: Walked, *, drafted: bool) -> None:
        """As `MarginalTrees.learn`. Writes the registers and the table."""
        count = len(choices)
        learn_transitions(
            tree.token_ids[:count], tree.parents[:count], choices, num_nodes=num_nodes, path=walked.path,
            steps=walked.steps, known=self.known, drafted=self.candidates if drafted else None,
        )  # fmt: skip

    def pause(self) -> None:
        self.known.weights.zero_()
