"""Calibration in Triton: one program a depth corrects, one in all learns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltatree.kernels.calibration.reference import Seen
from deltatree.kernels.walk.reference import Walked
from deltatree.tree import calibrated

_PRIOR = tl.constexpr(calibrated.PRIOR)
_WEIGHT = tl.constexpr(calibrated.WEIGHT)
_LEAST_FACTOR = tl.constexpr(calibrated.LEAST_FACTOR)


@triton.jit
def _corrected_kernel(values, hits, expected, out, D, C, svd, svc, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr):
    depth, d = tl.program_id(0), tl.arange(0, BLOCK_D)
    real = d < D
    hits_spine, hits_below = tl.load(hits + d, mask=real, other=0.0), tl.load(hits + D + d, mask=real, other=0.0)
    expected_spine = tl.load(expected + d, mask=real, other=0.0)
    expected_below = tl.load(expected + D + d, mask=real, other=0.0)
    overall_spine = (tl.sum(hits_spine, 0) + _WEIGHT) / (tl.sum(expected_spine, 0) + _WEIGHT)
    overall_below = (tl.sum(hits_below, 0) + _WEIGHT * _PRIOR * overall_spine) / (tl.sum(expected_below, 0) + _WEIGHT)
    spine = (tl.load(hits + depth) + _WEIGHT * overall_spine) / (tl.load(expected + depth) + _WEIGHT)
    below = (tl.load(hits + D + depth) + _WEIGHT * overall_below) / (tl.load(expected + D + depth) + _WEIGHT)
    discount = tl.log(tl.minimum(tl.maximum(below, _LEAST_FACTOR), 1.0))

    probability = tl.exp(tl.load(values + depth * svd))
    wanted = tl.minimum(probability * spine, (1 + probability) / 2)
    leaves = (wanted > 0) & (wanted < 1) & (probability < 1)
    best = tl.log(wanted)
    others = tl.log(1 - wanted) - tl.log(1 - probability)
    for start in range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        value = tl.load(values + depth * svd + c * svc, mask=c < C, other=0.0)
        on_spine = tl.where(c == 0, best, tl.minimum(value + others, best))
        tl.store(out + depth * C + c, tl.where(leaves, on_spine, value), mask=c < C)
        tl.store(out + (D + depth) * C + c, value + discount, mask=c < C)


@triton.jit
def _learn_kernel(values, ids, token_ids, steps, hits, expected, D, svd, sid, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    here = (d < D) & (d < tl.load(steps).to(tl.int32))
    chosen = tl.load(token_ids + d, mask=here, other=-1).to(tl.int64)
    is_first = here & (chosen == tl.load(ids + d * sid, mask=here, other=-2).to(tl.int64))
    probability = tl.exp(tl.load(values + d * svd, mask=here, other=0.0))
    first_miss = tl.min(tl.where(here & (is_first == 0), d, BLOCK_D), 0)
    for place in tl.static_range(2):
        at = here & ((d > first_miss) == (place == 1))
        kept = tl.load(hits + place * D + d, mask=at, other=0.0)
        tl.store(hits + place * D + d, kept + is_first.to(tl.float32), mask=at)
        kept = tl.load(expected + place * D + d, mask=at, other=0.0)
        tl.store(expected + place * D + d, kept + probability, mask=at)


def corrected(values: Tensor, seen: Seen, *, out: Tensor | None = None) -> Tensor:
    """As the reference, in one launch. out: contiguous"""
    depth, width = values.shape
    out = values.new_empty(2, depth, width, dtype=torch.float32) if out is None else out
    _corrected_kernel[(depth,)](
        values, seen.hits, seen.expected, out, depth, width, *values.stride(),
        BLOCK_D=triton.next_power_of_2(depth), BLOCK_C=min(128, triton.next_power_of_2(width)), num_warps=1,
    )  # fmt: skip
    return out


def learn_calibration(values: Tensor, ids: Tensor, walked: Walked, seen: Seen) -> None:
    """As the reference, in one launch."""
    depth = len(values)
    _learn_kernel[(1,)](
        values, ids, walked.token_ids, walked.steps, seen.hits, seen.expected, depth, values.stride(0), ids.stride(0),
        BLOCK_D=triton.next_power_of_2(depth), num_warps=1,
    )  # fmt: skip
