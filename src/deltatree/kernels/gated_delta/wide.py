"""The gated delta rule over a tree of many nodes, in Triton: two launches without a walk over the state.

`triton` walks the blocks of a tree one after the other, each with products over K, exponentials and a solve. Here the
first launch does all of that for all blocks at once, since nothing of it needs a pseudo-value. Its programs are of two
kinds, which do not wait for each other:

    tiles of the state   commit the pending path; K S0 and Q S0
    pairs of blocks      the [BLOCK_N, BLOCK_N] tiles of -X and of Y_ij = exp(G_i - G_j) (q_i . k_j), stash entries k and
                         G; on the diagonal (I + X_rr)^-1 in place of X_rr, by bands and sweeps as in `triton`

What they find goes to scratch, which stays in the L2 cache. The second launch has one program for each [N, BLOCK_V] of
a value head, in which a block costs few small products:

    rhs_r = diag(beta) (V - diag(exp G) K S0)_r
    u_r = (I + X_rr)^-1 (rhs_r - sum over earlier blocks j of X_rj u_j)     out_r = (diag(exp G) Q S0)_r + sum of Y_rj u_j

Up to four blocks (a panel) are solved in registers; later panels read the pseudo-values of earlier ones back.
No product has more than 32 rows: those of 64 become warp-group instructions on compute capability 9.0, which were seen
to read outside shared memory. (The commit's has K rows, and has always been right.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deltatree.kernels.chaining import chaining
from deltatree.kernels.gated_delta.parts import EXACT, _committed, _committed_long, _gate, _split3, _sums, path_block
from deltatree.kernels.gated_delta.reference import DeltaStash, Gates, PendingCommit

BAND = tl.constexpr(4)  # levels of a diagonal block that are inverted by products alone
MOST_IN_PANEL = 4  # blocks whose solve is unrolled
LONGEST_SUM = 128  # nodes whose log decays are summed at once


@triton.jit
def _seen(ancestors, rows, cols, N, sai, saj):
    """Bytes, not 0 where col is row or an ancestor of it."""
    inside = (rows < N)[:, None] & (cols < N)[None, :]
    return tl.load(ancestors + rows[:, None] * sai + cols[None, :] * saj, mask=inside, other=0)


@triton.jit
def _pair_sums(
    ancestors, g, row, col, N, sai, saj, sgn, a_log, dt_bias,
    RAW: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SUM: tl.constexpr,
):  # fmt: skip
    """The sums of two blocks' nodes over their ancestors, which are at most as far as the later block's last node."""
    rows = row * BLOCK_N + tl.arange(0, BLOCK_N)
    others = col * BLOCK_N + tl.arange(0, BLOCK_N)
    coarse = tl.zeros([BLOCK_N], tl.float32)
    fine, other_coarse, other_fine = coarse, coarse, coarse
    count = tl.zeros([BLOCK_N], tl.int32)
    for start in range(0, (row + 1) * BLOCK_N, BLOCK_SUM):
        cols = start + tl.arange(0, BLOCK_SUM)
        seen = _seen(ancestors, rows, cols, N, sai, saj)
        other_seen = _seen(ancestors, others, cols, N, sai, saj)
        gate = tl.load(g + cols.to(tl.int64) * sgn, mask=cols < N, other=0.0).to(tl.float32)
        gate = _gate(gate, RAW, a_log, dt_bias)
        more_coarse, more_fine, more = _sums(seen != 0, gate)
        coarse += more_coarse
        fine += more_fine
        count += more
        more_coarse, more_fine, _ = _sums(other_seen != 0, gate)
        other_coarse += more_coarse
        other_fine += more_fine
    return coarse, fine, count, other_coarse, other_fine


@triton.jit
def _rows(x, block, N, sxn, sx, offsets, inside, BLOCK_N: tl.constexpr):
    """[BLOCK_N, ...] of a block's nodes; zeros beyond the last."""
    rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
    return tl.load(
        x + rows.to(tl.int64)[:, None] * sxn + offsets[None, :] * sx,
        mask=(rows < N)[:, None] & inside[None, :],
        other=0.0,
    )


