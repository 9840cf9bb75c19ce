"""The gated delta rule over a tree, in Triton. The algebra and the names are those of `reference`.

A tree of few nodes takes one launch, the kernel of this file, which walks over blocks of nodes. In a tree of many that
walk takes most of the time; there the three launches of `lean` do most of the work for all blocks at once. LAUNCHES
says from where on.

Here one program owns a [K, BLOCK_V] tile of one value head's state: it reads it once, applies the pending path and
writes it back, and keeps it for all nodes. Nodes are taken in blocks of BLOCK_N; since parents come first, a block
needs only pseudo-values of earlier blocks, which the program left in the stash itself.

Within a block (I + X) u = rhs is solved over *bands* of BAND depth levels. X splits into pairs within one band and pairs
across bands. Within a band (I + X_in)^-1 = (I - X_in)(I + X_in^2) holds exactly for up to 4 levels and is well behaved;
then M = (I + X_in)^-1 X_out, and u = (I + X_in)^-1 rhs - M u is final for one more band with each sweep. Squaring X as a
whole would take fewer products, but its powers grow like binomials when keys repeat and beta nears 1, and cancel badly:
with float32 that loses every digit at depth 32. Sweeps cannot: an entry is final once its ancestors are.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deltatree.kernels.chaining import chaining
from deltatree.kernels.gated_delta.lean import launch_lean
from deltatree.kernels.gated_delta.parts import EXACT, _committed, _committed_long, _gate, _split3, path_block
from deltatree.kernels.gated_delta.reference import DeltaStash, Gates, PendingCommit

MOST_UNROLLED = 32  # deepest trees whose sweeps are unrolled
LEAN = {"KIND": "lean"}
SMALL_READS = {"READ_V": 16, "ROWS": 32, "READ_WARPS": 2}  # twice the programs, half of the work in each
# How a tree is launched, by value heads of all sequences and by its nodes: the first row and the first entry that reach
# decide. KIND "one" is the kernel of this file, "lean" those of `lean`; what else an entry holds overrides their sizes.
# Measured on an H200 (results/kernels-h200), but for 17 to 32 nodes in the second row.
LAUNCHES = (
    (40, ((32, {"KIND": "one"}), (math.inf, LEAN | SMALL_READS))),
    (math.inf, ((16, {"KIND": "one"}), (128, LEAN), (math.inf, LEAN | SMALL_READS))),
)


@triton.jit
def _sums(seen, gate):
    """Over the ancestors of a block's nodes: log decays as multiples of 1/64, the remainders, and the count.

    Multiples of 1/64 sum without rounding, so the difference of two long sums keeps the accuracy of its own size.
    """
    steps = tl.floor(gate * 64.0 + 0.5) * 0.015625
    coarse = tl.sum(tl.where(seen, steps[None, :], 0.0), 1)
    fine = tl.sum(tl.where(seen, (gate - steps)[None, :], 0.0), 1)
    return coarse, fine, tl.sum(seen.to(tl.int32), 1)


@triton.jit
def _totals(ancestors, g, block, N, sai, saj, sgn, a_log, dt_bias, RAW: tl.constexpr, BLOCK_N: tl.constexpr):
    """The sums of one block's nodes over their ancestors in all blocks."""
    rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
    coarse = tl.zeros([BLOCK_N], tl.float32)
    fine = tl.zeros([BLOCK_N], tl.float32)
    count = tl.zeros([BLOCK_N], tl.int32)
    for other in range(0, block + 1):
        cols = other * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = (rows[:, None] < N) & (cols[None, :] < N)
        seen = tl.load(ancestors + rows[:, None] * sai + cols[None, :] * saj, mask=inside, other=0) != 0
        gate = _gate(tl.load(g + cols.to(tl.int64) * sgn, mask=cols < N, other=0.0).to(tl.float32), RAW, a_log, dt_bias)
        more_coarse, more_fine, more = _sums(seen, gate)
        coarse += more_coarse
        fine += more_fine
        count += more
    return coarse, fine, count


