"""Mixture of experts in Triton: two products over blocks of BLOCK_M rows, at the speed of memory.

Up to a few hundred tokens the time is that of reading the woken experts' weights. A program owns one block of one expert
and BLOCK_N columns; how many blocks there are is known on the device only, so a launch has room for the most there can be
and programs beyond return at once. Nothing is added across programs, so no order of theirs changes a bit; a row's products
are summed in an order that knows nothing of the other rows, so a token's result does not depend on how many stand beside it.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deltatree.kernels.chaining import chaining
from deltatree.kernels.experts.reference import BLOCK_M, Routing, scratch_for
from deltatree.kernels.fetch import fetch_ahead

MOST_TOKENS = 1024  # of one routing: a program looks at all of them
EXACT = tl.constexpr("ieee" if torch.version.hip else "tf32x3")  # a float32 product to float32 accuracy
ROWS = tl.constexpr(BLOCK_M)


@triton.jit
def choose(
    values, gate, experts, weights, E,
    TOP_K: tl.constexpr, CHOICES: tl.constexpr, NORMALISE: tl.constexpr, NARROW: tl.constexpr, DTYPE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One token's choices from its logits. One and its expert make one integer, larger for the larger, then the lower expert.

    values: [BLOCK_E] float32, the logits of DTYPE    gate: the shared expert's, looked at where CHOICES > TOP_K
    experts, weights: where the token's rows begin    Returns the chosen experts, [BLOCK_C]
    """
    e = tl.arange(0, BLOCK_E)
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # adding 0 makes a zero of -0
    if NARROW:  # bfloat16: 16 bits and the expert fit in one word
        bits = bits >> 16
        keys = ((bits ^ ((bits >> 15) & 0x7FFF)) << 16) | (0xFFFF - e)
        lowest = -(2**31)
    else:
        bits = bits.to(tl.int64)
        keys = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) << 16) | (0xFFFF - e)
        lowest = -(2**63)
    keys = tl.where(e < E, keys, lowest)
    c = tl.arange(0, BLOCK_C)
    chosen = tl.full([BLOCK_C], 0, tl.int32)
    kept = tl.full([BLOCK_C], 0, tl.int32)  # the bits of their logits
    for choice in tl.static_range(TOP_K):
        best = tl.max(keys, 0)
        keys = tl.where(keys == best, lowest, keys)
        top = (best >> 16).to(tl.int32)
        top = (top ^ ((top >> 15) & 0x7FFF)) << 16 if NARROW else top ^ ((top >> 31) & 0x7FFFFFFF)
        chosen = tl.where(c == choice, 0xFFFF - (best & 0xFFFF).to(tl.int32), chosen)
        kept = tl.where(c == choice, top, kept)
    scores = tl.where(c < TOP_K, kept.to(tl.float32, bitcast=True), float("-inf"))
    highest = tl.max(scores, 0)
    shares = tl.exp(scores - highest)
    shares = shares / (tl.sum(shares, 0) if NORMALISE else tl.sum(tl.exp(values - highest), 0))
    shares = shares.to(DTYPE).to(tl.float32)
    if CHOICES > TOP_K:
        shares = tl.where(c == TOP_K, tl.sigmoid(gate).to(DTYPE).to(tl.float32), shares)
        chosen = tl.where(c == TOP_K, E, chosen)
    tl.store(experts + c, chosen, mask=c < CHOICES)
    tl.store(weights + c, shares, mask=c < CHOICES)
    return chosen


@triton.jit
def group_one(chosen, block_experts, block_rows, num_blocks, E, CHOICES: tl.constexpr, BLOCK_C: tl.constexpr):
    """The blocks of one token alone: every choice is one."""
    c = tl.arange(0, BLOCK_C)
    order = tl.where(chosen == E, -1, chosen)
    before = (order[:, None] > order[None, :]) & (c < CHOICES)[None, :]
    block = tl.sum(before.to(tl.int32), 1)
    row = tl.arange(0, ROWS)
    tl.store(block_experts + block, chosen, mask=c < CHOICES)
    rows = tl.where(row[None, :] == 0, c[:, None], -1)
    tl.store(block_rows + block[:, None] * ROWS + row[None, :], rows, mask=(c < CHOICES)[:, None])
    tl.store(num_blocks, CHOICES)


