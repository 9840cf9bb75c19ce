"""One token of the gated delta rule, in Triton: the state crosses memory once each way.

A program owns a [K, BLOCK_V] tile of one head's state of one sequence. What the output needs of the new state it has from the old
one, S'^T q = exp(g) S^T q + (k . q) u, so that both sums over the tile are taken as it arrives.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from deltatree.kernels.gated_delta.parts import _gate
from deltatree.kernels.gated_delta.reference import Gates

BLOCK_V = 32
"""Columns of a program's tile: one line of memory a row, and few enough registers for many programs side by side."""


@triton.jit
def _gated_delta_step_kernel(
    state, q, k, v, beta, log_decay, a_log, dt_bias, out, scale,
    ssb, ssh, ssk, ssv, sqb, sqh, sqk, skb, skh, skk, svb, svh, svv, sbb, sbh, sgb, sgh, sob, soh, sov,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RAW: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    b, hv = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    hk = hv // GROUP
    ok = tl.arange(0, BLOCK_K)
    ov = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    mk, mv = ok < K, ov < V
    inside = mk[:, None] & mv[None, :]
    tile = state + b * ssb + hv * ssh + ok[:, None] * ssk + ov[None, :] * ssv
    s = tl.load(tile, mask=inside, other=0.0)
    query = tl.load(q + b * sqb + hk * sqh + ok * sqk, mask=mk, other=0.0).to(tl.float32)
    key = tl.load(k + b * skb + hk * skh + ok * skk, mask=mk, other=0.0).to(tl.float32)
    value = tl.load(v + b * svb + hv * svh + ov * svv, mask=mv, other=0.0).to(tl.float32)
    write = tl.load(beta + b * sbb + hv * sbh).to(tl.float32)
    decay = tl.load(log_decay + b * sgb + hv * sgh).to(tl.float32)
    if RAW:
        write = tl.sigmoid(write)
        decay = _gate(decay, RAW, tl.load(a_log + hv).to(tl.float32), tl.load(dt_bias + hv).to(tl.float32))
    query = query * (tl.rsqrt(tl.sum(query * query, 0) + 1e-6) * scale)
    key = key * tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
    s = s * tl.exp(decay)
    u = write * (value - tl.sum(key[:, None] * s, 0))
    output = tl.sum(query[:, None] * s, 0) + tl.sum(query * key, 0) * u
    tl.store(tile, s + key[:, None] * u[None, :], mask=inside)
    tl.store(out + b * sob + hv * soh + ov * sov, output, mask=mv)


def gated_delta_step(
    state: Tensor,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    gates: Gates | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As the reference, in float32."""
    batch, heads, key_dim, value_dim = state.shape
    out = state.new_empty(batch, heads, value_dim) if out is None else out
    a_log, dt_bias = (None, None) if gates is None else (gates.a_log, gates.dt_bias)
    _gated_delta_step_kernel[(triton.cdiv(value_dim, BLOCK_V), heads, batch)](
        state, q, k, v, beta, log_decay, a_log, dt_bias, out, key_dim**-0.5,
        *state.stride(), *q.stride(), *k.stride(), *v.stride(), *beta.stride(), *log_decay.stride(), *out.stride(),
        GROUP=heads // q.shape[1], K=key_dim, V=value_dim, RAW=gates is not None,
        BLOCK_K=triton.next_power_of_2(key_dim), BLOCK_V=BLOCK_V, num_warps=4,
    )  # fmt: skip
    return out
