"""Worlds without models: a text that is known, a drafter that is right as often as it is told, and a clock that is counted."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deltatree.models.protocol import Verified
from deltatree.tree import DraftTree

VOCAB = 50


@dataclass
class TextState:
    length: int = 0
    pending: int = 0


class TextTarget:
    """Its greedy text is a fixed random one, whatever the prompt. seconds: of a verify, by nodes and context."""

    vocab_size, context_length, device = VOCAB, 1 << 20, torch.device("cpu")

    def __init__(self, seconds: Callable[[int, int], float] = lambda nodes, context: 0.0, seed: int = 0) -> None:
        self.seconds, self.now = seconds, 0.0
        self.text = torch.randint(VOCAB, (60_000,), generator=torch.Generator().manual_seed(seed)).tolist()

    def clock(self) -> float:
        return self.now

    def new_state(self) -> TextState:
        return TextState()

    def prefill(self, token_ids: list[int], state: TextState) -> Verified:
        first = state.length
        state.length += len(token_ids)
        return Verified(self._logits([state.length]), _places(first, len(token_ids)))

    def verify(self, tree: DraftTree, state: TextState) -> Verified:
        self.now += self.seconds(len(tree), state.length)
        places = [state.length + depth for depth in tree.depths.tolist()]
        return Verified(self._logits([place + 1 for place in places]), torch.tensor(places)[:, None].float())

    def commit(self, path: list[int], state: TextState) -> None:
        state.length += len(path)

    def _logits(self, places: list[int]) -> Tensor:
        return 20 * torch.nn.functional.one_hot(torch.tensor([self.text[p] for p in places]), VOCAB).float()


def _places(first: int, count: int) -> Tensor:
    return torch.arange(first, first + count)[:, None].float()


@dataclass
class OftenRight:
    """Right at depth d with probability right[d - 1] if it was right before, claimed with `confidence[d - 1]`.

    Where it is wrong, the right token is its second choice with probability `second`.
    """

    target: TextTarget
    right: tuple[float, ...]
    confidence: tuple[float, ...] | None = None
    second: float = 0.4
    seconds: float = 0.0  # of a draft
    context_length: int = 1 << 40
    seen: list[int] = field(default_factory=list)  # places of the features that came in, in order

    @property
    def depth(self) -> int:
        return len(self.right)

    def start(self) -> _OftenRight:
        return _OftenRight(self)


@dataclass
class _OftenRight:
    drafter: OftenRight
    committed: int = 0

    def propose(self, features: Tensor, *, bonus: int) -> Tensor:
        me, text = self.drafter, self.drafter.target.text
        me.target.now += me.seconds
        me.seen += [int(place) for place in features[:, 0]]
        self.committed += len(features)
        draw = random.Random(self.committed)
        claimed = me.confidence or me.right
        probs = torch.full((me.depth, VOCAB), 1e-4)
        for depth in range(1, me.depth + 1):
            truth = text[self.committed + depth]
            wrong = (truth + draw.randrange(1, VOCAB)) % VOCAB
            confidence = claimed[depth - 1]
            if draw.random() < me.right[depth - 1]:
                best, next_best = truth, wrong
            else:
                best, next_best = wrong, truth if draw.random() < me.second else (wrong + 1) % VOCAB
            probs[depth - 1, best], probs[depth - 1, next_best] = confidence, 0.6 * (1 - confidence)
        return (probs / probs.sum(-1, keepdim=True)).log()
