"""The transition tree in Triton: three launches to build it and four to learn from it, however many nodes it has.

`_pairs_kernel` looks up what needs no tree: how often each candidate follows each one of the depth before.
`_grow_kernel`, one program, keeps the best nodes found so far in a *pool*, best first. Each turn it takes the best
ones whose children are not known yet, some at once (one table lookup costs as much as many), scores their children,
drops those that are no better than the worst of a full pool, and merges the others in: an entry's place is the number
of better ones. No child outranks its parent, so once no node is left to take, the pool is the tree. One entry is one
integer that is compared as a whole:

    score (32 bits, of the order of the float32 number)
    31 - depth (5 bits) | 511 - parent (9) | 63 - rank (6) | on the spine (1) | taken (1)

The parent is its place in the pool + 1, renumbered at every merge; so equal scores are ordered by depth, parent and
rank as in the reference, and the last two bits decide nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltatree.kernels.transition_tree.reference import CANDIDATES, Transitions, check_candidates
from deltatree.kernels.tree_build.reference import TreeBuffers, check_sizes
from deltatree.kernels.tree_build.triton import _order_of, _relate_kernel, _score_of
from deltatree.transitions import table as layout
from deltatree.transitions.policy import BESIDE

_NOTHING = tl.constexpr(-(1 << 63))
"""No entry: below every packed one."""
_EMPTY = tl.constexpr(layout._EMPTY)
_MIX = tl.constexpr(layout._MIX)
_WAYS = tl.constexpr(layout.WAYS)
_TRIGRAM_BACKOFF = tl.constexpr(layout.TRIGRAM_BACKOFF)
_BIGRAM_BACKOFF = tl.constexpr(layout.BIGRAM_BACKOFF)
_BESIDE = tl.constexpr(BESIDE)
_C = tl.constexpr(CANDIDATES)
_FIRST_TAKEN = tl.constexpr(8)
"""Nodes a turn while the pool has room: their children are all merged in, so more would cost more than they save."""
_UNUSED = tl.constexpr(-64)
"""In place of a slot: the entry inserts nothing."""

_SIZES = ["budget", "D", "C", "nodes", "num_grams", "vocab", "bits", "num_buckets", "svd", "sid"]
"""Arguments that a kernel is not compiled anew for."""

RANKS = 8
"""Contexts a program of the first launch: so that a block of 16 takes one wave of an H200."""

CHUNK = 32
"""Entries that are compared with as many others at once."""


@triton.jit
def _lookup(keys, counts, key, exists, bits, num_buckets):
    """How often n-grams were seen. key: [n] int64; exists: [n], which to look up -> [n] float32"""
    bucket = ((key * _MIX) >> (64 - bits)) & (num_buckets - 1)
    at = bucket[:, None] * _WAYS + tl.arange(0, _WAYS)[None, :]
    hit = tl.load(keys + at, mask=exists[:, None], other=_EMPTY) == key[:, None]
    return tl.sum(tl.load(counts + at, mask=hit & exists[:, None], other=0.0), 1)


@triton.jit
def _log_ratio(trigrams, bigrams, seen, single, followed):
    """log(p(token | two before) / p(token)) by backing off from trigrams to bigrams to single tokens."""
    double = (bigrams + _BIGRAM_BACKOFF * single) / (followed + _BIGRAM_BACKOFF)
    triple = (trigrams + _TRIGRAM_BACKOFF * double) / (tl.maximum(seen, trigrams) + _TRIGRAM_BACKOFF)
    return tl.log(triple / single)


@triton.jit(do_not_specialize=_SIZES)
def _pairs_kernel(
    values, ids, root, before, keys, counts, single, followed, pairs, singles, follows, masses, seen_root,
    C, vocab, bits, num_buckets, svd, svc, sid, sic, RANKS: tl.constexpr,
):  # fmt: skip
    depth, rank = tl.program_id(0), tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    size = tl.cast(vocab, tl.int64) + 1
    c = tl.arange(0, _C)
    here = (rank < C) & ((depth > 0) | (rank == 0))  # the root is the one context of depth 0
    real = c < C
    token = tl.load(ids + depth * sid + c * sic, mask=real, other=0).to(tl.int64)
    above = tl.load(ids + (depth - 1) * sid + rank * sic, mask=here & (depth > 0), other=0).to(tl.int64)
    root_token = tl.load(root).to(tl.int64)
    last = tl.where(depth > 0, above, root_token)
    key = tl.reshape((vocab * size + last)[:, None] * size + token[None, :], [RANKS * _C])
    exists = tl.reshape(here[:, None] & real[None, :], [RANKS * _C])
    found = _lookup(keys, counts, key, exists, bits, num_buckets)
    tl.store(pairs + (depth * _C + tl.program_id(1) * RANKS) * _C + tl.arange(0, RANKS * _C), found)
    tl.store(follows + depth * _C + rank, tl.load(followed + last, mask=here, other=0.0))
    if tl.program_id(1) == 0:
        tl.store(singles + depth * _C + c, tl.load(single + token, mask=real, other=1.0))
        value = tl.load(values + depth * svd + c * svc, mask=real, other=float("-inf"))
        tl.store(masses + depth, tl.minimum(tl.log(tl.sum(tl.exp(value), 0)), 0.0))
        first = (c == 0) & (depth == 0)
        start = (vocab * size + tl.load(before)) * size + root_token + tl.zeros([_C], tl.int64)
        seen = _lookup(keys, counts, start, first, bits, num_buckets)
        tl.store(seen_root + c, seen, mask=first)


@triton.jit
def _depth_of(entry):
    return 31 - ((entry >> 17) & 31).to(tl.int32)


@triton.jit
def _parent_of(entry):
    return 511 - ((entry >> 8) & 511).to(tl.int32)


@triton.jit
def _rank_of(entry):
    return 63 - ((entry >> 2) & 63).to(tl.int32)


@triton.jit
def _entry(score, depth, parent, rank, on_spine):
    low = ((31 - depth) << 17) | ((511 - parent) << 8) | ((63 - rank) << 2) | (on_spine.to(tl.int32) << 1)
    return (_order_of(score).to(tl.int64) << 32) | low.to(tl.int64)


@triton.jit
def _num_better(entries, count, mine, CHUNK: tl.constexpr):
    """How many of the first `count` entries are better than each of mine."""
    better = tl.zeros([mine.shape[0], CHUNK], tl.int32)
    for first in range(0, count, CHUNK):
        j = first + tl.arange(0, CHUNK)
        other = tl.load(entries + j, mask=j < count, other=_NOTHING)
        better += (other[None, :] > mine[:, None]).to(tl.int32)
    return tl.sum(better, 1)


@triton.jit
def _moved(entry, exists, place):
    """An entry whose parent's number is its new place + 1."""
    parent = _parent_of(entry)
    has_parent = exists & (parent > 0)
    new = tl.load(place + parent - 1, mask=has_parent, other=-1).to(tl.int32) + 1
    return tl.where(has_parent, entry + ((parent - new).to(tl.int64) << 8), entry)


