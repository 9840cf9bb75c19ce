"""The tree policy that knows which token stands before: the drafter's marginals times the target's own transitions."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deltatree.transitions.table import NOTHING, TransitionTable
from deltatree.tree import Acceptance, DraftTree, chain_tree, top_candidates

CANDIDATES = 64
"""Tokens of every depth that are scored; the same at every budget, so that a larger tree begins with the smaller one."""
STRENGTHS = (0.25, 0.35, 0.5)
"""Exponent of the transitions at first: of the root's children, of the argmax spine's, of all others' children."""
BESIDE = 0.7
"""Exponent of the marginals beside the spine: the drafter made them for its own argmax before them."""
CURVATURE = 100.0
"""How firmly the first strengths are held: about as many observations as would move them by half of what they say."""
TEXT_WEIGHT, PICK_WEIGHT = 6.0, 1.0
"""What one token of prompt or answer, and one token picked at another verified node, counts against one of self-text."""


class Drafted(NamedTuple):
    """The candidates of a round: NumPy arrays [D, C], best first."""

    values: np.ndarray  # float32 log-probabilities
    token_ids: np.ndarray  # int64


class Level(NamedTuple):
    """The nodes of one depth, best first: NumPy arrays [F]."""

    scores: np.ndarray  # float64, log-probability of the prefix
    token_ids: np.ndarray
    parents: np.ndarray  # position in the level above
    before: np.ndarray  # the parent's token
    on_spine: np.ndarray  # bool: every token so far is the drafter's argmax


