"""What a profile's luck comes to in the long run: rounds of the real policies, without a target, over thousands of rounds.

A short measured text says to a hundredth what a round takes and hardly what it emits: some thirty rounds scatter by a tenth. So the
two are separated. Seconds of rounds are given, as they were measured; tokens are counted over texts that are long enough, with the
drafts of `planted`, the trees of `best_first` or of `Calibrated` as it learns, and the choices of `AutoBudget`, which is told those
seconds by a counted clock.
Every method meets the same drafts at the same places.

What the whole chain would have emitted at a method's places is known, and so is what it emits in the long run, by the profile. The
luck of the places is what lies between, and the seconds of a generation are freed of as much of it as they follow (a control variate).
Its mean is zero however rounds are chosen, as no choice of a place depends on the draft there (Wald), so that nothing is shifted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch

from deltatree.decode.acceptance import Drafts
from deltatree.decode.auto import AutoBudget, Experience
from deltatree.decode.calibration import _sizes, _spread
from deltatree.decode.costs import NODE_COUNTS, RoundCosts
from deltatree.decode.options import AUTO
from deltatree.device.loop import budget_to_build
from deltatree.projection.profiles import Profile
from deltatree.projection.replay import FastReplayDrafter, planted
from deltatree.tree import Acceptance, Calibrated, DraftTree, best_first, best_first_scored, chain_tree

BEST_FIRST = "best-first"
_VOCAB = 64  # only the planted tokens matter; no more of them fit into the widest tree
_WIDEST = 127  # drafted nodes of the trees that are cut to size
_FAR = 1000  # places between texts


@dataclass(frozen=True, slots=True)
class RoundSeconds:
    """What rounds take: measured ones at some sizes, straight lines over the doublings of the nodes between them.

    plain: without a draft    chain: of the drafter's whole chain
    trees: drafted rounds by their nodes, root included, as one piece of work; at least one size
    choice: what it adds where the host chooses between draft and verify
    buckets: node counts that are captured; None if any size runs as it is
    """

    plain: float
    chain: float
    trees: dict[int, float]
    choice: float = 0.0
    buckets: tuple[int, ...] | None = None

    def tree(self, num_nodes: int) -> float:
        """A round with a tree of so many nodes, root included."""
        sizes = sorted(self.trees)
        logs, seconds = np.log2(sizes), [self.trees[size] for size in sizes]
        at = np.log2(self.filled(num_nodes))
        if at > logs[-1] and len(sizes) > 1:  # nodes cost alike beyond the last two sizes
            slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
            return seconds[-1] + max(slope, 0.0) * (2**at - sizes[-1])
        return float(np.interp(at, logs, seconds))

    def spine(self, num_nodes: int, depth: int) -> float:
        """A round with the first nodes of a chain of `depth` drafted ones: as much beside a tree as the whole chain is."""
        return self.tree(num_nodes) * self.chain / self.tree(depth + 1)

    def filled(self, num_nodes: int) -> int:
        """Nodes that run where so many are asked for."""
        return num_nodes if self.buckets is None else min(size for size in self.buckets if size >= num_nodes)


@dataclass(frozen=True, slots=True)
class Place:
    """A draft at one place of the text, and what the target thinks of it."""

    drafts: Drafts  # a tree, the widest one of `best_first` if not said otherwise
    path: np.ndarray  # its accepted nodes, root first, rising
    right: int  # first tokens of the whole chain that are right
    log_probs: torch.Tensor  # [D, 3] float32, of the planted tokens, best first
    ranks: tuple[int, ...]  # [D] where the right token stands among them, -1 if nowhere


class Text:
    """An endless text and a drafter for it. Places are drafted once, so that all methods share the work and the luck.

    vocab_size: of the target; tokens that were not planted take a share of the drafter's probability
    """

    def __init__(self, profile: Profile, vocab_size: int = 150_000, seed: int = 0) -> None:
        self.profile = profile
        self._unplanted = (vocab_size - 3) * float(np.exp(FastReplayDrafter.LOWEST))
        self._seed = seed
        self.place = lru_cache(maxsize=None)(self._place)

    def luck(self, here: Place) -> float:
        """Tokens that the whole chain emits there beyond what it does in the long run."""
        return 1 + here.right - self.profile.chain_length

    def _place(self, number: int) -> Place:
        truth = [(number + depth) % _VOCAB for depth in range(self.profile.depth)]
        tokens, chances = planted(self.profile, truth, _VOCAB, f"{self._seed} {number}")
        logits = torch.tensor(chances).clamp_(min=1e-6).log_()
        logits -= (logits.exp().sum(-1, keepdim=True) + self._unplanted).log()
        log_probs = torch.full((self.profile.depth, _VOCAB), FastReplayDrafter.LOWEST)
        log_probs.scatter_(1, torch.tensor(tokens), logits)
        tree, scores = best_first_scored(log_probs, root=0, budget=_WIDEST)
        ranks = tuple(row.index(token) if token in row else -1 for row, token in zip(tokens, truth, strict=True))
        right = next((depth for depth, rank in enumerate(ranks) if rank), len(ranks))
        return Place(_drafts(tree, scores), _path(tree, truth), right, logits, ranks)


@dataclass(frozen=True, slots=True)
class Expected:
    """One method over many generations of equally many tokens."""

    num_tokens: int  # a generation, without the one that prefill emits
    seconds: np.ndarray  # [generations], as they went
    steady_seconds: np.ndarray  # [generations], freed of luck: what methods are compared by
    acceptance_length: float
    nodes_per_round: float
    num_rounds: int

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / float(self.steady_seconds.mean())

    @property
    def milliseconds_per_round(self) -> float:
        return 1e3 * float(self.seconds.sum()) / self.num_rounds

    def over(self, other: Expected) -> float:
        """How many times as fast as another method on the same texts."""
        return self.tokens_per_second / other.tokens_per_second

    def over_error(self, other: Expected | None = None) -> float:
        """Standard error of `over`, by the differences between texts; without another method, of the speed's, relative."""
        mine = self.steady_seconds
        missed = mine if other is None else other.steady_seconds - self.over(other) * mine
        return float(missed.std(ddof=1) / mine.mean() / missed.size**0.5) if missed.size > 1 else float("nan")


