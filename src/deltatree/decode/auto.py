"""`budget="auto"`: how much to draft is decided every round, by what it is expected to bring and what it costs.

Each round is worth the tokens it is expected to emit, less those that its seconds would bring at the going rate. Among the chain of
every length, the policy's tree at every size, and the bare root, the round takes what is worth most: over many rounds that is
the most tokens per second. Whether to draft at all is decided before, by the rates of drafted and of plain rounds: where
drafting does not pay it rests, and is tried again after ever longer stretches. Meanwhile the features of the committed tokens collect,
so that the drafter later has them all.

Where rounds stay on the device, looking at a tree costs a wait. Where one size all the time brings as much as choosing anew with that
wait, rounds go by unseen, the more of them the longer no look has changed the size.

The choice moves no token of the text, only the rounds in which it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from deltatree.decode.acceptance import AcceptanceModel, Drafts
from deltatree.decode.costs import RoundCosts
from deltatree.tree import Acceptance, DraftTree, chain_tree, scores_of

_EVIDENCE = 6  # drafted rounds before drafting may be judged
_PROBE = 2  # drafted rounds after a rest before it is judged again
_LOSS = 0.9  # of plain rounds' rate, below which drafting rests: a rate of some twenty rounds is off by a tenth easily
_SHORTEST_REST, _LONGEST_REST, _REST_AT_START = 8, 256, 32  # rounds
_PLAIN_CHECK = 64  # drafted rounds, at least, after which one plain round is measured
_CHECKS_SHARE = 0.001  # of the tokens, that such rounds may cost once they take what was expected
_AS_EXPECTED = 0.1  # of a round's seconds, that they may be off
_MEMORY, _LONG_MEMORY = 0.95, 0.995  # of the rates, a round
_LONG_EVIDENCE = 50  # drafted rounds before the long memory may judge
_LEAST_REACH = 12.0  # nodes
_HABIT = 16  # looks before rounds may go unseen
_SHORTEST_HABIT, _LONGEST_HABIT = 8, 32  # rounds without a look
_HABIT_MEMORY = 0.95  # of what choices bring, a look
_FEW_FEATURES = 32  # tokens that the drafter takes in beside drafting; a prompt takes a time of its own

LOOK = 0.0002
"""Seconds that a round on the device takes longer where the host looks at its tree: a matter of the host, not of the target."""


@dataclass
class Rate:
    """Tokens per second of drafted rounds, fading; the seconds are those that the costs say at their usual pace."""

    memory: float  # a round
    tokens: float = 0.0
    seconds: float = 0.0

    def learn(self, tokens: float, seconds: float) -> None:
        """Take in a round."""
        self.tokens, self.seconds = self.memory * self.tokens + tokens, self.memory * self.seconds + seconds

    def fade(self) -> None:
        """What was known fades against what comes."""
        self.tokens, self.seconds = 0.2 * self.tokens, 0.2 * self.seconds


@dataclass
class Habits:
    """What choices were expected to bring in the rounds that were looked at, fading: whether it pays to look at every tree.

    Compared are tokens per second, mean tokens over mean seconds: at a going rate, which scatters by a tenth, looks would seem to pay
    for following its scatter.
    """

    free_tokens: float = 0.0  # of what was chosen, another one every round
    free_seconds: float = 0.0  # at the usual pace
    always: np.ndarray | None = None  # [2, sizes], tokens of one choice for all rounds, trees and chains
    num_looks: int = 0
    lasts: int = _SHORTEST_HABIT  # rounds without a look, until the next one
    unseen: int = 0  # rounds since the last look
    last: tuple[int, bool] | None = None  # what the last look made a habit

    def learn(self, tokens: float, seconds: float, always: np.ndarray) -> None:
        """Take in a round that was looked at: what was chosen, and what every size would have brought."""
        if self.always is None:
            self.always = np.zeros_like(always)
        self.num_looks += 1
        share = max(1 - _HABIT_MEMORY, 1 / self.num_looks)
        self.free_tokens += share * (tokens - self.free_tokens)
        self.free_seconds += share * (seconds - self.free_seconds)
        self.always += share * (always - self.always)

    def best(self, seconds: np.ndarray, look: float) -> tuple[int, bool] | None:
        """The choice, as place among the sizes and whether a chain, that brings more in all rounds than looking at each.

        seconds: [sizes] of rounds at the usual pace    look: seconds that a look takes, at the usual pace
        """
        if self.num_looks < _HABIT:
            return None
        rates = self.always / seconds
        kind, place = divmod(int(rates.argmax()), seconds.size)
        freely = self.free_tokens / (self.free_seconds + look)
        return None if rates[kind, place] < freely else (place, bool(kind))

    def review(self, found: tuple[int, bool] | None) -> None:
        """A look is over: one that changed nothing makes the next one later, one that did makes it soon."""
        kept = found is not None and found == self.last
        self.lasts = min(2 * self.lasts, _LONGEST_HABIT) if kept else _SHORTEST_HABIT
        self.unseen, self.last = 0, found


@dataclass
class Experience:
    """What generations of one pair have taught: shared by them, and never needed for a right text."""

    costs: RoundCosts = field(default_factory=RoundCosts)
    acceptance: AcceptanceModel = field(default_factory=AcceptanceModel)
    recent: Rate = field(default_factory=lambda: Rate(_MEMORY))
    usual: Rate = field(default_factory=lambda: Rate(_LONG_MEMORY))
    num_drafted: int = 0  # rounds
    rounds: int = 0  # drafted ones, since drafting was last taken up
    rest: int = _SHORTEST_REST  # the next one's length, in rounds
    plain_is_known: bool = False  # the last plain round took what was expected
    habits: Habits = field(default_factory=Habits)
    reach: float = 32.0  # the largest size chosen lately; trees are built somewhat larger, to choose from

    def learn(self, tokens: float, seconds: float) -> None:
        """Take in a drafted round. seconds: what the costs say at their usual pace"""
        self.recent.learn(tokens, seconds)
        self.usual.learn(tokens, seconds)
        self.rounds, self.num_drafted = self.rounds + 1, self.num_drafted + 1
        if self.rounds >= 4 * _EVIDENCE:
            self.rest = _SHORTEST_REST

    def try_again(self) -> None:
        """A rest is over: what was known fades, so that a few rounds tell."""
        self.recent.fade()
        self.usual.fade()
        self.rounds = _EVIDENCE - _PROBE

    def rate(self, of: Rate | None = None) -> float:
        """Tokens per second of drafted rounds, at the machine's present pace. of: the recent ones if not said otherwise"""
        known = of or self.recent
        return known.tokens / (known.seconds * self.costs.pace_factor) if known.seconds else 0.0

    def drafting_loses(self, plain_rate: float) -> bool:
        """Whether plain rounds are faster: clearly of late, or in the long run by however little."""
        if self.rounds < _EVIDENCE:
            return False
        loses_long = self.num_drafted >= _LONG_EVIDENCE and self.rate(self.usual) < plain_rate
        return loses_long or self.rate() < _LOSS * plain_rate


