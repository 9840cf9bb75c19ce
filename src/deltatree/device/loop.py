"""Which rounds stay on the device, and the loop over them as `decode` wants it: fixed budgets, and one that is chosen."""

from __future__ import annotations

from collections.abc import Callable

from deltatree.decode.round import Round
from deltatree.decode.sampling import Sampler
from deltatree.device.launches import REST, Half
from deltatree.device.rounds import DeviceRound, DeviceRounds
from deltatree.drafter import FastDFlashDrafter, NoDrafter
from deltatree.drafter.fast_dflash import FastSession
from deltatree.drafter.protocol import Drafter
from deltatree.models.fast import FastTarget
from deltatree.models.protocol import Target
from deltatree.state import StaticState
from deltatree.transitions.policy import TransitionTree
from deltatree.tree import Calibrated, DraftTree, best_first, chain, no_draft


class DeviceLoop:
    """The rounds of one generation as `decode` wants them, on the device.

    build_tree: `no_draft`, `chain`, `best_first`, a `Calibrated`, a `TransitionTree`, or a policy that chooses its budget between draft
        and verify (`choose`)
    session: the drafter's, None or a resting one for plain decoding    last: prefill
    """

    def __init__(
        self,
        target: FastTarget,
        state: StaticState,
        session: FastSession | None,
        last: Round,
        *,
        build_tree: Callable[..., DraftTree],
        budget: int,
    ) -> None:
        self.target, self.state, self.policy, self.budget = target, state, build_tree, budget
        learning = learning_policy(build_tree) if session is not None else None
        self.is_chain = build_tree is chain or (isinstance(build_tree, TransitionTree) and build_tree.is_chain)
        self.rounds = DeviceRounds(target, state, session, last.features, last.bonus, learning)
        self.nothing = last.features[:0]  # of a round's committed tokens the drafter has seen all
        self._learn: Callable[[], None] = lambda: None  # what the last chosen round taught, to be taken in

    @staticmethod
    def covers(target: Target, drafter: Drafter, build_tree: Callable[..., DraftTree], sampler: Sampler) -> bool:
        """Whether these rounds emit what `decode_round` would: greedy, nothing processed, a tree that is built on the device."""
        fast = isinstance(target, FastTarget) and target.device_rounds
        if not fast or not isinstance(drafter, (FastDFlashDrafter, NoDrafter)):
            return False
        plain = sampler.processor is None and sampler.generator is None and sampler.constraint is None
        drafts = sampler.draft_processor is None and sampler.draft_filter is None
        return plain and drafts and has_device_tree(build_tree)

    def round(
        self, cut: Callable[[list[int]], tuple[int, str | None]], *, may_draft: bool, is_last: bool = False
    ) -> Round:
        """One round.

        cut: how many of the new tokens to keep, and why the text ends    may_draft: the drafter's block has a place
        is_last: the text ends with it in any case
        """
        if self.rounds.session is not None and not may_draft:
            self.rounds = self.rounds.without_session()
        if self.rounds.session is None:
            done = self._plain(is_last)
        elif hasattr(self.policy, "choose"):
            done = self._chosen(is_last)
        else:
            done = self.rounds.run(self.budget, chain=self.is_chain, then=self._next(is_last))
        kept, ended = cut(done.token_ids)
        if ended is not None:
            self._take_in()
        features = self.rounds.finish(kept) if ended is not None else self.nothing
        depth = 0 if done.num_nodes == 1 else self.rounds.max_depth
        return Round(done.token_ids[:kept], len(done.path), features, done.num_nodes, depth, ended)

    @property
    def length(self) -> int:
        """Committed tokens, those of the last path included."""
        return self.state.length + self.rounds.num_uncommitted

    @property
    def seconds(self) -> float | None:
        """What the last round's work took the device, pauses left out; None on a CPU."""
        return self.rounds.seconds

    def _next(self, is_last: bool) -> Half | None:
        """What the next round will most likely want first."""
        policy, rounds = self.policy, self.rounds
        if is_last:
            return None
        if rounds.session is None or getattr(policy, "rests", False):
            return REST
        if hasattr(policy, "choose"):
            return rounds.half(self._widest(), offer=True)
        return rounds.half(self.budget, chain=self.is_chain)

    def _plain(self, is_last: bool) -> DeviceRound:
        if hasattr(self.policy, "wants_draft"):
            self.policy.wants_draft(self.length, 0)
        return self.rounds.run(0, then=self._next(is_last))

    def _chosen(self, is_last: bool) -> DeviceRound:
        """Draft, let the policy choose by the scores, verify what it chose."""
        policy, rounds = self.policy, self.rounds
        if not policy.wants_draft(self.length, rounds.session.waiting):
            return rounds.run(0, then=self._next(is_last), meanwhile=self._take_in)
        habit = policy.habit()
        if habit is not None:
            (size, is_chain), meanwhile = habit, self._take_in
            rounds.offer(self._widest(1 if is_chain else size))
        else:
            drafted = rounds.draft(self._widest(), meanwhile=self._take_in_and_prepare)
            size, is_chain, meanwhile = len(policy.choose(drafted)), policy.choice.is_chain, policy.settle
        budget = self._filled(size, is_chain) - 1
        done = rounds.verify(budget, chain=is_chain, then=self._next(is_last), meanwhile=meanwhile)
        self._learn = policy.lesson(done.path[:size], size)
        return done

    def _widest(self, size: int = 1) -> int:
        """Budget of the tree to choose from, or to take `size` nodes of unseen."""
        return budget_to_build(max(self.policy.widest, size - 1), self.budget)

    def _filled(self, size: int, is_chain: bool) -> int:
        """Nodes to verify. A chain is lengthened to what is captured and costs what that costs; the policy only judges what
        it chose."""
        if not is_chain or size == 1:
            return size
        return min(self.target.bucket(size), self.rounds.max_depth + 1)

    def _take_in(self) -> None:
        """Learn from the last round: not before the device has work again."""
        self._learn()
        self._learn = lambda: None

    def _take_in_and_prepare(self) -> None:
        self._take_in()
        self.policy.prepare()


def learning_policy(build_tree: Callable[..., DraftTree]) -> TransitionTree | Calibrated | None:
    """The policy, or the one inside one that chooses its budget, if its trees depend on what a generation has shown."""
    policy = _chosen_from(build_tree)
    return policy if isinstance(policy, (TransitionTree, Calibrated)) else None


def has_device_tree(build_tree: Callable[..., DraftTree]) -> bool:
    """Whether a policy's tree is built on the device. A budget is chosen over trees, not over transitions' chain."""
    policy = _chosen_from(build_tree)
    if isinstance(policy, TransitionTree):
        return not (policy.is_chain and policy is not build_tree)
    return isinstance(policy, Calibrated) or policy in (no_draft, chain, best_first)


def _chosen_from(build_tree: Callable[..., DraftTree]) -> Callable[..., DraftTree]:
    """The policy whose trees a policy chooses from (see `DeviceLoop`), or the policy itself."""
    return build_tree.policy if hasattr(build_tree, "choose") else build_tree


WIDEST = (15, 31, 63, 127)
"""Budgets of the trees to choose from, so that few are captured; the largest budget is the last."""


def budget_to_build(wanted: int, largest: int) -> int:
    """Of the tree to choose from, where one of `wanted` drafted nodes would do."""
    return min(next((budget for budget in WIDEST if budget >= wanted), largest), largest)
