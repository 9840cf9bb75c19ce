"""The record of a draft tree in Triton: one program, which looks for first children among all nodes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltatree.kernels.draft_record.reference import ROWS


@triton.jit
def _record_kernel(
    scores, parents, depths, num_nodes, out, count, max_depth, limit, scale, BLOCK_N: tl.constexpr, STEP: tl.constexpr
):
    node = tl.arange(0, BLOCK_N)
    inside = node < count
    parent = tl.load(parents + node, mask=inside, other=-2).to(tl.int32)
    above = tl.maximum(parent, 0)
    score = tl.load(scores + node, mask=inside, other=0.0).to(tl.float64)
    given = tl.minimum(score - tl.load(scores + above, mask=inside, other=0.0).to(tl.float64), -1e-9)
    # The difference loses digits only where the log-odds are beyond any limit in use.
    odds = given - tl.log(1.0 - tl.exp(given))
    odds = tl.minimum(tl.maximum(odds, -limit), limit) / scale

    first = node
    for start in range(0, BLOCK_N, STEP):
        other = start + tl.arange(0, STEP)
        same = parent[:, None] == tl.load(parents + other, mask=other < count, other=-2).to(tl.int32)[None, :]
        first = tl.minimum(first, tl.min(tl.where(same, other[None, :], BLOCK_N), 1))
    at = tl.zeros([], tl.int32)
    below_spine = parent <= 0
    for _ in range(max_depth):
        at = tl.min(tl.where(parent == at, node, BLOCK_N), 0)
        below_spine = below_spine | (parent == at)
    kind = tl.where(below_spine, 0, 2) + tl.where(first == node, 0, 1)

    tl.store(out + node, tl.load(num_nodes).to(tl.float64), mask=inside)
    tl.store(out + count + node, odds, mask=inside)
    tl.store(out + 2 * count + node, parent.to(tl.float64), mask=inside)
    tl.store(out + 3 * count + node, tl.load(depths + node, mask=inside, other=0).to(tl.float64), mask=inside)
    tl.store(out + 4 * count + node, kind.to(tl.float64), mask=inside)


def draft_record(
    scores: Tensor,
    parents: Tensor,
    depths: Tensor,
    *,
    num_nodes: Tensor,
    max_depth: int,
    limit: float,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """As the reference, in one launch. All tensors are contiguous."""
    count = len(scores)
    out = torch.empty(ROWS, count, dtype=torch.float64, device=scores.device) if out is None else out
    block = triton.next_power_of_2(count)
    _record_kernel[(1,)](
        scores, parents, depths, num_nodes, out, count, max_depth, limit, scale, BLOCK_N=block, STEP=min(block, 16),
        num_warps=4,
    )  # fmt: skip
    return out