@triton.jit
def _block(
    q, k, v, beta, ancestors, block, N, sqn, sqk, skn, skk, svn, svv, sbn, sai, saj, ok, ov, mk, mv,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The inputs of one block of nodes."""
    rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
    mn = rows < N
    seen = tl.load(ancestors + rows[:, None] * sai + rows[None, :] * saj, mask=mn[:, None] & mn[None, :], other=0) != 0
    rows = rows.to(tl.int64)
    keys = tl.load(k + rows[:, None] * skn + ok[None, :] * skk, mask=mn[:, None] & mk[None, :], other=0.0)
    queries = tl.load(q + rows[:, None] * sqn + ok[None, :] * sqk, mask=mn[:, None] & mk[None, :], other=0.0)
    values = tl.load(v + rows[:, None] * svn + ov[None, :] * svv, mask=mn[:, None] & mv[None, :], other=0.0)
    gate = tl.load(beta + rows * sbn, mask=mn, other=0.0).to(tl.float32)
    return rows, mn, seen, keys, queries, values, gate


@triton.jit
def _tree_gated_delta_kernel(
    state, q, k, v, beta, log_decay, ancestors, out, new_k, new_u, new_g, a_log, dt_bias,
    path, path_length, old_k, old_u, old_g,
    N, num_blocks, scale,
    ssb, ssh, ssk, ssv, sqb, sqn, sqh, sqk, skb, skn, skh, skk, svb, svn, svh, svv, sbb, sbn, sbh, sgb, sgn, sgh,
    sai, saj, sob, son, soh, sov, nkb, nkn, nkh, nkk, nub, nun, nuh, nuv, ngb, ngn, ngh,
    spath, okb, okn, okh, okk, oub, oun, ouh, ouv, ogb, ogn, ogh,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PATH: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_PATH: tl.constexpr, BAND: tl.constexpr,
    RAW: tl.constexpr, PENDING: tl.constexpr, ONE_BLOCK: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
    CHAINED: tl.constexpr, SWEEPS: tl.constexpr,
):  # fmt: skip
    if CHAINED:  # the launch overlaps the end of the kernel before; nothing is read until that has finished
        gdc_wait()
        gdc_launch_dependents()
    head = tl.program_id(0)
    b = (head // HV).to(tl.int64)
    hv = (head % HV).to(tl.int64)
    hk = hv // GROUP
    first_v = tl.program_id(1) == 0
    ok = tl.arange(0, BLOCK_K)
    ov = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    mk, mv = ok < K, ov < V
    ok, ov = ok.to(tl.int64), ov.to(tl.int64)

    state += b * ssb + hv * ssh
    q += b * sqb + hk * sqh
    k += b * skb + hk * skh
    v += b * svb + hv * svh
    beta += b * sbb + hv * sbh
    log_decay += b * sgb + hv * sgh
    out += b * sob + hv * soh
    new_k += b * nkb + hk * nkh
    new_u += b * nub + hv * nuh
    new_g += b * ngb + hv * ngh

    where_state = state + ok[:, None] * ssk + ov[None, :] * ssv
    s = tl.load(where_state, mask=mk[:, None] & mv[None, :], other=0.0)
    if ONE_BLOCK:  # everything is on its way before anything is waited for
        rows, mn, seen, keys, queries, values, gate = _block(
            q, k, v, beta, ancestors, 0, N, sqn, sqk, skn, skk, svn, svv, sbn, sai, saj, ok, ov, mk, mv, BLOCK_N
        )
        own = tl.load(log_decay + rows * sgn, mask=mn, other=0.0).to(tl.float32)
    decay_scale = 0.0
    decay_shift = 0.0
    if RAW:
        decay_scale = tl.load(a_log + hv).to(tl.float32)
        decay_shift = tl.load(dt_bias + hv).to(tl.float32)
    if PENDING:
        old_k += b * okb + hk * okh
        old_u += b * oub + hv * ouh
        old_g += b * ogb + hv * ogh
        if PATH <= BLOCK_PATH:
            s, length = _committed(
                s,
                old_k,
                old_u,
                old_g,
                path,
                path_length,
                spath,
                okn,
                okk,
                oun,
                ouv,
                ogn,
                ok,
                ov,
                mk,
                mv,
                PATH,
                BLOCK_PATH,
            )
        else:
            s, length = _committed_long(
                s,
                old_k,
                old_u,
                old_g,
                path,
                path_length,
                spath,
                okn,
                okk,
                oun,
                ouv,
                ogn,
                ok,
                ov,
                mk,
                mv,
                PATH,
                BLOCK_PATH,
            )
        tl.store(where_state, s, mask=mk[:, None] & mv[None, :] & (length > 0))
        if not ONE_BLOCK:
            tl.debug_barrier()

    for block in range(0, 1 if ONE_BLOCK else num_blocks):
        if ONE_BLOCK:
            coarse, fine, count = _sums(seen, _gate(own, RAW, decay_scale, decay_shift))
        else:
            rows, mn, seen, keys, queries, values, gate = _block(
                q, k, v, beta, ancestors, block, N, sqn, sqk, skn, skk, svn, svv, sbn, sai, saj, ok, ov, mk, mv, BLOCK_N
            )
            coarse, fine, count = _totals(
                ancestors, log_decay, block, N, sai, saj, sgn, decay_scale, decay_shift, RAW, BLOCK_N
            )
        depth = tl.maximum(count - 1, 0)
        if RAW:
            gate = tl.where(mn, tl.sigmoid(gate), 0.0)
        if not SPLIT:
            keys, queries = keys.to(tl.float32), queries.to(tl.float32)
        # Products take the inputs as they are (exact in bfloat16); the norms are applied to their results.
        wide = keys.to(tl.float32)
        key_norm = tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6)
        if first_v and hv % GROUP == 0:
            tl.store(
                new_k + rows[:, None] * nkn + ok[None, :] * nkk,
                wide * key_norm[:, None],
                mask=mn[:, None] & mk[None, :],
            )
        wide = queries.to(tl.float32)
        query_norm = tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6) * scale
        total = coarse + fine
        # With several blocks every program reads the sums back, so each writes them: the same bits from all.
        if first_v or not ONE_BLOCK:
            tl.store(new_g + rows * ngn, total, mask=mn)
        carried = tl.exp(total)

        if not ONE_BLOCK:  # read again (from cache): the tile would not stay in registers through a block's solve
            s = tl.load(where_state, mask=mk[:, None] & mv[None, :], other=0.0)
        if SPLIT:
            s_high, s_middle, s_low = _split3(s)
            recalled = tl.dot(keys, s_low)
            recalled = tl.dot(keys, s_middle, recalled)
            recalled = tl.dot(keys, s_high, recalled)
            outputs = tl.dot(queries, s_low)
            outputs = tl.dot(queries, s_middle, outputs)
            outputs = tl.dot(queries, s_high, outputs)
        else:
            recalled = tl.dot(keys, s, input_precision=EXACT)
            outputs = tl.dot(queries, s, input_precision=EXACT)
        rhs = gate[:, None] * (values.to(tl.float32) - (carried * key_norm)[:, None] * recalled)
        outputs = (carried * query_norm)[:, None] * outputs

        if not ONE_BLOCK:
            for other in range(0, block):  # pseudo-values of earlier blocks are final
                cols = other * BLOCK_N + tl.arange(0, BLOCK_N)  # all of them below N
                above = (
                    tl.load(
                        ancestors + rows.to(tl.int32)[:, None] * sai + cols[None, :] * saj, mask=mn[:, None], other=0
                    )
                    != 0
                )
                cols = cols.to(tl.int64)
                past_total = tl.load(new_g + cols * ngn)
                u = tl.load(new_u + cols[:, None] * nun + ov[None, :] * nuv, mask=mv[None, :], other=0.0)
                past = tl.load(k + cols[:, None] * skn + ok[None, :] * skk, mask=mk[None, :], other=0.0).to(keys.dtype)
                wide = past.to(tl.float32)
                past_norm = tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6)
                past_coarse = tl.floor(past_total * 64.0 + 0.5) * 0.015625
                fade = (coarse[:, None] - past_coarse[None, :]) + (fine[:, None] - (past_total - past_coarse)[None, :])
                fade = tl.exp(tl.where(above, fade, float("-inf"))) * past_norm[None, :]
                x = (gate * key_norm)[:, None] * fade * tl.dot(keys, tl.trans(past), input_precision=EXACT)
                rhs -= tl.dot(x, u, input_precision=PRECISION)
                y = query_norm[:, None] * fade * tl.dot(queries, tl.trans(past), input_precision=EXACT)
                outputs = tl.dot(y, u, outputs, input_precision=PRECISION)

        # Masked before the exponential: off the path the difference may be positive and overflow.
        fade = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
        fade = tl.exp(tl.where(seen, fade, float("-inf"))) * key_norm[None, :]
        x = (gate * key_norm)[:, None] * fade * tl.dot(keys, tl.trans(keys), input_precision=EXACT)
        x = tl.where(rows[:, None] == rows[None, :], 0.0, x)
        y = query_norm[:, None] * fade * tl.dot(queries, tl.trans(keys), input_precision=EXACT)
        band = depth // BAND
        inner = band[:, None] == band[None, :]
        x_in = tl.where(inner, x, 0.0)
        x_out = tl.where(inner, 0.0, x)
        u = rhs
        if BAND > 1:
            u -= tl.dot(x_in, u, input_precision=PRECISION)
            if SWEEPS != 0:
                x_out -= tl.dot(x_in, x_out, input_precision=PRECISION)
        if BAND > 2:
            x_in = tl.dot(x_in, x_in, input_precision=PRECISION)
            u = tl.dot(x_in, u, u, input_precision=PRECISION)
            if SWEEPS != 0:
                x_out = tl.dot(x_in, x_out, x_out, input_precision=PRECISION)
        start = u
        if SWEEPS >= 0:
            for _ in tl.static_range(SWEEPS):
                u = start - tl.dot(x_out, u, input_precision=PRECISION)
        else:
            last = tl.max(tl.where(mn, band, 0), 0)
            for _ in range(0, last - tl.min(tl.where(mn, band, last), 0)):
                u = start - tl.dot(x_out, u, input_precision=PRECISION)
        tl.store(new_u + rows[:, None] * nun + ov[None, :] * nuv, u, mask=mn[:, None] & mv[None, :])
        outputs = tl.dot(y, u, outputs, input_precision=PRECISION)
        tl.store(out + rows[:, None] * son + ov[None, :] * sov, outputs, mask=mn[:, None] & mv[None, :])
        if not ONE_BLOCK:
            tl.debug_barrier()  # the next block reads this block's pseudo-values back


@triton.jit
def _commit_kernel(
    state, out, k, u, g, path, path_length,
    sls, ssb, ssh, ssk, ssv, slo, sob, soh, sok, sov, slk, skb, skn, skh, skk, slu, sub, sun, suh, suv,
    slg, sgb, sgn, sgh, spath,
    B, HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PATH: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_PATH: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    hv = (head % HV).to(tl.int64)
    b = ((head // HV) % B).to(tl.int64)
    layer = (head // HV // B).to(tl.int64)
    hk = hv // GROUP
    ok = tl.arange(0, BLOCK_K)
    ov = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    mk, mv = ok < K, ov < V
    ok, ov = ok.to(tl.int64), ov.to(tl.int64)
    inside = mk[:, None] & mv[None, :]
    tile = tl.load(
        state + layer * sls + b * ssb + hv * ssh + ok[:, None] * ssk + ov[None, :] * ssv, mask=inside, other=0.0
    )
    k += layer * slk + b * skb + hk * skh
    u += layer * slu + b * sub + hv * suh
    g += layer * slg + b * sgb + hv * sgh
    if PATH <= BLOCK_PATH:
        tile, _ = _committed(
            tile, k, u, g, path, path_length, spath, skn, skk, sun, suv, sgn, ok, ov, mk, mv, PATH, BLOCK_PATH
        )
    else:
        tile, _ = _committed_long(
            tile, k, u, g, path, path_length, spath, skn, skk, sun, suv, sgn, ok, ov, mk, mv, PATH, BLOCK_PATH
        )
    tl.store(out + layer * slo + b * sob + hv * soh + ok[:, None] * sok + ov[None, :] * sov, tile, mask=inside)


def block_sizes(
    num_nodes: int, key_dim: int, value_dim: int, dtype: torch.dtype, max_depth: int | None
) -> dict[str, int | str]:
    """The launch of the tree kernel: a fixed table, so that a run can be repeated and live state is never tuned on.

    Four warps and at most 32 nodes a block: products of 64 rows become warp-group instructions on compute capability 9.0,
    and around the loop of sweeps those were seen to read outside shared memory. Unrolled sweeps (max_depth given) should
    not; until that has been checked on a GPU, BLOCK_N=64 is only a `launch` override.
    """
    unrolled = max_depth is not None and max_depth <= MOST_UNROLLED
    block_n = 16 if num_nodes <= 16 else 32
    block_v = min(32, max(16, triton.next_power_of_2(value_dim)))
    # Three bfloat16 products keep 16 bits of either factor, enough for inputs that have 8.
    narrow = dtype == torch.bfloat16 and not (torch.version.hip or triton.knobs.runtime.interpret)
    return {
        "BLOCK_N": block_n,
        "BLOCK_V": block_v,
        "BAND": 4,
        "SWEEPS": max_depth // 4 if unrolled else -1,
        "PRECISION": "bf16x3" if narrow else EXACT.value,
        "num_warps": 4,
    }


def launch_of(heads: int, nodes: int) -> dict[str, int | str | bool]:
    """The launch of a tree of `nodes` nodes with `heads` value heads over all sequences, from LAUNCHES."""
    by_nodes = next(row for most, row in LAUNCHES if heads <= most)
    return next(launch for most, launch in by_nodes if nodes <= most)


def tree_gated_delta(
    state: Tensor,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    ancestors: Tensor,
    max_depth: int | None = None,
    gates: Gates | None = None,
    pending: PendingCommit | None = None,
    out: Tensor | None = None,
    stash: DeltaStash | None = None,
    launch: dict[str, int | str | bool] | None = None,
) -> tuple[Tensor, DeltaStash]:
    """As the reference, for float32 states.

    launch: for measurements. With KIND it replaces the choice of `launch_of`; all else overrides single entries of
        `block_sizes` or `lean_sizes`.
    """
    batch, heads, key_dim, value_dim = state.shape
    nodes, key_heads = q.shape[1:3]
    if out is None:
        out = state.new_empty(batch, nodes, heads, value_dim)
    if stash is None:
        stash = DeltaStash(
            state.new_empty(batch, nodes, key_heads, key_dim),
            state.new_empty(batch, nodes, heads, value_dim),
            state.new_empty(batch, nodes, heads),
        )
    seen = ancestors if ancestors.dtype == torch.uint8 else ancestors.to(state.device).view(torch.uint8)
    launch = ({} if launch and "KIND" in launch else launch_of(batch * heads, nodes)) | (launch or {})
    if launch.pop("KIND") == "lean":
        launch_lean(state, q, k, v, beta, log_decay, seen, gates, pending, out, stash, launch)
        return out, stash
    old = stash if pending is None else pending.stash
    path = None if pending is None else pending.path.to(state.device)
    sizes = chaining(state.device) | block_sizes(nodes, key_dim, value_dim, k.dtype, max_depth) | launch
    blocks = triton.cdiv(nodes, sizes["BLOCK_N"])
    _tree_gated_delta_kernel[(batch * heads, triton.cdiv(value_dim, sizes["BLOCK_V"]))](
        state, q, k, v, beta, log_decay, seen, out, stash.k, stash.u, stash.log_decay,
        None if gates is None else gates.a_log, None if gates is None else gates.dt_bias,
        path, None if pending is None else pending.length, old.k, old.u, old.log_decay,
        nodes, blocks, key_dim**-0.5,
        *state.stride(), *q.stride(), *k.stride(), *v.stride(), *beta.stride(), *log_decay.stride(),
        *seen.stride(), *out.stride(), *stash.k.stride(), *stash.u.stride(), *stash.log_decay.stride(),
        1 if path is None else path.stride(0), *old.k.stride(), *old.u.stride(), *old.log_decay.stride(),
        HV=heads, GROUP=heads // key_heads, K=key_dim, V=value_dim, PATH=0 if path is None else path.numel(),
        BLOCK_K=max(16, triton.next_power_of_2(key_dim)), BLOCK_PATH=path_block(path),
        RAW=gates is not None, PENDING=pending is not None, ONE_BLOCK=blocks == 1,
        SPLIT=q.dtype == k.dtype == torch.bfloat16 and not triton.knobs.runtime.interpret, **sizes,
    )  # fmt: skip
    return out, stash


def launch_commit(
    states: Tensor, outs: Tensor, stash: DeltaStash, path: Tensor, length: Tensor | None, block_v: int = 32
) -> None:
    """One launch over [L, B, HV, K, V] states; every tensor of the stash has the leading L too."""
    layers, batch, heads, key_dim, value_dim = states.shape
    path = path.to(states.device)
    block_v = min(block_v, max(16, triton.next_power_of_2(value_dim)))
    _commit_kernel[(triton.cdiv(value_dim, block_v), layers * batch * heads)](
        states, outs, stash.k, stash.u, stash.log_decay, path, length,
        *states.stride(), *outs.stride(), *stash.k.stride(), *stash.u.stride(), *stash.log_decay.stride(),
        path.stride(0), batch, HV=heads, GROUP=heads // stash.k.shape[3], K=key_dim, V=value_dim, PATH=path.numel(),
        BLOCK_K=max(16, triton.next_power_of_2(key_dim)), BLOCK_V=block_v, BLOCK_PATH=path_block(path), num_warps=4,
    )  # fmt: skip


def commit_gated_delta(
    state: Tensor, stash: DeltaStash, path: Tensor, *, length: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """As the reference, for float32 states. Each program reads its tile before it writes it, so out may be state."""
    out = torch.empty_like(state) if out is None else out
    layered = DeltaStash(stash.k[None], stash.u[None], stash.log_decay[None])
    launch_commit(state[None], out[None], layered, path, length)
    return out