@triton.jit
def _inverse(x, count, real, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr):
    """(I + X)^-1 of a diagonal block: within bands by products, then one more band final with each sweep."""
    node = tl.arange(0, BLOCK_N)
    band = tl.maximum(count - 1, 0) // BAND
    inner = band[:, None] == band[None, :]
    x_in = tl.where(inner, x, 0.0)
    x_out = tl.where(inner, 0.0, x)
    start = tl.where(node[:, None] == node[None, :], 1.0, 0.0) - x_in
    x_in = tl.dot(x_in, x_in, input_precision=PRECISION)
    start = tl.dot(x_in, start, start, input_precision=PRECISION)
    x_out = tl.dot(start, x_out, input_precision=PRECISION)
    inverse = start
    last = tl.max(tl.where(real, band, 0), 0)
    for _ in range(0, last - tl.min(tl.where(real, band, last), 0)):
        inverse = start - tl.dot(x_out, inverse, input_precision=PRECISION)
    return inverse


@triton.jit
def _state_tile(
    tile, state, committed, q, k, recalled, carried, path, path_length, old_k, old_u, old_g, N, share, scale,
    ssb, ssh, ssk, ssv, sqb, sqn, sqh, sqk, skb, skn, skh, skk, nub, nun, nuh, nuv,
    spath, okb, okn, okh, okk, oub, oun, ouh, ouv, ogb, ogn, ogh,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PATH: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr, BLOCK_PATH: tl.constexpr,
    PENDING: tl.constexpr, COPY: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """What `share` nodes read in one tile of the state: K S0 and Q S0 of normalised keys and scaled queries.

    Several programs with one tile each commit the path for themselves. None may write what another still reads, so with
    COPY the first leaves the committed tile in scratch and the second launch copies it over.
    """
    v_tiles: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    shares = tl.cdiv(N, share)
    head = tile // (v_tiles * shares)
    first = (tile // v_tiles % shares) * share
    b = (head // HV).to(tl.int64)
    hv = (head % HV).to(tl.int64)
    hk = hv // GROUP
    ok = tl.arange(0, BLOCK_K)
    ov = (tile % v_tiles) * BLOCK_V + tl.arange(0, BLOCK_V)
    mk, mv = ok < K, ov < V
    ok, ov = ok.to(tl.int64), ov.to(tl.int64)
    q += b * sqb + hk * sqh
    k += b * skb + hk * skh
    recalled += b * nub + hv * nuh
    carried += head.to(tl.int64) * N * V

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
        if COPY:
            committed += head.to(tl.int64) * K * V
            tl.store(committed + ok[:, None] * V + ov[None, :], s, mask=inside & (first == 0))
        else:
            tl.store(where_state, s, mask=inside & (length > 0))

    if SPLIT:
        s_high, less_middle, less_low = _split3(s)
        less_middle, less_low = -less_middle, -less_low
    for start in range(first, tl.minimum(first + share, N), ROWS):
        rows = start + tl.arange(0, ROWS)
        mn = rows < N
        rows = rows.to(tl.int64)
        keys = tl.load(k + rows[:, None] * skn + ok[None, :] * skk, mask=mn[:, None] & mk[None, :], other=0.0)
        queries = tl.load(q + rows[:, None] * sqn + ok[None, :] * sqk, mask=mn[:, None] & mk[None, :], other=0.0)
        # Products take the inputs as they are (exact in bfloat16); the norms are applied to their results.
        wide = keys.to(tl.float32)
        key_norm = tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6)
        wide = queries.to(tl.float32)
        query_norm = tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6) * scale
        if SPLIT:  # subtracted, not accumulated: three short chains of products instead of a long one
            found = tl.dot(keys, s_high) - tl.dot(keys, less_middle) - tl.dot(keys, less_low)
            outputs = tl.dot(queries, s_high) - tl.dot(queries, less_middle) - tl.dot(queries, less_low)
        else:
            found = tl.dot(keys.to(tl.float32), s, input_precision=EXACT)
            outputs = tl.dot(queries.to(tl.float32), s, input_precision=EXACT)
        written = mn[:, None] & mv[None, :]
        tl.store(recalled + rows[:, None] * nun + ov[None, :] * nuv, key_norm[:, None] * found, mask=written)
        tl.store(carried + rows[:, None] * V + ov[None, :], query_norm[:, None] * outputs, mask=written)


@triton.jit
def _block_pair(
    pair, q, k, beta, log_decay, ancestors, solve, read, new_k, new_g, a_log, dt_bias, N, num_blocks, scale,
    sqb, sqn, sqh, sqk, skb, skn, skh, skk, sbb, sbn, sbh, sgb, sgn, sgh, sai, saj, nkb, nkn, nkh, nkk, ngb, ngn, ngh,
    heads, HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SUM: tl.constexpr, ONE_SUM: tl.constexpr, RAW: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What the nodes of block `row` find in those of block `col`, for one value head."""
    head = pair % heads
    pair = pair // heads
    # Blocks stand in a circle, and pair counts first by distance: the diagonal ones, which take longest, start first.
    one = pair % num_blocks
    other = (one + pair // num_blocks) % num_blocks
    row, col = tl.maximum(one, other), tl.minimum(one, other)
    b = (head // HV).to(tl.int64)
    hv = (head % HV).to(tl.int64)
    hk = hv // GROUP
    ok = tl.arange(0, BLOCK_K)
    mk = ok < K
    ok = ok.to(tl.int64)
    q += b * sqb + hk * sqh
    k += b * skb + hk * skh
    beta += b * sbb + hv * sbh
    log_decay += b * sgb + hv * sgh

    node = tl.arange(0, BLOCK_N)
    rows = row * BLOCK_N + node
    mn = rows < N
    seen = _seen(ancestors, rows, col * BLOCK_N + node, N, sai, saj)
    gate = tl.load(beta + rows.to(tl.int64) * sbn, mask=mn, other=0.0).to(tl.float32)
    decay_scale = 0.0
    decay_shift = 0.0
    if RAW:
        gate = tl.sigmoid(gate)
        decay_scale = tl.load(a_log + hv).to(tl.float32)
        decay_shift = tl.load(dt_bias + hv).to(tl.float32)
    if ONE_SUM:  # all is on its way before anything is waited for
        cols = tl.arange(0, BLOCK_SUM)
        row_seen = _seen(ancestors, rows, cols, N, sai, saj)
        col_seen = _seen(ancestors, col * BLOCK_N + node, cols, N, sai, saj)
        decay = tl.load(log_decay + cols.to(tl.int64) * sgn, mask=cols < N, other=0.0).to(tl.float32)
        past = _rows(k, col, N, skn, skk, ok, mk, BLOCK_N)
        decay = _gate(decay, RAW, decay_scale, decay_shift)
        coarse, fine, count = _sums(row_seen != 0, decay)
        past_coarse, past_fine, _ = _sums(col_seen != 0, decay)
    else:
        past = _rows(k, col, N, skn, skk, ok, mk, BLOCK_N)
        coarse, fine, count, past_coarse, past_fine = _pair_sums(
            ancestors, log_decay, row, col, N, sai, saj, sgn, decay_scale, decay_shift, RAW, BLOCK_N, BLOCK_SUM
        )
    rows = rows.to(tl.int64)
    if not SPLIT:
        past = past.to(tl.float32)
    wide = past.to(tl.float32)
    past_norm = tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6)
    if row == col:
        if hv % GROUP == 0:
            normalised = new_k + b * nkb + hk * nkh + rows[:, None] * nkn + ok[None, :] * nkk
            tl.store(normalised, wide * past_norm[:, None], mask=mn[:, None] & mk[None, :])
        tl.store(new_g + b * ngb + hv * ngh + rows * ngn, coarse + fine, mask=mn)

    # Masked before the exponential: off the path the difference may be positive and overflow.
    fade = (coarse[:, None] - past_coarse[None, :]) + (fine[:, None] - past_fine[None, :])
    fade = tl.exp(tl.where(seen != 0, fade, float("-inf"))) * past_norm[None, :]
    x = tl.zeros([BLOCK_N, BLOCK_N], tl.float32)
    y = tl.zeros([BLOCK_N, BLOCK_N], tl.float32)
    for side in range(0, 2):  # queries, then keys; a loop, since both at once would not fit in registers
        left = _rows(
            tl.where(side == 0, q, k), row, N, tl.where(side == 0, sqn, skn), tl.where(side == 0, sqk, skk), ok, mk,
            BLOCK_N,
        )  # fmt: skip
        if not SPLIT:
            left = left.to(tl.float32)
        wide = left.to(tl.float32)
        norm = tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6) * tl.where(side == 0, scale, -gate)
        x = norm[:, None] * fade * tl.dot(left, tl.trans(past), input_precision=EXACT)
        y = tl.where(side == 0, x, y)
    slot = head.to(tl.int64) * (num_blocks * (num_blocks + 1) // 2) + row * (row + 1) // 2 + col
    within = slot * BLOCK_N * BLOCK_N + node[:, None] * BLOCK_N + node[None, :]
    tl.store(read + within, y)
    if row == col:
        x = _inverse(tl.where(node[:, None] == node[None, :], 0.0, -x), count, mn, BLOCK_N, PRECISION)
    tl.store(solve + within, x)


@triton.jit
def _prepare_kernel(
    state, committed, q, k, beta, log_decay, ancestors, solve, read, carried, new_k, new_u, new_g, a_log, dt_bias,
    path, path_length, old_k, old_u, old_g, N, num_blocks, num_tiles, heads, share, scale,
    ssb, ssh, ssk, ssv, sqb, sqn, sqh, sqk, skb, skn, skh, skk, sbb, sbn, sbh, sgb, sgn, sgh,
    sai, saj, nkb, nkn, nkh, nkk, nub, nun, nuh, nuv, ngb, ngn, ngh,
    spath, okb, okn, okh, okk, oub, oun, ouh, ouv, ogb, ogn, ogh,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PATH: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_PATH: tl.constexpr, BLOCK_SUM: tl.constexpr, ONE_SUM: tl.constexpr,
    RAW: tl.constexpr, PENDING: tl.constexpr, COPY: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
    CHAINED: tl.constexpr, FOLLOWED: tl.constexpr,
):  # fmt: skip
    """The first launch."""
    if CHAINED:  # the launch overlaps the end of the kernel before; nothing is read until that has finished
        gdc_wait()
    if FOLLOWED:
        gdc_launch_dependents()
    program = tl.program_id(0)
    if program < num_tiles:
        _state_tile(
            program, state, committed, q, k, new_u, carried, path, path_length, old_k, old_u, old_g, N, share, scale,
            ssb, ssh, ssk, ssv, sqb, sqn, sqh, sqk, skb, skn, skh, skk, nub, nun, nuh, nuv,
            spath, okb, okn, okh, okk, oub, oun, ouh, ouv, ogb, ogn, ogh,
            HV, GROUP, K, V, PATH, BLOCK_K, BLOCK_V, ROWS, BLOCK_PATH, PENDING, COPY, SPLIT,
        )  # fmt: skip
    else:
        _block_pair(
            program - num_tiles, q, k, beta, log_decay, ancestors, solve, read, new_k, new_g, a_log, dt_bias,
            N, num_blocks, scale, sqb, sqn, sqh, sqk, skb, skn, skh, skk, sbb, sbn, sbh, sgb, sgn, sgh, sai, saj,
            nkb, nkn, nkh, nkk, ngb, ngn, ngh, heads,
            HV, GROUP, K, BLOCK_K, BLOCK_N, BLOCK_SUM, ONE_SUM, RAW, SPLIT, PRECISION,
        )  # fmt: skip


@triton.jit
def _transposed(x, block, N, sxn, sx, offsets, inside, BLOCK_N: tl.constexpr):
    """[..., BLOCK_N] of a block's nodes; zeros beyond the last."""
    rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
    where = x + rows.to(tl.int64)[None, :] * sxn + offsets[:, None] * sx
    return tl.load(where, mask=(rows < N)[None, :] & inside[:, None], other=0.0)


@triton.jit
def _pair(tiles, row, col, num_blocks, BLOCK_N: tl.constexpr):
    """The transposed tile of a pair of blocks; zeros where a panel reaches beyond the last block."""
    node = tl.arange(0, BLOCK_N)
    slot = (row * (row + 1) // 2 + col) * BLOCK_N * BLOCK_N
    mask = (row < num_blocks) & (node[:, None] < BLOCK_N) & (node[None, :] < BLOCK_N)
    return tl.load(tiles + slot + node[:, None] + node[None, :] * BLOCK_N, mask=mask, other=0.0)


@triton.jit
def _halves(x, PRECISION: tl.constexpr):
    """A factor of `_product`: with bf16x3 two bfloat16 tiles that add up to it (16 bits), else itself twice.

    Splitting where the tile was loaded, and not in the product, also keeps Triton from moving it through shared memory
    right after its load, which would wait for one load after the other.
    """
    if PRECISION == "bf16x3":
        high = x.to(tl.bfloat16)
        low = (x - high.to(tl.float32)).to(tl.bfloat16)
    else:
        high, low = x, x
    return high, low


@triton.jit
def _product(a, b, start, PRECISION: tl.constexpr):
    """start + a b, both factors from `_halves`."""
    if PRECISION == "bf16x3":
        small = tl.dot(a[0], b[1], tl.dot(a[1], b[0]))
        product = tl.dot(a[0], b[0], start) + small
    else:
        product = tl.dot(a[0], b[0], start, input_precision=PRECISION)
    return product


@triton.jit
def _fetched(
    u, carried, v, beta, g, block, N, sun, suv, svn, svv, sbn, sgn, ov, mv, V: tl.constexpr, BLOCK_N: tl.constexpr
):
    """What `_start` needs of a block of nodes, on its way."""
    rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
    mn = rows < N
    rows = rows.to(tl.int64)
    recalled = _transposed(u, block, N, sun, suv, ov, mv, BLOCK_N)
    outputs = _transposed(carried, block, N, V, 1, ov, mv, BLOCK_N)
    values = _transposed(v, block, N, svn, svv, ov, mv, BLOCK_N)
    gate = tl.load(beta + rows * sbn, mask=mn, other=0.0)
    total = tl.load(g + rows * sgn, mask=mn, other=0.0)
    return recalled, outputs, values, gate, total


@triton.jit
def _settled(x, PRECISION: tl.constexpr):
    """x itself. Triton moves the tiles of a product through shared memory right after their load, one load after the
    other; it does not look past this assembly, so that loads may be on their way together."""
    if PRECISION == "bf16x3":  # not in the interpreter, and on NVIDIA only
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=False, pack=1)
    return x


@triton.jit
def _start(fetched, RAW: tl.constexpr, PRECISION: tl.constexpr):
    """The right-hand side of a block of nodes, and its outputs before the solve, both [V, N]."""
    recalled, outputs, values, gate, total = fetched
    gate = gate.to(tl.float32)
    if RAW:
        gate = tl.sigmoid(gate)
    fade = tl.exp(total)
    rhs = gate[None, :] * (values.to(tl.float32) - fade[None, :] * recalled)
    return _settled(rhs, PRECISION), _settled(fade[None, :] * outputs, PRECISION)


@triton.jit
def _halves(x, PRECISION: tl.constexpr):
    """A factor of `_product`: with bf16x3 two bfloat16 tiles that add up to it (16 bits), else itself twice."""
    if PRECISION == "bf16x3":
        high = x.to(tl.bfloat16)
        low = (x - high.to(tl.float32)).to(tl.bfloat16)
    else:
        high, low = x, x
    return high, low


@triton.jit
def _product(a, b, start, PRECISION: tl.constexpr):
    """start + a b, both factors from `_halves`."""
    if PRECISION == "bf16x3":
        small = tl.dot(a[0], b[1], tl.dot(a[1], b[0]))
        product = tl.dot(a[0], b[0], start) + small
    else:
        product = tl.dot(a[0], b[0], start, input_precision=PRECISION)
    return product


@triton.jit
def _solve_kernel(
    state, committed, solve, read, carried, v, beta, u, g, out, N, num_blocks,
    ssb, ssh, ssk, ssv, svb, svn, svh, svv, sbb, sbn, sbh, sub, sun, suh, suv, sgb, sgn, sgh, sob, son, soh, sov,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr, PANEL: tl.constexpr, ONE_PANEL: tl.constexpr, RAW: tl.constexpr, COPY: tl.constexpr,
    PRECISION: tl.constexpr, CHAINED: tl.constexpr, FOLLOWED: tl.constexpr,
):  # fmt: skip
    """The second launch: u holds K S0 and receives the pseudo-values.

    Everything is transposed, [V, N]: the result of one product is then a left factor of the next as it lies in registers.
    """
    if FOLLOWED:
        gdc_wait()
    if CHAINED:
        gdc_launch_dependents()
    head = tl.program_id(0).to(tl.int64)
    b, hv = head // HV, head % HV
    ov = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    mv = ov < V
    ov = ov.to(tl.int64)
    if COPY:
        ok = tl.arange(0, BLOCK_K)
        inside = (ok < K)[:, None] & mv[None, :]
        ok = ok.to(tl.int64)
        s = tl.load(committed + head * K * V + ok[:, None] * V + ov[None, :], mask=inside)
        tl.store(state + b * ssb + hv * ssh + ok[:, None] * ssk + ov[None, :] * ssv, s, mask=inside)
    size: tl.constexpr = BLOCK_N * BLOCK_N
    solve += head * (num_blocks * (num_blocks + 1) // 2) * size
    read += head * (num_blocks * (num_blocks + 1) // 2) * size
    carried += head * N * V
    v += b * svb + hv * svh
    beta += b * sbb + hv * sbh
    u += b * sub + hv * suh
    g += b * sgb + hv * sgh
    out += b * sob + hv * soh

    for panel in range(0, 1 if ONE_PANEL else tl.cdiv(num_blocks, PANEL)):
        first = panel * PANEL
        if ONE_PANEL:
            fetched = _fetched(u, carried, v, beta, g, first, N, sun, suv, svn, svv, sbn, sgn, ov, mv, V, BLOCK_N)
        else:
            left = ()  # right-hand sides less what earlier panels explain
            outputs = ()
            for r in tl.static_range(PANEL):
                rhs, result = _start(
                    _fetched(
                        u, carried, v, beta, g, first + r, N, sun, suv, svn, svv, sbn, sgn, ov, mv, V, BLOCK_N
                    ),
                    RAW, PRECISION,
                )  # fmt: skip
                left = left + (rhs,)  # noqa: RUF005  Triton has no unpacking
                outputs = outputs + (result,)  # noqa: RUF005
            for j in range(0, first):
                past = _transposed(u, j, N, sun, suv, ov, mv, BLOCK_N)
                next_left = ()
                next_outputs = ()
                for r in tl.static_range(PANEL):
                    x = _pair(solve, first + r, j, num_blocks, BLOCK_N)
                    y = _pair(read, first + r, j, num_blocks, BLOCK_N)
                    next_left = next_left + (tl.dot(past, x, left[r], input_precision=PRECISION),)  # noqa: RUF005
                    next_outputs = next_outputs + (tl.dot(past, y, outputs[r], input_precision=PRECISION),)  # noqa: RUF005
                left = next_left
                outputs = next_outputs
        # All of a row is on its way while the row before it is solved.
        ahead = (_pair(solve, first, first, num_blocks, BLOCK_N),)
        found = ()
        for r in tl.static_range(PANEL):
            tiles = ahead
            reads = ()
            for j in tl.static_range(r + 1):
                reads = reads + (_pair(read, first + r, first + j, num_blocks, BLOCK_N),)  # noqa: RUF005
            if ONE_PANEL:
                rhs, result = _start(fetched, RAW, PRECISION)
            else:
                rhs, result = left[r], outputs[r]
            if r + 1 < PANEL:
                ahead = ()
                for j in tl.static_range(r + 2):
                    ahead = ahead + (_pair(solve, first + r + 1, first + j, num_blocks, BLOCK_N),)  # noqa: RUF005
                if ONE_PANEL:
                    fetched = _fetched(
                        u, carried, v, beta, g, first + r + 1, N, sun, suv, svn, svv, sbn, sgn, ov, mv, V, BLOCK_N
                    )
            for j in tl.static_range(r):
                x = _halves(_settled(tiles[j], PRECISION), PRECISION)
                rhs = _product(found[j], x, rhs, PRECISION)
            x = _halves(_settled(tiles[r], PRECISION), PRECISION)
            solved = _product(_halves(rhs, PRECISION), x, tl.zeros([BLOCK_V, BLOCK_N], tl.float32), PRECISION)
            found = found + (_halves(solved, PRECISION),)  # noqa: RUF005
            rows = (first + r) * BLOCK_N + tl.arange(0, BLOCK_N)
            written = mv[:, None] & (rows < N)[None, :]
            rows = rows.to(tl.int64)
            tl.store(u + rows[None, :] * sun + ov[:, None] * suv, solved, mask=written)
            for j in tl.static_range(r + 1):
                y = _halves(_settled(reads[j], PRECISION), PRECISION)
                result = _product(found[j], y, result, PRECISION)
            tl.store(out + rows[None, :] * son + ov[:, None] * sov, result, mask=written)
        if not ONE_PANEL:
            tl.debug_barrier()  # the next panel reads this one's pseudo-values back


def wide_sizes(num_nodes: int, value_dim: int, dtype: torch.dtype) -> dict[str, int | str | bool]:
    """The two launches: a fixed table, so that a run can be repeated and live state is never tuned on.

    SHARE: nodes for which one program reads a tile of the state; where there are more, several programs do, and the
        second launch copies the committed state    ROWS: nodes that it reads at a time
    PREPARE_V, SOLVE_V, SOLVE_WARPS: value columns of a program of either launch (SOLVE_V: at most 32, see above), and
        warps of the second
    FOLLOWED: the second launch starts while the first ends (compute capability 9.0 and later)
    """
    block_v = min(32, max(16, triton.next_power_of_2(value_dim)))
    # Three bfloat16 products keep 16 bits of either factor, enough for inputs that have 8.
    narrow = dtype == torch.bfloat16 and not (torch.version.hip or triton.knobs.runtime.interpret)
    blocks = triton.cdiv(num_nodes, 32)
    return {
        "BLOCK_N": 32,
        "PREPARE_V": block_v,
        "SHARE": 128,
        "ROWS": 16,
        "SOLVE_V": block_v,
        "SOLVE_WARPS": 2 if blocks <= 2 else 4,
        "PANEL": triton.cdiv(blocks, triton.cdiv(blocks, MOST_IN_PANEL)),
        "PRECISION": "bf16x3" if narrow else EXACT.value,
        "CHAINED": False,
        "FOLLOWED": False,
    }


def _scratch(state: Tensor, nodes: int, block_n: int, copied: bool) -> list[Tensor]:
    """X, Y, the outputs before the solve, and the committed state: four parts of one new tensor."""
    batch, heads, key_dim, value_dim = state.shape
    blocks = triton.cdiv(nodes, block_n)
    pairs = blocks * (blocks + 1) // 2 * block_n**2
    numbers = [pairs, pairs, nodes * value_dim, key_dim * value_dim if copied else 0]
    return state.new_empty(batch * heads * sum(numbers)).split([batch * heads * n for n in numbers])


def launch_wide(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, seen: Tensor,
    gates: Gates | None, pending: PendingCommit | None, out: Tensor, stash: DeltaStash,
    launch: dict[str, int | str | bool],
) -> None:  # fmt: skip
    """Both launches; everything is as in `tree_gated_delta`, `seen` its ancestors as bytes. Scratch is allocated here.

    launch: overrides of `wide_sizes`; ONLY="prepare" or "solve" leaves out the other launch, to measure one.
    """
    batch, heads, key_dim, value_dim = state.shape
    nodes, key_heads = q.shape[1:3]
    chained = chaining(state.device)["CHAINED"]
    sizes = wide_sizes(nodes, value_dim, k.dtype) | {"CHAINED": chained, "FOLLOWED": chained} | launch
    only = sizes.pop("ONLY", None)
    blocks, all_heads = triton.cdiv(nodes, sizes["BLOCK_N"]), batch * heads
    copied = pending is not None and sizes["SHARE"] < nodes
    solve, read, carried, committed = _scratch(state, nodes, sizes["BLOCK_N"], copied)
    old, path = (stash, None) if pending is None else (pending.stash, pending.path.to(state.device))
    num_tiles = all_heads * triton.cdiv(value_dim, sizes["PREPARE_V"]) * triton.cdiv(nodes, sizes["SHARE"])
    common = {
        "HV": heads, "K": key_dim, "V": value_dim, "BLOCK_K": max(16, triton.next_power_of_2(key_dim)),
        "RAW": gates is not None, "COPY": copied,
    } | {name: sizes[name] for name in ("BLOCK_N", "PRECISION", "CHAINED", "FOLLOWED")}  # fmt: skip
    split = q.dtype == k.dtype == torch.bfloat16 and not triton.knobs.runtime.interpret
    if only in (None, "prepare"):
        _prepare_kernel[(num_tiles + all_heads * blocks * (blocks + 1) // 2,)](
            state, committed, q, k, beta, log_decay, seen, solve, read, carried, stash.k, stash.u, stash.log_decay,
            None if gates is None else gates.a_log, None if gates is None else gates.dt_bias,
            path, None if pending is None else pending.length, old.k, old.u, old.log_decay,
            nodes, blocks, num_tiles, all_heads, sizes["SHARE"], key_dim**-0.5,
            *state.stride(), *q.stride(), *k.stride(), *beta.stride(), *log_decay.stride(),
            *seen.stride(), *stash.k.stride(), *stash.u.stride(), *stash.log_decay.stride(),
            1 if path is None else path.stride(0), *old.k.stride(), *old.u.stride(), *old.log_decay.stride(),
            GROUP=heads // key_heads, PATH=0 if path is None else path.numel(), BLOCK_PATH=path_block(path),
            BLOCK_V=sizes["PREPARE_V"], ROWS=sizes["ROWS"],
            BLOCK_SUM=min(LONGEST_SUM, triton.next_power_of_2(nodes)), ONE_SUM=nodes <= LONGEST_SUM,
            PENDING=pending is not None, SPLIT=split,
            num_warps=4, **common, **({"launch_pdl": True} if sizes["CHAINED"] else {}),
        )  # fmt: skip
    if only in (None, "solve"):
        _solve_kernel[(all_heads, triton.cdiv(value_dim, sizes["SOLVE_V"]))](
            state, committed, solve, read, carried, v, beta, stash.u, stash.log_decay, out, nodes, blocks,
            *state.stride(), *v.stride(), *beta.stride(), *stash.u.stride(), *stash.log_decay.stride(), *out.stride(),
            BLOCK_V=sizes["SOLVE_V"], PANEL=sizes["PANEL"], ONE_PANEL=blocks <= sizes["PANEL"],
            num_warps=sizes["SOLVE_WARPS"], **common, **({"launch_pdl": True} if sizes["FOLLOWED"] else {}),
        )  # fmt: skip
