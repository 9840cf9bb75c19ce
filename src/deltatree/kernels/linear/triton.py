"""A linear layer for up to a few hundred tokens, in Triton: the weight is read once, whatever the number of tokens.

A program owns BLOCK_W rows of the weight and all tokens (up to 256 of them). Where a weight has too few rows to keep the
chip busy, its columns are split into shares, by the weight's shape alone; every share leaves its sums, and the program
that comes last adds them up, in the order of the shares. So neither the order of programs nor the number of tokens changes
a bit of a token's result: the weight is always the matrix instructions' first factor, and they add 16 columns at a time onto
the same sums, however many of them BLOCK_K brings in at once.
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
from deltatree.kernels.linear.reference import Partials, share_size, shares_of

EXACT = tl.constexpr("ieee" if torch.version.hip else "tf32x3")  # a float32 product to float32 accuracy


@triton.jit
def _piece(x, weight, N, M, K, share, sxn, swm, BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr):
    """A program's rows m of the weight and tokens n, whether there are such, its columns, and where both begin."""
    m = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.program_id(2) * share
    end = tl.minimum(start + share, K)
    mm, mn = m < M, n < N
    rows = weight + tl.where(mm, m, 0).to(tl.int64)[:, None] * swm  # rows beyond M: the first one, not stored
    tokens = x + n[None, :] * sxn
    return m, n, mm, mn, start, end, rows, tokens


@triton.jit
def _tile(rows, ks, swk, end, EVEN: tl.constexpr):
    """Columns ks of some rows of the weight."""
    where = rows + ks[None, :] * swk
    if EVEN:
        return tl.load(where)
    return tl.load(where, mask=(ks < end)[None, :], other=0.0)


@triton.jit
def _add_tile(total, tile, tokens, ks, mn, sxk, end, EVEN: tl.constexpr, WIDEN: tl.constexpr):
    """total + tile times the same columns of the tokens."""
    seen = mn[None, :] if EVEN else mn[None, :] & (ks < end)[:, None]
    inputs = tl.load(tokens + ks[:, None] * sxk, mask=seen, other=0.0)
    if WIDEN:  # Triton's interpreter cannot multiply bfloat16
        tile, inputs = tile.to(tl.float32), inputs.to(tl.float32)
    return tl.dot(tile, inputs, total, input_precision=EXACT)


