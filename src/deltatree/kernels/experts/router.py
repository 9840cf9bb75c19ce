"""The router in Triton: from tokens to grouped assignments in two or three launches that overlap each other's ends.

There is about a megabyte to read, so the time is that of waiting, once for each launch. The first one splits the router's
columns into shares and its rows into tiles: so many programs that each holds its piece of the weight before the tokens are
there (`kernels.chaining`). The second adds a token's shares up, in their order, and chooses. Where there are more tokens it
leaves a mark for each choice, a bit at its expert and token, and the third counts bits to find where an assignment stands.
Nothing needs sorting, and nothing is kept from call to call.

How the sums are split depends on the router alone, so a token's choices do not depend on how many stand beside it; marks are
set by atomic operations whose order changes nothing.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deltatree.kernels.experts.reference import RouterScratch, Routing
from deltatree.kernels.experts.triton import EXACT, MOST_TOKENS, ROWS, chain_options, choose, group_one

SHARE = 256  # columns of the router whose products one program adds up


@triton.jit(do_not_specialize=["N"])
def _shares_kernel(
    x, router, sums, marks, block_rows, N, R, K, num_marks, num_rows, sxn, sxk, srr, srk, spread,
    FILL: tl.constexpr, SHARE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr, WIDEN: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One share of some tokens' logits for some experts. All programs together clear the marks and empty the blocks."""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    share = tl.program_id(1)
    n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = share * SHARE + tl.arange(0, BLOCK_K)
    mr, mn = r < R, n < N
    columns = router + tl.where(mr, r, 0)[None, :] * srr  # rows beyond R: the first one, not stored
    tokens = x + n[:, None] * sxn
    weight = _columns(columns, ks, srk, K, EVEN)  # nobody writes it, so it is on its way while the kernel before ends
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    if marks is not None:
        program = (tl.program_id(2) * tl.num_programs(1) + share) * tl.num_programs(0) + tl.program_id(0)
        at = program * FILL + tl.arange(0, FILL)
        tl.store(marks + at, tl.zeros([FILL], tl.int32), mask=at < num_marks)
        tl.store(block_rows + at, tl.full([FILL], -1, tl.int32), mask=at < num_rows)
    total = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    for step in tl.static_range(SHARE // BLOCK_K):
        if step > 0:
            ks += BLOCK_K
            weight = _columns(columns, ks, srk, K, EVEN)
        seen = mn[:, None] if EVEN else mn[:, None] & (ks < K)[None, :]
        inputs = tl.load(tokens + ks[None, :] * sxk, mask=seen, other=0.0)
        if WIDEN:  # Triton's interpreter cannot multiply bfloat16
            inputs, weight = inputs.to(tl.float32), weight.to(tl.float32)
        total = tl.dot(inputs, weight, total, input_precision=EXACT)
    place = sums + (n * tl.num_programs(1) + share)[:, None] * spread + r[None, :]
    tl.store(place, total, mask=mn[:, None] & mr[None, :])


@triton.jit
def _columns(columns, ks, srk, K, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(columns + ks[:, None] * srk)
    return tl.load(columns + ks[:, None] * srk, mask=(ks < K)[:, None], other=0.0)


@triton.jit
def _choose_kernel(
    sums, experts, weights, block_experts, block_rows, num_blocks, marks, E, spread,
    SHARES: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr, NORMALISE: tl.constexpr, NARROW: tl.constexpr,
    DTYPE: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One token's choices from its shares, added up in their order and rounded as a linear layer's result is."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    n = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    mine = sums + n * SHARES * spread
    values = tl.load(mine + e, mask=e < E, other=float("-inf"))
    for share in tl.static_range(1, SHARES):
        values += tl.load(mine + share * spread + e, mask=e < E, other=0.0)
    gate = 0.0
    if CHOICES > TOP_K:
        gate = tl.load(mine + E)
        for share in tl.static_range(1, SHARES):
            gate += tl.load(mine + share * spread + E)
        gate = gate.to(DTYPE).to(tl.float32)
    chosen = choose(
        values.to(DTYPE).to(tl.float32), gate, experts + n * CHOICES, weights + n * CHOICES, E, TOP_K, CHOICES, NORMALISE,
        NARROW, DTYPE, BLOCK_E, BLOCK_C,
    )  # fmt: skip
    if marks is None:
        group_one(chosen, block_experts, block_rows, num_blocks, E, CHOICES, BLOCK_C)
    else:
        c = tl.arange(0, BLOCK_C)
        bit = tl.full([BLOCK_C], 1, tl.int32) << (n % 32)
        tl.atomic_or(marks + (n // 32) * E + chosen, bit, mask=c < TOP_K, sem="relaxed")


@triton.jit
def _ones(words):
    """How many bits of each int32 are set."""
    words = (words & 0x55555555) + ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words & 0x0F0F0F0F) + ((words >> 4) & 0x0F0F0F0F)
    words += words >> 8
    return (words + (words >> 16)) & 0x3F


@triton.jit(do_not_specialize=["N"])
def _group_kernel(
    experts, marks, block_experts, block_rows, num_blocks, N, E,
    CHOICES: tl.constexpr, SHARED: tl.constexpr, WORDS: tl.constexpr, BLOCK_A: tl.constexpr, BINS: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Where BLOCK_A assignments stand: behind the blocks of lower experts, and behind their own expert's lower tokens."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    bins = tl.arange(0, BINS)
    a = tl.program_id(0) * BLOCK_A + tl.arange(0, BLOCK_A)
    on = a < N * CHOICES
    expert = tl.load(experts + a, mask=on, other=E)
    counts = tl.zeros([BINS], tl.int32)
    for w in tl.static_range(WORDS):
        counts += _ones(tl.load(marks + w * E + bins, mask=bins < E, other=0))
    n = a // CHOICES
    routed = expert < E
    rank = tl.zeros([BLOCK_A], tl.int32)
    for w in tl.static_range(WORDS):
        word = tl.load(marks + w * E + expert, mask=routed, other=0)
        lower = ~(tl.full([BLOCK_A], -1, tl.int32) << (n & 31))
        rank += _ones(tl.where(w < n // 32, word, tl.where(w == n // 32, word & lower, 0)))
    shared_blocks = 0
    if SHARED:
        shared_blocks = tl.cdiv(N, ROWS)
    blocks = tl.cdiv(counts, ROWS)
    ends = tl.cumsum(blocks, 0) + shared_blocks
    tl.store(num_blocks + 0 * bins, ends, mask=(bins == BINS - 1) & (tl.program_id(0) == 0))
    start = tl.gather(ends - blocks, tl.where(routed, expert, 0), 0)
    if SHARED:  # all tokens choose it, and its blocks come first
        rank = tl.where(routed, rank, n)
        start = tl.where(routed, start, 0)
    tl.store(block_rows + start * ROWS + rank, a, mask=on)
    tl.store(block_experts + start + rank // ROWS, expert, mask=on & (rank % ROWS == 0))


def block_sizes(num_tokens: int, itemsize: int) -> dict[str, dict[str, int]]:
    """The three launches: a fixed table, so that a run can be repeated and live state is never tuned on."""
    return {
        "shares": {
            "BLOCK_N": 16 if num_tokens <= 64 else 32,
            "BLOCK_R": 32,
            "BLOCK_K": SHARE if itemsize == 2 else 64,
            "num_warps": 4,
        },
        "choose": {"num_warps": 1},
        "group": {"BLOCK_A": 128, "num_warps": 4},
    }


def router_scratch_for(x: Tensor, num_experts: int, *, shared: bool) -> RouterScratch:
    """The scratch that `route_tokens` needs with these arguments; what it holds before a call does not matter."""
    tokens, hidden = x.shape
    spread = triton.cdiv(num_experts + shared, 16) * 16  # so that every share begins where wide loads may
    words = triton.next_power_of_2(triton.cdiv(tokens, 32))
    return RouterScratch(
        torch.empty(tokens, triton.cdiv(hidden, SHARE), spread, dtype=torch.float32, device=x.device),
        torch.empty(words, num_experts, dtype=torch.int32, device=x.device) if tokens > 1 else None,
    )


def route_tokens(
    x: Tensor,
    router: Tensor,
    num_experts: int,
    top_k: int,
    normalise: bool,
    shared: bool = False,
    out: Routing | None = None,
    scratch: RouterScratch | None = None,
    *,
    launch: dict[str, dict[str, int]] | None = None,
    chained: bool | None = None,
) -> Routing:
    """As the reference, for up to MOST_TOKENS tokens: two launches for one token, three for more.

    launch: overrides single entries of `block_sizes`, for measurements
    chained: whether launches overlap (`kernels.chaining`); None for what the device can do
    """
    tokens, hidden = x.shape
    if tokens > MOST_TOKENS:
        raise ValueError(f"{tokens} tokens in one routing, at most {MOST_TOKENS} are possible; route them in parts")
    if out is None:
        out = Routing.empty(tokens, top_k, num_experts, shared=shared, device=x.device)
    if scratch is None:
        scratch = router_scratch_for(x, num_experts, shared=shared)
    sizes = {
        name: entry | (launch or {}).get(name, {}) for name, entry in block_sizes(tokens, x.element_size()).items()
    }
    chain = chain_options(x, chained)
    sums, marks = scratch.sums, scratch.marks
    shares, spread = sums.shape[1:]
    num_marks, num_rows = 0 if marks is None else marks.numel(), out.block_rows.numel()
    rows, choices = num_experts + shared, top_k + shared
    tables = out.block_experts, out.block_rows, out.num_blocks
    one = sizes["shares"]
    grid = triton.cdiv(rows, one["BLOCK_R"]), shares, triton.cdiv(tokens, one["BLOCK_N"])
    fill = triton.cdiv(max(num_marks, num_rows), math.prod(grid))
    _shares_kernel[grid](
        x, router, sums, marks, out.block_rows, tokens, rows, hidden, num_marks, num_rows, *x.stride(), *router.stride(),
        spread, FILL=max(64, triton.next_power_of_2(fill)), SHARE=SHARE, EVEN=hidden % SHARE == 0,
        WIDEN=triton.knobs.runtime.interpret, **one, **chain,
    )  # fmt: skip
    _choose_kernel[(tokens,)](
        sums, out.experts, out.weights, *tables, marks, num_experts, spread,
        SHARES=shares, TOP_K=top_k, CHOICES=choices, NORMALISE=normalise, NARROW=x.dtype == torch.bfloat16,
        DTYPE=_DTYPES[x.dtype], BLOCK_E=max(32, triton.next_power_of_2(num_experts)),
        BLOCK_C=max(16, triton.next_power_of_2(choices)), **sizes["choose"], **chain,
    )  # fmt: skip
    if marks is not None:
        group = sizes["group"]
        _group_kernel[(triton.cdiv(tokens * choices, group["BLOCK_A"]),)](
            out.experts, marks, *tables, tokens, num_experts, CHOICES=choices, SHARED=shared, WORDS=marks.shape[0],
            BINS=max(32, triton.next_power_of_2(num_experts)), **group, **chain,
        )  # fmt: skip
    return out


_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
