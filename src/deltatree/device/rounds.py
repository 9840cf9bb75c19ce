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

import numpy as np
import torch
from torch import Tensor

from deltatree.capture import Captured
from deltatree.decode.acceptance import Drafts
from deltatree.device.launches import REST, Arrival, Flight, Half, Span
from deltatree.device.work import RoundWork
from deltatree.drafter.fast_dflash import FastSession
from deltatree.models.fast import FastTarget
from deltatree.state import StaticState
from deltatree.transitions.policy import TransitionTree
from deltatree.tree import Calibrated


@dataclass(frozen=True, slots=True)
class DeviceRound:
    """What a round brought back to the host."""

    path: list[int]  # accepted nodes, the root first
    token_ids: list[int]  # emitted: the accepted drafted tokens, then the bonus token
    num_nodes: int  # verified, root included


class DeviceRounds:
    """Rounds of one generation: greedy, with best-first or calibrated trees, trees over transitions, chains, or no draft.

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
        return self.verify(budget, chain=chain, then=then, meanwhile=meanwhile)

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
        """The second half: verify the best `budget` nodes of the tree that was placed, and walk.

        chain: verify the drafter's most probable tokens in one line instead
        then, meanwhile: as for `run`
        """
        count, flight, self._flying = self._count(budget, chain), self._flying, None
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
        work = self._captured(*half)
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

    def _may_follow(self, half: Half, count: int) -> bool:
        """Whether a half can be launched before it is known how far this round goes: where nothing has to be captured first, and
        the drafter's block has a place whatever is accepted."""
        if self._key(*half) not in self.buffers.graphs:
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
