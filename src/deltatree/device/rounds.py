"""Greedy rounds that stay on the device: captured work for a whole round, and one small record back to the host.

The same round as `decode_round` (draft, build, verify, accept, commit), over the buffers of the fast target and the fast
drafter, with one difference: a round's path is committed first thing in the next round, so that the host can still cut it
where the text ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from deltatree.capture import Captured
from deltatree.decode.acceptance import LOGIT_LIMIT, LOGIT_SCALE, Drafts
from deltatree.decode.round import Round
from deltatree.decode.sampling import Sampler
from deltatree.device.trees import MarginalTrees, TransitionTrees
from deltatree.drafter import FastDFlashDrafter, NoDrafter
from deltatree.drafter.fast_dflash import FastSession
from deltatree.drafter.protocol import Drafter
from deltatree.kernels.draft_record import draft_record
from deltatree.kernels.tree_build import TreeBuffers
from deltatree.kernels.walk import Walked, walk
from deltatree.models.fast import USUAL_DEPTH, FastTarget
from deltatree.models.protocol import Target
from deltatree.state import Nodes, StaticBuffers, StaticState
from deltatree.state.static import MAX_DEPTH
from deltatree.transitions.policy import TransitionTree
from deltatree.tree import DraftTree, best_first, chain, no_draft


@dataclass(frozen=True, slots=True)
class DeviceRound:
    """What a round brought back to the host."""

    path: list[int]  # accepted nodes, the root first
    token_ids: list[int]  # emitted: the accepted drafted tokens, then the bonus token
    num_nodes: int  # verified, root included


class RoundWork:
    """What is captured of rounds: steps over a target's and a drafter's buffers, which outlive the generation.

    Nothing here knows the generation, so that the graphs, which stay with the buffers, hold none alive.
    context: the drafter's buffers, None without a drafter
    num_buckets: of a table of transitions, for trees that read one
    """

    def __init__(
        self,
        target: FastTarget,
        buffers: StaticBuffers,
        drafter: FastDFlashDrafter | None,
        context,
        num_buckets: int | None = None,
    ) -> None:
        self.target, self.buffers, self.drafter, self.context = target, buffers, drafter, context
        self.max_depth = 0 if drafter is None else drafter.depth
        with torch.inference_mode():
            self.walked = self.scratch(("walked", self.max_depth), lambda: Walked.empty(self.max_depth, target.device))
            if context is None:
                self.bonus = self.scratch("bonus", lambda: torch.zeros(1, dtype=torch.int64, device=target.device))
            else:
                self.bonus = context.bonus
        self.trees = MarginalTrees() if num_buckets is None else self._transitions(num_buckets)

    def _transitions(self, num_buckets: int) -> TransitionTrees:
        sizes = self.target.vocab_size, num_buckets, self.max_depth
        return self.scratch(("transitions", *sizes), lambda: TransitionTrees(*sizes, self.target.device))

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

    def round(self, count: int, chain: bool) -> None:
        self.draft(count, chain)
        self.verify(count)

    def draft(self, count: int, chain: bool) -> None:
        """Commit the last round's path, give the drafter its features, draft and build."""
        self.buffers.commit(self._path_size)
        context, tree = self.context, self.tree(count)
        if count == 1:
            if context is not None:
                self.drafter.append(context, context.features, context.count)
            tree.token_ids.copy_(self.bonus)
            return
        self.drafter.draft(context)
        self.trees.build(context.logits, self.bonus, tree, chain=chain)

    def offer(self, count: int) -> None:
        """Draft, and put what a choice needs in one piece for the host."""
        self.draft(count, False)
        tree = self.tree(count)
        draft_record(
            tree.scores, tree.parents, tree.depths, num_nodes=tree.num_nodes, max_depth=self.max_depth,
            limit=LOGIT_LIMIT, scale=LOGIT_SCALE, out=self.drafted(count),
        )  # fmt: skip

    def drafted(self, count: int) -> Tensor:
        """The record of a tree of `count` nodes: [5, count] float64."""
        new = partial(torch.zeros, 5, count, dtype=torch.float64, device=self.target.device)
        return self.scratch(("drafted", count), new)

    def verify_chain(self, count: int) -> None:
        """Verify a chain instead of the tree: it takes its tokens from the same draft, and the tree's place."""
        self.trees.build(self.context.logits, self.bonus, self.tree(count), chain=True)
        self.verify(count)

    def verify(self, count: int) -> None:
        """Verify the tree's first nodes, walk, learn, and leave path, steps, bonus and features where the next round finds them."""
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

    @property
    def _path_size(self) -> int:
        return self.max_depth + 1

    def scratch(self, key, new: Callable[[], object]) -> object:
        if key not in self.buffers.scratch:
            with torch.inference_mode():
                self.buffers.scratch[key] = new()
        return self.buffers.scratch[key]


