"""What a round costs on this machine, by the nodes that are verified and the length of the context.

Two curves: a plain round (no draft), and a drafted round over its number of nodes, draft and everything else included, so that
a mixture of experts' woken experts, launches and cliffs are in it as they are measured. Both are learned from the rounds as they run.
The machine's pace, which all rounds share, follows within some ten rounds; the shape of the curves follows slowly. So a machine
that other work slows down for a while does not make the size look bad that happened to run then.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

import numpy as np

NODE_COUNTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Sizes that are tried where the target has no buckets of its own; the root counts."""

SHORT = 1024
"""Tokens of context up to which all rounds cost alike; beyond, every doubling has curves of its own."""

_PACE_RATE, _SHAPE_RATE, _SURPRISE = 0.1, 0.03, 0.35
_REFIT = 5  # measured rounds after which a smooth curve is drawn anew; drawing it costs as much as all else here


class RoundCosts:
    """Seconds of a round. Until something is measured, a guess: a draft costs half a plain round, a node 3% of one.

    node_counts: sizes whose costs are told apart, rising from 1; the root counts
    captured: a forward runs at the next larger of these sizes, and each has its own cost, cliffs included; otherwise any
        size may run, and costs lie on a smooth curve
    clock: seconds that rounds are timed with; one that only counts this program's own is steadier on a shared machine
    """

    def __init__(
        self,
        node_counts: Iterable[int] = NODE_COUNTS,
        *,
        captured: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.node_counts = np.array(sorted(set(node_counts)))
        self._counts = self.node_counts.tolist()
        self.captured, self.clock = captured, clock
        self.pace = 0.0  # log: what all rounds take at the moment over what the curves say
        guess = np.log(0.02 * (1.5 + 0.03 * (self.node_counts - 1)))
        self._plain: dict[int, float] = {0: math.log(0.02)}  # by doublings of the context; logarithms of seconds
        self._drafted: dict[int, np.ndarray] = {0: guess}
        self._plain_seen: dict[int, int] = {0: 0}
        self._drafted_seen: dict[int, np.ndarray] = {0: np.zeros(self.node_counts.size)}
        self._fits: dict[int, np.ndarray] = {}
        self._risen: dict[int, np.ndarray] = {}  # drawn from them when needed
        self._unfitted = 0  # rounds measured since the curves were drawn

    @property
    def pace_factor(self) -> float:
        """What rounds take at the moment over what they usually take."""
        return math.exp(self.pace)

    def sizes(self, most: int) -> Sequence[int]:
        """Nodes of the rounds to choose from if there are `most`, root included, rising: a tree fills what is captured."""
        if not self.captured:
            return range(1, most + 1)
        return [*self._counts[: bisect_left(self._counts, most)], most]

    def plain(self, context: int) -> float:
        """Seconds of a round without a draft. context: committed tokens."""
        self._reach(context)
        return math.exp(self.pace + self._plain[_doubling(context)])

    def drafted(self, num_nodes: np.ndarray, context: int) -> np.ndarray:
        """Seconds of rounds that draft and verify so many nodes, root included; never falling with the nodes."""
        self._reach(context)
        doubling = _doubling(context)
        if self.captured:
            places = np.minimum(self.node_counts.searchsorted(num_nodes), self.node_counts.size - 1)
            return self.pace_factor * self._rising(doubling)[places]
        constant, by_node, by_doubling = self._line(doubling)
        num_nodes = np.asarray(num_nodes)
        return constant + by_node * (num_nodes - 1) + by_doubling * np.log2(num_nodes)

    def drafted_round(self, num_nodes: int, context: int) -> float:
        """`drafted` of one size, quicker."""
        self._reach(context)
        doubling = _doubling(context)
        if self.captured:
            return self.pace_factor * float(self._rising(doubling)[self._place(num_nodes)])
        constant, by_node, by_doubling = self._line(doubling)
        return constant + by_node * (num_nodes - 1) + by_doubling * math.log2(num_nodes)

    def _line(self, doubling: int) -> list[float]:
        """Seconds at the present pace where costs lie on a smooth curve: a constant, by node, by doubling of the nodes."""
        if doubling not in self._fits:
            self._fits[doubling] = self._fit(doubling)
        return [self.pace_factor * float(term) for term in self._fits[doubling]]

    def _rising(self, doubling: int) -> np.ndarray:
        """Seconds by node counts at the usual pace, never falling with them."""
        if doubling not in self._risen:
            self._risen[doubling] = np.maximum.accumulate(np.exp(self._drafted[doubling]))
        return self._risen[doubling]

    def _place(self, num_nodes: int) -> int:
        """Among the node counts, of the one that so many nodes run at."""
        return min(bisect_left(self._counts, num_nodes), len(self._counts) - 1)

    def _fit(self, doubling: int) -> np.ndarray:
        """A constant, a share of each node and one of each doubling of the nodes, none of them negative: [3] seconds.

        Noise would otherwise make some sizes look cheap beside their neighbours, and just these would be chosen.
        """
        measured = np.exp(self._drafted[doubling])
        weights = np.sqrt(self._drafted_seen[doubling] + 0.1) / measured
        counts = self.node_counts
        columns = np.stack([np.ones(counts.size), counts - 1.0, np.log2(counts)], axis=1) * weights[:, None]
        found = np.zeros(3)
        for terms in ([0, 1, 2], [0, 1], [0]):
            found[:] = 0
            found[terms] = np.linalg.lstsq(columns[:, terms], measured * weights, rcond=None)[0]
            if (found >= 0).all():
                break
        return found

    def num_plain(self, context: int) -> int:
        """Plain rounds that have been measured at about this context."""
        return self._plain_seen.get(_doubling(context), 0)

    def learn_plain(self, seconds: float, context: int) -> None:
        """Take in a measured round without a draft."""
        surprise = self._surprise(seconds, self.plain(context))
        doubling = _doubling(context)
        self._plain_seen[doubling] += 1
        self._plain[doubling] += surprise * max(1 / (self._plain_seen[doubling] + 2), _SHAPE_RATE)
        self.pace += _PACE_RATE * surprise

    def learn_drafted(self, num_nodes: int, seconds: float, context: int) -> None:
        """Take in a measured round with a draft."""
        surprise = self._surprise(seconds, self.drafted_round(num_nodes, context))
        doubling = _doubling(context)
        curve, seen = self._drafted[doubling], self._drafted_seen[doubling]
        if self.captured:
            place = self._place(num_nodes)
            seen[place] += 1
            curve[place] += surprise * max(1 / (seen[place] + 2), _SHAPE_RATE)
        else:
            shares = self._shares(num_nodes)
            seen += shares
            curve += shares * surprise * np.maximum(1 / (seen + 2), _SHAPE_RATE)
        self._risen.pop(doubling, None)
        self._unfitted += 1
        if self._unfitted >= _REFIT:
            self._unfitted = 0
            self._fits.clear()
        self.pace += _PACE_RATE * surprise

    def set_curves(self, plain_seconds: float, drafted_seconds: dict[int, float]) -> None:
        """Start from measured seconds at a short context; sizes that were not measured follow on straight lines."""
        measured = sorted(drafted_seconds)
        xs, ys = np.array(measured, dtype=float), np.array([drafted_seconds[n] for n in measured])
        curve = np.interp(self.node_counts, xs, ys)
        if xs.size > 1:
            slope = max((ys[-1] - ys[-2]) / (xs[-1] - xs[-2]), 0.0)
            curve += slope * np.maximum(self.node_counts - xs[-1], 0)
        self.pace = 0.0
        self._plain, self._drafted = {0: math.log(plain_seconds)}, {0: np.log(curve)}
        self._plain_seen, self._drafted_seen = {0: 2}, {0: np.full(self.node_counts.size, 2.0)}
        self._fits.clear()
        self._risen.clear()

    def _surprise(self, seconds: float, expected: float) -> float:
        """How much longer than expected, as a logarithm; a hiccup counts no more than a third."""
        return min(max(math.log(max(seconds, 1e-7) / expected), -_SURPRISE), _SURPRISE)

    def _shares(self, num_nodes: int) -> np.ndarray:
        """How much a round of so many nodes says about every size, 0 to 1, where all lie on one smooth curve."""
        return np.exp2(-2 * np.abs(np.log2(self.node_counts / num_nodes)))

    def _reach(self, context: int) -> None:
        """Curves for a context that is met first start as the nearest ones, ready to be corrected."""
        doubling = _doubling(context)
        if doubling not in self._plain:
            nearest = min(self._plain, key=lambda known: abs(known - doubling))
            self._plain[doubling], self._plain_seen[doubling] = self._plain[nearest], 0
            self._drafted[doubling] = self._drafted[nearest].copy()
            self._drafted_seen[doubling] = np.zeros(self.node_counts.size)


def _doubling(context: int) -> int:
    return max((context - 1) // SHORT, 0).bit_length()
