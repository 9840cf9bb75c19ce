"""Greedy rounds that stay on the device: two pieces of captured work a round, and one small record back to the host.

The same round as `decode_round` (draft, build, verify, accept, commit), over the buffers of the fast target and the fast
drafter, with two differences. A round's path is committed first thing in the next verify, so that the host can still cut it
where the text ends. And the first half of the next round, which touches nothing that a cut would have to take back, is
launched before the record of this one is waited for: while the host reads, cuts, hands out the text and decides, the device drafts.
A round without a draft is launched ahead as a whole after another one, for a path of one node is never cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deltatree.capture import Captured
from deltatree.decode.acceptance import LOGIT_LIMIT, LOGIT_SCALE, Drafts
from deltatree.decode.round import Round
from deltatree.decode.sampling import Sampler
from deltatree.device.trees import CalibratedTrees, MarginalTrees, TransitionTrees
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
from deltatree.tree import Calibrated, DraftTree, best_first, chain, no_draft


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


class Half(NamedTuple):
    """The first half of a round: all before verify. It leaves the target's state alone."""

    kind: str  # "draft"; "offer", a draft with a record to choose from; "rest", no draft
    count: int  # nodes that it places, root included
    is_chain: bool = False

    def serves(self, wanted: Half) -> bool:
        """Whether a round that wants another half can go on from this one. Trees stand best first, and every one has its root;
        a chain is laid from any draft."""
        if wanted.kind == "rest" or self == wanted:
            return True
        may_be_chosen_from = self.kind == "offer" and wanted.kind in ("draft", "offer")
        return may_be_chosen_from and (wanted.is_chain or self.count >= wanted.count)


REST = Half("rest", 1)


class Span:
    """Between two places of the device's stream, both of them passed when it is asked. On a CPU it knows nothing.

    Events are made once and recorded again and again, for making one takes the host longer than a launch.
    """

    def __init__(self, is_gpu: bool) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * is_gpu)]

    def __enter__(self) -> Span:
        if self._events:
            self._events[0].record()
        return self

    def __exit__(self, *_) -> None:
        if self._events:
            self._events[1].record()

    @property
    def seconds(self) -> float | None:
        return self._events[0].elapsed_time(self._events[1]) / 1e3 if self._events else None

    @property
    def has_ended(self) -> bool:
        return not self._events or self._events[1].query()

    def pause_before(self, later: Span) -> float:
        """Seconds from the end of this one to the start of a later one, both of them ended."""
        return self._events[1].elapsed_time(later._events[0]) / 1e3


class Arrival:
    """Where a record of the device comes to on the host."""

    def __init__(self, record: Tensor) -> None:
        with torch.inference_mode(
            False
        ):  # written outside of that mode, which takes the host longer to enter than to copy
            self._held = torch.empty(record.shape, dtype=record.dtype, pin_memory=record.is_cuda)
        self._array = self._held.numpy()
        self._event = torch.cuda.Event() if record.is_cuda else None

    def send(self, record: Tensor) -> Arrival:
        """Copy the record as it is when all that was launched is done."""
        self._held.copy_(record, non_blocking=True)
        if self._event is not None:
            self._event.record()
        return self

    def wait(self) -> np.ndarray:
        """The record, until another one is sent here."""
        if self._event is not None:
            self._event.synchronize()
        return self._array


class Flight(NamedTuple):
    """A round that was launched whole."""

    count: int  # nodes that it verifies, root included
    arrival: Arrival
    spans: tuple[Span, Span]  # of its halves