@triton.jit
def _linear_kernel(
    x, weight, bias, out, sums, counters, N, M, K, share, sxn, sxk, swm, swk, sb, son, som,
    SHARES: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    WIDEN: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    m, n, mm, mn, start, end, rows, tokens = _piece(x, weight, N, M, K, share, sxn, swm, BLOCK_W, BLOCK_N)
    if CHAINED:
        if swk == 1:  # as much as may come while the kernel before finishes
            fetch_ahead(weight, m, mm, swm, start, tl.minimum(start + 512, end), BLOCK_K)
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros([BLOCK_W, BLOCK_N], tl.float32)
    for k in range(start, end, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        total = _add_tile(total, _tile(rows, ks, swk, end, EVEN), tokens, ks, mn, sxk, end, EVEN, WIDEN)
    if SHARES == 1:
        if bias is not None:
            total += tl.load(bias + m * sb, mask=mm, other=0.0).to(tl.float32)[:, None]
        tl.store(out + n[None, :] * son + m[:, None] * som, total, mask=mn[None, :] & mm[:, None])
    else:
        _add_shares(total, sums, counters, bias, out, m, n, N, M, sb, son, som, SHARES, BLOCK_W, BLOCK_N)


@triton.jit
def _add_shares(
    total, sums, counters, bias, out, m, n, N, M, sb, son, som,
    SHARES: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Leave a share's sums; whoever is the last to do so adds them all up, a few tokens at a time."""
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    own = tl.arange(0, BLOCK_W)[:, None] * BLOCK_N
    place = sums + (tile.to(tl.int64) * SHARES + tl.program_id(2)) * (BLOCK_W * BLOCK_N)
    tl.store(place + own + tl.arange(0, BLOCK_N)[None, :], total, mask=(n < N)[None, :])
    tl.debug_barrier()  # the whole program has stored before one of its threads counts it
    if tl.atomic_add(counters + tile, 1, sem="acq_rel") == SHARES - 1:
        base = sums + tile.to(tl.int64) * SHARES * (BLOCK_W * BLOCK_N)
        mm = m < M
        shift = tl.zeros([BLOCK_W], tl.float32)
        if bias is not None:
            shift += tl.load(bias + m * sb, mask=mm, other=0.0).to(tl.float32)
        for first in range(0, BLOCK_N, 16):
            column = first + tl.arange(0, 16)
            token = tl.program_id(1) * BLOCK_N + column
            seen = (token < N)[None, :] & mm[:, None]
            result = tl.zeros([BLOCK_W, 16], tl.float32)
            for other in tl.static_range(SHARES):
                where = base + other * (BLOCK_W * BLOCK_N) + own + column[None, :]
                result += tl.load(where, mask=seen, other=0.0, cache_modifier=".cg")
            tl.store(out + token[None, :] * son + m[:, None] * som, result + shift[:, None], mask=seen)
        tl.store(counters + tile, 0)


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    """Shared memory that one block may have: about 100 KB on compute capability 8.6, 8.9 and 12, 160 or more elsewhere."""
    on_gpu = device.type == "cuda"
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0) if on_gpu else 1 << 30


def block_sizes(num_tokens: int, itemsize: int, shared_bytes: int) -> dict[str, int]:
    """The launch: a fixed table, so that a run can be repeated and live state is never tuned on.

    Up to 32 tokens only the weight counts: narrow blocks, two programs a multiprocessor. Then the tokens themselves, read by
    every program, become the larger part of what a multiprocessor takes in, so the blocks get twice as wide.
    """
    if itemsize > 2:
        return {
            "BLOCK_W": 64,
            "BLOCK_N": 16 if num_tokens <= 16 else 32,
            "BLOCK_K": 32,
            "num_warps": 4,
            "num_stages": 3,
        }
    block_n = min(256, max(16, triton.next_power_of_2(num_tokens)))
    if shared_bytes < 160_000:
        block_n = min(64, block_n)
        return {"BLOCK_W": 64, "BLOCK_N": block_n, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4}
    if block_n <= 32:
        return {"BLOCK_W": 64, "BLOCK_N": block_n, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4}
    if block_n == 64:
        return {"BLOCK_W": 128, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 6}
    return {"BLOCK_W": 128, "BLOCK_N": block_n, "BLOCK_K": 64, "num_warps": 8, "num_stages": 5 if block_n == 128 else 4}


def scratch_for(x: Tensor, weight: Tensor, launch: dict[str, int] | None = None) -> Partials | None:
    """The scratch that a call with these shapes needs, None for none; calls that do not overlap may share one."""
    shares = shares_of(*weight.shape)
    if shares == 1:
        return None
    sizes = block_sizes(x.shape[0], x.element_size(), _shared_bytes(x.device)) | (launch or {})
    tiles = triton.cdiv(weight.shape[0], sizes["BLOCK_W"]) * triton.cdiv(x.shape[0], sizes["BLOCK_N"])
    floats = tiles * shares * sizes["BLOCK_W"] * sizes["BLOCK_N"]
    return Partials(
        torch.empty(floats, dtype=torch.float32, device=x.device),
        torch.zeros(tiles, dtype=torch.int32, device=x.device),
    )


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    scratch: Partials | None = None,
    *,
    launch: dict[str, int] | None = None,
    chained: bool = False,
) -> Tensor:
    """As the reference, summed in float32. scratch: from `scratch_for`. launch: overrides `block_sizes`, to measure.

    chained: a programmatic dependent launch (compute capability 9.0 on), for callers whose other kernels are too
    """
    (tokens, columns), rows = x.shape, weight.shape[0]
    out = x.new_empty(tokens, rows) if out is None else out
    shares = shares_of(rows, columns)
    if scratch is None and shares > 1:
        scratch = scratch_for(x, weight, launch)
    sizes = block_sizes(tokens, x.element_size(), _shared_bytes(x.device)) | (launch or {})
    grid = (triton.cdiv(rows, sizes["BLOCK_W"]), triton.cdiv(tokens, sizes["BLOCK_N"]), shares)
    _linear_kernel[grid](
        x, weight, bias, out, None if scratch is None else scratch.sums, None if scratch is None else scratch.counters,
        tokens, rows, columns, share_size(rows, columns), *x.stride(), *weight.stride(), 1 if bias is None else bias.stride(0), *out.stride(),
        SHARES=shares, EVEN=columns % sizes["BLOCK_K"] == 0, WIDEN=triton.knobs.runtime.interpret, CHAINED=chained,
        **({"launch_pdl": True} if chained else {}), **sizes,
    )  # fmt: skip
    return out


@triton.jit
def _parts_kernel(
    x, weight, out, N, M, K, share, sxn, sxk, swm, swk, son, sop, som,
    BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HELD: tl.constexpr, LONGER: tl.constexpr,
    EVEN: tl.constexpr, WIDEN: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One share of the columns for BLOCK_W rows of the weight, whose first HELD columns are there before the tokens are."""
    m, n, mm, mn, start, end, rows, tokens = _piece(x, weight, N, M, K, share, sxn, swm, BLOCK_W, BLOCK_N)
    ks = start + tl.arange(0, HELD)
    held = _tile(rows, ks, swk, end, EVEN)
    if CHAINED:
        if LONGER and swk == 1:
            fetch_ahead(weight, m, mm, swm, start + HELD, tl.minimum(start + HELD + 512, end), BLOCK_K)
        gdc_wait()
        gdc_launch_dependents()
    total = _add_tile(tl.zeros([BLOCK_W, BLOCK_N], tl.float32), held, tokens, ks, mn, sxk, end, EVEN, WIDEN)
    if LONGER:
        for k in range(start + HELD, end, BLOCK_K):
            further = k + tl.arange(0, BLOCK_K)
            tile = _tile(rows, further, swk, end, EVEN)
            total = _add_tile(total, tile, tokens, further, mn, sxk, end, EVEN, WIDEN)
    where = out + n[None, :] * son + tl.program_id(2) * sop + m[:, None] * som
    tl.store(where, total, mask=mn[None, :] & mm[:, None])


def parts_blocks(num_tokens: int, share: int, itemsize: int) -> dict[str, int]:
    """The launch of `linear_parts`: two programs share a multiprocessor, and sums have one order for any number of tokens."""
    if itemsize > 2:
        return {"BLOCK_W": 64, "BLOCK_N": 16, "BLOCK_K": 32, "HELD": 128, "num_warps": 4, "num_stages": 3}
    held = 512 if share <= 512 else 256
    block_n, stages = (16, 3) if num_tokens <= 16 else (32, 2)
    return {"BLOCK_W": 64, "BLOCK_N": block_n, "BLOCK_K": 128, "HELD": held, "num_warps": 4, "num_stages": stages}


def linear_parts(
    x: Tensor, weight: Tensor, out: Tensor | None = None, *, launch: dict[str, int] | None = None
) -> Tensor:
    """As the reference, summed in float32. launch: overrides `parts_blocks`, to measure.

    Chained: the first columns of the weight come while the kernel ahead still runs.
    """
    (tokens, columns), rows = x.shape, weight.shape[0]
    shares, size = shares_of(rows, columns), share_size(rows, columns)
    out = x.new_empty(tokens, shares, rows, dtype=torch.float32) if out is None else out
    sizes = parts_blocks(tokens, size, x.element_size()) | (launch or {})
    grid = (triton.cdiv(rows, sizes["BLOCK_W"]), triton.cdiv(tokens, sizes["BLOCK_N"]), shares)
    even = columns % size == 0 and size >= sizes["HELD"] and (size - sizes["HELD"]) % sizes["BLOCK_K"] == 0
    _parts_kernel[grid](
        x, weight, out, tokens, rows, columns, size, *x.stride(), *weight.stride(), *out.stride(),
        EVEN=even, LONGER=size > sizes["HELD"], WIDEN=triton.knobs.runtime.interpret, **chaining(x.device), **sizes,
    )  # fmt: skip
    return out
