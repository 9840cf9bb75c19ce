"""Drafters that draft what they are told: the doubles that ship, for tests and examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

UNBOUNDED = 1 << 62


def one_hot_log_probs(token_ids: Sequence[int], vocab_size: int, confidence: float = 0.99) -> Tensor:
    """[len(token_ids), vocab] float32: `confidence` on each token, the rest spread evenly over all others."""
    rest = (1 - confidence) / max(vocab_size - 1, 1)
    probs = torch.full((len(token_ids), vocab_size), rest)
    if token_ids:
        probs[torch.arange(len(token_ids)), torch.as_tensor(token_ids)] = confidence
    return probs.log()


@dataclass
class ScriptedDrafter:
    """Drafts what `script(committed, bonus)` returns: log-probabilities or logits [<= depth, vocab].

    committed: tokens in the state, so that the root stands at that position.
    """

    script: Callable[[int, int], Tensor]
    depth: int = 7
    context_length: int = UNBOUNDED

    def start(self) -> _ScriptedSession:
        return _ScriptedSession(self)


@dataclass
class _ScriptedSession:
    drafter: ScriptedDrafter
    committed: int = 0
    received: list[Tensor] = field(default_factory=list)  # every features tensor, for tests that look

    def propose(self, features: Tensor, *, bonus: int) -> Tensor:
        self.received.append(features)
        self.committed += features.shape[0]
        return self.drafter.script(self.committed, bonus).float().log_softmax(-1)


class NoDrafter(ScriptedDrafter):
    """Proposes nothing: plain decoding."""

    def __init__(self, vocab_size: int) -> None:
        self.nothing = torch.empty(0, vocab_size)
        super().__init__(lambda committed, bonus: self.nothing, depth=0)

    def start(self) -> _SilentSession:
        return _SilentSession(self.nothing)


@dataclass
class _SilentSession:
    """Keeps no features, however long the text."""

    nothing: Tensor

    def propose(self, features: Tensor, *, bonus: int) -> Tensor:
        return self.nothing


class RightDrafter(ScriptedDrafter):
    """Knows the whole text (prompt and continuation) and drafts it."""

    def __init__(self, text: Sequence[int], vocab_size: int, depth: int = 7) -> None:
        text = list(text)

        def script(committed: int, bonus: int) -> Tensor:
            return one_hot_log_probs(text[committed + 1 : committed + 1 + depth], vocab_size)

        super().__init__(script, depth)


class WrongDrafter(ScriptedDrafter):
    """Knows the whole text and drafts another token everywhere."""

    def __init__(self, text: Sequence[int], vocab_size: int, depth: int = 7) -> None:
        wrong = [(token + 1) % vocab_size for token in text]

        def script(committed: int, bonus: int) -> Tensor:
            return one_hot_log_probs(wrong[committed + 1 : committed + 1 + depth], vocab_size, confidence=0.999)

        super().__init__(script, depth)


class RandomDrafter(ScriptedDrafter):
    """Drafts noise, the same at the same place for the same seed."""

    def __init__(self, vocab_size: int, depth: int = 7, seed: int = 0) -> None:
        def script(committed: int, bonus: int) -> Tensor:
            generator = torch.Generator().manual_seed(hash((seed, committed, bonus)) & 0x7FFFFFFF)
            return torch.randn(depth, vocab_size, generator=generator)

        super().__init__(script, depth)
