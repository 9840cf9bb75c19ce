"""The walk down a verified tree in Triton: one program, one search among all nodes a step."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from deltatree.kernels.walk.reference import Walked


@triton.jit
def _walk_kernel(
    token_ids, parents, target_ids, num_nodes, steps_out, bonus_out, path, emitted, places, BLOCK_N: tl.constexpr
):
    node = tl.arange(0, BLOCK_N)
    count = tl.load(num_nodes).to(tl.int32)
    drafted = (node > 0) & (node < count)
    token = tl.load(token_ids + node, mask=drafted, other=-1)
    parent = tl.load(parents + node, mask=drafted, other=-1)
    at = tl.zeros([], tl.int32)
    steps = tl.zeros([], tl.int32)
    bonus = tl.zeros([], tl.int32)
    walking = count > 0
    for place in range(places):
        choice = tl.load(target_ids + at, mask=walking, other=0).to(tl.int32)
        tl.store(path + place, at)
        tl.store(emitted + place, choice)
        bonus = tl.where(walking, choice, bonus)
        steps += walking.to(tl.int32)
        following = tl.min(tl.where(drafted & (parent == at) & (token == choice), node, BLOCK_N), 0)
        walking = walking & (following < BLOCK_N)
        at = tl.where(walking, following, 0)
    tl.store(steps_out, steps)
    tl.store(bonus_out, bonus)


def walk(
    token_ids: Tensor,
    parents: Tensor,
    target_ids: Tensor,
    *,
    num_nodes: Tensor,
    max_depth: int,
    out: Walked | None = None,
) -> Walked:
    """As the reference, in one launch."""
    out = Walked.empty(max_depth, token_ids.device) if out is None else out
    nodes = token_ids.numel()
    _walk_kernel[(1,)](
        token_ids, parents, target_ids, num_nodes, out.steps, out.bonus, out.path, out.token_ids, max_depth + 1,
        BLOCK_N=triton.next_power_of_2(nodes), num_warps=1 if nodes <= 256 else 2,
    )  # fmt: skip
    return out