def simulate(
    budget: int | str,
    text: Text,
    seconds: RoundSeconds,
    *,
    tree: str = BEST_FIRST,
    is_chain: bool = False,
    num_tokens: int = 127,
    lives: int = 4,
    generations: int = 16,
) -> Expected:
    """Generations of one method.

    budget: drafted nodes, 0 for plain decoding, or "auto"    tree: whose nodes, "best-first" or "calibrated"
    is_chain: the drafter's whole chain instead
    num_tokens: of a generation, beside the one that prefill emits
    lives: how often `auto` starts with nothing but measured costs; each time one more generation teaches it and is not counted
    generations: counted ones of each life
    """
    spent, luck, lengths, nodes = [], [], [], []
    for life in range(lives):
        trees = _TREES[tree]()
        arm = _Auto(text, seconds, trees) if budget == AUTO else _Fixed(text, seconds, trees, budget, is_chain)
        for number in range(generations + 1):
            place = ((generations + 1) * life + number) * (_FAR + num_tokens)
            began, lucky, end = arm.now, arm.luck, place + num_tokens
            trees.begin()
            arm.begin()
            while place < end:
                length, num_nodes = arm.round(place)
                place += length
                if number:
                    lengths.append(length)
                    nodes.append(num_nodes - 1)
            if number:
                spent.append(arm.now - began)
                luck.append(arm.luck - lucky)
    rounds = len(lengths)
    went = np.array(spent)
    steady = _freed(went, np.array(luck))
    return Expected(num_tokens, went, steady, sum(lengths) / rounds, sum(nodes) / rounds, rounds)


def _freed(seconds: np.ndarray, luck: np.ndarray) -> np.ndarray:
    """Seconds of generations less what followed their luck, whose true mean is zero. Both [generations]."""
    apart = luck - luck.mean()
    spread = float(apart @ apart)
    return seconds - luck * float(apart @ seconds) / spread if spread and luck.size > 2 else seconds


