"""Attention over a tree, in Triton: the keys are split over the chip, and no mask of the committed rows exists.

The query heads of one key head and the nodes form the rows of one product. The blocks of keys of all key heads, those
of committed rows first (all visible, no mask), the nodes' own rows last (the ancestor mask, [N, N]), form one line that
is cut into equal shares; a program takes a block of rows and one share. The nodes' rows begin a block of their own:
the mask's columns then lie in words that are copied beside the keys; else every thread would load bytes, each at an
address of its own. How many rows are committed is read on the device, so a captured launch serves every length, and a
short text in large buffers is cut into fewer shares. What a share finds for one key head is a *part*: a mean (in the
queries' dtype), a maximum and a weight for each row. The parts of a row lie side by side. A second kernel combines them
in the order of the keys.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deltatree.kernels.chaining import chaining
from deltatree.kernels.fetch import fetch_ahead


@triton.jit
def _cut(length, N, heads, shares, least, WINDOW: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """The first row that a node may see, blocks of keys from there on for each head, and how many shares they make."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW + 1, 0) // BLOCK_KEYS * BLOCK_KEYS
    blocks = tl.cdiv(length - first, BLOCK_KEYS) + tl.cdiv(N, BLOCK_KEYS)
    return first, blocks, tl.minimum(shares, heads * tl.maximum(blocks // least, 1))


@triton.jit
def _length(committed, committed_here):
    length = committed_here
    if committed is not None:
        length = tl.load(committed).to(tl.int32)
    return length


@triton.jit
def _fetch_first(
    keys, values, first, length, blocks, shares, H, heads, skb, skh, skr, svb, svh, svr,
    D: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Ask the cache for the first block of committed rows of this program's share."""
    block = tl.minimum(tl.program_id(1), shares - 1) * (heads * blocks) // shares
    head = block // blocks
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    row = first + (block % blocks) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    wanted = (row < length) & (tl.program_id(1) < shares)
    fetch_ahead(keys + b * skb + h * skh, row, wanted, skr, 0, D, BLOCK_D)
    fetch_ahead(values + b * svb + h * svh, row, wanted, svr, 0, D, BLOCK_D)


@triton.jit
def _fold(scores, scale, top, weight, total, values, PRECISION: tl.constexpr):
    """One block of keys into the running maximum, weight and sum. scale: above 0, makes units of log 2 of the scores."""
    higher = tl.maximum(top, tl.max(scores, 1) * scale)
    anchor = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp2(top - anchor)
    shares = tl.exp2(scores * scale - anchor[:, None])
    weight = weight * shrink + tl.sum(shares, 1)
    total = tl.dot(shares.to(values.dtype), values, total * shrink[:, None], input_precision=PRECISION)
    return higher, weight, total


@triton.jit
def _gated(x, gate, place, mask, dtype: tl.constexpr):
    """x in `dtype`, times sigmoid(gate) if there is one."""
    x = x.to(dtype)
    if gate is not None:
        x = x.to(tl.float32) * tl.sigmoid(tl.load(gate + place, mask=mask, other=0.0).to(tl.float32))
    return x


@triton.jit(do_not_specialize=["most_shares", "least", "srow", "spart", "committed_here"])
def _share_kernel(
    q, keys, values, ancestors, depths, committed, committed_here, means, tops, weights, gate, out,
    N, H, heads, most_shares, least, srow, spart, scale,
    sqb, sqh, sqn, sqd, skb, skh, skr, skd, svb, svh, svr, svd, sai, saj, sgb, sgh, sgn, sgd, sob, soh, son, sod,
    GROUP: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, DIRECT: tl.constexpr, ACROSS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
    FETCH: tl.constexpr, AHEAD: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """heads: key heads of the whole batch    ACROSS: whether a share may reach over several of them.

    srow, spart: between the parts of two rows, and between two parts of one row
    least: blocks that a share has, where the text has that many; more than 1 was slower for every tree
    FETCH: ask for a share's first block before the kernel ahead has finished; what is read for that decides nothing else.
    AHEAD: ask for blocks so many steps before they are copied; 0 for not at all.
    """
    if CHAINED:
        if FETCH:
            early = _length(committed, committed_here)
            start, early_blocks, early_shares = _cut(early, N, heads, most_shares, least, WINDOW, BLOCK_KEYS)
            _fetch_first(
                keys, values, start, early, early_blocks, early_shares, H, heads, skb, skh, skr, svb, svh, svr,
                D, BLOCK_KEYS, BLOCK_D,
            )  # fmt: skip
        gdc_wait()
        gdc_launch_dependents()
    length = _length(committed, committed_here)
    end = length + N
    first, blocks, shares = _cut(length, N, heads, most_shares, least, WINDOW, BLOCK_KEYS)
    old_blocks = tl.cdiv(length - first, BLOCK_KEYS)  # of committed rows
    share = tl.program_id(1)
    begin = tl.minimum(share, shares) * (heads * blocks) // shares
    stop = tl.minimum(share + 1, shares) * (heads * blocks) // shares

    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    at = tl.arange(0, BLOCK_KEYS)
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    md = d < D
    node = rows % N
    on = (rows < GROUP * N) & (begin < stop)
    depth = tl.zeros([BLOCK_M], tl.int32)
    if WINDOW > 0:
        depth = tl.load(depths + node, mask=on, other=0).to(tl.int32)

    last = begin // blocks + 1
    if ACROSS:
        last = tl.cdiv(stop, blocks)
    for head in tl.range(begin // blocks, last, num_stages=1):
        b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
        from_block, to_block = tl.maximum(begin - head * blocks, 0), tl.minimum(stop - head * blocks, blocks)
        query_head = h * GROUP + rows // N
        queries = tl.load(
            q + b * sqb + query_head[:, None] * sqh + node.to(tl.int64)[:, None] * sqn + d[None, :] * sqd,
            mask=on[:, None] & md[None, :], other=0.0,
        )  # fmt: skip
        head_keys = keys + b * skb + h * skh
        head_values = values + b * svb + h * svh
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        weight = tl.zeros([BLOCK_M], tl.float32)
        total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        plain = from_block
        if WINDOW == 0:  # whole blocks of committed rows
            plain = tl.maximum(from_block, tl.minimum(to_block, length // BLOCK_KEYS))
        for start in range(first + from_block * BLOCK_KEYS, first + plain * BLOCK_KEYS, BLOCK_KEYS):
            if AHEAD > 0:
                later = start + AHEAD * BLOCK_KEYS + at
                fetch_ahead(head_keys, later, later < first + plain * BLOCK_KEYS, skr, 0, D, BLOCK_D)
                fetch_ahead(head_values, later, later < first + plain * BLOCK_KEYS, svr, 0, D, BLOCK_D)
            row = (start + at).to(tl.int64)
            key = tl.load(head_keys + row[None, :] * skr + d[:, None] * skd, mask=md[:, None], other=0.0)
            scores = tl.dot(queries, key, input_precision=PRECISION)
            value = tl.load(head_values + row[:, None] * svr + d[None, :] * svd, mask=md[None, :], other=0.0)
            top, weight, total = _fold(scores, scale, top, weight, total, value, PRECISION)
        for block in range(plain, to_block):
            others = (block - old_blocks) * BLOCK_KEYS  # a node's number, where this is a block of nodes
            other = others + at
            fresh = (others >= 0) & (other < N)
            row = tl.where(others >= 0, length + others, first + block * BLOCK_KEYS) + at
            inside = row < tl.where(others >= 0, end, length)
            where = ancestors + node[:, None] * sai + other[None, :] * saj
            seen = tl.load(where, mask=on[:, None] & fresh[None, :], other=0) != 0
            seen = seen | (inside & (row < length))[None, :]
            if WINDOW > 0:
                place = row + tl.zeros([BLOCK_KEYS], tl.int32)
                place = tl.where(fresh, length + tl.load(depths + other, mask=fresh, other=0).to(tl.int32), place)
                seen = seen & (length + depth[:, None] - place[None, :] < WINDOW)
            row = row.to(tl.int64)
            key = tl.load(
                head_keys + row[None, :] * skr + d[:, None] * skd, mask=md[:, None] & inside[None, :], other=0.0
            )
            scores = tl.dot(queries, key, input_precision=PRECISION)
            value = tl.load(
                head_values + row[:, None] * svr + d[None, :] * svd, mask=md[None, :] & inside[:, None], other=0.0
            )
            scores = tl.where(seen, scores, float("-inf"))
            top, weight, total = _fold(scores, scale, top, weight, total, value, PRECISION)

        mean = total / tl.where(weight > 0.0, weight, 1.0)[:, None]
        on_all = on[:, None] & md[None, :]
        if DIRECT:
            n = node.to(tl.int64)[:, None]
            place = b * sgb + query_head[:, None] * sgh + n * sgn + d[None, :] * sgd
            mean = _gated(mean, gate, place, on_all, out.dtype.element_ty)
            tl.store(out + b * sob + query_head[:, None] * soh + n * son + d[None, :] * sod, mean, mask=on_all)
        else:
            slot = (share + head).to(tl.int64) * spart + rows.to(
                tl.int64
            ) * srow  # share + head: parts of the line so far
            tl.store(tops + slot, top, mask=on)
            tl.store(weights + slot, weight, mask=on)
            tl.store(means + slot[:, None] * D + d[None, :], mean, mask=on_all)


@triton.jit
def _parts_of(head, length, N, heads, most_shares, least, WINDOW: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """The first share that holds keys of a head, and how many do."""
    _, blocks, shares = _cut(length, N, heads, most_shares, least, WINDOW, BLOCK_KEYS)
    low = ((head * blocks + 1) * shares - 1) // (heads * blocks)
    return low, ((head + 1) * blocks * shares - 1) // (heads * blocks) - low + 1


@triton.jit(do_not_specialize=["most_shares", "least", "srow", "spart", "committed_here"])
def _combine_rows_kernel(
    means, tops, weights, committed, committed_here, gate, out,
    N, H, heads, most_shares, least, srow, spart, sgb, sgh, sgn, sgd, sob, soh, son, sod,
    MOST: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """BLOCK_R rows, every part in turn, so that no thread waits for another. MOST: parts that a head can have."""
    head = tl.program_id(2)
    # Before the wait, as in `_combine_kernel`.
    low, count = _parts_of(head, _length(committed, committed_here), N, heads, most_shares, least, WINDOW, BLOCK_KEYS)
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = (tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)[None, :]
    on = rows < GROUP * N
    on_all = on[:, None] & (d < D)
    base = (low + head).to(tl.int64) * spart + rows.to(tl.int64) * srow
    b, h, n = (head // H).to(tl.int64), (head % H).to(tl.int64), (rows % N).to(tl.int64)[:, None]
    query_head = (h * GROUP + rows // N)[:, None]
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    highest = tl.full([BLOCK_R], float("-inf"), tl.float32)
    for part in tl.static_range(MOST):
        top = tl.load(tops + base + part * spart, mask=on & (part < count), other=float("-inf"))
        highest = tl.maximum(highest, top)
    highest = tl.where(on, highest, 0.0)
    total = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    whole = tl.zeros([BLOCK_R], tl.float32)
    for part in tl.static_range(MOST):
        slot, there = base + part * spart, on & (part < count)
        top = tl.load(tops + slot, mask=there, other=float("-inf"))
        factor = tl.exp2(top - highest) * tl.load(weights + slot, mask=there, other=0.0)
        mean = tl.load(means + slot[:, None] * D + d, mask=on_all & (part < count), other=0.0)
        whole += factor
        total += mean.to(tl.float32) * factor[:, None]
    place = b * sgb + query_head * sgh + n * sgn + d * sgd
    total = _gated(total / tl.where(on, whole, 1.0)[:, None], gate, place, on_all, out.dtype.element_ty)
    tl.store(out + b * sob + query_head * soh + n * son + d * sod, total, mask=on_all)


@triton.jit(do_not_specialize=["most_shares", "least", "srow", "spart", "committed_here"])
def _combine_kernel(
    means, tops, weights, committed, committed_here, gate, out,
    N, H, heads, most_shares, least, srow, spart, sgb, sgh, sgn, sgd, sob, soh, son, sod,
    MOST: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    BLOCK_ALL: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """BLOCK_D dimensions of one row, BLOCK_S parts at once. MOST: parts that a head can have."""
    row, head = tl.program_id(0), tl.program_id(2)
    # Before the wait: the share kernel writes no length, and whatever ran before it had finished when it let this one start.
    low, count = _parts_of(head, _length(committed, committed_here), N, heads, most_shares, least, WINDOW, BLOCK_KEYS)
    base = (low + head).to(tl.int64) * spart + row.to(tl.int64) * srow
    d = (tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)
    md = d < D
    if CHAINED:
        gdc_launch_dependents()  # at once: the product behind may take in its weight meanwhile
        gdc_wait()
    every = tl.arange(0, BLOCK_ALL)
    highest = tl.max(tl.load(tops + base + every * spart, mask=every < count, other=float("-inf")), 0)
    total = tl.zeros([BLOCK_D], tl.float32)
    whole = 0.0
    for start in tl.static_range(0, MOST, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        slot = base + s * spart
        top = tl.load(tops + slot, mask=s < count, other=float("-inf"))
        weight = tl.load(weights + slot, mask=s < count, other=0.0)
        part = tl.load(means + slot[:, None] * D + d[None, :], mask=(s < count)[:, None] & md[None, :], other=0.0)
        factor = tl.exp2(top - highest) * weight
        whole += tl.sum(factor, 0)
        total += tl.sum(part.to(tl.float32) * factor[:, None], 0)
    b, h, n = (head // H).to(tl.int64), (head % H).to(tl.int64), (row % N).to(tl.int64)
    query_head = h * GROUP + row // N
    place = b * sgb + query_head * sgh + n * sgn + d * sgd
    total = _gated(total / whole, gate, place, md, out.dtype.element_ty)
    tl.store(out + b * sob + query_head * soh + n * son + d * sod, total, mask=md)


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
    block_m = 128 if rows > 64 else max(16, triton.next_power_of_2(rows))
    sizes = {"BLOCK_M": block_m, "BLOCK_KEYS": 64, "num_warps": 8 if rows > 64 else 4}
    if head_dim <= 128:
        return sizes | {"num_stages": 3}
    return sizes | {"num_stages": 2} | (deeper_blocks(rows) if shared_bytes >= 220_000 else {})


def deeper_blocks(rows: int) -> dict[str, int]:
    """What changes in `block_sizes` where several blocks of 256-wide heads are to be on their way while one is multiplied.

    Two stages copy a block only after the one before it is done with. Trees of many rows are bound by their products and
    keep the wide blocks; they only ask the cache for them early.
    """
    if rows <= 16:
        return {"BLOCK_KEYS": 32, "num_stages": 6}
    if rows <= 128:
        return {"BLOCK_KEYS": 32, "num_stages": 6 if rows <= 32 else 5 if rows <= 64 else 4}
    return {"AHEAD": 1}


def num_shares(q: Tensor, keys: Tensor, launch: dict[str, int]) -> int:
    """The most shares that the keys of all heads are cut into: with the blocks of rows as many as fill the chip.

    A multiple of the heads unless that idles an eighth of the chip, so that few shares reach over two heads.
    """
    batch, query_heads, nodes, _ = q.shape
    heads = batch * keys.shape[1]
    row_blocks = triton.cdiv(query_heads // keys.shape[1] * nodes, launch["BLOCK_M"])
    residents = launch.get("residents", 1)
    fill = max(1, residents * _num_processors(q.device) // row_blocks)
    fill = min(fill, 64 * residents * heads, heads * triton.cdiv(keys.shape[2], launch["BLOCK_KEYS"]))
    return fill - fill % heads if fill % heads <= fill // 8 else fill


def _slots(q: Tensor, keys: Tensor, shares: int) -> int:
    """Rows of parts that the scratch has room for; see the share kernel's `slot`."""
    slots = q.shape[1] // keys.shape[1] * q.shape[2] * (shares + q.shape[0] * keys.shape[1] - 1)
    return -(-slots // 4) * 4  # what follows is aligned to 16 bytes


def scratch_for(q: Tensor, keys: Tensor, launch: dict[str, int] | None = None) -> Tensor:
    """The scratch that a call with these shapes needs, for callers that capture it.

    A mean in q's dtype, a maximum and a weight in float32 for each row of each part.
    """
    sizes = _sizes(q, keys, launch)
    slots = _slots(q, keys, sizes.get("shares") or num_shares(q, keys, sizes))
    floats = 2 * slots + -(-slots * q.shape[3] * q.element_size() // 4)
    return torch.empty(floats, dtype=torch.float32, device=q.device)


def _sizes(q: Tensor, keys: Tensor, launch: dict[str, int] | None) -> dict[str, int]:
    rows = q.shape[1] // keys.shape[1] * q.shape[2]
    return block_sizes(rows, q.shape[3], q.element_size(), _shared_bytes(q.device)) | (launch or {})


DEFAULTS = {"AHEAD": 0, "FETCH": True, "least": 1}
"""Of `launch`: what a call takes where neither `block_sizes` nor the caller names it."""


def _combine_sizes(most: int, rows: int, head_dim: int, processors: int) -> dict[str, int]:
    """The launch of the second kernel. most: parts of a head    rows: of all heads, whose dimensions are split if few.

    Few parts of many rows are combined several rows at once.
    """
    if most <= 16 and rows >= 4 * processors:
        block_d = max(16, triton.next_power_of_2(head_dim))
        return {"BLOCK_R": max(4, 1024 // block_d), "BLOCK_D": block_d, "num_warps": 4}
    block_s = min(64, triton.next_power_of_2(most))
    block_d = max(16, triton.next_power_of_2(head_dim))
    while block_d > 64 and rows * triton.cdiv(head_dim, block_d) < processors:
        block_d //= 2
    warps = max(1, min(8, block_s * block_d // 1024))
    return {
        "BLOCK_ALL": triton.next_power_of_2(most),
        "BLOCK_S": block_s,
        "BLOCK_D": block_d,
        "num_warps": warps,
    }


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
    gate: Tensor | None = None,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
    launch: dict[str, int] | None = None,
) -> Tensor:
    """As the reference, summed in float32. scratch: from `scratch_for`. launch: overrides `block_sizes`, to measure.

    launch may also give `shares` (into how many the keys are cut at most), `residents` (programs that one
    processor is to hold at once), `FETCH` (whether keys are asked for before the kernel ahead has finished), `least` (see
    the share kernel) and `combine` (instead of `_combine_sizes`).
    """
    batch, query_heads, nodes, dim = q.shape
    heads, group = batch * keys.shape[1], query_heads // keys.shape[1]
    rows = group * nodes
    sizes = DEFAULTS | _sizes(q, keys, launch)
    shares = sizes.pop("shares", None) or num_shares(q, keys, sizes)
    second, _ = sizes.pop("combine", None), sizes.pop("residents", None)
    if q.element_size() * dim < 128 or not keys.stride(3) == values.stride(3) == 1 or not chaining(q.device)["CHAINED"]:
        sizes |= {"AHEAD": 0, "FETCH": False}
    out = torch.empty_like(q) if out is None else out
    if scratch is None:
        scratch = scratch_for(q, keys, {**sizes, "shares": shares})
    slots = _slots(q, keys, shares)
    tops, weights, means = scratch[:slots], scratch[slots:], scratch[2 * slots :].view(q.dtype)
    seen = ancestors if ancestors.dtype == torch.uint8 else ancestors.to(q.device).view(torch.uint8)
    on_device = isinstance(length, torch.Tensor)
    committed = (length, 0) if on_device else (None, length)
    extents = (nodes, keys.shape[1], heads, shares, sizes.pop("least"), shares + heads - 1, 1)
    gate_and_out = (*((0, 0, 0, 0) if gate is None else gate.stride()), *out.stride())
    shape = {"GROUP": group, "D": dim, "WINDOW": window or 0}
    direct = heads % shares == 0  # every share has whole heads
    _share_kernel[(triton.cdiv(rows, sizes["BLOCK_M"]), shares)](
        q, keys, values, seen, None if window is None else depths.to(q.device), *committed, means, tops, weights, gate, out,
        *extents, (dim**-0.5 if scale is None else scale) * 1.4426950408889634,
        *q.stride(), *keys.stride(), *values.stride(), *seen.stride(), *gate_and_out,
        **shape, DIRECT=direct, ACROSS=shares % heads != 0, BLOCK_D=max(16, triton.next_power_of_2(dim)), PRECISION="tf32x3",
        **sizes, **chaining(q.device),
    )  # fmt: skip
    if not direct:
        most = shares // heads if shares % heads == 0 else triton.cdiv(shares, heads) + 1
        if second is None:
            second = _combine_sizes(most, rows * heads, dim, _num_processors(q.device))
        kernel = _combine_rows_kernel if "BLOCK_R" in second else _combine_kernel
        kernel[(triton.cdiv(rows, second.get("BLOCK_R", 1)), triton.cdiv(dim, second["BLOCK_D"]), heads)](
            means, tops, weights, *committed, gate, out, *extents, *gate_and_out,
            MOST=most, BLOCK_KEYS=sizes["BLOCK_KEYS"], **shape, **second, **chaining(q.device),
        )  # fmt: skip
    return out
