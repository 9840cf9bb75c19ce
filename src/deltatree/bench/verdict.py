"""Was it lossless? The first divergence from plain decoding, judged by the numeric noise that this run shows.

A tree forward and a one-token forward compute the same numbers in another order, so that in half precision their logits
differ slightly and a near-tie may fall either way. `measure_noise` writes a plain text twice, once with one-token forwards
and once with trees, states included, and takes the largest change in the distance between any two of the best tokens. A
divergence is a near-tie if plain decoding's own distance between its best token and the arm's token is not larger than that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from deltatree.bench.records import Divergence
from deltatree.models.protocol import Target
from deltatree.tree import DraftTree, chain_tree

BEST = 8
"""Tokens per position whose logits are compared for noise."""

KEPT = 64
"""Best logits kept per position of a plain text."""

CEILINGS = {torch.float32: 0.01, torch.float64: 1e-6}
HALF_CEILING = 1.0
"""Noise above these is no rounding: it comes from a wrong state or mask, and excuses nothing."""


class PlainText:
    """The best logits before every token of a plainly decoded text, from one-token forwards, computed when first asked for.

    token_ids: the text's new tokens, of which position 0 is chosen by prefill
    """

    def __init__(self, target: Target, prompt_ids: list[int], token_ids: list[int]) -> None:
        self.target, self.prompt_ids, self.token_ids = target, prompt_ids, token_ids
        self._rows: list[tuple[Tensor, Tensor]] = []

    def best(self, position: int) -> tuple[Tensor, Tensor]:
        """Values and token ids [KEPT] that decided the token at `position`, best first."""
        if not self._rows:
            self._rows = list(self._decided())
        return self._rows[position]

    def _decided(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Row by row, to the end: a state kept for later would be one more beside those that are timed."""
        state = self.target.new_state()
        logits = self.target.prefill(self.prompt_ids, state).logits
        yield tuple(logits[0].topk(min(KEPT, logits.shape[-1])))
        for root in self.token_ids[:-1]:  # nothing is asked about what would follow the last
            logits = self.target.verify(chain_tree([root]), state).logits
            self.target.commit([0], state)
            yield tuple(logits[0].topk(min(KEPT, logits.shape[-1])))

    def gap(self, position: int, token: int) -> float:
        """The best logit minus that of `token`; at least the distance to the last one kept."""
        values, ids = self.best(position)
        where = (ids == token).nonzero()
        return float(values[0] - values[int(where[0]) if len(where) else -1])


def first_divergence(plain: PlainText, token_ids: list[int]) -> Divergence | None:
    """Where a text leaves the plain one, or None if it is the same."""
    truth = plain.token_ids
    if token_ids == truth:
        return None
    position = next((i for i, (a, b) in enumerate(zip(token_ids, truth, strict=False)) if a != b), None)
    if position is None:  # one text ends where the other goes on
        position = min(len(token_ids), len(truth))
        ours, theirs = (text[position] if position < len(text) else -1 for text in (token_ids, truth))
        return Divergence(position, ours, theirs, None)
    token = token_ids[position]
    return Divergence(position, token, truth[position], plain.gap(position, token))


def judge(divergence: Divergence | None, noise: float) -> str:
    """`identical`, `near_tie` or `diverged`."""
    if divergence is None:
        return "identical"
    return "near_tie" if divergence.gap is not None and divergence.gap <= noise else "diverged"


def noise_ceiling(target: Target) -> float:
    return CEILINGS.get(target.embed(torch.zeros(1, dtype=torch.int64)).dtype, HALF_CEILING)


@torch.inference_mode()
def measure_noise(plain: PlainText, shapes: Iterable[tuple[int, int]]) -> float:
    """The largest change, between one-token and tree forwards, in the distance between any two of the BEST tokens.

    shapes: depth and number of drafted nodes of the trees that the arms verify. Each tree holds the plain text as its
    spine, and other tokens beside it; the spine is committed, so that what states gather on the way counts too.
    """
    target, text = plain.target, plain.token_ids
    noise = 0.0
    for depth, num_drafted in set(shapes):
        state = target.new_state()
        target.prefill(plain.prompt_ids, state)
        start = 0
        while start < len(text) - 1:
            spine = text[start : min(start + 1 + min(depth, num_drafted), len(text) - 1)]
            tree = _around(spine, num_drafted, target.vocab_size)
            logits = target.verify(tree, state).logits[: len(spine)]
            target.commit(list(range(len(spine))), state)
            for offset, row in enumerate(logits):
                values, ids = (x[:BEST] for x in plain.best(start + offset + 1))
                change = row[ids] - values
                noise = max(noise, float(change.max() - change.min()))
            start += len(spine)
    return noise


def _around(spine: list[int], num_drafted: int, vocab_size: int) -> DraftTree:
    """A tree with `spine` (root first) as its first nodes, filled up with other children of its nodes."""
    tokens, parents = list(spine), list(range(-1, len(spine) - 1))
    for filler in range(num_drafted + 1 - len(spine)):
        parent, turn = filler % len(spine), 1 + filler // len(spine)
        following = spine[parent + 1] if parent + 1 < len(spine) else spine[parent]
        tokens.append((following + turn) % vocab_size)
        parents.append(parent)
    return DraftTree.from_parents(tokens, parents)
