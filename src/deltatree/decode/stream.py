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
    from deltatree.device.rounds import DeviceLoop, FastSession

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
        and one that chooses its budget `wants_draft(context, num_features)` before each round and `finish()` after it
    conversation: where to continue from if the prompt extends it, and where to leave the state at the end or when closed
    """
    check_prompt(prompt_ids, target)
    room = target.context_length - len(prompt_ids)
    if room == 0:
        return
    ending.max_new_tokens = min(ending.max_new_tokens, room)

    held = conversation._take(target, drafter, prompt_ids) if conversation is not None else None
    state = held.state if held else target.new_state()
    session = held.session if held else GuardedSession(drafter.start(), target.vocab_size)
    verified = target.prefill(prompt_ids[state.length :], state)
    features = torch.cat([held.features, verified.features]) if held else verified.features
    first = sampler.bind(chain_tree(prompt_ids[-1:]), verified.logits, prompt_ids)(0, [0])
    _, ended = ending.cut([first])
    last = Round([first], 0, features, 0, ended=ended)
    del held, verified, features
    if hasattr(build_tree, "begin"):
        build_tree.begin(prompt_ids)
    device, keeps_device = None, covers_device(target, drafter, build_tree, sampler)

    def num_captured() -> int:
        return getattr(target, "num_captured", 0) + getattr(drafter, "num_captured", 0)

    def finish(before: int) -> None:
        if hasattr(build_tree, "finish") and num_captured() == before:  # else its time was that of a capture
            build_tree.finish()

    while True:
        if conversation is not None:
            conversation._held = _Held(target, drafter, state, session, last.features, prompt_ids, ending.new_ids)
        yield last
        if last.ended is not None:
            return
        if conversation is not None:
            conversation._held = None  # while a round runs the state is in motion
        captured = num_captured()
        length = state.length if device is None else device.length
        may_draft = length + drafter.depth < drafter.context_length  # else its block has no place left
        if keeps_device and device is None:
            device = device_loop(target, state, session.inner, last, build_tree=build_tree, budget=budget)
        if device is not None:
            last = device.round(ending.cut, may_draft=may_draft)
            session.watch(last.acceptance_length, last.num_nodes)
            finish(captured)
            continue
        if not may_draft:
            session.rest()
        history = prompt_ids + ending.new_ids
        before = last.features
        rests = hasattr(build_tree, "wants_draft") and not build_tree.wants_draft(state.length, len(before))
        last = decode_round(
            target,
            state,
            NoDrafter(target.vocab_size).start() if rests else session,
            last,
            build_tree=partial(sampler.draft, build_tree, history=history),
            budget=budget,
            max_depth=target.context_length - 1 - state.length,
            sampler=sampler,
            history=history,
            cut=ending.cut,
            observe=getattr(build_tree, "observe", None),
        )
        session.watch(last.acceptance_length, last.num_nodes)
        if rests:  # the drafter has not seen these yet: it gets them when it drafts again
            last = replace(last, features=torch.cat([before, last.features]))
        finish(captured)
