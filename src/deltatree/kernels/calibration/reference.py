"""`tree.Calibrated` over tensors, in plain PyTorch: its factors, its two rows of scores a depth, and its learning."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deltatree.kernels.walk.reference import Walked
from deltatree.tree.calibrated import BELOW, LEAST_FACTOR, PRIOR, SPINE, WEIGHT


@dataclass(frozen=True, slots=True)
class Seen:
    """What one generation has shown, by place (`SPINE`, `BELOW`) and depth."""

    hits: Tensor  # [2, D] float32, first choices that were right
    expected: Tensor  # [2, D] float32, how many of them the drafter expected

    @classmethod
    def empty(cls, depth: int, device: torch.device | str) -> Seen:
        return cls(torch.zeros(2, depth, device=device), torch.zeros(2, depth, device=device))


def corrected(values: Tensor, seen: Seen, *, out: Tensor | None = None) -> Tensor:
    """Scores on the spine and below siblings.

    values: [D, C] float32, log-probabilities, best first, C at least 1
    out: [2, D, C] float32, written and returned instead of a new tensor
    Rows stay best first. On the spine the first choice is corrected, never beyond half of what it lacks, and the others share what
    it leaves; below a sibling all are discounted.
    """
    out = values.new_empty(2, *values.shape) if out is None else out
    probability = values[:, 0].exp()
    wanted = torch.minimum(probability * _factors(seen, SPINE), (1 + probability) / 2)
    leaves = (wanted > 0) & (wanted < 1) & (probability < 1)
    best = wanted.log()
    others = (1 - wanted).log() - (1 - probability).log()
    rows = torch.minimum(values + others[:, None], best[:, None])
    rows[:, 0] = best
    out[SPINE] = torch.where(leaves[:, None], rows, values)
    out[BELOW] = values + _factors(seen, BELOW).clamp(LEAST_FACTOR, 1).log()[:, None]
    return out


def learn_calibration(values: Tensor, ids: Tensor, walked: Walked, seen: Seen) -> None:
    """Take in a verified draft: one token that the target chose for every node of the path.

    values, ids: [D, C] of the draft, not corrected    walked: at most D + 1 steps    seen: added to
    """
    steps = torch.arange(len(values), device=values.device)
    chosen, first = walked.token_ids[: len(values)].long(), ids[:, 0].long()
    here, is_first = steps < walked.steps, chosen == first
    misses = (here & ~is_first).long().cumsum(0) - (here & ~is_first).long()  # before this depth
    for place, at in ((SPINE, here & (misses == 0)), (BELOW, here & (misses > 0))):
        seen.hits[place] += (at & is_first).float()
        seen.expected[place] += torch.where(at, values[:, 0].exp(), 0.0)


def _factors(seen: Seen, place: int) -> Tensor:
    """What a first choice's probability is multiplied by, by the depth of its parent: [D]."""
    overall = _overall(seen, place)
    return (seen.hits[place] + WEIGHT * overall) / (seen.expected[place] + WEIGHT)


def _overall(seen: Seen, place: int) -> Tensor:
    """The factor of all depths together."""
    prior = 1.0 if place == SPINE else PRIOR * _overall(seen, SPINE)
    return (seen.hits[place].sum() + WEIGHT * prior) / (seen.expected[place].sum() + WEIGHT)
