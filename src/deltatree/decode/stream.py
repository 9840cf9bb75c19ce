"""The loop: prefill, then rounds until the text ends. Every method is this loop with another tree policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from deltatree.decode.round import Round, decode_round
from deltatree.decode.sampling import Sampler
from deltatree.drafter.protocol import Drafter
from deltatree.drafter.scripted import NoDrafter
from deltatree.errors import PromptError
from deltatree.models.protocol import Target
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


def check_prompt(prompt_ids: list[int], target: Target) -> None:
    """Raises PromptError for a prompt that is empty, too long for the context, or outside the vocabulary."""
    if not prompt_ids:
        raise PromptError("the prompt is empty; give at least one token")
    if len(prompt_ids) > target.context_length:
        raise PromptError(
            f"the prompt has {len(prompt_ids)} tokens, the target's context is {target.context_length}; shorten the prompt"
        )
    if not 0 <= min(prompt_ids) <= max(prompt_ids) < target.vocab_size:
        raise PromptError(
            f"the prompt has token ids outside the vocabulary of {target.vocab_size}; use this target's tokenizer"
        )


def decode(
    target: Target,
    drafter: Drafter,
    prompt_ids: list[int],
    *,
    build_tree: Callable[..., DraftTree],
    budget: int,
    ending: Ending,
    sampler: Sampler,
) -> Iterator[Round]:
    """Yield prefill and then every round, until the text ends. Closing the iterator early frees the state."""
    check_prompt(prompt_ids, target)
    room = target.context_length - len(prompt_ids)
    if room == 0:
        return
    ending.max_new_tokens = min(ending.max_new_tokens, room)

    state, session = target.new_state(), drafter.start()
    verified = target.prefill(prompt_ids, state)
    first = sampler.bind(chain_tree(prompt_ids[-1:]), verified.logits, prompt_ids)(0, [0])
    _, ended = ending.cut([first])
    last = Round([first], 0, verified.features, 0, ended=ended)
    yield last
    while last.ended is None:
        if state.length + drafter.depth >= drafter.context_length:  # its block has no place left
            session = NoDrafter(target.vocab_size).start()
        last = decode_round(
            target,
            state,
            session,
            last,
            build_tree=build_tree,
            budget=budget,
            max_depth=target.context_length - 1 - state.length,
            sampler=sampler,
            history=prompt_ids + ending.new_ids,
            cut=ending.cut,
        )
        yield last
