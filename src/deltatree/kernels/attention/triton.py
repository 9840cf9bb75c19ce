"""Attention over a tree, in Triton: the keys are split over the chip, and no mask of the committed rows exists.

The query heads of one key head and the nodes form the rows of one product. A program takes a block of those rows and one
share of the keys, committed rows first (all visible, no mask), the nodes' own rows last (the ancestor mask, [N, N]). Every
share leaves its mean (in the queries' dtype), maximum and weight; a second kernel combines them. How many rows are
committed is read on the device, so a captured launch serves every length up to the capacity.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deltatree.kernels.chaining import chaining


@triton.jit
def _fold(scores, top, weight, total, values, PRECISION: tl.constexpr):
    """One block of keys into the running maximum, weight and sum; scores are in units of log 2."""
    higher = tl.maximum(top, tl.max(scores, 1))
    anchor = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp2(top - anchor)
    shares = tl.exp2(scores - anchor[:, None])
    weight = weight * shrink + tl.sum(shares, 1)
    total = tl.dot(shares.to(values.dtype), values, total * shrink[:, None], input_precision=PRECISION)
    return higher, weight, total


@triton.jit
def _share_kernel(
    q, keys, values, ancestors, depths, committed, committed_here, means, tops, weights, out,
    N, H, rows_total, scale,
    sqb, sqh, sqn, sqd, skb, skh, skr, skd, svb, svh, svr, svd, sai, saj, sob, soh, son, sod,
    GROUP: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, DIRECT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    share, shares = tl.program_id(1), tl.num_programs(1)
    head = tl.program_id(2)
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    length = committed_here
    if committed is not None:
        length = tl.load(committed).to(tl.int32)
    end = length + N
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW + 1, 0) // BLOCK_KEYS * BLOCK_KEYS
    blocks = tl.cdiv(end - first, BLOCK_KEYS)
    each = tl.cdiv(blocks, shares) * BLOCK_KEYS
    low = first + share * each
    high = tl.minimum(low + each, end)

    d = tl.arange(0, BLOCK_D).to(tl.int64)
    md = d < D
    node = rows % N
    on = rows < GROUP * N
    query_head = h * GROUP + rows // N
    queries = tl.load(
        q + b * sqb + query_head[:, None] * sqh + node.to(tl.int64)[:, None] * sqn + d[None, :] * sqd,
        mask=on[:, None] & md[None, :], other=0.0,
    )  # fmt: skip
    keys += b * skb + h * skh
    values += b * svb + h * svh
    depth = tl.zeros([BLOCK_M], tl.int32)
    if WINDOW > 0:
        depth = tl.load(depths + node, mask=on, other=0).to(tl.int32)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    at = tl.arange(0, BLOCK_KEYS)
    plain_high = low
    if WINDOW == 0:  # whole blocks of committed rows
        plain_high = tl.maximum(low, tl.minimum(high, length // BLOCK_KEYS * BLOCK_KEYS))
    for start in range(low, plain_high, BLOCK_KEYS):
        row = (start + at).to(tl.int64)
        key = tl.load(keys + row[None, :] * skr + d[:, None] * skd, mask=md[:, None], other=0.0)
        scores = tl.dot(queries, key, input_precision=PRECISION) * scale
        value = tl.load(values + row[:, None] * svr + d[None, :] * svd, mask=md[None, :], other=0.0)
        top, weight, total = _fold(scores, top, weight, total, value, PRECISION)
    for start in range(plain_high, high, BLOCK_KEYS):
        row = start + at
        inside = row < end
        other = row - length
        fresh = (other >= 0) & inside
        seen = (
            tl.load(ancestors + node[:, None] * sai + other[None, :] * saj, mask=on[:, None] & fresh[None, :], other=0)
            != 0
        )
        seen = seen | (row < length)[None, :]
        if WINDOW > 0:
            place = row + tl.zeros([BLOCK_KEYS], tl.int32)
            place = tl.where(fresh, length + tl.load(depths + other, mask=fresh, other=0).to(tl.int32), place)
            seen = seen & (length + depth[:, None] - place[None, :] < WINDOW)
        row = row.to(tl.int64)
        key = tl.load(keys + row[None, :] * skr + d[:, None] * skd, mask=md[:, None] & inside[None, :], other=0.0)
        scores = tl.dot(queries, key, input_precision=PRECISION) * scale
        value = tl.load(values + row[:, None] * svr + d[None, :] * svd, mask=md[None, :] & inside[:, None], other=0.0)
        top, weight, total = _fold(tl.where(seen, scores, float("-inf")), top, weight, total, value, PRECISION)

    if DIRECT:
        place = out + b * sob + query_head[:, None] * soh + node.to(tl.int64)[:, None] * son + d[None, :] * sod
        tl.store(place, total / weight[:, None], mask=on[:, None] & md[None, :])
    else:
        slot = (head.to(tl.int64) * shares + share) * rows_total + rows
        tl.store(tops + slot, top, mask=on)
        tl.store(weights + slot, weight, mask=on)
        if low < high:
            mean = total / tl.where(weight > 0.0, weight, 1.0)[:, None]
            tl.store(means + slot[:, None] * D + d[None, :], mean, mask=on[:, None] & md[None, :])


@triton.jit
def _combine_kernel(
    means, tops, weights, out, N, H, rows_total, sob, soh, son, sod,
    SHARES: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """ROWS rows, one share of them after the other: nothing that is loaded depends on what came before."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    head = tl.program_id(1)
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    md = d < D
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    on = rows < rows_total
    slot = head.to(tl.int64) * SHARES * rows_total + rows
    best = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for _ in tl.range(0, SHARES, loop_unroll_factor=8):
        top = tl.load(tops + slot, mask=on, other=float("-inf"))
        own = tl.load(weights + slot, mask=on, other=0.0)  # 0 where a share saw nothing, and its mean was not written
        part = tl.load(means + slot[:, None] * D + d[None, :], mask=(own > 0.0)[:, None] & md[None, :], other=0.0)
        higher = tl.maximum(best, top)
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        shrink, factor = tl.exp2(best - anchor), tl.exp2(top - anchor) * own
        total = total * shrink[:, None] + part.to(tl.float32) * factor[:, None]
        weight = weight * shrink + factor
        best = higher
        slot += rows_total
    total /= tl.where(on, weight, 1.0)[:, None]
    query_head = h * GROUP + rows // N
    place = out + b * sob + query_head[:, None] * soh + (rows % N).to(tl.int64)[:, None] * son + d[None, :] * sod
    tl.store(place, total, mask=on[:, None] & md[None, :])