def seconds_of_rows(
    rows: list[dict],
    tree: str = BEST_FIRST,
    *,
    choice: float = 0.0,
    buckets: tuple[int, ...] | None = None,
    more: dict[int, float] | None = None,
) -> RoundSeconds:
    """What rounds took in a projection's rows of one profile, with the trees of one policy.

    more: seconds of drafted rounds at sizes below the smallest row's and above the largest one's
    """
    took = {
        (row["method"], row["budget"]): row["milliseconds_per_round"] / 1e3
        for row in rows
        if tree_of(row) in (None, tree)
    }
    trees = {
        1 + budget: seconds
        for (method, budget), seconds in took.items()
        if method == "ddtree" and budget not in (0, AUTO)
    }
    depth = next(row["budget"] for row in rows if row["method"] == "dflash")
    chain = took["dflash", depth]
    least, most = min(trees, default=depth + 1), max(trees, default=depth + 1)
    trees = {size: seconds for size, seconds in (more or {}).items() if not least <= size <= most} | trees
    return RoundSeconds(took["ar", 0], chain, trees or {depth + 1: chain}, choice, buckets)


def tree_of(row: dict) -> str | None:
    """Whose trees a projection's row has; None if it has none. Rows of before there were several do not say it."""
    return row.get("tree", BEST_FIRST) if row["method"] == "ddtree" else None


def add_expected(rows: list[dict], profile: Profile, seconds: Mapping[str, RoundSeconds], **lengths) -> None:
    """Add to a projection's rows of one profile what they come to in the long run.

    seconds: by tree    lengths: of `simulate`

    Adds `expected_` columns: acceptance_length, nodes_per_round, milliseconds_per_round, tokens_per_second with
    its relative standard error, speedup, speedup_over_dflash, share_of_best_fixed with its standard error, rounds.
    """
    text = Text(profile)
    arms = []
    for row in rows:
        tree = tree_of(row) or next(iter(seconds))
        arms.append(
            simulate(row["budget"], text, seconds[tree], tree=tree, is_chain=row["method"] == "dflash", **lengths)
        )
    by_method = {row["method"]: arm for row, arm in reversed(list(zip(rows, arms, strict=True)))}
    fixed = [arm for row, arm in zip(rows, arms, strict=True) if row["budget"] != AUTO]
    best = max(fixed, key=lambda arm: arm.tokens_per_second)
    for row, arm in zip(rows, arms, strict=True):
        found = {
            "acceptance_length": arm.acceptance_length,
            "nodes_per_round": arm.nodes_per_round,
            "milliseconds_per_round": arm.milliseconds_per_round,
            "tokens_per_second": arm.tokens_per_second,
            "tokens_per_second_error": arm.over_error(),
            "speedup": arm.over(by_method["ar"]),
            "speedup_over_dflash": arm.over(by_method["dflash"]),
            "speedup_over_dflash_error": arm.over_error(by_method["dflash"]),
            "share_of_best_fixed": arm.over(best),
            "share_of_best_fixed_error": arm.over_error(best),
            "rounds": arm.num_rounds,
        }
        row |= {f"expected_{name}": value for name, value in found.items()}


class _BestFirst:
    """Trees of `best_first`: every place has its widest one."""

    def begin(self) -> None:
        """A generation begins."""

    def grow(self, here: Place, budget: int) -> Place:
        """The place with a tree of at least so many drafted nodes, if there are as many. Called once for every draft."""
        return here

    def learn(self, here: Place, length: int) -> None:
        """A drafted round has emitted so many tokens there."""


class _Calibrated(_BestFirst):
    """Trees of `Calibrated`, built at every place as it has learned by then. Tokens are called by their ranks."""

    def __init__(self) -> None:
        self.policy = Calibrated()

    def begin(self) -> None:
        self.policy.begin([])

    def grow(self, here: Place, budget: int) -> Place:
        tree, scores = self.policy.scored(here.log_probs, root=_ROOT, budget=budget)
        return replace(here, drafts=_drafts(tree, scores), path=_path(tree, here.ranks))

    def learn(self, here: Place, length: int) -> None:
        chosen = [*here.ranks, _BEYOND][:length]
        visited = chain_tree([_ROOT, *chosen[:-1]])
        self.policy.observe(visited, Acceptance(list(range(length)), bonus=chosen[-1]), here.log_probs)


_ROOT, _BEYOND = 0, -1  # tokens that are no ranks: any will do
_TREES = {BEST_FIRST: _BestFirst, "calibrated": _Calibrated}


def _drafts(tree: DraftTree, scores: torch.Tensor) -> Drafts:
    return Drafts.of(tree.parents.numpy(), tree.depths.numpy(), scores.numpy())