@triton.jit(do_not_specialize=_SIZES)
def _grow_kernel(
    values, ids, root, before_root, strengths, keys, counts, pairs, singles, follows, masses, seen_root,
    pool, fresh, place, picks, token_ids, parents, depths, scores, num_nodes,
    budget, D, C, vocab, bits, num_buckets, svd, svc, sid, sic,
    CHAIN: tl.constexpr, SLOTS: tl.constexpr, TAKEN: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    FIRST: tl.constexpr = TAKEN if TAKEN < _FIRST_TAKEN else _FIRST_TAKEN
    size = tl.cast(vocab, tl.int64) + 1
    root_token, before_token = tl.load(root).to(tl.int64), tl.load(before_root)
    slot, c, k = tl.arange(0, SLOTS), tl.arange(0, _C)[None, :], tl.arange(0, TAKEN)
    tl.store(pool + slot, tl.full([SLOTS], _NOTHING, tl.int64))
    tl.store(picks + k, tl.full([TAKEN], -1, tl.int64))  # the root alone is taken first; it is no entry
    count = tl.zeros([], tl.int32)
    num_taken = ((D > 0) & (C > 0) & (budget > 0)).to(tl.int32) + count
    tl.debug_barrier()
    while num_taken > 0:
        # The taken nodes and where they stand.
        at = tl.load(picks + k, mask=k < num_taken, other=-1).to(tl.int32)
        is_node = at >= 0
        entry = tl.load(pool + at, mask=is_node, other=0)
        score = tl.where(is_node, _score_of((entry >> 32).to(tl.int32)), 0.0)
        depth = tl.where(is_node, _depth_of(entry), 0)
        rank = tl.where(is_node, _rank_of(entry), 0)
        on_spine = tl.where(is_node, (entry >> 1) & 1, 1) == 1
        parent = tl.where(is_node, _parent_of(entry), 0)
        rank_above = _rank_of(tl.load(pool + parent - 1, mask=parent > 0, other=0))
        last = tl.load(ids + (depth - 1) * sid + rank * sic, mask=depth > 0, other=0).to(tl.int64)
        last = tl.where(depth > 0, last, root_token)
        above = tl.load(ids + (depth - 2) * sid + rank_above * sic, mask=depth > 1, other=0).to(tl.int64)
        before = tl.where(depth > 1, above, tl.where(depth > 0, root_token, before_token))
        # seen: how often the node's token followed the one before it; among the pairs of the depth above
        rank_seen = tl.where(depth > 1, rank_above, 0)
        seen = tl.load(pairs + ((depth - 1) * _C + rank_seen) * _C + rank, mask=depth > 0, other=0.0)
        seen = tl.where(depth > 0, seen, tl.load(seen_root))
        follow = tl.load(follows + depth * _C + rank)

        # Their children's scores.
        real = (k < num_taken)[:, None] & (c < C)
        token = tl.load(ids + depth[:, None] * sid + c * sic, mask=real, other=0).to(tl.int64)
        value = tl.load(values + depth[:, None] * svd + c * svc, mask=real, other=float("-inf"))
        single = tl.load(singles + depth[:, None] * _C + c)
        bigrams = tl.load(pairs + (depth * _C + rank)[:, None] * _C + c)
        key = tl.reshape((before * size + last)[:, None] * size + token, [TAKEN * _C])
        trigrams = _lookup(keys, counts, key, tl.reshape(real, [TAKEN * _C]), bits, num_buckets)
        trigrams = tl.reshape(trigrams, [TAKEN, _C])
        ratio = _log_ratio(trigrams, bigrams, seen[:, None], single, follow[:, None])
        strength = tl.load(strengths + tl.where(on_spine, (depth > 0).to(tl.int32), 2))
        raw = tl.where(on_spine, 1.0, _BESIDE)[:, None] * value + strength[:, None] * ratio
        raw = raw - tl.max(raw, 1)[:, None]
        raw = raw + (tl.load(masses + depth) - tl.log(tl.sum(tl.exp(raw), 1)))[:, None]
        child = score[:, None] + tl.minimum(raw, 0.0)
        rank_here = c + tl.zeros([TAKEN, _C], tl.int32)
        new = _entry(child, depth[:, None] + 1, at[:, None] + 1, rank_here, on_spine[:, None] & (rank_here == 0))
        worst = tl.load(pool + budget - 1)  # nothing as long as there is room
        new = tl.where(real & (child > float("-inf")) & ((new >> 2) > (worst >> 2)), new, _NOTHING)
        if CHAIN:
            new = tl.where(new == tl.max(new, 1)[:, None], new, _NOTHING)
        new = tl.reshape(new, [TAKEN * _C])
        kept = new != _NOTHING
        tl.store(fresh + tl.cumsum(kept.to(tl.int32), 0) - 1, new, mask=kept)
        num_fresh = tl.sum(kept.to(tl.int32), 0)
        tl.debug_barrier()

        # Everyone's place among old and new.
        old = tl.load(pool + slot)
        old_place = slot + _num_better(fresh, num_fresh, old, CHUNK)
        tl.store(place + slot, old_place.to(tl.int64))
        for first in range(0, num_fresh, CHUNK):
            j = first + tl.arange(0, CHUNK)
            mine = tl.load(fresh + j, mask=j < num_fresh, other=_NOTHING)
            better = _num_better(pool, count, mine, CHUNK) + _num_better(fresh, num_fresh, mine, CHUNK)
            tl.store(place + SLOTS + j, better.to(tl.int64), mask=j < num_fresh)
        tl.debug_barrier()
        old = _moved(old, old != _NOTHING, place)
        tl.store(pool + old_place, tl.where(old_place < budget, old, _NOTHING), mask=old_place < SLOTS)
        for first in range(0, num_fresh, CHUNK):
            j = first + tl.arange(0, CHUNK)
            mine = _moved(tl.load(fresh + j, mask=j < num_fresh, other=_NOTHING), j < num_fresh, place)
            to = tl.load(place + SLOTS + j, mask=j < num_fresh, other=SLOTS).to(tl.int32)
            tl.store(pool + to, tl.where(to < budget, mine, _NOTHING), mask=to < SLOTS)
        count = tl.minimum(count + num_fresh, budget)
        tl.debug_barrier()

        # The best ones whose children are not known come next.
        entries = tl.load(pool + slot)
        tl.debug_barrier()
        waits = (entries != _NOTHING) & ((entries & 1) == 0) & (_depth_of(entries) < D)
        order = tl.cumsum(waits.to(tl.int32), 0)
        takes = waits & (order <= tl.where(count < budget, FIRST, TAKEN))
        tl.store(pool + slot, entries | 1, mask=takes)
        tl.store(picks + order - 1, slot.to(tl.int64), mask=takes)
        num_taken = tl.sum(takes.to(tl.int32), 0)
        tl.debug_barrier()

    entries = tl.load(pool + slot)
    exists = entries != _NOTHING
    depth = tl.where(exists, _depth_of(entries), 0)
    drafted = tl.load(ids + (depth - 1) * sid + _rank_of(entries) * sic, mask=exists, other=0).to(tl.int64)
    inside = slot < budget
    tl.store(token_ids + 1 + slot, drafted, mask=inside)
    tl.store(parents + 1 + slot, tl.where(exists, _parent_of(entries), 0), mask=inside)
    tl.store(depths + 1 + slot, depth, mask=inside)
    score = tl.where(exists, _score_of((entries >> 32).to(tl.int32)), float("-inf"))
    tl.store(scores + 1 + slot, score, mask=inside)
    tl.store(token_ids, root_token)
    tl.store(parents, -1)
    tl.store(depths, 0)
    tl.store(scores, 0.0)
    tl.store(num_nodes, 1 + count)


def _shape(budget: int) -> tuple[int, int, int]:
    """Of a tree: slots of the pool, nodes taken at once, warps."""
    taken, warps = (8, 4) if budget <= 32 else (16, 8) if budget <= 128 else (32, 16)
    return max(32, triton.next_power_of_2(budget)), taken, warps


def _split(scratch: Tensor, counts: list[int]) -> list[Tensor]:
    return list(scratch[: sum(counts)].split(counts))


def _build_counts(depths: int, budget: int) -> tuple[list[int], list[int]]:
    """Integers of 64 bits and of 32: of the pool, and of what is looked up beforehand."""
    slots, taken, _ = _shape(budget)
    whole = [slots, taken * CANDIDATES, slots + taken * CANDIDATES, taken]
    rows = max(depths, 1) * CANDIDATES
    return whole, [rows * CANDIDATES, rows, rows, max(depths, 1), 1]


def scratch_for(values: Tensor, budget: int) -> Tensor:
    """The scratch that a tree needs, for callers that capture it: 16 KB a depth, and some."""
    whole, halves = _build_counts(len(values), budget)
    return torch.empty(2 * sum(whole) + sum(halves), dtype=torch.float32, device=values.device)


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
) -> TreeBuffers:
    """As the reference, in three launches. scratch: from `scratch_for`."""
    check_sizes(values, budget, out)
    check_candidates(values)
    out = TreeBuffers.empty(budget + 1, kernel, values.device) if out is None else out
    scratch = scratch_for(values, budget) if scratch is None else scratch
    root = torch.as_tensor(root, device=values.device)
    (depths, width), nodes, table = values.shape, budget + 1, known.table
    whole, halves = _build_counts(depths, budget)
    pool, fresh, place, picks = _split(scratch[: 2 * sum(whole)].view(torch.int64), whole)
    looked_up = _split(scratch[2 * sum(whole) :], halves)
    sizes = width, table.vocab_size, len(table.keys).bit_length() - 1, len(table.keys), *values.stride(), *ids.stride()
    if depths:
        _pairs_kernel[(depths, CANDIDATES // RANKS)](
            values, ids, root, known.before, table.keys, table.counts, table.single, table.followed, *looked_up, *sizes,
            RANKS=RANKS, num_warps=4,
        )  # fmt: skip
    slots, taken, warps = _shape(budget)
    _grow_kernel[(1,)](
        values, ids, root, known.before, known.strengths, table.keys, table.counts, *looked_up,
        pool, fresh, place, picks, out.token_ids, out.parents, out.depths, out.scores, out.num_nodes,
        budget, depths, *sizes, CHAIN=chain, SLOTS=slots, TAKEN=1 if chain else taken, CHUNK=CHUNK,
        num_warps=2 if chain else warps,
    )  # fmt: skip
    block_i = 4
    _relate_kernel[(triton.cdiv(nodes, block_i),)](
        out.parents, out.num_nodes, out.ancestors, out.rows, nodes, *out.ancestors.stride(), *out.rows.stride(),
        depths, KERNEL=out.rows.shape[1], BLOCK_I=block_i, BLOCK_J=triton.next_power_of_2(nodes), num_warps=2,
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