@functools.cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    """Shared memory that one block may have: about 100 KB on compute capability 8.6, 8.9 and 12, 160 or more elsewhere."""
    on_gpu = device.type == "cuda"
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0) if on_gpu else 1 << 30


def block_sizes(rows: int, head_dim: int, itemsize: int, shared_bytes: int) -> dict[str, int]:
    """The launch of the share kernel: a fixed table by rows (query heads of one key head x nodes) and head size."""
    if itemsize > 2:
        return {"BLOCK_M": 32 if rows > 16 else 16, "BLOCK_KEYS": 32, "num_warps": 4, "num_stages": 1}
    if shared_bytes < 160_000:
        block_m = min(64, max(16, triton.next_power_of_2(rows)))
        return {"BLOCK_M": block_m, "BLOCK_KEYS": 32, "num_warps": 4, "num_stages": 2 if head_dim <= 128 else 1}
    if rows <= 64:
        block_m = max(16, triton.next_power_of_2(rows))
        return {"BLOCK_M": block_m, "BLOCK_KEYS": 64, "num_warps": 4, "num_stages": 3 if head_dim <= 128 else 2}
    return {"BLOCK_M": 128, "BLOCK_KEYS": 64, "num_warps": 8, "num_stages": 3 if head_dim <= 128 else 2}