class DeviceRounds:
    """Rounds of one generation: greedy, with best-first trees, chains, trees over transitions, or no draft.

    state: after prefill, with nothing to commit    session: the drafter's context, or None for plain decoding alone
    features: [n, F], of committed tokens that the session has not seen    bonus: the root of the first tree
    policy: that has begun the generation, for trees over transitions and their chain
    """

    def __init__(
        self,
        target: FastTarget,
        state: StaticState,
        session: FastSession | None,
        features: Tensor,
        bonus: int,
        policy: TransitionTree | None = None,
    ) -> None:
        self.target, self.state, self.session, self.buffers = target, state, session, state.buffers
        drafter, context = (None, None) if session is None else (session.drafter, session.buffers)
        num_buckets = None if policy is None else policy.base.num_buckets
        self.work = RoundWork(target, state.buffers, drafter, context, num_buckets)
        self.max_depth, self.bonus = self.work.max_depth, self.work.bonus
        with torch.inference_mode():
            if session is not None:
                session.place(features)
            if policy is not None:
                self.work.trees.begin(policy)
            self.bonus.fill_(bonus)
            self.buffers.steps.zero_()
        self._uncommitted: list[int] = []

    def run(self, budget: int, *, chain: bool = False, meanwhile: Callable[[], None] = lambda: None) -> DeviceRound:
        """A whole round as one piece of captured work.

        budget: drafted nodes, 0 for plain decoding    meanwhile: what the host does while the device works
        """
        count = self._count(budget, chain)
        self._prepare(count)
        work = self._captured("round", count, chain, partial(self.work.round, count, chain))
        return self._finish(work, count, meanwhile)

    def draft(self, budget: int, meanwhile: Callable[[], None] = lambda: None) -> Drafts:
        """The first half of a round whose budget is chosen in between: commit, draft, build the widest tree.

        Returns its nodes, best ones first.

        meanwhile: what the host does while the device drafts
        """
        count = self._count(budget, False)
        self._prepare(count)
        self._captured("draft", count, False, partial(self.work.offer, count))()
        self._count_committed()
        meanwhile()
        record = self._read(self.work.drafted(count), ("drafted", count))
        kept = int(record[0, 0])
        parents, depths, kinds = record[2:, :kept].astype(np.int64)
        return Drafts(parents, depths, kinds, record[1, :kept].copy())

    def verify(self, budget: int, *, chain: bool = False, meanwhile: Callable[[], None] = lambda: None) -> DeviceRound:
        """The second half: verify the best `budget` nodes of the tree that `draft` built, and walk.

        chain: verify the drafter's most probable tokens in one line instead
        meanwhile: what the host does while the device verifies
        """
        count = self._count(budget, chain)
        work = partial(self.work.verify_chain if chain else self.work.verify, count)
        return self._finish(self._captured("verify", count, chain, work), count, meanwhile)

    @torch.inference_mode()
    def finish(self, kept: int) -> Tensor:
        """Commit the first `kept` nodes of the last path, where the text ends. Returns their features, [kept, F]."""
        path = self._uncommitted[:kept]
        self._uncommitted = []
        features = self.buffers.features[path].clone()
        if self.session is not None:
            self.session.waiting = 0  # the caller has them now
            self.session.buffers.count.zero_()
        if path:
            self.buffers.steps.fill_(len(path))
            self.target.captured_commit(self.buffers, len(path))()
            self.state.length += len(path)
        return features

    def _commit_now(self) -> None:
        """Commit the last path outside of a round."""
        if self._uncommitted:
            self.target.captured_commit(self.buffers, len(self._uncommitted))()
            self._count_committed()

    def _count_committed(self) -> None:
        """The device has committed the last path."""
        self.state.length += len(self._uncommitted)
        self._uncommitted = []

    @property
    def num_uncommitted(self) -> int:
        """Nodes of the last path, which the next round commits."""
        return len(self._uncommitted)

    def without_session(self) -> DeviceRounds:
        """The same generation from here on without its drafter."""
        features = self.finish(self.num_uncommitted)
        return DeviceRounds(self.target, self.state, None, features, int(self.bonus))

    def _finish(self, work: Captured, count: int, meanwhile: Callable[[], None] = lambda: None) -> DeviceRound:
        """Run the work that ends a round and read its record."""
        work()
        meanwhile()
        steps, _, *rest = self._read(self.work.walked.record, ("record", self.max_depth)).tolist()
        path, tokens = rest[:steps], rest[self.max_depth + 1 :][:steps]
        self._count_committed()
        self._uncommitted = path
        if self.session is not None:
            self.session.count(steps)
        return DeviceRound(path, tokens, count)

    def _read(self, record: Tensor, key) -> np.ndarray:
        """A record of the device on the host, when it has arrived: one of the two waits of a round."""
        is_gpu = record.is_cuda
        held, array = self.work.scratch(("host", *key), partial(_on_host, record))
        held.copy_(record, non_blocking=True)
        if is_gpu:
            torch.cuda.current_stream().synchronize()
        return array

    def _captured(self, kind, count: int, chain: bool, work: Callable[[], None]) -> Captured:
        """Captured work over these buffers. Its warm-up repeats a round, so the buffers' small registers are put back."""
        trees = self.work.trees
        key = ("round", kind, count, chain, None if self.session is None else id(self.session.buffers), trees.key)
        if key not in self.buffers.graphs:
            with torch.inference_mode():
                self.target.num_captured += 1
                self._commit_now()  # the warm-up writes the scratch that a waiting commit would read
                registers = [self.buffers.steps, self.buffers.length, self.buffers.path, self.bonus, *trees.registers]
                if self.session is not None:
                    context = self.session.buffers
                    registers += [context.length, context.count, context.features]
                kept = [register.clone() for register in registers]

                def nothing_yet() -> None:
                    """Every pass of the warm-up leaves a path to commit, and the next one must not commit it."""
                    self.buffers.steps.zero_()
                    trees.pause()

                what = f"rounds of {count} nodes"
                quiet = torch.inference_mode()(work)  # where nothing is captured it runs as it is, every time
                self.buffers.graphs[key] = Captured(
                    quiet, self.target.device, self.target._pool, what=what, before=nothing_yet
                )
                for register, value in zip(registers, kept, strict=True):
                    register.copy_(value)
        return self.buffers.graphs[key]

    def _prepare(self, count: int) -> None:
        if count > 1:
            self.session.prepare(self.state.length + self.num_uncommitted)

    def _count(self, budget: int, chain: bool) -> int:
        return 1 + (min(budget, self.max_depth) if chain else budget if self.max_depth else 0)


