"""Tree policies: which nodes to draft from the drafter's per-depth log-probabilities.

A policy is a function `(log_probs [D, vocab], root, budget) -> DraftTree`. A chain and "no draft" are trees too, so
plain decoding, DFlash and DDTree are one loop with three policies. A policy that learns while running is an object with
`__call__` of that signature, `begin(prompt_ids)` before the first round of a generation, and `observe(tree, accepted,
logits)` after each verify.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from ctypes import c_float

import numpy as np
import torch
from torch import Tensor

from deltatree.tree.calibrated import Calibrated
from deltatree.tree.candidates import top_candidates
from deltatree.tree.draft_tree import DraftTree, chain_tree


def no_draft(log_probs: Tensor, *, root: int, budget: int) -> DraftTree:
    """The root alone: plain decoding."""
    return chain_tree([root])


def chain(log_probs: Tensor, *, root: int, budget: int) -> DraftTree:
    """The most probable token of every depth in one line, at most `budget` of them: DFlash."""
    depth = min(budget, log_probs.shape[0])
    if depth <= 0:
        return chain_tree([root])
    _, ids = top_candidates(log_probs[:depth], 1)
    return chain_tree([root, *ids[:, 0].tolist()])


def best_first(log_probs: Tensor, *, root: int, budget: int) -> DraftTree:
    """The `budget` most probable prefixes under the product of the drafter's per-depth probabilities: DDTree.

    A heap holds prefixes by log-probability, then by their ranks. Taking one out offers its next sibling and its first
    child, neither of which can outrank it, so nodes come out best first and parents before children: the first nodes of
    the list are the tree of a smaller budget. A prefix's log-probability is its parent's plus its token's, rounded to
    float32, so that `kernels.tree_build` makes the same tree of the same candidates, node for node.

    log_probs: [D, vocab] float32. Source: Ringel and Romano 2026, arXiv:2604.12989, algorithm 1.
    """
    return best_first_scored(log_probs, root=root, budget=budget)[0]


def best_first_scored(log_probs: Tensor, *, root: int, budget: int) -> tuple[DraftTree, Tensor]:
    """`best_first` with every node's score: log-probability of its prefix, [N] float64, the root's 0, never rising.

    The tree for a smaller budget is the first nodes of the tree for a larger one.
    """
    num_depths = log_probs.shape[0]
    if budget <= 0 or num_depths == 0:
        return chain_tree([root]), torch.zeros(1, dtype=torch.float64)
    values, ids = top_candidates(log_probs, budget)
    value, token = values.float().tolist(), ids.tolist()
    width = len(token[0])

    tokens, parents, depths, scores = [root], [-1], [0], [0.0]
    heap = [(-value[0][0], (0,), 0)]  # (minus log-probability, rank at each depth, parent node)
    while heap and len(tokens) <= budget:
        negative, ranks, parent = heapq.heappop(heap)
        depth, rank = len(ranks), ranks[-1]
        node = len(tokens)
        tokens.append(token[depth - 1][rank])
        parents.append(parent)
        depths.append(depth)
        scores.append(-negative)
        if rank + 1 < width:
            sibling = _float32(scores[parent] + value[depth - 1][rank + 1])
            heapq.heappush(heap, (-sibling, (*ranks[:-1], rank + 1), parent))
        if depth < num_depths:
            heapq.heappush(heap, (-_float32(scores[node] + value[depth][0]), (*ranks, 0), node))
    tokens, parents, depths, scores = (torch.from_numpy(np.array(held)) for held in (tokens, parents, depths, scores))
    return DraftTree(tokens, parents, depths), scores


def scores_of(tree: DraftTree, log_probs: Tensor) -> Tensor:
    """Log-probability of every node's prefix under the marginals, [N] float64, the root's 0: any tree's scores.

    log_probs: [D, vocab], those that the tree was built from.
    """
    scores = torch.zeros(len(tree), dtype=torch.float64)
    if len(tree) > 1:
        rows, columns = (index[1:].to(log_probs.device) for index in (tree.depths - 1, tree.token_ids))
        scores[1:] = log_probs[rows, columns].cpu().double()
    for depth in range(2, tree.max_depth + 1):
        nodes = (tree.depths == depth).nonzero()[:, 0]
        scores[nodes] += scores[tree.parents[nodes]]
    return scores


def _float32(number: float) -> float:
    """Rounded to float32. A sum of two float32 numbers rounded twice is the float32 sum."""
    return c_float(number).value


POLICIES: dict[str, Callable[..., DraftTree] | type] = {
    "chain": chain,
    "best-first": best_first,
    "calibrated": Calibrated,
}
"""The policies that a user picks by name, with `tree=` or `--tree`. A class makes one policy a generation: it learns."""