def num_shares(q: Tensor, keys: Tensor, launch: dict[str, int]) -> int:
    """Into how many shares the keys are split: as many as fill the chip, at most one per block of the capacity."""
    batch, heads, nodes, _ = q.shape
    row_blocks = triton.cdiv(heads // keys.shape[1] * nodes, launch["BLOCK_M"])
    fill = max(1, _num_processors(q.device) // (row_blocks * batch * keys.shape[1]))
    return min(fill, 128, triton.cdiv(keys.shape[2], launch["BLOCK_KEYS"]))


def _floats(q: Tensor, shares: int) -> int:
    """Size of the scratch: a mean in q's dtype, a maximum and a weight in float32 for each row and share."""
    slots = q[..., 0].numel() * shares
    return 2 * slots + -(-slots * q.shape[3] * q.element_size() // 4)


def scratch_for(q: Tensor, keys: Tensor, launch: dict[str, int] | None = None) -> Tensor:
    """The scratch that a call with these shapes needs, for callers that capture it."""
    sizes = block_sizes(
        q.shape[1] // keys.shape[1] * q.shape[2], q.shape[3], q.element_size(), _shared_bytes(q.device)
    ) | (launch or {})
    shares = sizes.get("shares") or num_shares(q, keys, sizes)
    return torch.empty(_floats(q, shares), dtype=torch.float32, device=q.device)


def tree_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    ancestors: Tensor,
    length: Tensor | int,
    scale: float | None = None,
    depths: Tensor | None = None,
    window: int | None = None,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
    launch: dict[str, int] | None = None,
) -> Tensor:
    """As the reference, summed in float32. scratch: from `scratch_for`. launch: overrides `block_sizes`, to measure."""
    batch, heads, nodes, dim = q.shape
    key_heads = keys.shape[1]
    rows = heads // key_heads * nodes
    sizes = block_sizes(rows, dim, q.element_size(), _shared_bytes(q.device)) | (launch or {})
    shares = sizes.pop("shares", None) or num_shares(q, keys, sizes)
    out = torch.empty_like(q) if out is None else out
    if scratch is None:
        scratch = scratch_for(q, keys, {**sizes, "shares": shares})
    slots = batch * heads * nodes * shares
    tops, weights, means = scratch[:slots], scratch[slots:], scratch[2 * slots :].view(q.dtype)
    seen = ancestors if ancestors.dtype == torch.uint8 else ancestors.to(q.device).view(torch.uint8)
    on_device = isinstance(length, torch.Tensor)
    block_d = max(16, triton.next_power_of_2(dim))
    grid = (triton.cdiv(rows, sizes["BLOCK_M"]), shares, batch * key_heads)
    _share_kernel[grid](
        q, keys, values, seen, None if window is None else depths.to(q.device),
        length if on_device else None, 0 if on_device else length, means, tops, weights, out,
        nodes, key_heads, rows, (dim**-0.5 if scale is None else scale) * 1.4426950408889634,
        *q.stride(), *keys.stride(), *values.stride(), *seen.stride(), *out.stride(),
        GROUP=heads // key_heads, D=dim, WINDOW=window or 0, DIRECT=shares == 1, BLOCK_D=block_d,
        PRECISION="tf32x3", **sizes, **chaining(q.device),
    )  # fmt: skip
    if shares > 1:
        at_once = 4 if rows >= 64 else 1  # one warp a row
        _combine_kernel[(triton.cdiv(rows, at_once), batch * key_heads)](
            means, tops, weights, out, nodes, key_heads, rows, *out.stride(),
            SHARES=shares, GROUP=heads // key_heads, D=dim, ROWS=at_once, BLOCK_D=block_d, num_warps=at_once,
            **chaining(q.device),
        )  # fmt: skip
    return out
