"""The best-first draft tree in Triton: one program takes out node after node, a second launch works out the relations.

Every node that has been taken out holds one *offer*: its best child that is not in the tree yet. The next node is the best
offer of all; after that its parent offers the next sibling, and it offers its own first child. All offers stand in the
registers of one warp, each packed into one integer that is compared as a whole:

    score (32 bits, of the order of the float32 number) | 511 - place (9) | parent (9) | depth of the parent (5) | rank (9)

`place` numbers the offers in the order of their ranks as tuples, which decides between equal scores. The two offers that
follow a taken one stand where it stood, the first child before the next sibling; what stood behind moves up by one.

With scores of two kinds, `branched` says of every node whether it or one above it is not the best candidate of its depth.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deltatree.kernels.tree_build.reference import TreeBuffers, check_sizes

_NOTHING = tl.constexpr(-(1 << 63))
"""No offer: below every packed one, for no score has this order."""


@triton.jit
def _order_of(x):
    """float32 to int32 of the same order, both zeros alike."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _score_of(order):
    bits = order ^ ((order >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _offer(exists, score, place, parent, depth, rank):
    low = (tl.cast(511 - place, tl.int64) << 23) | (parent << 14) | (depth << 9) | rank
    return tl.where(exists, (_order_of(score).to(tl.int64) << 32) | low, _NOTHING)


@triton.jit
def _grow_kernel(
    values, ids, root, root_here, token_ids, parents, depths, scores, num_nodes, branched,
    nodes, D, C, svp, svd, svc, sid, sic, SLOTS: tl.constexpr,
):  # fmt: skip
    token = root_here
    if root is not None:
        token = tl.load(root)
    tl.store(token_ids, token)
    tl.store(parents, -1)
    tl.store(depths, 0)
    tl.store(scores, 0.0)
    if branched is not None:
        tl.store(branched, 0)
    slot = tl.arange(0, SLOTS)  # the offer of node i stands in slot i
    some = (D > 0) & (C > 0)
    first = tl.load(values, mask=some, other=0.0)
    offers = tl.where(slot == 0, _offer(some, first, 0, 0, 0, 0), _NOTHING)
    count = 1
    for node in range(1, nodes):
        best = tl.max(offers, 0)
        found = best != _NOTHING
        score = _score_of((best >> 32).to(tl.int32))
        behind = ((best >> 23) & 511).to(tl.int32)
        parent = ((best >> 14) & 511).to(tl.int32)
        depth = ((best >> 9) & 31).to(tl.int32)
        rank = (best & 511).to(tl.int32)
        tl.store(scores + node, tl.where(found, score, float("-inf")))
        tl.debug_barrier()  # every thread reads scores that one has written
        has_sibling = found & (rank + 1 < C)
        has_child = found & (depth + 1 < D)
        own = tl.load(scores + parent, mask=found, other=0.0)
        above, here = values, values
        if branched is not None:
            is_branch = tl.load(branched + parent, mask=found, other=0)
            above += is_branch * svp
            is_branch |= (rank > 0).to(tl.int32)
            here += is_branch * svp
            tl.store(branched + node, is_branch)
        sibling = own + tl.load(above + depth * svd + (rank + 1) * svc, mask=has_sibling, other=0.0)
        child = score + tl.load(here + (depth + 1) * svd, mask=has_child, other=0.0)
        drafted = tl.load(ids + depth * sid + rank * sic, mask=found, other=0)  # may be wider than the root's integer
        moved = (offers != _NOTHING) & (((offers >> 23) & 511) < behind)
        offers = tl.where(moved, offers - (1 << 23), offers)
        place = 511 - behind
        offers = tl.where(slot == parent, _offer(has_sibling, sibling, place + 1, parent, depth, rank + 1), offers)
        offers = tl.where(slot == node, _offer(has_child, child, place, node, depth + 1, 0), offers)
        count += found.to(tl.int32)
        tl.store(token_ids + node, drafted)
        tl.store(parents + node, tl.where(found, parent, 0))
        tl.store(depths + node, tl.where(found, depth + 1, 0))
    tl.store(num_nodes, count)


@triton.jit
def _relate_kernel(
    parents, num_nodes, ancestors, rows, nodes, sai, saj, srn, srt, steps,
    KERNEL: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    j = tl.arange(0, BLOCK_J)
    count = tl.load(num_nodes)
    seen = i[:, None] == j[None, :]
    at = tl.where(i < count, i, 0)  # padding sees itself alone, as the root does
    for _ in range(steps):
        at = tl.load(parents + at, mask=at > 0, other=-1).to(tl.int32)
        seen = seen | (at[:, None] == j[None, :])
    inside = (i < nodes)[:, None] & (j < nodes)[None, :]
    tl.store(ancestors + i[:, None] * sai + j[None, :] * saj, seen.to(tl.uint8), mask=inside)

    at = i
    for tap in tl.static_range(KERNEL):  # newest input first; past the root the window, its last column first
        row = tl.maximum(at + (KERNEL - 1), 0)
        tl.store(rows + i * srn + (KERNEL - 1 - tap) * srt, row, mask=i < nodes)
        up = tl.load(parents + tl.maximum(at, 0), mask=(i < nodes) & (at >= 0), other=0).to(tl.int32)
        at = tl.where(at >= 0, up, at - 1)


def build_tree(
    values: Tensor,
    ids: Tensor,
    root: Tensor | int,
    *,
    budget: int,
    kernel: int = 4,
    out: TreeBuffers | None = None,
) -> TreeBuffers:
    """As the reference, in two launches."""
    check_sizes(values, budget, out)
    out = TreeBuffers.empty(budget + 1, kernel, values.device) if out is None else out
    nodes, on_device = budget + 1, isinstance(root, torch.Tensor)
    branched = torch.empty(nodes, dtype=torch.int32, device=values.device) if values.dim() == 3 else None
    _grow_kernel[(1,)](
        values, ids, root if on_device else None, 0 if on_device else root,
        out.token_ids, out.parents, out.depths, out.scores, out.num_nodes, branched,
        nodes, len(ids), min(ids.shape[1], budget), *([0, *values.stride()][-3:]), *ids.stride(),
        SLOTS=max(32, triton.next_power_of_2(budget)), num_warps=1,
    )  # fmt: skip
    block_i = 4
    _relate_kernel[(triton.cdiv(nodes, block_i),)](
        out.parents, out.num_nodes, out.ancestors, out.rows, nodes, *out.ancestors.stride(), *out.rows.stride(),
        len(ids), KERNEL=out.rows.shape[1], BLOCK_I=block_i, BLOCK_J=triton.next_power_of_2(nodes), CHAINED=False,
        num_warps=2,
    )  # fmt: skip
    return out
