"""The transition tree in Triton: three launches to build it and four to learn from it, however many nodes it has.

What a node adds to its parent's score depends on its *context* alone: its depth, the ranks of its parent and of its
parent's parent, and whether the parent is on the spine. `_lists_kernel` therefore looks up the likely contexts at once,
in many programs, and writes a *list* of each: all children, best first. `_grow_kernel`, one warp, then takes out node
after node, as the best-first builder does: every node that has been taken out holds one *offer*, its best child that is
not in the tree yet. A list that is missing is made when its node is taken out, at the price of a few lookups in a row.

An offer is two integers of 32 bits, for a warp finds the largest of such in one instruction. The first is of the order of
the score, the second decides between equal ones:

    31 - depth (5 bits) | 511 - parent (9) | rank (6) | list of its own children (9)

No two offers have one parent, so equal scores are ordered by depth and parent, and by rank within a list, as in the
reference; the other bits decide nothing.

Lists of one depth: number 0 is the spine's. Then come classes: class k holds the nodes of ranks 2^k - 1 to 2^(k+1) - 2
whose parents have ranks below REACH / 2^k, for a node of a poor rank under another of a poor rank hardly enters a tree.
An entry of a list is one integer of 64 bits: what the child adds to the score (32 bits, float32) | REACH / 2^k of its
class (7) | number of its list under a parent of rank 0 (9) | rank (6).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deltatree.kernels.chaining import chaining
from deltatree.kernels.transition_tree.reference import CANDIDATES, Transitions, check_candidates
from deltatree.kernels.tree_build.reference import TreeBuffers, check_sizes
from deltatree.kernels.tree_build.triton import _order_of, _relate_kernel, _score_of
from deltatree.transitions import table as layout
from deltatree.transitions.policy import BESIDE

_NOTHING = tl.constexpr(-(1 << 55))
"""No child: its score beside its parent's is -inf."""
_NO_ORDER = tl.constexpr(-(1 << 31))
"""No offer: below the order of every score."""
_UNLISTED = tl.constexpr(511)
"""In place of a list's number: it has not been made."""
_EMPTY = tl.constexpr(layout._EMPTY)
_MIX = tl.constexpr(layout._MIX)
_WAYS = tl.constexpr(layout.WAYS)
_TRIGRAM_BACKOFF = tl.constexpr(layout.TRIGRAM_BACKOFF)
_BIGRAM_BACKOFF = tl.constexpr(layout.BIGRAM_BACKOFF)
_BESIDE = tl.constexpr(BESIDE)
_C = tl.constexpr(CANDIDATES)
_UNUSED = tl.constexpr(-64)
"""In place of a slot: the entry inserts nothing."""

_SIZES = ["budget", "D", "C", "nodes", "num_grams", "vocab", "bits", "num_buckets", "svd", "sid"]
"""Arguments that a kernel is not compiled anew for."""


GROUP = 1
"""Lists that one program makes beforehand."""
CHUNK = 32
"""Entries that are compared with as many others at once."""


def reach_of(budget: int) -> int:
    """A power of two, 1 to 64: lists are made of best candidates under parents of ranks below it. A fixed table.

    Larger trees hold poorer candidates: of the shipped pair 1 list a round is missing at 16 nodes, 4 at 64 and 13 at 256;
    half the reach would leave twice as many out. No choice changes the tree.
    """
    return 8 if budget <= 32 else 32 if budget <= 128 else 64


@triton.jit
def _lookup(keys, counts, key, exists, bits, num_buckets):
    """How often n-grams were seen. key: [n] int64; exists: [n], which to look up -> [n] float32"""
    bucket = ((key * _MIX) >> (64 - bits)) & (num_buckets - 1)
    found = tl.full(key.shape, -1, tl.int32)
    for way in tl.static_range(_WAYS):  # a bucket is one thread's: many threads would all work out the same
        found = tl.where(tl.load(keys + bucket * _WAYS + way) == key, way, found)
    return tl.load(counts + bucket * _WAYS + found, mask=exists & (found >= 0), other=0.0)


