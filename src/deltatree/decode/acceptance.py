"""How likely drafted tokens are to be accepted: the drafter's confidences, corrected by what the target accepted.

A drafted token stands with probability `q` in the drafter's eyes. Given that its parent is accepted, it is taken to be accepted with
probability `sigmoid(bias[kind] + bias[kind, depth] + slope[kind] * logit(q))`, where the kind says where the token stands: on the
spine (every token the first choice so far), beside it, or below a branch. All terms start so that `q` is believed, except for
first choices below a branch: a block drafter does not know there that it has missed, and claims as before. They are
learned while running from the children of visited nodes, whose fate a round reveals without bias. A kind's bias forgets within
some twenty rounds, so that a change of subject is noticed; the others remember hundreds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

SPINE, BESIDE, BELOW, BELOW_BESIDE = range(4)
"""Kinds of drafted nodes: first choice on the spine, another choice beside it, first choice below a branch, another there."""

MAX_DEPTH = 32
"""Depths beyond it share its bias."""

_KINDS, _DEPTHS = 4, MAX_DEPTH + 1
_NUM_TERMS = _KINDS * (_DEPTHS + 2)
_TERMS = (_KINDS, _KINDS * _DEPTHS, _KINDS)  # biases, biases by depth, slopes
_KEPT, _PRIOR = np.repeat([0.94, 0.995, 0.995], _TERMS), np.repeat([1.0, 6.0, 4.0], _TERMS)  # a round
LOGIT_LIMIT, LOGIT_SCALE = 9.0, 4.0
"""Of a drafted token's log-odds: bound, and what they are divided by."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """The nodes of a draft tree as arrays, root first."""

    parents: np.ndarray  # [N] int64
    depths: np.ndarray  # [N] int64
    kinds: np.ndarray  # [N] int64
    logits: np.ndarray  # [N] float64, the drafter's log-odds of each token after its parent, scaled and bounded

    @classmethod
    def of(cls, parents: ArrayLike, depths: ArrayLike, scores: ArrayLike) -> Drafts:
        """Of a tree's fields, [N] each. scores: log-probability of each node's prefix in the drafter's eyes, the root's 0."""
        parents, depths, scores = (np.asarray(field) for field in (parents, depths, scores))
        return cls(parents, depths, _kinds(parents), _scaled_logits(scores - scores[parents]))

    def __len__(self) -> int:
        return self.parents.size

    def cut(self, size: int) -> Drafts:
        """The first `size` nodes."""
        return Drafts(self.parents[:size], self.depths[:size], self.kinds[:size], self.logits[:size])

    def spine(self) -> np.ndarray:
        """The nodes whose tokens are all first choices, the root first: a chain."""
        return (self.kinds == SPINE).nonzero()[0]

    def chain(self, nodes: np.ndarray) -> Drafts:
        """Such nodes alone, as a chain."""
        order = np.arange(nodes.size)
        return Drafts(order - 1, order, self.kinds[nodes], self.logits[nodes])


def _scaled_logits(log_probs: np.ndarray) -> np.ndarray:
    log_probs = np.minimum(log_probs, -1e-9)
    logits = log_probs - np.log(-np.expm1(log_probs))
    return np.minimum(np.maximum(logits, -LOGIT_LIMIT), LOGIT_LIMIT) / LOGIT_SCALE  # quicker than `np.clip`


def _kinds(parents: np.ndarray) -> np.ndarray:
    """Kind of every node; a first choice is the first of its parent's children."""
    kinds, has_child = [SPINE], [False] * parents.size
    for parent in parents[1:].tolist():
        above = SPINE if kinds[parent] == SPINE else BELOW
        kinds.append(above + has_child[parent])  # BESIDE and BELOW_BESIDE follow SPINE and BELOW
        has_child[parent] = True
    return np.array(kinds)


class AcceptanceModel:
    """Calibrated acceptance of drafted tokens. Shared by generations of one pair; every round teaches it."""

    def __init__(self) -> None:
        # All terms in one array, so that all of them fade at once.
        self._terms, self._weights = np.zeros(_NUM_TERMS), np.zeros(_NUM_TERMS)
        self.slope[:] = LOGIT_SCALE
        self.bias[BELOW], self.slope[BELOW] = -1.0, 0.5 * LOGIT_SCALE

    @property
    def bias(self) -> np.ndarray:
        """[kinds], to be written in place; as are the others."""
        return self._terms[:_KINDS]

    @property
    def depth_bias(self) -> np.ndarray:
        """[kinds, depths]."""
        return self._terms[_KINDS:-_KINDS].reshape(_KINDS, _DEPTHS)

    @property
    def slope(self) -> np.ndarray:
        """[kinds]."""
        return self._terms[-_KINDS:]

    def given_parent(self, drafts: Drafts) -> np.ndarray:
        """[N] float64: probability that a node is accepted if its parent is; the root's is 1."""
        depths = np.minimum(drafts.depths, MAX_DEPTH)
        level = (
            self.bias[drafts.kinds] + self.depth_bias[drafts.kinds, depths] + self.slope[drafts.kinds] * drafts.logits
        )
        chances = 1 / (1 + np.exp(-level))
        chances[0] = 1.0
        return chances

    def of_paths(self, drafts: Drafts) -> list[float]:
        """[N] probability that a node and all its ancestors are accepted. Their sum is the expected acceptance length."""
        chances, paths = self.given_parent(drafts).tolist(), [1.0]
        parents = drafts.parents.tolist()
        for chance, parent in zip(chances[1:], parents[1:], strict=True):  # parents come first
            paths.append(chance * paths[parent])
        return paths

    def learn(self, drafts: Drafts, path: list[int]) -> None:
        """Take in one round. path: the accepted nodes, from the root on; the children of all of them have been judged."""
        self._weights *= _KEPT
        visited, missed, weights = set(path), defaultdict(float), defaultdict(float)  # the last two by term
        kinds, depths, logits = drafts.kinds.tolist(), drafts.depths.tolist(), drafts.logits.tolist()
        terms, parents = self._terms, drafts.parents.tolist()
        for node in range(1, len(parents)):  # few of them are judged: quicker one by one than as arrays
            if parents[node] not in visited:
                continue
            kind, logit = kinds[node], logits[node]
            bias, slope = kind, _NUM_TERMS - _KINDS + kind
            depth_bias = _KINDS + kind * _DEPTHS + min(depths[node], MAX_DEPTH)
            chance = 1 / (1 + math.exp(-(terms[bias] + terms[depth_bias] + terms[slope] * logit)))
            for term, scale in ((bias, 1.0), (depth_bias, 1.0), (slope, logit)):
                missed[term] += ((node in visited) - chance) * scale
                weights[term] += chance * (1 - chance) * scale**2
        for term, miss in missed.items():
            # Curvature seen so far beside the prior's: a Newton step divides by it.
            self._weights[term] += weights[term]
            terms[term] += 0.5 * miss / (self._weights[term] + _PRIOR[term])  # halved: several terms mend the same miss
        slopes = self.slope
        np.minimum(np.maximum(slopes, 0.0, out=slopes), 2 * LOGIT_SCALE, out=slopes)