def _path(tree: DraftTree, truth: Sequence[int]) -> np.ndarray:
    """Nodes that are right, root first. truth: tokens after the root, in the words of the tree"""
    child = {edge: node for node, edge in enumerate(zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True))}
    path = [0]
    for token in truth:
        node = child.get((path[-1], token))
        if node is None:
            break
        path.append(node)
    return np.array(path)


class _Fixed:
    """Plain decoding, the whole chain, or trees of one size."""

    def __init__(self, text: Text, seconds: RoundSeconds, trees: _BestFirst, budget: int, is_chain: bool) -> None:
        self.text, self.trees, self.now, self.luck = text, trees, 0.0, 0.0
        self.size = 1 + (text.profile.depth if is_chain else budget)
        self.is_chain = is_chain
        self.seconds = seconds.plain if self.size == 1 else seconds.chain if is_chain else seconds.tree(self.size)

    def begin(self) -> None:
        """A generation begins."""

    def round(self, place: int) -> tuple[int, int]:
        """Tokens that a round emits there, and its nodes, root included."""
        self.now += self.seconds
        if self.size == 1:
            return 1, 1
        here = self.text.place(place)
        self.luck += self.text.luck(here)
        if self.is_chain:
            return _of_chain(here, self.size), self.size
        length = _of_tree(self.trees.grow(here, self.size - 1), self.size)
        self.trees.learn(here, length)
        return length, self.size


class _Auto:
    """Budget `auto` as `DeviceLoop` asks it; what a round has taught is taken in while the next one drafts."""

    def __init__(self, text: Text, seconds: RoundSeconds, trees: _BestFirst) -> None:
        self.text, self.seconds, self.trees, self.now, self.luck = text, seconds, trees, 0.0, 0.0
        buckets, depth = seconds.buckets, text.profile.depth
        sizes = _sizes(buckets or NODE_COUNTS, depth + 1)
        costs = RoundCosts(sizes, captured=buckets is not None, clock=lambda: self.now)
        measured = {size: seconds.tree(size) for size in _spread(costs)}
        costs.set_curves(seconds.plain, measured)
        self.experience, self.most = Experience(costs), int(costs.node_counts[-1]) - 1
        self._learn: Callable[[], None] = lambda: None
        self._paused = 0.0  # seconds of the round in which the device waited for the choice

    def begin(self) -> None:
        """A generation begins."""
        self.policy = AutoBudget(best_first, self.experience, best_first_scored)
        self.policy.begin([])

    def round(self, place: int) -> tuple[int, int]:
        """Tokens that a round emits there, and its nodes, root included."""
        policy, began, self._paused = self.policy, self.now, 0.0
        if policy.wants_draft(place % _FAR, 1):
            length, size = self._drafted(self.text.place(place))
        else:
            self._take_in()
            self.now += self.seconds.plain
            length, size = 1, 1
        policy.finish(self.now - began - self._paused)
        return length, size

    def _drafted(self, here: Place) -> tuple[int, int]:
        policy = self.policy
        self.luck += self.text.luck(here)
        habit = policy.habit() if self.seconds.buckets is not None else None
        self._take_in()
        if habit is None:
            wanted = min(policy.widest, self.most)
            if self.seconds.buckets is not None:
                wanted = budget_to_build(wanted, self.most)
            here = self.trees.grow(here, wanted)
            size, is_chain = len(policy.choose(here.drafts.cut(1 + wanted))), policy.choice.is_chain
            self._paused = self.seconds.choice
            self.now += self._paused
        else:
            size, is_chain = habit
            here = self.trees.grow(here, size - 1)
        if is_chain:
            depth = self.text.profile.depth
            filled = min(self.seconds.filled(size), depth + 1)  # lengthened to what is captured
            self.now += self.seconds.spine(filled, depth)
            length, path = _of_chain(here, filled), list(range(_of_chain(here, size)))
        else:
            self.now += self.seconds.tree(size)
            length = _of_tree(here, size)
            path = here.path[:length].tolist()
        self.trees.learn(here, length)
        self._learn = policy.lesson(path, size)
        return length, size

    def _take_in(self) -> None:
        self._learn()
        self._learn = lambda: None


def _of_tree(place: Place, size: int) -> int:
    """Tokens emitted if the first nodes of the tree are verified."""
    return int(np.searchsorted(place.path, size))


def _of_chain(place: Place, size: int) -> int:
    """Tokens emitted if the first choices are verified, so many with the root."""
    return 1 + min(place.right, size - 1)