class TransitionTree:
    """Best-first trees (or the greedy chain) over `log marginal + strength * log(p(token | two before) / p(token))`.

    The scores of a node's children are renormalised over the candidates of their depth, to the probability that the drafter gave
    those in all; so no child outranks its parent, and a tree's first n nodes are the tree of budget n. Scores choose nodes
    and nothing else: the text stays the target's.

    One object serves one generation. While it runs it learns from every round: n-grams of the prompt, the answer and the tokens
    that the target picks at verified nodes, in a copy of the table; and the strengths, by one Newton step on the
    log-likelihood of the tokens that the target chose.

    table: of the target; an empty one leaves the marginals, reordered beside the spine
    is_chain: the greedy descent instead of a tree    refines: count n-grams while running
    counts_picks: among them what the target picks at nodes beside the accepted path
    """

    def __init__(
        self, table: TransitionTable, *, is_chain: bool = False, refines: bool = True, counts_picks: bool = True
    ) -> None:
        self.is_chain, self.refines, self.counts_picks = is_chain, refines, counts_picks
        self.base = table
        self.before = NOTHING  # the token before the root
        self._prompt_ids: list[int] | None = None
        self._own: tuple[TransitionTable, TransitionTable] | None = None
        self._drafted: Drafted | None = None
        self.strengths = np.array(STRENGTHS)
        self._curvature = np.full(len(STRENGTHS), CURVATURE)

    def begin(self, prompt_ids: list[int]) -> None:
        """Start a generation: forget the last one, count the prompt."""
        self.strengths = np.array(STRENGTHS)
        self._curvature = np.full(len(STRENGTHS), CURVATURE)
        self.before = prompt_ids[-1]
        self._prompt_ids, self._own = prompt_ids, None

    @property
    def weights(self) -> tuple[float, float]:
        """What an n-gram of the answer counts, and one that the target picks beside it."""
        return (TEXT_WEIGHT, PICK_WEIGHT * self.counts_picks) if self.refines else (0.0, 0.0)

    def count_prompt(self, table: TransitionTable) -> None:
        """Count the prompt's n-grams into a table, on any device, unless nothing is to be counted."""
        if self.refines and self._prompt_ids is not None and len(self._prompt_ids) > 1:
            text = torch.tensor([NOTHING, *self._prompt_ids], device=table.keys.device)
            before, last, token = text.unfold(0, 3, 1).T
            table.add(before, last, token, torch.full(token.shape, TEXT_WEIGHT, device=text.device))

    @property
    def _table(self) -> TransitionTable | None:
        """The generation's own copy, made when first needed (rounds on a device need another one); None without."""
        if self._own is None and self.refines and self._prompt_ids is not None:
            table = self.base.clone()
            self.count_prompt(table)
            self._own = table, table.view()
        return self._own[0] if self._own is not None else None

    @property
    def _view(self) -> TransitionTable:
        """What is read: the copy, or the table itself."""
        return self.base.view() if self._table is None else self._own[1]

    def __call__(self, log_probs: Tensor, *, root: int, budget: int) -> DraftTree:
        """The tree after `root`. log_probs: [D, vocab]"""
        self._drafted = None
        if budget <= 0 or not len(log_probs):
            return chain_tree([root])
        drafted = self._drafted = Drafted(*(found.numpy() for found in top_candidates(log_probs, CANDIDATES)))
        mass = np.minimum(np.log(np.exp(drafted.values).sum(-1)), 0)  # of a depth's candidates
        level = Level(np.zeros(1), np.array([root]), np.zeros(1, np.int64), np.array([self.before]), np.ones(1, bool))
        levels, worst = [level], -np.inf
        width = 1 if self.is_chain else budget
        for depth in range(min(len(mass), budget)):
            level = self._grow(level, drafted, depth, mass[depth], width, worst)
            if not len(level.scores):
                break
            levels.append(level)
            scores = np.concatenate([held.scores for held in levels[1:]])
            if len(scores) >= budget:  # what is no better than the worst of these has no place, nor have its children
                worst = np.partition(scores, -budget)[-budget]
        return _tree_of(levels, budget)

    def _grow(self, level: Level, drafted: Drafted, depth: int, mass: float, width: int, worst: float) -> Level:
        """The best `width` children of a level that score above `worst`."""
        token_ids = drafted.token_ids[depth]
        which, beside = self._kinds(level.on_spine, depth)
        scores = (1 - (1 - BESIDE) * beside)[:, None] * drafted.values[depth]
        scores = scores + self.strengths[which][:, None] * self._view.scores(level.before, level.token_ids, token_ids)
        scores -= scores.max(1, keepdims=True)
        scores += mass - np.log(np.exp(scores).sum(1, keepdims=True))
        scores = (level.scores[:, None] + np.minimum(scores, 0)).ravel()
        order = np.argsort(-scores, kind="stable")[:width]
        order = order[scores[order] > worst]
        parents, rank = order // len(token_ids), order % len(token_ids)
        on_spine = level.on_spine[parents] & (rank == 0)
        return Level(scores[order], token_ids[rank], parents, level.token_ids[parents], on_spine)

    @staticmethod
    def _kinds(on_spine: np.ndarray, depth: int | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which strength holds for the children of nodes, [F], and whether they are beside the spine, [F] bool."""
        beside = ~on_spine
        return np.where(beside, 2, np.where(np.equal(depth, 0), 0, 1)), beside

    def observe(self, tree: DraftTree, accepted: Acceptance, logits: Tensor) -> None:
        """Learn from a verified tree. logits: [N, vocab]"""
        path = tree.token_ids[accepted.path]
        chosen = torch.cat([path[1:], torch.tensor([accepted.bonus])])
        before = torch.cat([torch.tensor([self.before]), path[:-1]])
        if self._drafted is not None:
            self._learn(before.numpy(), path.numpy(), chosen.numpy(), self._drafted)
        if self._table is not None:
            others = torch.full((len(tree),), self.counts_picks)
            others[accepted.path] = False
            others = others.nonzero()[:, 0]
            picks = logits[others.to(logits.device)].argmax(-1).cpu()
            self._table.add(
                torch.cat([before, tree.token_ids[tree.parents[others]]]),
                torch.cat([path, tree.token_ids[others]]),
                torch.cat([chosen, picks]),
                torch.cat([torch.full(path.shape, TEXT_WEIGHT), torch.full(picks.shape, PICK_WEIGHT)]),
            )
        self.before = int(path[-1])

    def _learn(self, before: np.ndarray, path: np.ndarray, chosen: np.ndarray, drafted: Drafted) -> None:
        """Move the strengths to where the chosen tokens of the accepted path become more probable among the candidates."""
        count = min(len(path), len(drafted.values))
        values, token_ids = drafted.values[:count], drafted.token_ids[:count]
        hit = token_ids == chosen[:count, None]
        found = hit.any(1)
        on_spine = np.concatenate([[True], np.cumprod(path[1:count] == token_ids[: count - 1, 0]).astype(bool)])
        which, beside = self._kinds(on_spine, np.arange(count))
        ratios = self._view.scores(before[:count], path[:count], token_ids)
        scores = (1 - (1 - BESIDE) * beside)[:, None] * values + self.strengths[which][:, None] * ratios
        probs = np.exp(scores - scores.max(1, keepdims=True))
        probs /= probs.sum(1, keepdims=True)
        mean = (probs * ratios).sum(1)
        variance = (probs * ratios**2).sum(1) - mean**2
        slope = np.zeros_like(self.strengths)
        np.add.at(slope, which, ((ratios * hit).sum(1) - mean) * found)
        np.add.at(self._curvature, which, variance * found)
        self.strengths = np.clip(self.strengths + slope / self._curvature, 0, 1)


def _tree_of(levels: list[Level], budget: int) -> DraftTree:
    """The best `budget` nodes of all levels below the root's, best first; of equals the shallower one comes first."""
    starts = np.cumsum([0, *(len(level.scores) for level in levels)])
    scores, token_ids, depths, parents = (
        np.concatenate(rows)
        for rows in zip(
            *(
                (level.scores, level.token_ids, np.full(len(level.scores), depth), level.parents + start)
                for depth, (level, start) in enumerate(zip(levels, (-1, *starts[:-1]), strict=False))
            ),
            strict=True,
        )
    )
    kept = np.concatenate([[0], 1 + np.argsort(-scores[1:], kind="stable")[:budget]])
    place = np.zeros(len(scores), np.int64)
    place[kept] = np.arange(len(kept))
    parents = place[parents[kept]]
    parents[0] = -1
    return DraftTree(torch.from_numpy(token_ids[kept]), torch.from_numpy(parents), torch.from_numpy(depths[kept]))