class DeviceRounds:
    """Rounds of one generation: greedy, with best-first trees, chains, trees over transitions, or no draft.

    state: after prefill, with nothing to commit    session: the drafter's context, or None for plain decoding alone
    features: [n, F], of committed tokens that the session has not seen    bonus: the root of the first tree
    policy: that has begun the generation, where its trees are not best-first ones
    """

    def __init__(
        self,
        target: FastTarget,
        state: StaticState,
        session: FastSession | None,
        features: Tensor,
        bonus: int,
        policy: TransitionTree | Calibrated | None = None,
    ) -> None:
        self.target, self.state, self.session, self.buffers = target, state, session, state.buffers
        drafter, context = (None, None) if session is None else (session.drafter, session.buffers)
        self.work = RoundWork(target, state.buffers, drafter, context, policy)
        self.max_depth, self.bonus = self.work.max_depth, self.work.bonus
        with torch.inference_mode():
            if session is not None:
                session.place(features)
            if policy is not None:
                self.work.trees.begin(policy)
            self.bonus.fill_(bonus)
            self.buffers.steps.zero_()
        self._uncommitted: list[int] = []
        self._is_gpu = target.device.type == "cuda"
        self._first_spans, self._second_spans = (cycle(self._spans_of(half)) for half in ("first", "second"))
        self._half, self._drafting = REST, next(self._first_spans)  # of the round that runs
        self._ahead: Half | None = None  # of the next round, launched already
        self._flying: Flight | None = None  # the next round, launched already as a whole
        self._flights = 0
        self._spans: tuple[Span, ...] = ()  # of the last round that was read

    def half(self, budget: int, *, chain: bool = False, offer: bool = False) -> Half:
        """The first half of a round that may verify `budget` drafted nodes. offer: of a tree to choose from"""
        count = self._count(budget, chain)
        return REST if count == 1 else Half("offer" if offer else "draft", count, chain)

    def run(
        self,
        budget: int,
        *,
        chain: bool = False,
        then: Half | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> DeviceRound:
        """A whole round.

        budget: drafted nodes, 0 for plain decoding
        then: what to launch of the next round before this one's record is waited for, best what it will want; `REST`
            promises a round without a draft, which is launched whole after another such
        meanwhile: what the host does while the device works
        """
        if self._flying is None:
            self._begin(self.half(budget, chain=chain))
        return self._end(self._count(budget, chain), chain, then, meanwhile)

    def offer(self, budget: int) -> None:
        """The first half of a round whose budget is chosen later: draft, and build the widest tree."""
        self._begin(self.half(budget, offer=True))

    def draft(self, budget: int, meanwhile: Callable[[], None] = lambda: None) -> Drafts:
        """`offer`, and the nodes of its tree, best ones first.

        meanwhile: what the host does while the device drafts
        """
        self.offer(budget)
        meanwhile()
        record = self._offered.wait()
        kept = int(record[0, 0])
        parents, depths, kinds = record[2:, :kept].astype(np.int64)
        return Drafts(parents, depths, kinds, record[1, :kept].copy())

    def verify(
        self,
        budget: int,
        *,
        chain: bool = False,
        then: Half | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> DeviceRound:
        """The second half: verify the best `budget` nodes of the tree that was offered, and walk.

        chain: verify the drafter's most probable tokens in one line instead
        then, meanwhile: as for `run`
        """
        return self._end(self._count(budget, chain), chain, then, meanwhile)

    @property
    def seconds(self) -> float | None:
        """What the last round's work took the device; None on a CPU."""
        return sum(span.seconds for span in self._spans) if self._is_gpu else None

    @torch.inference_mode()
    def finish(self, kept: int) -> Tensor:
        """Commit the first `kept` nodes of the last path, where the text ends. Returns their features, [kept, F].

        What was launched ahead comes to nothing. A path that a round without a draft has committed is no longer among them.
        """
        path = self._uncommitted[:kept]
        self._uncommitted, self._ahead, self._flying = [], None, None
        features = self.buffers.features[path].clone()
        self.buffers.steps.fill_(len(path))
        if self.session is not None:
            self.session.waiting = 0  # the caller has them now
            self.session.buffers.count.zero_()
        if path:
            self.target.captured_commit(self.buffers, len(path))()
            self.state.length += len(path)
        return features

    def _commit_now(self) -> None:
        """Commit the last path outside of a round."""
        if self._uncommitted:
            self.target.captured_commit(self.buffers, len(self._uncommitted))()
            self._count_committed()

    def _count_committed(self) -> None:
        """The device has committed the last path, or will have before anything else that is launched."""
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

    def _begin(self, wanted: Half) -> None:
        """Have a round's first half on the device."""
        half, self._ahead = self._ahead, None
        if half is None or not half.serves(wanted):
            if half is not None:
                with torch.inference_mode():
                    self.session.buffers.count.zero_()  # the context has what waited
            half = wanted
            self._launch_half(half)
        self._half = half

    def _launch_half(self, half: Half) -> None:
        work = self._captured_half(half)
        with next(self._first_spans) as self._drafting:
            work()
        if half.kind == "offer":
            self._offered = self._send(self.work.drafted(half.count), "drafted", half.count)

    def _launch_verify(self, count: int, chain: bool) -> Flight:
        works = [self._captured("verify", count)]
        if chain and not self._half.is_chain and count > 1:
            works.insert(0, self._captured("chain", count))
        self._count_committed()
        with next(self._second_spans) as verifying:
            for work in works:
                work()
        self._flights += 1
        arrival = self._send(self.work.walked.record, "record", self.max_depth, self._flights % 2)
        return Flight(count, arrival, (self._drafting, verifying))

    def _end(self, count: int, chain: bool, then: Half | None, meanwhile: Callable[[], None]) -> DeviceRound:
        """Launch what ends a round, and what may begin the next one; read the record."""
        flight, self._flying = self._flying, None
        if flight is None:
            flight = self._launch_verify(count, chain)
        if then is not None and self._may_follow(then, count):
            self._launch_half(then)
            if then == REST and count == 1:
                self._half, self._flying = then, self._launch_verify(1, False)
            else:
                self._ahead = then
        meanwhile()
        return self._land(flight)

    def _may_follow(self, half: Half, count: int) -> bool:
        """Whether a half can be launched before it is known how far this round goes: where nothing has to be captured first, and
        the drafter's block has a place whatever is accepted."""
        if self._key(half.kind, half.count, half.is_chain) not in self.buffers.graphs:
            return False
        if self.session is None:
            return True
        furthest = self.state.length + min(count, self.max_depth + 1)
        return furthest + self.session.drafter.depth < self.session.drafter.context_length

    def _land(self, flight: Flight) -> DeviceRound:
        """Wait for a round's record, and take in what it says."""
        steps, _, *rest = flight.arrival.wait().tolist()
        path, tokens = rest[:steps], rest[self.max_depth + 1 :][:steps]
        self._uncommitted, self._spans = path, flight.spans
        if self.session is not None:
            self.session.count(steps)
        if self._flying is not None:  # it commits this path, and has appended its features
            self._count_committed()
            if self.session is not None:
                self.session.count(0)
        return DeviceRound(path, tokens, flight.count)

    def _spans_of(self, half: str) -> list[Span]:
        """Two, for a half may be launched before the time of the last one has been asked for."""
        return self.work.scratch(("spans", half), lambda: [Span(self._is_gpu) for _ in range(2)])

    def _send(self, record: Tensor, *key) -> Arrival:
        """Have a record copied to the host."""
        return self.work.scratch(("host", *key), partial(Arrival, record)).send(record)

    def _key(self, kind: str, count: int, chain: bool = False) -> tuple:
        """Of captured work over these buffers."""
        context = None if self.session is None else id(self.session.buffers)
        return "round", kind, count, chain, context, self.work.trees.key

    def _captured_half(self, half: Half) -> Captured:
        return self._captured(half.kind, half.count, half.is_chain)

    def _captured(self, kind: str, count: int, chain: bool = False) -> Captured:
        """Captured work over these buffers. Its warm-up repeats it, so the buffers' small registers are put back."""
        key = self._key(kind, count, chain)
        if key not in self.buffers.graphs:
            self.buffers.graphs[key] = self._capture(kind, count, chain)
        return self.buffers.graphs[key]

    @torch.inference_mode()
    def _capture(self, kind: str, count: int, chain: bool) -> Captured:
        works = {
            "rest": self.work.rest,
            "draft": partial(self.work.draft, count, chain),
            "offer": partial(self.work.offer, count),
            "chain": partial(self.work.lay, count, True),
            "verify": partial(self.work.verify, count),
        }
        trees, counts = self.work.trees, [self.buffers.steps]
        self.target.num_captured += 1
        if kind == "verify":
            self._commit_now()  # the warm-up writes the scratch that a waiting commit would read
        registers = [self.buffers.steps, self.buffers.length, self.buffers.path, self.bonus, *trees.registers]
        if self.session is not None:
            context = self.session.buffers
            counts.append(context.count)
            registers += [context.length, context.count, context.features]
        kept = [register.clone() for register in registers]

        def nothing_yet() -> None:
            """Every pass of the warm-up leaves something to commit and to append, which the next one must not."""
            for number in counts:
                number.zero_()
            trees.pause()

        quiet = torch.inference_mode()(works[kind])  # where nothing is captured it runs as it is, every time
        what = f"rounds of {count} nodes"
        captured = Captured(quiet, self.target.device, self.target._pool, what=what, before=nothing_yet)
        for register, value in zip(registers, kept, strict=True):
            register.copy_(value)
        return captured

    def _count(self, budget: int, chain: bool) -> int:
        return 1 + (min(budget, self.max_depth) if chain else budget if self.max_depth else 0)


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
