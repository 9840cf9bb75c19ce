"""What the decode loop knows of a drafter."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class DraftSession(Protocol):
    """A drafter inside one generation, with its own context of committed features."""

    def propose(self, features: Tensor, *, bonus: int) -> Tensor:
        """Log-probabilities [D, vocab] float32 for depths 1..D after `bonus`.

        features: [n, F], the target's features of the tokens committed since the last call (after prefill: of the whole
        prompt), in order. `bonus` is the root of the next tree: emitted, not committed, so without features yet.
        """


class Drafter(Protocol):
    """What proposes log-probabilities. Shared by generations; each one starts its own session."""

    depth: int  # D, the deepest node it can propose
    context_length: int  # committed tokens + depth that it can place; beyond, decoding goes on plainly

    def start(self) -> DraftSession: ...
