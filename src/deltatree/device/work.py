"""What is captured of rounds: their steps over the buffers of the fast target and the fast drafter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from deltatree.decode.acceptance import LOGIT_LIMIT, LOGIT_SCALE
from deltatree.device.trees import CalibratedTrees, MarginalTrees, TransitionTrees
from deltatree.drafter import FastDFlashDrafter
from deltatree.kernels.draft_record import draft_record
from deltatree.kernels.tree_build import TreeBuffers
from deltatree.kernels.walk import Walked, walk
from deltatree.models.fast import USUAL_DEPTH, FastTarget
from deltatree.state import Nodes, StaticBuffers
from deltatree.state.static import MAX_DEPTH
from deltatree.transitions.policy import TransitionTree
from deltatree.tree import Calibrated


class RoundWork:
    """What is captured of rounds: steps over a target's and a drafter's buffers, which outlive the generation.

    Nothing here knows the generation, so that the graphs, which stay with the buffers, hold none alive.
    context: the drafter's buffers, None without a drafter
    policy: whose trees are built; best-first ones if None
    """

    def __init__(
        self,
        target: FastTarget,
        buffers: StaticBuffers,
        drafter: FastDFlashDrafter | None,
        context,
        policy: TransitionTree | Calibrated | None = None,
    ) -> None:
        self.target, self.buffers, self.drafter, self.context = target, buffers, drafter, context
        self.max_depth = 0 if drafter is None else drafter.depth
        with torch.inference_mode():
            self.walked = self.scratch(("walked", self.max_depth), lambda: Walked.empty(self.max_depth, target.device))
            if context is None:
                self.bonus = self.scratch("bonus", lambda: torch.zeros(1, dtype=torch.int64, device=target.device))
            else:
                self.bonus = context.bonus
        self.trees = self._trees_of(policy)

    def _trees_of(
        self, policy: TransitionTree | Calibrated | None
    ) -> MarginalTrees | CalibratedTrees | TransitionTrees:
        """Lent by the buffers, where captured work finds them again."""
        depth, device = self.max_depth, self.target.device
        if policy is None:
            return MarginalTrees()
        if isinstance(policy, Calibrated):
            return self.scratch(("calibrated", depth), lambda: CalibratedTrees(depth, device))
        sizes = self.target.vocab_size, policy.base.num_buckets, depth
        return self.scratch(("transitions", *sizes), lambda: TransitionTrees(*sizes, device))

    def tree(self, count: int) -> TreeBuffers:
        """The buffers of a tree of `count` nodes, root included. Every size lies in the same memory."""
        kernel, device = self.target.shapes.kernel, self.target.device

        def new() -> TreeBuffers:
            whole = TreeBuffers.empty(self.buffers.max_nodes, kernel, device)
            root = whole.first(1)  # what all roots have in common: a plain round writes its token only
            for name, value in (("parents", -1), ("depths", 0), ("scores", 0), ("ancestors", 1), ("num_nodes", 1)):
                getattr(root, name).fill_(value)
            root.rows.copy_(torch.arange(kernel))
            return whole

        return self.scratch("tree", new).first(count)

    def rest(self) -> None:
        """No draft: give the drafter its features all the same, and place the root."""
        context = self.context
        if context is not None:
            self.drafter.append(context, context.features, context.count)
        self.tree(1).token_ids.copy_(self.bonus)

    def draft(self, count: int, chain: bool = False) -> None:
        """Give the drafter its features, draft, and build the tree."""
        self.drafter.draft(self.context)
        self.lay(count, chain)

    def lay(self, count: int, chain: bool) -> None:
        """Build a tree or a chain from the draft; the tree's place is the same for all."""
        self.trees.build(self.context.logits, self.bonus, self.tree(count), chain=chain)

    def offer(self, count: int) -> None:
        """Draft, and put what a choice needs in one piece for the host."""
        self.draft(count)
        tree = self.tree(count)
        draft_record(
            tree.scores, tree.parents, tree.depths, num_nodes=tree.num_nodes, max_depth=self.max_depth,
            limit=LOGIT_LIMIT, scale=LOGIT_SCALE, out=self.drafted(count),
        )  # fmt: skip

    def drafted(self, count: int) -> Tensor:
        """The record of a tree of `count` nodes: [5, count] float64."""
        new = partial(torch.zeros, 5, count, dtype=torch.float64, device=self.target.device)
        return self.scratch(("drafted", count), new)

    def verify(self, count: int) -> None:
        """Commit the last round's path, verify the tree's first nodes, walk, learn, and leave path, steps, bonus and
        features where the next round finds them."""
        self.buffers.commit(self.max_depth + 1)
        tree = self.tree(count)
        buffers, walked = self.buffers, self.walked
        nodes = Nodes(tree.token_ids, tree.depths, tree.rows, tree.ancestors.view(torch.bool))
        self.target.step(buffers, nodes, 0 if count == 1 else self._depth)
        choices = buffers.logits[:count].argmax(-1)
        num_nodes = tree.num_nodes.clamp(max=count)
        walk(nodes.token_ids, tree.parents, choices, num_nodes=num_nodes, max_depth=self.max_depth, out=walked)
        self.trees.learn(tree, choices, num_nodes, walked, drafted=count > 1)
        buffers.path[: self.max_depth + 1].copy_(walked.path)
        buffers.steps.copy_(walked.steps)
        self.bonus.copy_(walked.bonus)
        context = self.context
        if context is not None:
            context.features[: self.max_depth + 1] = buffers.features.index_select(0, walked.path)
            context.count.copy_(walked.steps)

    @property
    def _depth(self) -> int:
        return USUAL_DEPTH if self.max_depth <= USUAL_DEPTH else MAX_DEPTH

    def scratch(self, key, new: Callable[[], object]) -> object:
        if key not in self.buffers.scratch:
            with torch.inference_mode():
                self.buffers.scratch[key] = new()
        return self.buffers.scratch[key]
