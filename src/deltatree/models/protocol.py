"""What the decode loop knows of a target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from deltatree.state import TreeState
from deltatree.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Verified:
    """What one forward of the target returns."""

    logits: Tensor  # [N, vocab] float32 for a verify, [1, vocab] (the last token's) for a prefill
    features: Tensor  # [N, F], the tapped hidden states side by side; F = 0 without taps


class Target(Protocol):
    """The model whose output we keep."""

    vocab_size: int
    context_length: int
    device: torch.device

    def new_state(self) -> TreeState:
        """An empty state for one generation."""

    def prefill(self, token_ids: list[int], state: TreeState) -> Verified:
        """Write a prompt into the state. Features of every token, logits of the last one. Long prompts go in chunks."""

    def verify(self, tree: DraftTree, state: TreeState) -> Verified:
        """One forward over all nodes. Writes scratch only: it can be called again with another tree."""

    def commit(self, path: list[int], state: TreeState) -> None:
        """Make one path of the last verified tree part of the state: after prefill, the only write."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """The input embeddings, shared with the drafter: [...] int64 -> [..., hidden]."""

    def head(self, hidden: Tensor) -> Tensor:
        """The output head, shared with the drafter: [..., hidden] -> [..., vocab]."""
