"""A tree policy that corrects the drafter's probabilities by what the target accepted so far.

A block drafter gives one probability for every place of its block, whichever tokens stand before. But the argmax chain, the
*spine*, is one text that the drafter made up as a whole, and a branch is not: once a sibling was right and the drafter
wrong, its probabilities for the places behind are worth less. So spine and branches are corrected apart. A factor above 1
on the spine makes the tree longer, one below 1 makes it wider, and a low one below siblings keeps the branches short.
"""

from __future__ import annotations

import heapq
import math

import torch
from torch import Tensor

from deltatree.tree.accept import Acceptance
from deltatree.tree.candidates import top_candidates
from deltatree.tree.draft_tree import DraftTree, chain_tree

SPINE, BELOW = 0, 1
"""Where a place stands: every token before it was the drafter's first choice, or one was not."""

PRIOR = 0.8
"""Factor below a sibling, over that of the spine, before anything was seen there. The spine begins at 1."""

WEIGHT = 8.0
"""Expected hits that a prior, or the factor of all depths for one of them, counts for."""


LEAST_FACTOR = 1e-6
"""Below a sibling."""


class Calibrated:
    """The `budget` best prefixes under corrected probabilities, learnt within one generation.

    On the spine and below siblings, each with a factor of its own for every depth: how often the drafter's first choice was
    the target's, over how often it should have been. A depth's factor leans on that of all depths. That of the spine leans
    on 1, that below siblings on a share of the spine's.
    On the spine the first choice is corrected and its siblings share the rest; below a sibling all tokens are. Nodes come
    out best first by these scores, so the first nodes of the list are the tree of a smaller budget.
    """

    def __init__(self) -> None:
        self.begin([])

    def begin(self, prompt_ids: list[int]) -> None:
        """Forget what was learnt."""
        self._hits: tuple[list[float], list[float]] = ([], [])  # by place and depth: first choices that were right
        self._expected: tuple[list[float], list[float]] = ([], [])  # and how many the drafter expected
        self._first: list[tuple[int, float]] = []  # first choice and its probability at every depth of the last draft

    def __call__(self, log_probs: Tensor, *, root: int, budget: int) -> DraftTree:
        """log_probs: [D, vocab] float32, never above 0"""
        return self.scored(log_probs, root=root, budget=budget)[0]

    def scored(self, log_probs: Tensor, *, root: int, budget: int) -> tuple[DraftTree, Tensor]:
        """The tree with every node's corrected log-probability of its prefix, [N] float64, the root's 0, never rising."""
        self._first = []
        if budget <= 0 or log_probs.shape[0] == 0:
            return chain_tree([root]), torch.zeros(1, dtype=torch.float64)
        values, ids = (x.tolist() for x in top_candidates(log_probs.float(), budget))
        self._first = [(tokens[0], math.exp(row[0])) for row, tokens in zip(values, ids, strict=True)]
        rows = [(self._on_spine(row, depth), self._below_sibling(row, depth)) for depth, row in enumerate(values)]
        return _best_prefixes(rows, ids, root, budget)

    def observe(self, tree: DraftTree, accepted: Acceptance, logits: Tensor) -> None:
        """Learn from the tokens that the target chose: one a visited node, whether it was drafted or not."""
        choices = [*tree.token_ids[accepted.path[1:]].tolist(), accepted.bonus]
        place = SPINE
        for depth, (choice, (first, probability)) in enumerate(zip(choices, self._first, strict=False)):
            for counts in (*self._hits, *self._expected):
                counts.extend([0.0] * (depth + 1 - len(counts)))
            self._hits[place][depth] += choice == first
            self._expected[place][depth] += probability
            if choice != first:
                place = BELOW

    def factor(self, place: int, depth: int) -> float:
        """What a first choice's probability is multiplied by. depth: of the parent, 0 for the root's children."""
        hits, expected, overall = self._hits[place], self._expected[place], self._overall(place)
        if depth >= len(hits):
            return overall
        return (hits[depth] + WEIGHT * overall) / (expected[depth] + WEIGHT)

    def _overall(self, place: int) -> float:
        """The factor of all depths together."""
        prior = 1.0 if place == SPINE else PRIOR * self._overall(SPINE)
        return (sum(self._hits[place]) + WEIGHT * prior) / (sum(self._expected[place]) + WEIGHT)

    def _on_spine(self, row: list[float], depth: int) -> list[float]:
        """The first choice corrected, never beyond half of what it lacks; the others share what it leaves."""
        probability = self._first[depth][1]
        corrected = min(probability * self.factor(SPINE, depth), (1 + probability) / 2)
        if not 0 < corrected < 1 or probability >= 1:
            return row
        best, others = math.log(corrected), math.log1p(-corrected) - math.log1p(-probability)
        return [best, *(min(value + others, best) for value in row[1:])]

    def _below_sibling(self, row: list[float], depth: int) -> list[float]:
        discount = self.factor(BELOW, depth)
        return row if discount >= 1 else [value + math.log(max(discount, LEAST_FACTOR)) for value in row]


def _best_prefixes(
    rows: list[tuple[list[float], list[float]]], ids: list[list[int]], root: int, budget: int
) -> tuple[DraftTree, Tensor]:
    """The best prefixes by a heap, as in `best_first`, with two rows of scores a depth: on the spine, below a sibling."""
    tokens, parents, depths, scores, places = [root], [-1], [0], [0.0], [SPINE]
    heap = [(-rows[0][SPINE][0], (0,), 0)]  # (minus score, rank at each depth, parent node)
    while heap and len(tokens) <= budget:
        negative, ranks, parent = heapq.heappop(heap)
        depth, rank, node = len(ranks), ranks[-1], len(tokens)
        tokens.append(ids[depth - 1][rank])
        parents.append(parent)
        depths.append(depth)
        scores.append(-negative)
        places.append(BELOW if rank else places[parent])
        row = rows[depth - 1][places[parent]]
        if rank + 1 < len(row):
            heapq.heappush(heap, (-(scores[parent] + row[rank + 1]), (*ranks[:-1], rank + 1), parent))
        if depth < len(rows):
            heapq.heappush(heap, (-(scores[node] + rows[depth][places[node]][0]), (*ranks, 0), node))
    tree = DraftTree(torch.tensor(tokens), torch.tensor(parents), torch.tensor(depths))
    return tree, torch.tensor(scores, dtype=torch.float64)
