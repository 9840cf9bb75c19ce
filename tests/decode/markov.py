"""A target whose every conditional distribution is written down: the next token depends on the two before it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from deltatree.drafter import ScriptedDrafter
from deltatree.models.protocol import Verified

VOCAB = 12


@dataclass
class MarkovState:
    token_ids: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.token_ids)


class MarkovTarget:
    """logits after (a, b) are a row of a fixed table."""

    vocab_size, context_length, device = VOCAB, 1 << 20, torch.device("cpu")

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = 1.5 * torch.randn(VOCAB, VOCAB, VOCAB, generator=generator)

    def new_state(self) -> MarkovState:
        return MarkovState()

    def prefill(self, token_ids: list[int], state: MarkovState) -> Verified:
        state.token_ids += token_ids
        a, b = state.token_ids[-2:]
        return Verified(self.table[a, b][None], torch.empty(len(token_ids), 0))

    def verify(self, tree, state: MarkovState) -> Verified:
        tokens, parents = tree.token_ids.tolist(), tree.parents.tolist()
        before = [state.token_ids[-1] if parent < 0 else tokens[parent] for parent in parents]
        self._tokens = tokens
        return Verified(self.table[before, tokens], torch.empty(len(tokens), 0))

    def commit(self, path: list[int], state: MarkovState) -> None:
        state.token_ids += [self._tokens[node] for node in path]


def exact(target: MarkovTarget, history: list[int], options) -> np.ndarray:
    """The processed distribution after `history`, [vocab] float64, written without any of the library's code."""
    scores = target.table[history[-2], history[-1]].double().numpy().copy()
    if options.repetition_penalty != 1:
        for token in set(history):
            scores[token] = (
                scores[token] * options.repetition_penalty
                if scores[token] < 0
                else scores[token] / options.repetition_penalty
            )
    scores /= options.temperature
    if options.top_k:
        scores[scores < np.sort(scores)[-options.top_k]] = -np.inf
    probs = np.exp(scores - scores.max())
    probs /= probs.sum()
    if options.top_p < 1:  # the smallest set of best tokens that holds top_p
        order = np.argsort(-probs)
        kept = order[: int(np.searchsorted(np.cumsum(probs[order]), options.top_p)) + 1]
        probs[np.setdiff1d(order, kept)] = 0
        probs /= probs.sum()
    return probs


def exact_pairs(target: MarkovTarget, prompt: list[int], options) -> np.ndarray:
    """[vocab, vocab]: probability of every continuation of two tokens."""
    first = exact(target, prompt, options)
    return np.stack([first[a] * exact(target, [*prompt, a], options) for a in range(VOCAB)])


def drafter(kind: str, target: MarkovTarget) -> ScriptedDrafter:
    """right: the target's own marginals of the next tokens; wrong: their reverse; over-confident: all on one token."""

    def script(committed: int, bonus: int) -> torch.Tensor:
        likely = target.table.mean(0)[bonus].softmax(-1)
        rows = torch.stack([likely, likely @ target.table.mean(0).softmax(-1)]).log()
        if kind == "wrong":
            return -rows
        return 40 * rows if kind == "over-confident" else rows

    return ScriptedDrafter(script, depth=2)
