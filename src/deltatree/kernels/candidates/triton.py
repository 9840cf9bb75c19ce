"""The best tokens of every depth in two launches, exact whatever the logits are.

Tokens stand in groups of `GROUP` consecutive ids. The k best tokens of a row are in its k best groups, when groups are
ordered by their best token and equal ones by their place: any other group has k tokens ahead of each of its own. So the
first launch keeps one number a group (and a share of the sum of exponentials), and the second, one program a row, finds
the k best groups, reads their tokens again and finds the k best of those. Both searches set the bits of the k-th largest
number one by one, counting how many numbers reach it; both lists come out in order of ids, which settles ties.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltatree.kernels.candidates.reference import check_k

GROUP = 32
"""Consecutive tokens a group; as many groups as their tokens, for a vocabulary of 248,320 and k = 256."""

BLOCK_GROUPS = 128
"""Groups a program of the first launch."""


@triton.jit
def _ordered(x):
    """float32 to uint32 of the same order, 0 below all."""
    bits = x.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _best_places(keys, k):
    """Where the k largest keys go, in the order they stand in, or -1; of equal ones the first win. Key 0 is never taken."""
    lowest = tl.zeros([], tl.uint32)
    bit = tl.full([], 0x80000000, tl.uint32)
    for _ in range(32):
        enough = tl.sum((keys >= (lowest | bit)).to(tl.int32), 0) >= k
        lowest = tl.where(enough, lowest | bit, lowest)
        bit = bit >> 1
    above, level = keys > lowest, (keys == lowest) & (keys > 0)
    room = k - tl.sum(above.to(tl.int32), 0)
    # one running count for both: above in the upper half, level in the lower
    counts = tl.cumsum((above.to(tl.int32) << 16) + level.to(tl.int32), 0)
    before = counts & 0xFFFF
    chosen = above | (level & (before <= room))
    return tl.where(chosen, (counts >> 16) + tl.minimum(before, room) - 1, -1)


@triton.jit
def _groups_kernel(
    logits, tops, maxima, sums, vocab, num_groups, sld, slv,
    GROUP: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
):  # fmt: skip
    row, share = tl.program_id(1).to(tl.int64), tl.program_id(0)
    group = share * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(logits + row * sld + token.to(tl.int64) * slv, mask=token < vocab, other=float("-inf")).to(tl.float32)
    top = tl.max(x, 1)
    tl.store(tops + row * num_groups + group, top, mask=group < num_groups)
    peak = tl.max(top, 0)
    anchor = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.sum(tl.exp(x - anchor), 1), 0)
    place = row * tl.num_programs(0) + share
    tl.store(maxima + place, peak)
    tl.store(sums + place, total)


@triton.jit
def _select_kernel(
    logits, tops, maxima, sums, chosen, found, found_ids, values, ids,
    vocab, num_groups, shares, k, groups_taken, sld, slv, svd, svk, sid, sik,
    GROUP: tl.constexpr, BLOCK_SHARES: tl.constexpr, BLOCK_GROUPS: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_J: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    share = tl.arange(0, BLOCK_SHARES)
    peaks = tl.load(maxima + row * shares + share, mask=share < shares, other=float("-inf"))
    parts = tl.load(sums + row * shares + share, mask=share < shares, other=0.0)
    peak = tl.max(peaks, 0)
    # each share is below 1 + its size, so no sum overflows; the whole is at least 1, its log at least 0
    weight = tl.maximum(tl.log(tl.sum(tl.exp(peaks - peak) * parts, 0)), 0.0)

    group = tl.arange(0, BLOCK_GROUPS)
    top = tl.load(tops + row * num_groups + group, mask=group < num_groups, other=float("-inf"))
    keys = tl.where(group < num_groups, _ordered((top - peak) - weight), 0)
    place = _best_places(keys, groups_taken)
    tl.store(chosen + row * k + place, group, mask=place >= 0)
    tl.debug_barrier()

    slot = tl.arange(0, BLOCK_K * GROUP)
    taken = slot < groups_taken * GROUP
    token = tl.load(chosen + row * k + slot // GROUP, mask=taken, other=0) * GROUP + slot % GROUP
    taken = taken & (token < vocab)
    x = tl.load(logits + row * sld + token.to(tl.int64) * slv, mask=taken, other=float("-inf")).to(tl.float32)
    x = (x - peak) - weight
    place = _best_places(tl.where(taken, _ordered(x), 0), k)
    tl.store(found + row * k + place, x, mask=place >= 0)
    tl.store(found_ids + row * k + place, token, mask=place >= 0)
    tl.debug_barrier()

    # The k found stand in order of ids: one's rank is how many are larger, or equal and before it. (Keys and not numbers
    # are compared, so that every rank is given out even if the logits are NaN.)
    i = tl.arange(0, BLOCK_K)
    value = tl.load(found + row * k + i, mask=i < k, other=float("-inf"))
    key, rank = _ordered(value), tl.zeros([BLOCK_K], tl.int32)
    for first in range(0, k, BLOCK_J):
        j = first + tl.arange(0, BLOCK_J)
        other = _ordered(tl.load(found + row * k + j, mask=j < k, other=float("-inf")))
        ahead = (other[None, :] > key[:, None]) | ((other[None, :] == key[:, None]) & (j[None, :] < i[:, None]))
        rank += tl.sum((ahead & (j < k)[None, :]).to(tl.int32), 1)
    tl.store(values + row * svd + rank * svk, value, mask=i < k)
    tl.store(ids + row * sid + rank * sik, tl.load(found_ids + row * k + i, mask=i < k, other=0), mask=i < k)


def _sizes(logits: Tensor, k: int) -> tuple[int, int, int]:
    """k as far as there are tokens, groups and shares of a row."""
    vocab = logits.shape[1]
    groups = triton.cdiv(vocab, GROUP)
    return min(k, vocab), groups, triton.cdiv(groups, BLOCK_GROUPS)


def scratch_for(logits: Tensor, k: int) -> Tensor:
    """The scratch that a call with these shapes needs, for callers that capture it: about vocab / 8 bytes a row."""
    k, groups, shares = _sizes(logits, k)
    return torch.empty(logits.shape[0] * (groups + 2 * shares + 3 * k), dtype=torch.float32, device=logits.device)


def top_candidates(
    logits: Tensor, k: int, *, out: tuple[Tensor, Tensor] | None = None, scratch: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As the reference, with a sum of exponentials of its own. scratch: from `scratch_for`."""
    check_k(k)
    k, groups, shares = _sizes(logits, k)
    depths, vocab = logits.shape
    if out is None:
        values = torch.empty(depths, k, dtype=torch.float32, device=logits.device)
        out = values, torch.empty(depths, k, dtype=torch.int64, device=logits.device)
    if depths == 0:
        return out
    scratch = scratch_for(logits, k) if scratch is None else scratch
    counts = [depths * n for n in (groups, shares, shares, k, k, k)]
    tops, maxima, sums, chosen, found, found_ids = scratch[: sum(counts)].split(counts)
    _groups_kernel[(shares, depths)](
        logits, tops, maxima, sums, vocab, groups, *logits.stride(), GROUP=GROUP, BLOCK_GROUPS=BLOCK_GROUPS, num_warps=4
    )
    _select_kernel[(depths,)](
        logits, tops, maxima, sums, chosen.view(torch.int32), found, found_ids.view(torch.int32), *out,
        vocab, groups, shares, k, min(k, groups), *logits.stride(), *out[0].stride(), *out[1].stride(),
        GROUP=GROUP, BLOCK_SHARES=triton.next_power_of_2(shares), BLOCK_GROUPS=triton.next_power_of_2(groups),
        BLOCK_K=triton.next_power_of_2(k), BLOCK_J=32, num_warps=16 if vocab > 2**16 else 8,
    )  # fmt: skip
    return out