def _on_host(record: Tensor) -> tuple[Tensor, np.ndarray]:
    """Where the host holds such a record, and the same memory as an array."""
    with torch.inference_mode(False):  # written outside of that mode, which takes the host longer to enter than to copy
        held = torch.empty(record.shape, dtype=record.dtype, pin_memory=record.is_cuda)
    return held, held.numpy()


class DeviceLoop:
    """The rounds of one generation as `decode` wants them, on the device.

    build_tree: `no_draft`, `chain`, `best_first`, a `TransitionTree`, or a policy that chooses its budget between draft
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
        transitions = transition_policy(build_tree) if session is not None else None
        self.is_chain = build_tree is chain or (transitions is build_tree and transitions.is_chain)
        self.rounds = DeviceRounds(target, state, session, last.features, last.bonus, transitions)
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

    def round(self, cut: Callable[[list[int]], tuple[int, str | None]], *, may_draft: bool) -> Round:
        """One round. cut: how many of the new tokens to keep, and why the text ends. may_draft: the block has a place."""
        if self.rounds.session is not None and not may_draft:
            self.rounds = self.rounds.without_session()
        if self.rounds.session is None:
            done = self._plain()
        elif hasattr(self.policy, "choose"):
            done = self._chosen()
        else:
            done = self.rounds.run(self.budget, chain=self.is_chain)
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

    def _plain(self) -> DeviceRound:
        if hasattr(self.policy, "wants_draft"):
            self.policy.wants_draft(self.length, 0)
        return self.rounds.run(0)

    def _chosen(self) -> DeviceRound:
        """Draft, let the policy choose by the scores, verify what it chose."""
        policy, rounds = self.policy, self.rounds
        if not policy.wants_draft(self.length, rounds.session.waiting):
            return rounds.run(0, meanwhile=self._take_in)
        habit = policy.habit()
        if habit is not None:
            size, is_chain = habit
            done = rounds.run(self._filled(size, is_chain) - 1, chain=is_chain, meanwhile=self._take_in)
        else:
            drafted = rounds.draft(budget_to_build(policy.widest, self.budget), meanwhile=self._take_in_and_prepare)
            size = len(policy.choose(drafted))
            is_chain = policy.choice.is_chain
            done = rounds.verify(self._filled(size, is_chain) - 1, chain=is_chain, meanwhile=policy.settle)
        self._learn = policy.lesson(done.path[:size], size)
        return done

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


def transition_policy(build_tree: Callable[..., DraftTree]) -> TransitionTree | None:
    """The policy, or the one inside that chooses its budget, if it reads transitions."""
    policy = _chosen_from(build_tree)
    return policy if isinstance(policy, TransitionTree) else None


def has_device_tree(build_tree: Callable[..., DraftTree]) -> bool:
    """Whether a policy's tree is built on the device. A budget is chosen over trees, not over transitions' chain."""
    policy = _chosen_from(build_tree)
    if isinstance(policy, TransitionTree):
        return not (policy.is_chain and policy is not build_tree)
    return policy in (no_draft, chain, best_first)


def _chosen_from(build_tree: Callable[..., DraftTree]) -> Callable[..., DraftTree]:
    """The policy whose trees a policy chooses from (see `DeviceLoop`), or the policy itself."""
    return build_tree.policy if hasattr(build_tree, "choose") else build_tree


WIDEST = (15, 31, 63, 127)
"""Budgets of the trees to choose from, so that few are captured; the largest budget is the last."""


def budget_to_build(wanted: int, largest: int) -> int:
    """Of the tree to choose from, where one of `wanted` drafted nodes would do."""
    return min(next((budget for budget in WIDEST if budget >= wanted), largest), largest)
