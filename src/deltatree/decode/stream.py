"""The loop: prefill, then rounds until the text ends. Every method is this loop with another tree policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from deltatree.decode.guard import GuardedSession
from deltatree.decode.round import Round, decode_round
from deltatree.decode.sampling import Sampler
from deltatree.drafter.protocol import Drafter, DraftSession
from deltatree.drafter.scripted import NoDrafter
from deltatree.errors import PromptError
from deltatree.models.protocol import Target
from deltatree.state import TreeState
from deltatree.tree import DraftTree, chain_tree


@dataclass
class Ending:
    """Where the text ends: exactly where plain decoding would end it.

    stop_ids: end tokens; the one that stops the text is emitted, nothing after it
    max_new_tokens: never a token more    is_done: a further test, given all new tokens so far
    """

    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    is_done: Callable[[list[int]], bool] | None = None
    new_ids: list[int] = field(default_factory=list)

    @property
    def num_left(self) -> int:
        """New tokens that may still come."""
        return self.max_new_tokens - len(self.new_ids)

    def cut(self, token_ids: list[int]) -> tuple[int, str | None]:
        """How many of these tokens belong to the text, and the reason if it ends with the last of them."""
        for count, token in enumerate(token_ids, start=1):
            self.new_ids.append(token)
            if token in self.stop_ids or (self.is_done is not None and self.is_done(self.new_ids)):
                return count, "stop"
            if len(self.new_ids) >= self.max_new_tokens:
                return count, "length"
        return len(token_ids), None


class _Held(NamedTuple):
    """A generation between two rounds."""

    target: Target
    drafter: Drafter
    state: TreeState
    session: GuardedSession
    features: Tensor  # [n, F], of committed tokens that the session has not seen yet
    prompt_ids: list[int]
    new_ids: list[int]


@dataclass(eq=False)
class Conversation:
    """What a generation leaves behind: a prompt that extends its committed tokens exactly is not prefilled again.

    Nothing is rolled back here either, so there is no reuse of a shorter prefix. The last emitted token is not committed:
    it is part of what the next prompt brings.
    """

    reused_length: int = 0  # tokens of the running prompt that were not prefilled again
    _held: _Held | None = field(default=None, repr=False)

    @property
    def token_ids(self) -> list[int]:
        """The committed tokens."""
        if self._held is None:
            return []
        return (self._held.prompt_ids + self._held.new_ids)[: self._held.state.length]

    def continues(self, prompt_ids: list[int]) -> int:
        """How many tokens of this prompt are committed already: all that there are, or none."""
        held = self._held
        if held is None or not 0 < held.state.length < len(prompt_ids):
            return 0
        return held.state.length if prompt_ids[: held.state.length] == self.token_ids else 0

    def clear(self) -> None:
        """Let go of the state."""
        self._held, self.reused_length = None, 0

    def _take(self, target: Target, drafter: Drafter, prompt_ids: list[int]) -> _Held | None:
        """Hand the held generation over if this prompt continues it, and let go of it in any case."""
        held, length = self._held, self.continues(prompt_ids)
        self.clear()
        if not length or held.target is not target:
            return None
        if isinstance(drafter, NoDrafter):  # it needs no context
            held = held._replace(session=GuardedSession(drafter.start(), target.vocab_size))
        elif held.drafter is not drafter or held.session.failure:
            return None
        self.reused_length = length
        return held


def check_prompt(prompt_ids: list[int], target: Target) -> None:
    """Raises PromptError for a prompt that is empty, too long for the context, or outside the vocabulary."""
    if not prompt_ids:
        raise PromptError("the prompt is empty; give at least one token")
    if len(prompt_ids) > target.context_length:
        raise PromptError(
            f"the prompt has {len(prompt_ids)} tokens, the target's context is {target.context_length}; shorten the prompt "
            "or, where the model allows more, load it with a larger context_length"
        )
    if not 0 <= min(prompt_ids) <= max(prompt_ids) < target.vocab_size:
        raise PromptError(
            f"the prompt has token ids outside the vocabulary of {target.vocab_size}; use this target's tokenizer"
        )


def covers_device(target: Target, *args) -> bool:
    """Whether the rounds may stay on the device. Only a target with captured work is looked at closer."""
    if not hasattr(target, "captured_verify"):
        return False
    from deltatree.device import DeviceLoop

    return DeviceLoop.covers(target, *args)


def device_loop(target: Target, state: TreeState, session: DraftSession | None, last: Round, **options):
    """The rounds of one generation on the device."""
    from deltatree.device.loop import DeviceLoop, FastSession

    return DeviceLoop(target, state, session if isinstance(session, FastSession) else None, last, **options)


def decode(
    target: Target,
    drafter: Drafter,
    prompt_ids: list[int],
    *,
    build_tree: Callable[..., DraftTree],
    budget: int,
    ending: Ending,
    sampler: Sampler,
    conversation: Conversation | None = None,
) -> Iterator[Round]:
    """Yield prefill and then every round, until the text ends. Closing the iterator early frees the state.

    build_tree: a tree policy; one that learns while running also has `begin(prompt_ids)` and `observe` (see `tree.policies`),
        and one that chooses its budget `wants_draft(context, num_features)` before each round and `finish(seconds)` after
        it, with the device's time or None where only the clock knows
    conversation: where to continue from if the prompt extends it, and where to leave the state at the end or when closed
    """
    check_prompt(prompt_ids, target)
    room = target.context_length - len(prompt_ids)
    if room == 0:
        return
    ending.max_new_tokens = min(ending.max_new_tokens, room)

    held = conversation._take(target, drafter, prompt_ids) if conversation is not None else None
    rounds = _Rounds(
        target, drafter, prompt_ids, held, build_tree=build_tree, budget=budget, ending=ending, sampler=sampler
    )
    last = rounds.prefill(held)
    del held
    while True:
        if conversation is not None:
            conversation._held = rounds.held(last)
        yield last
        if last.ended is not None:
            return
        if conversation is not None:
            conversation._held = None  # while a round runs the state is in motion
        last = rounds.run(last)


class _Rounds:
    """The rounds of one generation: all that they share. Each is `decode_round`, or the same on the device.

    held: an earlier generation that the prompt extends, or None
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        prompt_ids: list[int],
        held: _Held | None,
        *,
        build_tree: Callable[..., DraftTree],
        budget: int,
        ending: Ending,
        sampler: Sampler,
    ) -> None:
        self.target, self.drafter, self.prompt_ids = target, drafter, prompt_ids
        self.build_tree, self.budget, self.ending, self.sampler = build_tree, budget, ending, sampler
        self.state = held.state if held else target.new_state()
        self.session = held.session if held else GuardedSession(drafter.start(), target.vocab_size)
        self.keeps_device = covers_device(target, drafter, build_tree, sampler)
        self.device = None  # the loop there, from the first round on

    def prefill(self, held: _Held | None) -> Round:
        """Take in the prompt, or what an earlier generation lacks of it, and choose the first token."""
        verified = self.target.prefill(self.prompt_ids[self.state.length :], self.state)
        features = torch.cat([held.features, verified.features]) if held else verified.features
        first = self.sampler.bind(chain_tree(self.prompt_ids[-1:]), verified.logits, self.prompt_ids)(0, [0])
        _, ended = self.ending.cut([first])
        if hasattr(self.build_tree, "begin"):
            self.build_tree.begin(self.prompt_ids)
        return Round([first], 0, features, 0, ended=ended)

    def held(self, last: Round) -> _Held:
        """The generation as it is after this round."""
        return _Held(
            self.target, self.drafter, self.state, self.session, last.features, self.prompt_ids, self.ending.new_ids
        )

    def run(self, last: Round) -> Round:
        """The round after `last`. A policy that goes by time is told when it is over."""
        captured = self._num_captured()
        length = self.state.length if self.device is None else self.device.length
        may_draft = length + self.drafter.depth < self.drafter.context_length  # else its block has no place left
        done = (self._on_device if self.keeps_device else self._on_host)(last, may_draft)
        is_typical = self._num_captured() == captured  # else its time was that of a capture
        if is_typical and hasattr(self.build_tree, "finish"):
            self.build_tree.finish(None if self.device is None else self.device.seconds)
        return done

    def _on_device(self, last: Round, may_draft: bool) -> Round:
        if self.device is None:
            self.device = device_loop(
                self.target, self.state, self.session.inner, last, build_tree=self.build_tree, budget=self.budget
            )
        is_last = self.ending.num_left == 1
        done = self.device.round(self.ending.cut, may_draft=may_draft, is_last=is_last)
        self.session.watch(done.acceptance_length, done.num_nodes)
        return done

    def _on_host(self, last: Round, may_draft: bool) -> Round:
        target, state, policy = self.target, self.state, self.build_tree
        if not may_draft:
            self.session.rest()
        history = self.prompt_ids + self.ending.new_ids
        rests = hasattr(policy, "wants_draft") and not policy.wants_draft(state.length, len(last.features))
        done = decode_round(
            target,
            state,
            NoDrafter(target.vocab_size).start() if rests else self.session,
            last,
            build_tree=partial(self.sampler.draft, policy, history=history),
            budget=self.budget,
            max_depth=target.context_length - 1 - state.length,
            sampler=self.sampler,
            history=history,
            cut=self.ending.cut,
            observe=getattr(policy, "observe", None),
        )
        self.session.watch(done.acceptance_length, done.num_nodes)
        if rests:  # the drafter has not seen these yet: it gets them when it drafts again
            done = replace(done, features=torch.cat([last.features, done.features]))
        return done

    def _num_captured(self) -> int:
        return getattr(self.target, "num_captured", 0) + getattr(self.drafter, "num_captured", 0)
