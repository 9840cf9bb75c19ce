"""The gated delta rule over a tree of many nodes, in Triton: three launches of little code.

`triton` walks the blocks of a tree one after the other, each with products over K, exponentials and a solve. Of all
that only the pseudo-values must wait for earlier blocks. So two launches do the rest for all blocks at once, and the
third walks with small products only:

    first     tiles of the state: commit the pending path; K S0 and Q S0 of raw keys and queries
              blocks of one key head: norms, stash entry k, G as two sums and the depths
    second    diagonal blocks of one value head: Y_rr and (I + X_rr)^-1, whose products are one loop
              pairs of blocks of one key head: k_i . k_j and q_i . k_j once, then the gates of each of its value heads
    third     [N, BLOCK_V] of one value head, block r after block r:
              u_r = (I + X_rr)^-1 (rhs_r - sum over earlier blocks j of X_rj u_j)
              out_r = (diag(exp G) Q S0)_r + sum of Y_rj u_j    where rhs_r = (diag(beta) (V - diag(exp G) K S0))_r

X_ij = beta_i exp(G_i - G_j) (k_i . k_j) and Y_ij = exp(G_i - G_j) (q_i . k_j), where j is an ancestor of i, or in Y
also i itself. Off the diagonal their tiles hold the exponentials and raw products only: the norms and betas are factors
of rows and columns, and the third launch applies them to its vectors. It fetches tiles and earlier pseudo-values ahead.

Nothing is worked out twice, products that are needed often are the body of a loop, and every launch keeps few registers
and little shared memory, so that an SM holds several of its programs. A launch lets the next one begin as its programs
end, not as they begin: that one's programs then find all SMs free, and none takes more of them than its share.

Scratch between the launches stays in the L2 cache. With bfloat16 inputs X, Y and the pseudo-values read back are stored
as two bfloat16 tiles that add up to 16 bits, split once by whoever writes them, and the state is multiplied in two as
well; other inputs keep all of it in float32, and products are float32 to its full accuracy.
No product has more than 32 rows: those of 64 become warp-group instructions on compute capability 9.0, which were seen
to read outside shared memory. (The commit's has K rows, and has always been right.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from deltatree.kernels.chaining import chaining
from deltatree.kernels.gated_delta.parts import EXACT, _committed, _committed_long, _gate, _split3, path_block
from deltatree.kernels.gated_delta.reference import DeltaStash, Gates, PendingCommit

BLOCK_N = 32  # nodes of a block


@triton.jit
def _two_parts(x):
    """Two float32 tiles that add up to x; the first is a bfloat16 number, the second nearly one (16 bits in all)."""
    high = ((x.to(tl.int32, bitcast=True) + 0x8000) & -65536).to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit
def _product(a, a_low, b, b_low, start, PARTS: tl.constexpr):
    """start + a b, either factor one tile or the sum of two."""
    if PARTS == 2:
        small = tl.dot(a, b_low) + tl.dot(a_low, b)
        product = tl.dot(a, b, start) + small
    else:
        product = tl.dot(a, b, start, input_precision=EXACT)
    return product


@triton.jit
def _store_parts(where, x, apart, PARTS: tl.constexpr):
    if PARTS == 2:
        high, low = _two_parts(x)
        tl.store(where, high.to(where.dtype.element_ty))
        tl.store(where + apart, low.to(where.dtype.element_ty))
    else:
        tl.store(where, x)


@triton.jit
def _load_parts(where, apart, PARTS: tl.constexpr):
    high = tl.load(where)
    low = high
    if PARTS == 2:
        low = tl.load(where + apart)
    return high, low


@triton.jit
def _state_tile(
    tile, state, q, k, carried, path, path_length, old_k, old_u, old_g, N, heads,
    ssb, ssh, ssk, ssv, sqb, sqn, sqh, sqk, skb, skn, skh, skk,
    spath, okb, okn, okh, okk, oub, oun, ouh, ouv, ogb, ogn, ogh,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PATH: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr, BLOCK_PATH: tl.constexpr,
    PENDING: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """The state's part in all nodes: a tile of the state, the path committed, times raw keys and queries."""
    v_tiles: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head = (tile // v_tiles).to(tl.int64)
    b, hv = head // HV, head % HV
    hk = hv // GROUP
    ok = tl.arange(0, BLOCK_K)
    ov = (tile % v_tiles) * BLOCK_V + tl.arange(0, BLOCK_V)
    mk, mv = ok < K, ov < V
    ok, ov = ok.to(tl.int64), ov.to(tl.int64)
    inside = mk[:, None] & mv[None, :]
    where_state = state + b * ssb + hv * ssh + ok[:, None] * ssk + ov[None, :] * ssv
    s = tl.load(where_state, mask=inside, other=0.0)
    if PENDING:
        old_k += b * okb + hk * okh
        old_u += b * oub + hv * ouh
        old_g += b * ogb + hv * ogh
        if PATH <= BLOCK_PATH:
            s, length = _committed(
                s, old_k, old_u, old_g, path, path_length, spath, okn, okk, oun, ouv, ogn, ok, ov, mk, mv,
                PATH, BLOCK_PATH,
            )  # fmt: skip
        else:
            s, length = _committed_long(
                s, old_k, old_u, old_g, path, path_length, spath, okn, okk, oun, ouv, ogn, ok, ov, mk, mv,
                PATH, BLOCK_PATH,
            )  # fmt: skip
        tl.store(where_state, s, mask=inside & (length > 0))
    if SPLIT:
        high, middle, _ = _split3(s)  # 16 bits: enough for inputs that have 8
        less_middle = -middle
    q += b * sqb + hk * sqh
    k += b * skb + hk * skh
    carried += head * N * V
    for start in range(0, N, ROWS):
        rows = start + tl.arange(0, ROWS)
        mn = rows < N
        rows = rows.to(tl.int64)
        read = mn[:, None] & mk[None, :]
        keys = tl.load(k + rows[:, None] * skn + ok[None, :] * skk, mask=read, other=0.0)
        queries = tl.load(q + rows[:, None] * sqn + ok[None, :] * sqk, mask=read, other=0.0)
        if SPLIT:  # the inputs as they are, exact; subtracted, not accumulated: short chains side by side
            found = tl.dot(keys, high) - tl.dot(keys, less_middle)
            outputs = tl.dot(queries, high) - tl.dot(queries, less_middle)
        else:
            found = tl.dot(keys.to(tl.float32), s, input_precision=EXACT)
            outputs = tl.dot(queries.to(tl.float32), s, input_precision=EXACT)
        where = carried + rows[:, None] * V + ov[None, :]
        written = mn[:, None] & mv[None, :]
        tl.store(where, found, mask=written)
        tl.store(where + tl.cast(heads, tl.int64) * N * V, outputs, mask=written)


@triton.jit
def _totals(
    ancestors, g, block, N, sai, saj, sgn, sgh, a_log, dt_bias,
    GROUP: tl.constexpr, RAW: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SUM: tl.constexpr, NARROW: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums of a block's nodes over their ancestors, for the GROUP value heads of one key head: column 3 i is that of
    the ith's log decays as multiples of 1/64, 3 i + 1 that of the rest, 3 i + 2 the count.

    One product for all: ancestors as ones, and the summands in two parts. Multiples of 1/64 sum without rounding, so a
    difference of two long sums keeps the accuracy of its own size. g, a_log, dt_bias point at the first value head.
    """
    rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, COLUMNS)
    head, part = column // 3, (column % 3)[None, :]
    used = head < GROUP
    head = head.to(tl.int64)
    decay_scale = 0.0
    decay_shift = 0.0
    if RAW:
        decay_scale = tl.load(a_log + head, mask=used, other=0.0).to(tl.float32)[None, :]
        decay_shift = tl.load(dt_bias + head, mask=used, other=0.0).to(tl.float32)[None, :]
    sums = tl.zeros([BLOCK_N, COLUMNS], tl.float32)
    for start in tl.range(0, (block + 1) * BLOCK_N, BLOCK_SUM, num_stages=1):
        cols = start + tl.arange(0, BLOCK_SUM)
        inside = (rows < N)[:, None] & (cols < N)[None, :]
        seen = tl.load(ancestors + rows[:, None] * sai + cols[None, :] * saj, mask=inside, other=0)
        where = g + cols.to(tl.int64)[:, None] * sgn + head[None, :] * sgh
        gate = tl.load(where, mask=(cols < N)[:, None] & used[None, :], other=0.0).to(tl.float32)
        gate = _gate(gate, RAW, decay_scale, decay_shift)
        steps = tl.floor(gate * 64.0 + 0.5) * 0.015625
        high, low = _two_parts(tl.where(part == 0, steps, tl.where(part == 1, gate - steps, 1.0)))
        ones = tl.where(seen != 0, 1.0, 0.0)
        if NARROW:
            ones, high, low = ones.to(tl.bfloat16), high.to(tl.bfloat16), low.to(tl.bfloat16)
        sums = tl.dot(ones, high, sums, input_precision=EXACT)
        sums = tl.dot(ones, low, sums, input_precision=EXACT)
    return sums


@triton.jit
def _inverse(x, count, real, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, NARROW: tl.constexpr):
    """(I + X)^-1 of a diagonal block, by bands of two levels of depth: one more is final with each sweep.

    Within bands (I + X_in)^-1 = I - X_in, since a child's child is in the next. The loop's first product is
    M = (I - X_in) X_out, the others are the sweeps T <- (I - X_in) - M T.
    """
    node = tl.arange(0, BLOCK_N)
    band = tl.maximum(count - 1, 0) // 2
    inner = band[:, None] == band[None, :]
    start = tl.where(node[:, None] == node[None, :], 1.0, 0.0) - tl.where(inner, x, 0.0)
    last = tl.max(tl.where(real, band, 0), 0)
    # No path has more nodes in a block than there are, however far apart their depths.
    sweeps = tl.minimum(last - tl.min(tl.where(real, band, last), 0), BLOCK_N)
    left, right = start, tl.where(inner, 0.0, x)
    for i in range(0, tl.where(sweeps > 0, sweeps + 1, 0)):
        if PARTS == 2:
            a, a_low = _two_parts(left)
            c, c_low = _two_parts(right)
            if NARROW:
                a, a_low, c, c_low = (
                    a.to(tl.bfloat16), a_low.to(tl.bfloat16), c.to(tl.bfloat16), c_low.to(tl.bfloat16)
                )  # fmt: skip
            found = tl.dot(a, c) - tl.dot(a, -c_low) - tl.dot(-a_low, c)
        else:
            found = tl.dot(left, right, input_precision=EXACT)
        left = tl.where(i == 0, found, left)
        right = tl.where(i == 0, start, start - found)
    return tl.where(sweeps > 0, right, start)


@triton.jit
def _node_factors(
    which, q, k, log_decay, ancestors, new_k, new_g, factors, sums, a_log, dt_bias, N, scale, key_heads, heads,
    sqb, sqn, sqh, sqk, skb, skn, skh, skk, sgb, sgn, sgh, sai, saj, nkb, nkn, nkh, nkk, ngb, ngn, ngh,
    HK: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SUM: tl.constexpr, RAW: tl.constexpr, NARROW: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of one key head and one block of nodes: the factors that normalise keys and queries, the stash's keys, and the
    sums of log decays and the count of ancestors for each of its value heads."""
    head = (which % key_heads).to(tl.int64)
    b, hk = head // HK, head % HK
    block = which // key_heads
    rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
    mn = rows < N
    rows = rows.to(tl.int64)
    ok = tl.arange(0, BLOCK_K)
    inside = mn[:, None] & (ok < K)[None, :]
    ok = ok.to(tl.int64)
    keys = tl.load(k + b * skb + hk * skh + rows[:, None] * skn + ok[None, :] * skk, mask=inside, other=0.0)
    queries = tl.load(q + b * sqb + hk * sqh + rows[:, None] * sqn + ok[None, :] * sqk, mask=inside, other=0.0)
    first = hk * GROUP
    found = _totals(  # while keys and queries are on their way
        ancestors, log_decay + b * sgb + first * sgh, block, N, sai, saj, sgn, sgh,
        a_log + first if RAW else a_log, dt_bias + first if RAW else dt_bias,
        GROUP, RAW, BLOCK_N, BLOCK_SUM, NARROW, COLUMNS,
    )  # fmt: skip
    keys, queries = keys.to(tl.float32), queries.to(tl.float32)
    norm = tl.rsqrt(tl.sum(keys * keys, 1) + 1e-6)
    tl.store(new_k + b * nkb + hk * nkh + rows[:, None] * nkn + ok[None, :] * nkk, keys * norm[:, None], mask=inside)
    tl.store(factors + head * N + rows, norm, mask=mn)
    norm = tl.rsqrt(tl.sum(queries * queries, 1) + 1e-6) * scale
    tl.store(factors + (key_heads + head) * N + rows, norm, mask=mn)
    column = tl.arange(0, COLUMNS)
    which_sum, of_head = (column % 3).to(tl.int64), column // 3
    where = sums + (which_sum * heads + head * GROUP + of_head)[None, :] * N + rows[:, None]
    tl.store(where, found, mask=mn[:, None] & (of_head < GROUP)[None, :])
    for i in tl.static_range(GROUP):
        whole = tl.sum(tl.where(((of_head == i) & (which_sum < 2))[None, :], found, 0.0), 1)
        tl.store(new_g + b * ngb + (first + i) * ngh + rows * ngn, whole, mask=mn)


@triton.jit
def _read_kernel(
    state, q, k, log_decay, ancestors, carried, factors, sums, new_k, new_g, a_log, dt_bias,
    path, path_length, old_k, old_u, old_g, N, num_small, heads, scale,
    ssb, ssh, ssk, ssv, sqb, sqn, sqh, sqk, skb, skn, skh, skk, sgb, sgn, sgh,
    sai, saj, nkb, nkn, nkh, nkk, ngb, ngn, ngh, spath, okb, okn, okh, okk, oub, oun, ouh, ouv, ogb, ogn, ogh,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PATH: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_PATH: tl.constexpr, BLOCK_SUM: tl.constexpr, RAW: tl.constexpr, PENDING: tl.constexpr,
    SPLIT: tl.constexpr, NARROW: tl.constexpr, COLUMNS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """The first launch."""
    if CHAINED:  # the launch overlaps the end of the kernel before; nothing is read until that has finished
        gdc_wait()
    program = tl.program_id(0)
    if program < num_small:
        _node_factors(
            program, q, k, log_decay, ancestors, new_k, new_g, factors, sums, a_log, dt_bias,
            N, scale, heads // GROUP, heads, sqb, sqn, sqh, sqk, skb, skn, skh, skk, sgb, sgn, sgh, sai, saj,
            nkb, nkn, nkh, nkk, ngb, ngn, ngh, HV // GROUP, GROUP, K, BLOCK_K, BLOCK_N, BLOCK_SUM, RAW, NARROW,
            COLUMNS,
        )  # fmt: skip
    else:
        _state_tile(
            program - num_small, state, q, k, carried, path, path_length, old_k, old_u, old_g, N, heads,
            ssb, ssh, ssk, ssv, sqb, sqn, sqh, sqk, skb, skn, skh, skk,
            spath, okb, okn, okh, okk, oub, oun, ouh, ouv, ogb, ogn, ogh,
            HV, GROUP, K, V, PATH, BLOCK_K, BLOCK_V, ROWS, BLOCK_PATH, PENDING, SPLIT,
        )  # fmt: skip


@triton.jit
def _pair_kernel(
    q, k, beta, ancestors, solve, read, sums, N, num_blocks, heads,
    sqb, sqn, sqh, sqk, skb, skn, skh, skk, sbb, sbn, sbh, sai, saj,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    RAW: tl.constexpr, SPLIT: tl.constexpr, PARTS: tl.constexpr, NARROW: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """The second launch: what the nodes of block `row` find in those of block `col`; for one value head if they are
    the same block, else for all value heads of one key head."""
    if CHAINED:
        gdc_wait()
    # Blocks stand in a circle, and pairs count first by distance: the diagonal ones, which take longest, start first.
    pair = tl.program_id(1)
    distance = pair // num_blocks
    one = pair - distance * num_blocks
    other = tl.where(one + distance < num_blocks, one + distance, one + distance - num_blocks)
    row, col = tl.maximum(one, other), tl.minimum(one, other)
    diagonal = distance == 0
    first = tl.program_id(0).to(tl.int64) * tl.where(diagonal, 1, GROUP)
    if first >= heads:
        return
    b = first // HV
    hk = first % HV // GROUP
    ok = tl.arange(0, BLOCK_K)
    mk = ok < K
    ok = ok.to(tl.int64)
    q += b * sqb + hk * sqh
    k += b * skb + hk * skh
    node = tl.arange(0, BLOCK_N)
    rows, cols = row * BLOCK_N + node, col * BLOCK_N + node
    mn, mc = rows < N, cols < N
    seen = tl.load(ancestors + rows[:, None] * sai + cols[None, :] * saj, mask=mn[:, None] & mc[None, :], other=0)
    rows, cols = rows.to(tl.int64), cols.to(tl.int64)
    past = tl.load(k + cols[None, :] * skn + ok[:, None] * skk, mask=mk[:, None] & mc[None, :], other=0.0)
    keys = tl.load(k + rows[:, None] * skn + ok[None, :] * skk, mask=mn[:, None] & mk[None, :], other=0.0)
    queries = tl.load(q + rows[:, None] * sqn + ok[None, :] * sqk, mask=mn[:, None] & mk[None, :], other=0.0)
    if SPLIT:
        x = tl.dot(keys, past)
        y = tl.dot(queries, past)
    else:
        past = past.to(tl.float32)
        x = tl.dot(keys.to(tl.float32), past, input_precision=EXACT)
        y = tl.dot(queries.to(tl.float32), past, input_precision=EXACT)
    size: tl.constexpr = BLOCK_N * BLOCK_N * PARTS
    apart = tl.cast(heads, tl.int64) * N
    for i in range(0, tl.where(diagonal, 1, GROUP)):
        head = first + i
        where = sums + head * N
        coarse = tl.load(where + rows, mask=mn, other=0.0)
        fine = tl.load(where + apart + rows, mask=mn, other=0.0)
        past_coarse = tl.load(where + cols, mask=mc, other=0.0)
        past_fine = tl.load(where + apart + cols, mask=mc, other=0.0)
        # Masked before the exponential: off the path the difference may be positive and overflow.
        fade = (coarse[:, None] - past_coarse[None, :]) + (fine[:, None] - past_fine[None, :])
        fade = tl.exp(tl.where(seen != 0, fade, float("-inf")))
        slot = head * (num_blocks * (num_blocks + 1) // 2) + row * (row + 1) // 2 + col
        within = slot * size + node[:, None] * BLOCK_N + node[None, :]
        _store_parts(read + within, fade * y, BLOCK_N * BLOCK_N, PARTS)
        tile = fade * x
        if row == col:
            gate = tl.load(beta + b * sbb + (head % HV) * sbh + rows * sbn, mask=mn, other=0.0).to(tl.float32)
            count = tl.load(where + 2 * apart + rows, mask=mn, other=0.0).to(tl.int32)
            if RAW:
                gate = tl.sigmoid(gate)
            same = node[:, None] == node[None, :]
            squares = tl.where(same, x, 0.0)
            norm = tl.rsqrt(tl.sum(squares, 1) + 1e-6)
            past_norm = tl.rsqrt(tl.sum(squares, 0) + 1e-6)
            tile = tl.where(same, 0.0, (gate * norm)[:, None] * tile * past_norm[None, :])
            tile = _inverse(tile, count, mn, BLOCK_N, PARTS, NARROW)
        _store_parts(solve + within, tile, BLOCK_N * BLOCK_N, PARTS)


@triton.jit
def _held(x, HELD: tl.constexpr):
    """x itself. Triton moves the tiles of a product through shared memory right after their load, and would wait for
    them there; it does not look past this assembly, so that they may be on their way while something else is done."""
    if HELD:
        if x.dtype == tl.bfloat16:
            x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=2)
        else:
            x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=False, pack=1)
    return x


@triton.jit
def _solve_kernel(
    solve, read, carried, factors, found, v, beta, u, g, out, N, num_blocks, heads,
    svb, svn, svh, svv, sbb, sbn, sbh, sub, sun, suh, suv, sgb, sgn, sgh, sob, son, soh, sov,
    HV: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
    RAW: tl.constexpr, PARTS: tl.constexpr, HELD: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """The third launch: pseudo-values and outputs of one [N, BLOCK_V] of a value head.

    Everything is transposed, [V, N]: a right-hand side is then a left factor of the next product as it lies in
    registers. `found` keeps the pseudo-values, times the norm of their key, as later blocks of this program read them.
    """
    if CHAINED:
        gdc_wait()
    head = tl.program_id(0).to(tl.int64)
    b, hv = head // HV, head % HV
    node = tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_V)
    ov = tl.program_id(1) * BLOCK_V + column
    mv = ov < V
    ov = ov.to(tl.int64)
    area: tl.constexpr = BLOCK_N * BLOCK_N
    mine: tl.constexpr = BLOCK_V * BLOCK_N
    size: tl.constexpr = area * PARTS
    pairs = head * (num_blocks * (num_blocks + 1) // 2) * size
    transposed = node[:, None] + node[None, :] * BLOCK_N
    solve += pairs + transposed
    read += pairs + transposed
    found += (head * tl.num_programs(1) + tl.program_id(1)) * num_blocks * mine * PARTS
    found += column[:, None] * BLOCK_N + node[None, :]
    carried += head * N * V + ov[:, None]
    factors += (b * (HV // GROUP) + hv // GROUP) * N
    v += b * svb + hv * svh + ov[:, None] * svv
    beta += b * sbb + hv * sbh
    u += b * sub + hv * suh + ov[:, None] * suv
    g += b * sgb + hv * sgh
    out += b * sob + hv * soh + ov[:, None] * sov

    for row in range(0, num_blocks):
        rows = row * BLOCK_N + node
        mn = rows < N
        inside = mv[:, None] & mn[None, :]
        rows = rows.to(tl.int64)
        slot = row * (row + 1) // 2
        # All of it is on its way while earlier blocks are read.
        gate = tl.load(beta + rows * sbn, mask=mn, other=0.0).to(tl.float32)
        total = tl.load(g + rows * sgn, mask=mn, other=0.0)
        norm = tl.load(factors + rows, mask=mn, other=0.0)
        query_norm = tl.load(factors + heads // GROUP * N + rows, mask=mn, other=0.0)
        values = tl.load(v + rows[None, :] * svn, mask=inside, other=0.0)
        recalled = tl.load(carried + rows[None, :] * V, mask=inside, other=0.0)
        outputs = tl.load(carried + tl.cast(heads, tl.int64) * N * V + rows[None, :] * V, mask=inside, other=0.0)
        t, t_low = _load_parts(solve + (slot + row) * size, area, PARTS)
        y, y_low = _load_parts(read + (slot + row) * size, area, PARTS)
        below = tl.zeros([BLOCK_V, BLOCK_N], tl.float32)
        result = tl.zeros([BLOCK_V, BLOCK_N], tl.float32)
        for col in range(0, row):
            past, past_low = _load_parts(found + col * mine * PARTS, mine, PARTS)
            x_tile, x_low = _load_parts(solve + (slot + col) * size, area, PARTS)
            y_tile, y_tile_low = _load_parts(read + (slot + col) * size, area, PARTS)
            below = _product(past, past_low, x_tile, x_low, below, PARTS)
            result = _product(past, past_low, y_tile, y_tile_low, result, PARTS)
        if RAW:
            gate = tl.sigmoid(gate)
        fade = tl.exp(total)
        recalled, outputs = _held(recalled, HELD), _held(outputs, HELD)
        rhs = values.to(tl.float32) - norm[None, :] * (fade[None, :] * recalled + below)
        rhs = gate[None, :] * rhs
        t, y = _held(t, HELD), _held(y, HELD)
        low = rhs
        if PARTS == 2:
            t_low, y_low = _held(t_low, HELD), _held(y_low, HELD)
            rhs, low = _two_parts(rhs)
        solved = _product(rhs.to(t.dtype), low.to(t.dtype), t, t_low, tl.zeros([BLOCK_V, BLOCK_N], tl.float32), PARTS)
        tl.store(u + rows[None, :] * sun, solved, mask=inside)
        solved = solved * norm[None, :]
        low = solved
        if PARTS == 2:
            solved, low = _two_parts(solved)
        solved, low = solved.to(t.dtype), low.to(t.dtype)
        tl.store(found + row * mine * PARTS, solved)
        if PARTS == 2:
            tl.store(found + row * mine * PARTS + mine, low)
        result = _product(solved, low, y, y_low, result, PARTS)
        result = query_norm[None, :] * (fade[None, :] * outputs + result)
        tl.store(out + rows[None, :] * son, result, mask=inside)
        tl.debug_barrier()  # the next block reads this one's pseudo-values back


def lean_sizes(num_nodes: int, value_dim: int, dtype: torch.dtype) -> dict[str, int | bool]:
    """The three launches: a fixed table, so that a run can be repeated and live state is never tuned on.

    READ_V, SOLVE_V: value columns of a program of the first and third launch; *_WARPS: the warps of each launch
    ROWS: nodes for which a tile of the state is multiplied at a time    BLOCK_SUM: log decays that are summed at once
    PARTS: tiles that a stored factor is made of: two of bfloat16, or one of float32
    NARROW: products may take bfloat16    HELD: see `_held`
    """
    block_v = min(32, max(16, triton.next_power_of_2(value_dim)))
    native = not triton.knobs.runtime.interpret
    return {
        "READ_V": block_v,
        "READ_WARPS": 4,
        "ROWS": 16,
        "BLOCK_SUM": min(128, max(32, triton.next_power_of_2(num_nodes))),
        "PAIR_WARPS": 2 if dtype == torch.bfloat16 else 4,  # float32 factors take twice the registers
        # Fewer columns than nodes of a block: only then does Triton give every warp nodes of its own.
        "SOLVE_V": 16,
        "SOLVE_WARPS": 2,
        # Three bfloat16 products keep 16 bits of either factor, enough for inputs that have 8.
        "PARTS": 2 if dtype == torch.bfloat16 and native and not torch.version.hip else 1,
        "NARROW": native,
        "HELD": native and not torch.version.hip,
    }


def _scratch(state: Tensor, nodes: int, key_heads: int, sizes: dict[str, int | bool]) -> list[Tensor]:
    """X, Y, the pseudo-values as they are read back; K S0 and Q S0, norms, sums: six parts of one new tensor."""
    batch, heads, _, value_dim = state.shape
    blocks, v_tiles = triton.cdiv(nodes, BLOCK_N), triton.cdiv(value_dim, sizes["SOLVE_V"])
    pairs = batch * heads * (blocks * (blocks + 1) // 2) * BLOCK_N**2 * sizes["PARTS"]
    found = batch * heads * v_tiles * blocks * sizes["SOLVE_V"] * BLOCK_N * sizes["PARTS"]
    narrow = sizes["PARTS"] == 2 and sizes["NARROW"]
    tiles = [n // 2 if narrow else n for n in (pairs, pairs, found)]
    rest = [2 * batch * heads * nodes * value_dim, 2 * batch * key_heads * nodes, 3 * batch * heads * nodes]
    *tiles, carried, factors, sums = state.new_empty(sum(tiles + rest)).split(tiles + rest)
    return [*(x.view(torch.bfloat16) if narrow else x for x in tiles), carried, factors, sums]


def launch_lean(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, seen: Tensor,
    gates: Gates | None, pending: PendingCommit | None, out: Tensor, stash: DeltaStash,
    launch: dict[str, int | str | bool],
) -> None:  # fmt: skip
    """All launches; everything is as in `tree_gated_delta`, `seen` its ancestors as bytes. Scratch is allocated here.

    launch: overrides of `lean_sizes`.
    """
    batch, heads, key_dim, value_dim = state.shape
    nodes, key_heads = q.shape[1:3]
    sizes = lean_sizes(nodes, value_dim, k.dtype) | launch
    blocks, all_heads, all_key_heads = triton.cdiv(nodes, BLOCK_N), batch * heads, batch * key_heads
    solve, read, found, carried, factors, sums = _scratch(state, nodes, key_heads, sizes)
    old, path = (stash, None) if pending is None else (pending.stash, pending.path.to(state.device))
    block_k = max(16, triton.next_power_of_2(key_dim))
    split = q.dtype == k.dtype == torch.bfloat16 and sizes["NARROW"]
    common = {"HV": heads, "GROUP": heads // key_heads, "BLOCK_N": BLOCK_N, "RAW": gates is not None}
    common |= chaining(state.device)
    num_small = all_key_heads * blocks
    _read_kernel[(num_small + all_heads * triton.cdiv(value_dim, sizes["READ_V"]),)](
        state, q, k, log_decay, seen, carried, factors, sums, stash.k, stash.log_decay,
        None if gates is None else gates.a_log, None if gates is None else gates.dt_bias,
        path, None if pending is None else pending.length, old.k, old.u, old.log_decay,
        nodes, num_small, all_heads, key_dim**-0.5,
        *state.stride(), *q.stride(), *k.stride(), *log_decay.stride(),
        *seen.stride(), *stash.k.stride(), *stash.log_decay.stride(),
        1 if path is None else path.stride(0), *old.k.stride(), *old.u.stride(), *old.log_decay.stride(),
        K=key_dim, V=value_dim, PATH=0 if path is None else path.numel(), BLOCK_PATH=path_block(path),
        PENDING=pending is not None, BLOCK_K=block_k, BLOCK_V=sizes["READ_V"], ROWS=sizes["ROWS"],
        BLOCK_SUM=sizes["BLOCK_SUM"], SPLIT=split, NARROW=sizes["NARROW"],
        COLUMNS=max(16, triton.next_power_of_2(3 * heads // key_heads)), num_warps=sizes["READ_WARPS"], **common,
    )  # fmt: skip
    _pair_kernel[(all_heads, blocks * (blocks + 1) // 2)](
        q, k, beta, seen, solve, read, sums, nodes, blocks, all_heads,
        *q.stride(), *k.stride(), *beta.stride(), *seen.stride(),
        K=key_dim, BLOCK_K=block_k, SPLIT=split, PARTS=sizes["PARTS"], NARROW=sizes["NARROW"],
        num_warps=sizes["PAIR_WARPS"], **common,
    )  # fmt: skip
    _solve_kernel[(all_heads, triton.cdiv(value_dim, sizes["SOLVE_V"]))](
        solve, read, carried, factors, found, v, beta, stash.u, stash.log_decay, out, nodes, blocks, all_heads,
        *v.stride(), *beta.stride(), *stash.u.stride(), *stash.log_decay.stride(), *out.stride(),
        V=value_dim, BLOCK_V=sizes["SOLVE_V"], PARTS=sizes["PARTS"], HELD=sizes["HELD"],
        num_warps=sizes["SOLVE_WARPS"], **common,
    )  # fmt: skip