@triton.jit
def _log_ratio(trigrams, bigrams, seen, single, followed):
    """log(p(token | two before) / p(token)) by backing off from trigrams to bigrams to single tokens."""
    double = (bigrams + _BIGRAM_BACKOFF * single) / (followed + _BIGRAM_BACKOFF)
    triple = (trigrams + _TRIGRAM_BACKOFF * double) / (tl.maximum(seen, trigrams) + _TRIGRAM_BACKOFF)
    return tl.log(triple / single)


@triton.jit
def _sorted(rows):
    """Rows of _C different integers, the largest of a row first, by a bitonic network. [G, _C]"""
    c, held = tl.broadcast_to(tl.arange(0, _C)[None, :], rows.shape), rows
    for run in tl.static_range(1, 7):
        for bit in tl.static_range(run - 1, -1, -1):
            other = tl.gather(held, c ^ (1 << bit), 1)
            takes_larger = ((c >> run) & 1) == ((c >> bit) & 1)
            held = tl.where((held > other) == takes_larger, held, other)
    return held


@triton.jit
def _write_lists(
    lists, number, here, depth, above, rank, on_spine,
    values, ids, root_token, before_token, strengths, keys, counts, single, followed,
    C, vocab, bits, num_buckets, svd, svc, sid, sic, REACH: tl.constexpr,
):  # fmt: skip
    """Write the children of nodes of one depth, best first.

    number: [G], of the lists, all depths counted; here: [G], which to write    above, rank: [G], of parent and node
    """
    size, c = tl.cast(vocab, tl.int64) + 1, tl.arange(0, _C)
    real = c < C
    token = tl.load(ids + depth * sid + c * sic, mask=real, other=0).to(tl.int64)
    value = tl.load(values + depth * svd + c * svc, mask=real, other=float("-inf"))
    last = tl.load(ids + (depth - 1) * sid + rank * sic, mask=here & (depth > 0), other=0).to(tl.int64)
    last = tl.where(depth > 0, last, root_token)
    before = tl.load(ids + (depth - 2) * sid + above * sic, mask=here & (depth > 1), other=0).to(tl.int64)
    before = tl.where(depth > 1, before, tl.where(depth > 0, root_token, before_token))
    strength = tl.load(strengths + tl.where(on_spine, (depth > 0).to(tl.int32), 2))
    follow, alone = tl.load(followed + last), tl.load(single + token, mask=real, other=1.0)
    seen = _lookup(keys, counts, (vocab * size + before) * size + last, here, bits, num_buckets)

    exists = tl.reshape(here[:, None] & real[None, :], [here.shape[0] * _C])
    key = tl.reshape((vocab * size + last)[:, None] * size + token[None, :], [here.shape[0] * _C])
    bigrams = tl.reshape(_lookup(keys, counts, key, exists, bits, num_buckets), [here.shape[0], _C])
    key = tl.reshape((before * size + last)[:, None] * size + token[None, :], [here.shape[0] * _C])
    trigrams = tl.reshape(_lookup(keys, counts, key, exists, bits, num_buckets), [here.shape[0], _C])
    ratio = _log_ratio(trigrams, bigrams, seen[:, None], alone[None, :], follow[:, None])
    raw = tl.where(on_spine, 1.0, _BESIDE)[:, None] * value[None, :] + strength[:, None] * ratio
    raw = raw - tl.max(raw, 1)[:, None]
    mass = tl.minimum(tl.log(tl.sum(tl.exp(value), 0)), 0.0)  # of the depth's candidates
    raw = raw + (mass - tl.log(tl.sum(tl.exp(raw), 1)))[:, None]
    step = tl.where((value > float("-inf"))[None, :], tl.minimum(raw, 0.0), float("-inf"))

    order = (_order_of(step).to(tl.int64) << 32) | (63 - c)[None, :]
    order, place = _sorted(order), c[None, :]
    rank, step = 63 - (order & 63).to(tl.int32), _score_of((order >> 32).to(tl.int32))
    kind = ((rank + 1).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127  # floor(log2(rank + 1))
    start = 1 + kind * REACH + (rank + 1 - (1 << kind)) * (REACH >> kind)
    entry = step.to(tl.int32, bitcast=True).to(tl.int64) << 32
    entry = entry | (((REACH >> kind) << 15) | (start << 6) | rank).to(tl.int64)
    tl.store(lists + number[:, None] * _C + place, entry, mask=here[:, None])


@triton.jit(do_not_specialize=_SIZES)
def _lists_kernel(
    lists, values, ids, root, before_root, strengths, keys, counts, single, followed,
    C, vocab, bits, num_buckets, svd, svc, sid, sic,
    REACH: tl.constexpr, CLASSES: tl.constexpr, GROUP: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    depth, first = tl.program_id(0), tl.program_id(1) * GROUP
    number = first + tl.arange(0, GROUP)
    on_spine = number == 0
    kind, within = tl.maximum(number - 1, 0) // REACH, tl.maximum(number - 1, 0) % REACH
    shift = tl.maximum(CLASSES - 1 - kind, 0)  # the class has 2^shift parents
    rank, above = (1 << kind) - 1 + (within >> shift), within & ((1 << shift) - 1)
    here = (number <= CLASSES * REACH) & (rank < C) & (above < C) & ((depth > 1) | (above == 0))
    here = here & ((depth > 0) | on_spine)  # the root is on the spine
    if tl.max(here.to(tl.int32), 0) > 0:
        _write_lists(
            lists, depth * (CLASSES * REACH + 1) + number, here, depth, above, rank, on_spine,
            values, ids, tl.load(root).to(tl.int64), tl.load(before_root), strengths, keys, counts, single, followed,
            C, vocab, bits, num_buckets, svd, svc, sid, sic, REACH=REACH,
        )  # fmt: skip


@triton.jit
def _offer(exists, entry, score, depth, parent, above, spine):
    """The order and the rest of the offer that an entry of a list makes; above: the parent's rank; and its list."""
    step, low = (entry >> 32).to(tl.int32).to(tl.float32, bitcast=True), entry.to(tl.int32)
    rank = low & 63
    known = tl.where(above < ((low >> 15) & 127), ((low >> 6) & 511) + above, _UNLISTED)
    known = tl.where(spine & (rank == 0), 0, known)
    order = tl.where(exists & (step > float("-inf")), _order_of(score + step), _NO_ORDER)
    return order, ((31 - depth) << 24) | ((511 - parent) << 15) | (rank << 9) | known, known


@triton.jit(do_not_specialize=_SIZES)
def _grow_kernel(
    lists, values, ids, root, before_root, strengths, keys, counts, single, followed, taken,
    token_ids, parents, depths, scores, num_nodes,
    budget, D, C, vocab, bits, num_buckets, svd, svc, sid, sic,
    CHAIN: tl.constexpr, SLOTS: tl.constexpr, REACH: tl.constexpr, CLASSES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    A_DEPTH: tl.constexpr = CLASSES * REACH + 1
    root_token, before_token = tl.load(root).to(tl.int64), tl.load(before_root)
    slot = tl.arange(0, SLOTS)  # the offer of node i stands in slot i
    some = (D > 0) & (budget > 0)
    order, low, _ = _offer(some, tl.load(lists, mask=some, other=_NOTHING), 0.0, 1, 0, 0, True)
    orders, lows = tl.where(slot == 0, order, _NO_ORDER), tl.where(slot == 0, low, 0)
    # Of node i in slot i, as integers, for a warp adds up such in one instruction: the score, and
    # where the child after the offered one stands in the lists (24 bits) | node on the spine (1) | rank of node (6).
    owns = tl.zeros([SLOTS], tl.int32)
    nexts = tl.where(slot == 0, (1 << 7) | 64, 0)
    ahead_first, ahead_second, ahead_third, warm = root_token, root_token, root_token, tl.cast(D, tl.int32)
    nowhere, places = tl.zeros([32], tl.int32), (511 - slot) << 15
    for node in range(1, budget + 1):
        best = tl.max(orders, 0)
        low = tl.max(tl.where(orders == best, lows, -1), 0)
        found = best != _NO_ORDER
        low = tl.where(found, low, -1)
        score = tl.where(found, _score_of(best), float("-inf"))
        depth, parent = 31 - ((low >> 24) & 31), 511 - ((low >> 15) & 511)
        rank, number = (low >> 9) & 63, low & 511
        has_child, on_spine = found & (depth < D), number == 0
        number += depth * A_DEPTH
        is_listed = has_child & ((low & 511) != _UNLISTED)
        first = tl.load(lists + number * _C, mask=is_listed, other=_NOTHING)
        tl.store(taken + node - 1 + nowhere, low)  # by all threads, which is no branch
        tl.store(scores + node + nowhere, score)
        offered = lows == low  # no two offers have one parent
        own = tl.sum(tl.where(offered, owns, 0), 0).to(tl.float32, bitcast=True)
        behind = tl.sum(tl.where(offered, nexts, 0), 0)

        if has_child & ((low & 511) == _UNLISTED):
            number = D * A_DEPTH + node
            one = tl.arange(0, 1)
            _write_lists(
                lists, number + one, one == 0, depth, (behind & 63) + one, rank + one, one > 0,
                values, ids, root_token, before_token, strengths, keys, counts, single, followed,
                C, vocab, bits, num_buckets, svd, svc, sid, sic, REACH=REACH,
            )  # fmt: skip
            tl.debug_barrier()
            first = tl.load(lists + number * _C)
        has_sibling = found & ((behind >> 7) % _C > 0)
        if CHAIN:
            has_sibling = has_sibling & False
        second = tl.load(lists + (behind >> 7), mask=has_sibling, other=_NOTHING)
        # What the last turn loaded ahead, the lists of offers that may come next, is used for nothing else; so added, it
        # is not waited for before this.
        warm = warm ^ (ahead_first + first).to(tl.int32) ^ (ahead_second + first).to(tl.int32)
        # one more entry ahead of the siblings, for every fourth lies in another sector of the cache
        warm = warm ^ (ahead_third + first).to(tl.int32)
        ahead_third = tl.load(lists + (behind >> 7) + 1, mask=has_sibling, other=0)

        order, low, known = _offer(has_child, first, score, depth + 1, node, rank, on_spine)
        comes = (order != _NO_ORDER) & (known != _UNLISTED) & (depth + 1 < D)
        ahead_first = tl.load(lists + ((depth + 1) * A_DEPTH + known) * _C, mask=comes, other=0)
        is_node = (low & (511 << 15)) == places
        orders, lows = tl.where(is_node, order, orders), tl.where(is_node, low, lows)
        owns = tl.where(is_node, score.to(tl.int32, bitcast=True), owns)
        nexts = tl.where(is_node, ((number * _C + 1) << 7) | (on_spine.to(tl.int32) << 6) | rank, nexts)

        order, low, known = _offer(has_sibling, second, own, depth, parent, behind & 63, (behind & 64) > 0)
        comes = (order != _NO_ORDER) & (known != _UNLISTED) & (depth < D)
        ahead_second = tl.load(lists + (depth * A_DEPTH + known) * _C, mask=comes, other=0)
        orders, lows = tl.where(offered, order, orders), tl.where(offered, low, lows)
        nexts = tl.where(offered, behind + (1 << 7), nexts)

    tl.debug_barrier()
    inside = slot < budget
    low = tl.load(taken + slot, mask=inside, other=-1)
    depth, rank = 31 - ((low >> 24) & 31), (low >> 9) & 63
    drafted = tl.load(ids + (depth - 1) * sid + rank * sic, mask=depth > 0, other=0).to(tl.int64)
    tl.store(token_ids + 1 + slot, drafted, mask=inside)
    tl.store(parents + 1 + slot, (511 - ((low >> 15) & 511)).to(tl.int64), mask=inside)
    tl.store(depths + 1 + slot, depth.to(tl.int64), mask=inside)
    tl.store(token_ids, root_token)
    tl.store(parents, -1)
    tl.store(depths, 0)
    tl.store(scores, 0.0)
    tl.store(num_nodes, 1 + tl.sum((depth > 0).to(tl.int32), 0))
    tl.store(taken + budget, warm)


def _counts(depths: int, budget: int, reach: int) -> tuple[int, int]:
    """Integers of 64 bits, of all lists, and of 32, of the nodes taken out."""
    return (depths * _num_lists(reach) + budget + 1) * CANDIDATES, budget + 1


def _num_lists(reach: int) -> int:
    """Of one depth that are made beforehand."""
    return reach * reach.bit_length() + 1


def scratch_for(values: Tensor, budget: int, reach: int | None = None) -> Tensor:
    """The scratch that a tree needs, for callers that capture it: 17 KB a depth at 16 nodes, 225 KB at 256."""
    whole, halves = _counts(min(len(values), budget), budget, reach or reach_of(budget))
    return torch.empty(2 * whole + halves, dtype=torch.float32, device=values.device)


def build_transition_tree(
    values: Tensor,
    ids: Tensor,
    root: Tensor | int,
    known: Transitions,
    *,
    budget: int,
    chain: bool = False,
    kernel: int = 4,
    out: TreeBuffers | None = None,
    scratch: Tensor | None = None,
    reach: int | None = None,
) -> TreeBuffers:
    """As the reference, in three launches. scratch: from `scratch_for`    reach: instead of `reach_of`"""
    check_sizes(values, budget, out)
    check_candidates(values)
    reach = reach or reach_of(budget)
    out = TreeBuffers.empty(budget + 1, kernel, values.device) if out is None else out
    scratch = scratch_for(values, budget, reach) if scratch is None else scratch
    root = torch.as_tensor(root, device=values.device)
    depths, nodes, table = min(len(values), budget), budget + 1, known.table
    whole, halves = _counts(depths, budget, reach)
    lists, taken = scratch[: 2 * whole].view(torch.int64), scratch[2 * whole :][:halves].view(torch.int32)
    inputs = (
        lists, values, ids, root, known.before, known.strengths, table.keys, table.counts, table.single, table.followed
    )  # fmt: skip
    sizes = (
        values.shape[1], table.vocab_size, len(table.keys).bit_length() - 1, len(table.keys), *values.stride(),
        *ids.stride(),
    )  # fmt: skip
    chained = chaining(values.device)
    shape = {"REACH": reach, "CLASSES": reach.bit_length(), **chained}
    if depths:
        _lists_kernel[(depths, triton.cdiv(_num_lists(reach), GROUP))](
            *inputs, *sizes, **shape, GROUP=GROUP, num_warps=1
        )
    _grow_kernel[(1,)](
        *inputs, taken, out.token_ids, out.parents, out.depths, out.scores, out.num_nodes, budget, depths, *sizes,
        **shape, CHAIN=chain, SLOTS=max(32, triton.next_power_of_2(budget)),
        num_warps=1,  # more would make a missing list sooner and take turns later
    )  # fmt: skip
    block_i = 4
    _relate_kernel[(triton.cdiv(nodes, block_i),)](
        out.parents, out.num_nodes, out.ancestors, out.rows, nodes, *out.ancestors.stride(), *out.rows.stride(),
        depths, KERNEL=out.rows.shape[1], BLOCK_I=block_i, BLOCK_J=triton.next_power_of_2(nodes), num_warps=2,
        **chained,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=_SIZES)
def _fit_kernel(
    token_ids, parents, target_ids, path, steps, values, ids, before_root, strengths, curvature,
    keys, counts, single, followed,
    D, C, vocab, bits, num_buckets, svd, svc, sid, sic, ROWS: tl.constexpr,
):  # fmt: skip
    size = tl.cast(vocab, tl.int64) + 1
    t, c = tl.arange(0, ROWS), tl.arange(0, _C)[None, :]
    judged = t < tl.minimum(tl.load(steps).to(tl.int32), D)
    node = tl.load(path + t, mask=judged, other=0)
    last = tl.load(token_ids + node, mask=judged, other=0).to(tl.int64)
    chosen = tl.load(target_ids + node, mask=judged, other=0).to(tl.int64)
    parent = tl.load(parents + node, mask=judged, other=-1)
    before = tl.load(token_ids + parent, mask=parent >= 0, other=0).to(tl.int64)
    before = tl.where(parent >= 0, before, tl.load(before_root))
    first = tl.load(ids + (t - 1) * sid, mask=judged & (t > 0), other=0).to(tl.int64)
    strays = judged & (t > 0) & (last != first)
    on_spine = tl.cumsum(strays.to(tl.int32), 0) == 0
    which = tl.where(on_spine, (t > 0).to(tl.int32), 2)

    real = judged[:, None] & (c < C)
    token = tl.load(ids + t[:, None] * sid + c * sic, mask=real, other=0).to(tl.int64)
    value = tl.load(values + t[:, None] * svd + c * svc, mask=real, other=float("-inf"))
    exists = tl.reshape(real, [ROWS * _C])
    key = tl.reshape((before * size + last)[:, None] * size + token, [ROWS * _C])
    trigrams = tl.reshape(_lookup(keys, counts, key, exists, bits, num_buckets), [ROWS, _C])
    key = tl.reshape((vocab * size + last)[:, None] * size + token, [ROWS * _C])
    bigrams = tl.reshape(_lookup(keys, counts, key, exists, bits, num_buckets), [ROWS, _C])
    seen = _lookup(keys, counts, (vocab * size + before) * size + last, judged, bits, num_buckets)
    follow = tl.load(followed + last, mask=judged, other=0.0)
    alone = tl.load(single + token, mask=real, other=1.0)
    ratio = tl.where(real, _log_ratio(trigrams, bigrams, seen[:, None], alone, follow[:, None]), 0.0)
    strength = tl.load(strengths + which)
    raw = tl.where(on_spine, 1.0, _BESIDE)[:, None] * value + strength[:, None] * ratio
    raw = tl.where(judged[:, None], raw, 0.0)
    probs = tl.exp(raw - tl.max(raw, 1)[:, None])
    probs = probs / tl.sum(probs, 1)[:, None]
    mean = tl.sum(probs * ratio, 1)
    variance = tl.sum(probs * ratio * ratio, 1) - mean * mean
    hit = real & (token == chosen[:, None])
    found = judged & (tl.sum(hit.to(tl.int32), 1) > 0)
    pull = tl.sum(tl.where(hit, ratio, 0.0), 1) - mean
    tl.debug_barrier()  # every thread has read the strengths
    for kind in tl.static_range(3):
        counted = found & (which == kind)
        held = tl.load(curvature + kind) + tl.sum(tl.where(counted, variance, 0.0), 0)
        moved = tl.load(strengths + kind) + tl.sum(tl.where(counted, pull, 0.0), 0) / held
        tl.debug_barrier()
        tl.store(curvature + kind, held)
        tl.store(strengths + kind, tl.minimum(tl.maximum(moved, 0.0), 1.0))


@triton.jit(do_not_specialize=_SIZES)
def _grams_kernel(
    token_ids, parents, target_ids, num_nodes, path, steps, before_root, weights, followed, grams, shares,
    nodes, vocab, BLOCK: tl.constexpr, PATH: tl.constexpr,
):  # fmt: skip
    """The bigram and the trigram that end in every node's pick, and what each counts; 0 for what is not there."""
    size = tl.cast(vocab, tl.int64) + 1
    node = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = node < nodes
    used = node < tl.load(num_nodes).to(tl.int32)
    last = tl.load(token_ids + node, mask=used, other=0).to(tl.int64)
    pick = tl.load(target_ids + node, mask=used, other=0).to(tl.int64)
    parent = tl.load(parents + node, mask=used, other=-1)
    before = tl.load(token_ids + parent, mask=used & (parent >= 0), other=0).to(tl.int64)
    before = tl.where(parent >= 0, before, tl.load(before_root))
    t = tl.arange(0, PATH)
    accepted = tl.load(path + t, mask=t < tl.load(steps).to(tl.int32), other=-1)
    on_path = tl.max((accepted[None, :] == node[:, None]).to(tl.int32), 1) == 1
    weight = tl.where(on_path, tl.load(weights), tl.load(weights + 1))
    weight = tl.where(used, weight, 0.0)
    tl.atomic_add(followed + last, weight, mask=weight > 0)  # whole numbers: any order gives the same sum
    tl.store(grams + node, (vocab * size + last) * size + pick, mask=inside)
    tl.store(grams + nodes + node, (before * size + last) * size + pick, mask=inside)
    tl.store(shares + node, weight, mask=inside)
    tl.store(shares + nodes + node, tl.where(before >= 0, weight, 0.0), mask=inside)


@triton.jit(do_not_specialize=_SIZES)
def _plan_kernel(
    keys, grams, shares, totals, slots, num_grams, bits, num_buckets, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    """What the first of equal n-grams counts in all, and its slot; -1 - occupied ways where it has none yet."""
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = e < num_grams
    key = tl.load(grams + e, mask=inside, other=_EMPTY)
    counts = tl.load(shares + e, mask=inside, other=0.0) > 0
    total = tl.zeros([BLOCK, CHUNK], tl.float32)
    earlier = tl.zeros([BLOCK, CHUNK], tl.int32)
    for first in range(0, num_grams, CHUNK):
        j = first + tl.arange(0, CHUNK)
        other = tl.load(grams + j, mask=j < num_grams, other=_EMPTY)
        share = tl.load(shares + j, mask=j < num_grams, other=0.0)
        same = (other[None, :] == key[:, None]) & (share > 0)[None, :]
        total += tl.where(same, share[None, :], 0.0)
        earlier += (same & (j[None, :] < e[:, None])).to(tl.int32)
    leads = inside & counts & (tl.sum(earlier, 1) == 0)
    bucket = ((key * _MIX) >> (64 - bits)) & (num_buckets - 1)
    way = tl.arange(0, _WAYS)[None, :]
    held = tl.load(keys + bucket[:, None] * _WAYS + way, mask=leads[:, None], other=_EMPTY)
    match = tl.max(tl.where(held == key[:, None], way, -1), 1)
    occupied = tl.sum((held != _EMPTY).to(tl.int32), 1)
    slot = tl.where(match >= 0, bucket * _WAYS + match, -1 - occupied)
    tl.store(totals + e, tl.sum(total, 1), mask=inside)
    tl.store(slots + e, tl.where(leads, slot, _UNUSED), mask=inside)


@triton.jit(do_not_specialize=_SIZES)
def _insert_kernel(
    keys, counts, grams, totals, slots, token_ids, path, steps, before_root, num_grams, bits, num_buckets,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Count into known slots; of a bucket's new n-grams the most frequent take its free ways, equal ones by key."""
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = e < num_grams
    key = tl.load(grams + e, mask=inside, other=_EMPTY)
    total = tl.load(totals + e, mask=inside, other=0.0)
    slot = tl.load(slots + e, mask=inside, other=_UNUSED)
    bucket = ((key * _MIX) >> (64 - bits)) & (num_buckets - 1)
    ahead = tl.zeros([BLOCK, CHUNK], tl.int32)
    for first in range(0, num_grams, CHUNK):
        j = first + tl.arange(0, CHUNK)
        other = tl.load(grams + j, mask=j < num_grams, other=_EMPTY)
        sum_there = tl.load(totals + j, mask=j < num_grams, other=0.0)
        slot_there = tl.load(slots + j, mask=j < num_grams, other=_UNUSED)
        is_new = (slot_there < 0) & (slot_there != _UNUSED)
        same = (((other * _MIX) >> (64 - bits)) & (num_buckets - 1))[None, :] == bucket[:, None]
        level = sum_there[None, :] == total[:, None]
        more = (sum_there[None, :] > total[:, None]) | (level & (other[None, :] < key[:, None]))
        ahead += (same & more & is_new[None, :]).to(tl.int32)
    is_known = slot >= 0
    tl.store(counts + slot, tl.load(counts + slot, mask=is_known, other=0.0) + total, mask=is_known)
    way = -1 - slot + tl.sum(ahead, 1)
    fits = (slot < 0) & (slot != _UNUSED) & (way < _WAYS)
    tl.store(keys + bucket * _WAYS + way, key, mask=fits)
    tl.store(counts + bucket * _WAYS + way, total, mask=fits)
    if tl.program_id(0) == 0:
        node = tl.load(path + tl.load(steps).to(tl.int32) - 1)
        tl.store(before_root, tl.load(token_ids + node).to(tl.int64))


def learning_scratch_for(token_ids: Tensor) -> Tensor:
    """The scratch that learning from a tree of these nodes needs, for callers that capture it."""
    return torch.empty(12 * token_ids.numel(), dtype=torch.float32, device=token_ids.device)


def learn_transitions(
    token_ids: Tensor,
    parents: Tensor,
    target_ids: Tensor,
    *,
    num_nodes: Tensor,
    path: Tensor,
    steps: Tensor,
    known: Transitions,
    drafted: tuple[Tensor, Tensor] | None = None,
    scratch: Tensor | None = None,
) -> None:
    """As the reference, in four launches, or three where nothing was drafted. scratch: from `learning_scratch_for`."""
    nodes, table = token_ids.numel(), known.table
    scratch = learning_scratch_for(token_ids) if scratch is None else scratch
    grams, slots = scratch[: 8 * nodes].view(torch.int64).split(2 * nodes)
    shares, totals = scratch[8 * nodes : 12 * nodes].split(2 * nodes)
    buckets = len(table.keys).bit_length() - 1, len(table.keys)
    if drafted is not None:
        values, ids = drafted
        _fit_kernel[(1,)](
            token_ids, parents, target_ids, path, steps, values, ids, known.before, known.strengths, known.curvature,
            table.keys, table.counts, table.single, table.followed,
            *values.shape, table.vocab_size, *buckets, *values.stride(), *ids.stride(),
            ROWS=triton.next_power_of_2(len(values)), num_warps=8,
        )  # fmt: skip
    block = 32
    _grams_kernel[(triton.cdiv(nodes, block),)](
        token_ids, parents, target_ids, num_nodes, path, steps, known.before, known.weights, table.followed, grams,
        shares, nodes, table.vocab_size, BLOCK=block, PATH=triton.next_power_of_2(path.numel()), num_warps=1,
    )  # fmt: skip
    grid = (triton.cdiv(2 * nodes, block),)
    _plan_kernel[grid](
        table.keys, grams, shares, totals, slots, 2 * nodes, *buckets, BLOCK=block, CHUNK=CHUNK, num_warps=2
    )
    _insert_kernel[grid](
        table.keys, table.counts, grams, totals, slots, token_ids, path, steps, known.before, 2 * nodes, *buckets,
        BLOCK=block, CHUNK=CHUNK, num_warps=2,
    )  # fmt: skip