@triton.jit
def _choose_kernel(
    logits, shared_logit, experts, weights, block_experts, block_rows, num_blocks,
    E, sln, sle, ssn,
    TOP_K: tl.constexpr, CHOICES: tl.constexpr, NORMALISE: tl.constexpr, NARROW: tl.constexpr, ALONE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    n = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    values = tl.load(logits + n * sln + e * sle, mask=e < E, other=float("-inf")).to(tl.float32)
    gate = 0.0
    if shared_logit is not None:
        gate = tl.load(shared_logit + n * ssn).to(tl.float32)
    chosen = choose(
        values, gate, experts + n * CHOICES, weights + n * CHOICES, E, TOP_K, CHOICES, NORMALISE, NARROW,
        logits.dtype.element_ty, BLOCK_E, BLOCK_C,
    )  # fmt: skip
    if ALONE:
        group_one(chosen, block_experts, block_rows, num_blocks, E, CHOICES, BLOCK_C)


@triton.jit
def _group_kernel(
    experts, block_experts, block_rows, num_blocks, N, E,
    TOP_K: tl.constexpr, CHOICES: tl.constexpr, SHARED: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_A: tl.constexpr, BINS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """The blocks of BLOCK_E experts (one more program: of the shared one). Each program counts all assignments itself."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    n = tl.arange(0, BLOCK_N)
    row = tl.arange(0, ROWS)
    part = tl.arange(0, BLOCK_N // ROWS)
    shared_blocks = 0
    if SHARED:
        shared_blocks = tl.cdiv(N, ROWS)
    if SHARED and tl.program_id(0) == tl.num_programs(0) - 1:
        token = part[:, None] * ROWS + row[None, :]
        rows = tl.where(token < N, token * CHOICES + TOP_K, -1)
        tl.store(block_experts + part, tl.full([BLOCK_N // ROWS], 0, tl.int32) + E, mask=part < shared_blocks)
        tl.store(block_rows + token, rows, mask=(part < shared_blocks)[:, None])
    else:
        a = tl.arange(0, BLOCK_A)
        every = tl.load(experts + a, mask=a < N * CHOICES, other=E)
        bins = tl.arange(0, BINS)
        blocks_of = tl.cdiv(tl.histogram(every, BINS, mask=every < E), ROWS)
        if tl.program_id(0) == 0:
            tl.store(num_blocks, tl.sum(blocks_of, 0) + shared_blocks)
        e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
        start = tl.sum(tl.where(bins[:, None] < e[None, :], blocks_of[:, None], 0), 0) + shared_blocks
        which = tl.full([BLOCK_N, BLOCK_E], 0, tl.int32)  # choice + 1 where a token chose the expert
        for choice in tl.static_range(TOP_K):
            theirs = tl.load(experts + n * CHOICES + choice, mask=n < N, other=E)
            which = tl.where(theirs[:, None] == e[None, :], choice + 1, which)
        hit = (which > 0) & (e < E)[None, :]
        rank = tl.cumsum(hit.to(tl.int32), 0) - 1
        count = tl.sum(hit.to(tl.int32), 0)
        place = start[None, :] * ROWS + rank
        tl.store(block_rows + place, n[:, None] * CHOICES + which - 1, mask=hit)
        blocks = tl.cdiv(count, ROWS)
        spare = count[:, None] + row[None, :]
        unused = spare < blocks[:, None] * ROWS
        tl.store(block_rows + start[:, None] * ROWS + spare, tl.full([BLOCK_E, ROWS], -1, tl.int32), mask=unused)
        names = e[:, None] + tl.full([BLOCK_E, BLOCK_N // ROWS], 0, tl.int32)
        tl.store(block_experts + start[:, None] + part[None, :], names, mask=part[None, :] < blocks[:, None])


@triton.jit
def _weight_tile(weight, cols, ks, swn, swk, K, N, EVEN: tl.constexpr):
    """[K, N] tile of a weight stored [N, K]."""
    where = weight + cols[None, :] * swn + ks[:, None] * swk
    if EVEN:
        return tl.load(where)
    return tl.load(where, mask=(ks < K)[:, None] & (cols < N)[None, :], other=0.0)


@triton.jit
def _add_product(inputs, weight, total, WIDEN: tl.constexpr):
    if WIDEN:  # Triton's interpreter cannot multiply bfloat16
        inputs, weight = inputs.to(tl.float32), weight.to(tl.float32)
    return tl.dot(inputs, weight, total, input_precision=EXACT)


@triton.jit
def _gate_up_kernel(
    x, block_experts, block_rows, num_blocks, weight, shared, out,
    first, E, K, N, sxn, sxk, swe, swn, swk, so,
    CHOICES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, WIDEN: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of one block of rows: K = H, N = I."""
    block = first + tl.program_id(1)
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if CHAINED:
        if shared is not None and swk == 1:  # noqa: SIM102 (known at compile time, the next one only on the device)
            if block == 0:  # woken whatever the routing is
                fetch_ahead(shared, cols, cols < N, swn, 0, K, BLOCK_K)
                fetch_ahead(shared, cols + N, cols < N, swn, 0, K, BLOCK_K)
        gdc_wait()
        gdc_launch_dependents()
    rows = tl.load(block_rows + block * ROWS + tl.arange(0, ROWS))
    expert = tl.load(block_experts + block)
    if block >= tl.load(num_blocks):
        return
    base = weight + expert.to(tl.int64) * swe
    if shared is not None:
        base = tl.where(expert == E, shared, base)
    on = rows >= 0
    x += (rows // CHOICES)[:, None] * sxn
    up_base = base + N * swn
    gate = tl.zeros([ROWS, BLOCK_N], tl.float32)
    up = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        seen = on[:, None] if EVEN else on[:, None] & (ks < K)[None, :]
        inputs = tl.load(x + ks[None, :] * sxk, mask=seen, other=0.0)
        gate = _add_product(inputs, _weight_tile(base, cols, ks, swn, swk, K, N, EVEN), gate, WIDEN)
        up = _add_product(inputs, _weight_tile(up_base, cols, ks, swn, swk, K, N, EVEN), up, WIDEN)
    activated = gate * tl.sigmoid(gate) * up
    tl.store(out + rows[:, None] * so + cols[None, :], activated, mask=on[:, None] & (cols < N)[None, :])


@triton.jit
def _down_kernel(
    activated, weights, block_experts, block_rows, num_blocks, weight, shared, out,
    first, E, K, N, sa, swe, swn, swk, so, soh,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, WIDEN: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """The weighted second product of one block of rows: K = I, N = H."""
    # Even before the wait for the activations the routing is there: the first product waited for it before it let us start.
    block = first + tl.program_id(1)
    rows = tl.load(block_rows + block * ROWS + tl.arange(0, ROWS))
    expert = tl.load(block_experts + block)
    if block >= tl.load(num_blocks):
        return
    base = weight + expert.to(tl.int64) * swe
    if shared is not None:
        base = tl.where(expert == E, shared, base)
    on = rows >= 0
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if CHAINED:
        if swk == 1:
            fetch_ahead(base, cols, cols < N, swn, 0, K, BLOCK_K)
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        seen = on[:, None] if EVEN else on[:, None] & (ks < K)[None, :]
        inputs = tl.load(activated + rows[:, None] * sa + ks[None, :], mask=seen, other=0.0)
        total = _add_product(inputs, _weight_tile(base, cols, ks, swn, swk, K, N, EVEN), total, WIDEN)
    total = total * tl.load(weights + rows, mask=on, other=0.0)[:, None]
    tl.store(out + rows[:, None] * so + cols[None, :] * soh, total, mask=on[:, None] & (cols < N)[None, :])


@triton.jit
def _combine_kernel(
    parts, out, H, spn, spc, sph, son, soh, CHOICES: tl.constexpr, BLOCK_H: tl.constexpr, CHAINED: tl.constexpr
):  # fmt: skip
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    n = tl.program_id(1)
    h = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    total = tl.zeros([BLOCK_H], tl.float32)
    for choice in tl.static_range(CHOICES):
        total += tl.load(parts + n * spn + choice * spc + h * sph, mask=h < H, other=0.0).to(tl.float32)
    tl.store(out + n * son + h * soh, total, mask=h < H)


def chain_options(tensor: Tensor, chained: bool | None) -> dict[str, bool]:
    if chained is None:
        return chaining(tensor.device)
    return {"CHAINED": chained} | ({"launch_pdl": True} if chained else {})


def route(
    logits: Tensor,
    top_k: int,
    normalise: bool,
    shared_logit: Tensor | None = None,
    out: Routing | None = None,
    *,
    chained: bool | None = None,
) -> Routing:
    """As the reference, for up to MOST_TOKENS tokens: one launch for one token, two for more.

    chained: whether launches overlap (`kernels.chaining`); None for what the device can do
    """
    tokens, num_experts = logits.shape
    if tokens > MOST_TOKENS:
        raise ValueError(f"{tokens} tokens in one routing, at most {MOST_TOKENS} are possible; route them in parts")
    shared = shared_logit is not None
    if out is None:
        out = Routing.empty(tokens, top_k, num_experts, shared=shared, device=logits.device)
    choices = top_k + shared
    chain = chain_options(logits, chained)
    _choose_kernel[(tokens,)](
        logits, shared_logit, out.experts, out.weights, out.block_experts, out.block_rows, out.num_blocks,
        num_experts, *logits.stride(), shared_logit.stride(0) if shared else 1,
        TOP_K=top_k, CHOICES=choices, NORMALISE=normalise, NARROW=logits.dtype == torch.bfloat16, ALONE=tokens == 1,
        BLOCK_E=max(32, triton.next_power_of_2(num_experts)), BLOCK_C=max(16, triton.next_power_of_2(choices)),
        num_warps=1, **chain,
    )  # fmt: skip
    if tokens > 1:
        block_e = 16
        _group_kernel[(triton.cdiv(num_experts, block_e) + shared,)](
            out.experts, out.block_experts, out.block_rows, out.num_blocks, tokens, num_experts,
            TOP_K=top_k, CHOICES=choices, SHARED=shared, BLOCK_E=block_e,
            BLOCK_N=max(BLOCK_M, triton.next_power_of_2(tokens)), BLOCK_A=max(256, triton.next_power_of_2(tokens * choices)),
            BINS=max(32, triton.next_power_of_2(num_experts)), num_warps=4 if tokens <= 64 else 8, **chain,
        )  # fmt: skip
    return out


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    """Shared memory that one block may have: about 100 KB on compute capability 8.6, 8.9 and 12, 160 or more elsewhere."""
    on_gpu = device.type == "cuda"
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0) if on_gpu else 1 << 30


def block_sizes(num_tokens: int, itemsize: int, shared_bytes: int) -> dict[str, dict[str, int]]:
    """The launches of both products: a fixed table, so that a run can be repeated and live state is never tuned on.

    To be at the speed of memory a multiprocessor needs some 64 KB on their way, from two programs or more; one token wakes
    so few experts that narrower columns are needed for every multiprocessor to have a program. BLOCK_K sets the order of
    the sums, so it depends on nothing but the dtype.
    """
    block_k = 128 if itemsize == 2 else 32
    few = num_tokens == 1
    return {
        "gate_up": _fitting(
            {"BLOCK_N": 32 if few else 64, "BLOCK_K": block_k, "num_warps": 4}, 2, itemsize, shared_bytes
        ),
        "down": _fitting({"BLOCK_N": 64, "BLOCK_K": block_k, "num_warps": 4}, 1, itemsize, shared_bytes),
    }


def _fitting(sizes: dict[str, int], weight_tiles: int, itemsize: int, shared_bytes: int) -> dict[str, int]:
    """As many stages, up to five, as let two programs share a multiprocessor; n stages have n - 1 buffers."""
    buffer = (BLOCK_M + weight_tiles * sizes["BLOCK_N"]) * sizes["BLOCK_K"] * itemsize
    return sizes | {"num_stages": 1 + max(1, min(4, shared_bytes // 2 // buffer))}


def expert_mlp(
    x: Tensor,
    routing: Routing,
    gate_up: Tensor,
    down: Tensor,
    shared_gate_up: Tensor | None = None,
    shared_down: Tensor | None = None,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
    *,
    launch: dict[str, dict[str, int]] | None = None,
    chained: bool | None = None,
) -> Tensor:
    """As the reference, summed in float32: two launches, four if the shared expert has another width than the others.

    launch: overrides single entries of `block_sizes`, for measurements    chained: as in `route`
    """
    if out is None:
        out = x.new_empty(*routing.experts.shape, x.shape[1])
    if scratch is None:
        scratch = scratch_for(x, routing, gate_up, shared_gate_up)
    sizes = block_sizes(x.shape[0], x.element_size(), _shared_bytes(x.device))
    sizes = {name: entry | (launch or {}).get(name, {}) for name, entry in sizes.items()}
    common = {"WIDEN": triton.knobs.runtime.interpret} | chain_options(x, chained)
    room, shared_blocks = routing.block_experts.shape[0], triton.cdiv(x.shape[0], BLOCK_M)
    if shared_gate_up is None:
        _two_products(x, routing, gate_up, down, None, None, out, scratch, (0, room), sizes, common)
    elif _alike(gate_up[0], shared_gate_up) and _alike(down[0], shared_down):
        _two_products(x, routing, gate_up, down, shared_gate_up, shared_down, out, scratch, (0, room), sizes, common)
    else:
        alone = (w[None].expand(gate_up.shape[0] + 1, -1, -1) for w in (shared_gate_up, shared_down))
        _two_products(x, routing, *alone, None, None, out, scratch, (0, shared_blocks), sizes, common)
        _two_products(x, routing, gate_up, down, None, None, out, scratch, (shared_blocks, room), sizes, common)
    return out


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.stride() == other.stride()


def _two_products(
    x: Tensor,
    routing: Routing,
    gate_up: Tensor,
    down: Tensor,
    shared_gate_up: Tensor | None,
    shared_down: Tensor | None,
    out: Tensor,
    scratch: Tensor,
    blocks: tuple[int, int],
    sizes: dict[str, dict[str, int]],
    common: dict[str, bool],
) -> None:
    """Both launches over blocks[0] .. blocks[1] - 1 of the routing."""
    first, end = blocks
    experts, _, hidden = gate_up.shape
    width, choices = down.shape[2], out.shape[1]
    tables = routing.block_experts, routing.block_rows, routing.num_blocks
    one, two = sizes["gate_up"], sizes["down"]
    _gate_up_kernel[(triton.cdiv(width, one["BLOCK_N"]), end - first)](
        x, *tables, gate_up, shared_gate_up, scratch, first, experts, hidden, width,
        *x.stride(), *gate_up.stride(), scratch.stride(1),
        CHOICES=choices, EVEN=width % one["BLOCK_N"] == 0 and hidden % one["BLOCK_K"] == 0, **one, **common,
    )  # fmt: skip
    _down_kernel[(triton.cdiv(hidden, two["BLOCK_N"]), end - first)](
        scratch, routing.weights, *tables, down, shared_down, out, first, experts, width, hidden,
        scratch.stride(1), *down.stride(), *out.stride()[1:],
        EVEN=hidden % two["BLOCK_N"] == 0 and width % two["BLOCK_K"] == 0, **two, **common,
    )  # fmt: skip


def combine(parts: Tensor, out: Tensor | None = None, *, chained: bool | None = None) -> Tensor:
    """As the reference, summed in float32."""
    tokens, choices, hidden = parts.shape
    out = parts.new_empty(tokens, hidden) if out is None else out
    block_h = 512
    _combine_kernel[(triton.cdiv(hidden, block_h), tokens)](
        parts, out, hidden, *parts.stride(), *out.stride(), CHOICES=choices, BLOCK_H=block_h, num_warps=4,
        **chain_options(parts, chained),
    )  # fmt: skip
    return out