@dataclass(frozen=True, slots=True)
class Choice:
    """What a round was given, and why."""

    probabilities: list[float]  # of every node to be accepted, in node order; the root's is 1
    seconds: float  # what the round was expected to take
    is_chain: bool

    @property
    def expected(self) -> float:
        """Acceptance length."""
        return float(np.sum(self.probabilities))


class AutoBudget:
    """A tree policy that chooses its own budget, for one generation.

    policy: which tree; the first nodes of its tree for the largest budget are its tree for a smaller one
    scored: the same with the nodes' scores, where the policy has them at hand
    experience: what is known already; goes on learning

    The device waits for `choose`, so that it only does what needs the drafts. What can be known before is worked out by
    `prepare`, while the device drafts, and what is noted for later by `settle`, while it verifies; who calls neither
    gets the same choices.
    """

    def __init__(
        self,
        policy: Callable[..., DraftTree],
        experience: Experience,
        scored: Callable[..., tuple[DraftTree, Tensor]] | None = None,
    ) -> None:
        self.policy, self.experience, self.scored = policy, experience, scored
        self.choice: Choice | None = None  # of the last round
        self._resting = self._since_plain = 0
        self._seconds_since_plain = 0.0
        self._drafted = False  # whether this round drafts
        self._context, self._is_typical, self._started = 0, True, 0.0
        self._seconds, self._prices = np.zeros(0), []  # of this round by its nodes; tokens that the seconds would bring
        self._drafts: Drafts | None = None  # that this round chose from; None where it saw none
        self._nodes = np.zeros(1, dtype=np.int64)  # of them, what it took
        self._unsettled: Callable[[], None] | None = None
        self._built: DraftTree | None = None
        self._num_nodes = 1

    def begin(self, prompt_ids: list[int]) -> None:
        """A generation begins."""
        if hasattr(self.policy, "begin"):
            self.policy.begin(prompt_ids)
        self.experience.rest = min(self.experience.rest, _REST_AT_START)

    def wants_draft(self, context: int, num_features: int) -> bool:
        """Whether the coming round drafts. context: committed tokens; num_features: of them unseen by the drafter."""
        self._started, self._context = self.experience.costs.clock(), context
        self._drafts = self.choice = self._unsettled = None
        self._prices = []
        self._drafted = False
        self._is_typical = num_features <= _FEW_FEATURES
        known, costs = self.experience, self.experience.costs
        if self._resting > 0:
            self._resting -= 1
            if self._resting == 0:
                known.try_again()
            return False
        if self._checks_plain(context):
            self._since_plain, self._seconds_since_plain = 0, 0.0
            return False
        if known.drafting_loses(1 / costs.plain(context)):
            self._resting, known.rest = known.rest - 1, min(2 * known.rest, _LONGEST_REST)
            return False
        return True

    def _checks_plain(self, context: int) -> bool:
        """Whether it is time to measure a plain round: the less often, the more it loses against a drafted one."""
        known, costs, rate = self.experience, self.experience.costs, self.experience.rate()
        if self._since_plain < _PLAIN_CHECK:
            return self._since_plain >= 4 and not costs.num_plain(context)
        lost = rate * costs.plain(context) - 1  # tokens
        return not known.plain_is_known or lost <= _CHECKS_SHARE * rate * self._seconds_since_plain

    def __call__(self, log_probs: Tensor, *, root: int, budget: int) -> DraftTree:
        """The tree that is worth most, of at most `budget` drafted nodes. log_probs: [D, vocab]; D = 0 is a plain round."""
        if budget <= 0 or log_probs.shape[0] == 0:
            return self.policy(log_probs, root=root, budget=0)  # so that one that learns knows of the round
        tree, scores = self._scored(log_probs, root, min(budget, self.widest))
        nodes = self.choose(Drafts.of(tree.parents.numpy(), tree.depths.numpy(), scores.numpy()))
        if self.choice.is_chain:
            self._built = chain_tree(torch.from_numpy(tree.token_ids.numpy()[nodes]))
        else:
            self._built = DraftTree(*(field[: nodes.size] for field in (tree.token_ids, tree.parents, tree.depths)))
        return self._built

    @property
    def widest(self) -> int:
        """Drafted nodes that a tree needs, so that there is enough to choose from: on captured sizes, the next larger one."""
        return int((1.5 if self.experience.costs.captured else 1.25) * self.experience.reach)

    def prepare(self, most: int | None = None) -> None:
        """What rounds of up to `most` nodes cost, those of all sizes if not said, before there is a tree to choose from."""
        costs = self.experience.costs
        sizes = np.arange(1, (most or int(costs.node_counts[-1])) + 1)
        self._seconds = costs.drafted(sizes, self._context)
        self._prices = (self._rate() * self._seconds).tolist()

    def choose(self, drafts: Drafts) -> np.ndarray:
        """The nodes of the round that is worth most, root included: the first so many, or the first of the spine.

        drafts: what may be verified, best nodes first
        """
        known = self.experience
        if len(self._prices) < len(drafts):
            self.prepare(len(drafts))
        chances, spine = known.acceptance.of_paths(drafts), drafts.spine()
        of_spine = [chances[node] for node in spine.tolist()]
        of_tree, tree_size = _most_worth(chances, self._prices, known.costs.sizes(len(drafts)))
        of_chain, chain_size = _most_worth(of_spine, self._prices, range(1, spine.size + 1))
        is_chain = of_chain >= of_tree and chain_size > 1
        size = chain_size if of_chain >= of_tree else tree_size
        nodes = spine[:size] if is_chain else np.arange(size)
        probabilities = (of_spine if is_chain else chances)[:size]
        self.choice = Choice(probabilities, float(self._seconds[size - 1]), is_chain)
        self._drafts, self._nodes, self._num_nodes = drafts, nodes, size
        self._drafted = True
        self._unsettled = partial(self._weigh, chances, of_spine)
        known.reach = max(size, 0.95 * known.reach, _LEAST_REACH)
        return nodes

    def settle(self) -> None:
        """Note what the choice was made from, if that was not done yet: before the round's lesson, whenever there is time."""
        unsettled, self._unsettled = self._unsettled, None
        if unsettled is not None and self.experience.costs.captured:
            unsettled()

    def habit(self) -> tuple[int, bool] | None:
        """Nodes, root included, of the coming round and whether it is a chain, where a look at its tree would not pay.

        Without a look there is no wait between draft and verify. Now and then there is one all the same.
        """
        habits = self.experience.habits
        found = habits.last if habits.unseen < habits.lasts else None
        if found is None:
            return None
        habits.unseen += 1
        self._drafted = True
        place, is_chain = found
        return int(self.experience.costs.node_counts[place]), is_chain

    def _weigh(self, trees: list[float], chains: list[float]) -> None:
        """Note what every size would have brought. trees, chains: chances of their nodes; further ones would add little"""
        costs, habits = self.experience.costs, self.experience.habits
        sizes, pace = costs.node_counts, costs.pace_factor
        tokens = [np.cumsum(chances)[np.minimum(sizes, len(chances)) - 1] for chances in (trees, chains)]
        habits.learn(self.choice.expected, self.choice.seconds / pace, np.stack(tokens))
        habits.review(habits.best(costs.drafted(sizes, self._context) / pace, LOOK / pace))

    def _rate(self) -> float:
        """Tokens per second that a round's time would bring otherwise."""
        known = self.experience
        plain = 1 / known.costs.plain(self._context)
        return max(plain, known.rate()) if known.rounds >= _EVIDENCE else plain

    def _scored(self, log_probs: Tensor, root: int, budget: int) -> tuple[DraftTree, Tensor]:
        if self.scored is not None:
            return self.scored(log_probs, root=root, budget=budget)
        tree = self.policy(log_probs, root=root, budget=budget)
        return tree, scores_of(tree, log_probs)

    def observe(self, tree: DraftTree, accepted: Acceptance, logits: Tensor) -> None:
        """What the target accepted. tree: as it was verified, which a grammar may have made smaller."""
        if hasattr(self.policy, "observe"):
            self.policy.observe(tree, accepted, logits)
        if self._drafts is None:
            return
        path = accepted.path if len(tree) == len(self._built) else _find(self._built, tree, accepted)
        self.learn(path, len(tree))

    def learn(self, path: list[int], num_nodes: int) -> None:
        """Take in the round that was chosen. path: accepted nodes, from the root on; num_nodes: verified, root included."""
        self.lesson(path, num_nodes)()

    def lesson(self, path: list[int], num_nodes: int) -> Callable[[], None]:
        """`learn`, to be called whenever there is time, be it in the next round."""
        self.settle()
        self._num_nodes = num_nodes
        known, context = self.experience, self._context
        drafts, nodes, choice = self._drafts, self._nodes, self.choice

        def learn() -> None:
            tokens = float(len(path))
            if drafts is not None:  # not a habit's
                known.acceptance.learn(drafts.chain(nodes) if choice.is_chain else drafts.cut(nodes.size), path)
                # The expectation is calibrated and less noisy than one outcome; both together are quick and honest.
                tokens = 0.5 * (choice.expected + tokens)
            seconds = known.costs.drafted_round(num_nodes, context) / known.costs.pace_factor
            known.learn(tokens, seconds)

        return learn

    @property
    def rests(self) -> bool:
        """Whether the next round will be a plain one, whatever this one brings."""
        return self._resting > 0

    def finish(self, seconds: float | None = None) -> None:
        """The round is over: its time counts, unless the drafter read a prompt in it.

        seconds: of its work where that was measured, pauses left out; otherwise the clock's since `wants_draft`
        """
        costs = self.experience.costs
        if seconds is None:
            seconds = costs.clock() - self._started
        self.settle()
        if not self._drafted:
            expected = costs.plain(self._context)
            self.experience.plain_is_known = abs(seconds - expected) < _AS_EXPECTED * expected
            costs.learn_plain(seconds, self._context)
            return
        self._since_plain += 1
        self._seconds_since_plain += seconds
        if self._is_typical:
            costs.learn_drafted(self._num_nodes, seconds, self._context)


def _most_worth(chances: Iterable[float], prices: Sequence[float], sizes: Sequence[int]) -> tuple[float, int]:
    """What the best of these sizes is worth, and that size; of equal ones the smallest.

    chances: of the nodes to be accepted    prices: of a round by its nodes, in tokens
    """
    tokens = list(accumulate(chances))
    worth = [tokens[size - 1] - prices[size - 1] for size in sizes]
    best = max(worth)
    return best, sizes[worth.index(best)]


def _find(built: DraftTree, pruned: DraftTree, accepted: Acceptance) -> list[int]:
    """The accepted path as nodes of the tree that was built, before nodes were removed from it."""
    child = {edge: node for node, edge in enumerate(zip(built.parents.tolist(), built.token_ids.tolist(), strict=True))}
    path = [0]
    for token in pruned.token_ids[accepted.path[1:]].tolist():
        path.append(child[path[-1], token])
    return path
