"""The baseline that the tree kernels replace: node after node from its parent's state, one full state stored per node."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _node_states_kernel(
    state, nodes_state, parents, q, k, v, beta, log_decay, out, N, scale,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    hv = tl.program_id(0).to(tl.int64)
    hk = hv // GROUP
    ok = tl.arange(0, K)
    ov = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    tile = ok[:, None] * V + ov[None, :]
    for node in range(N):
        parent = tl.load(parents + node)
        before = state + hv * K * V
        if parent >= 0:
            before = nodes_state + (parent.to(tl.int64) * HV + hv) * K * V
        s = tl.load(before + tile)
        key = tl.load(k + (node * (HV // GROUP) + hk) * K + ok).to(tl.float32)
        query = tl.load(q + (node * (HV // GROUP) + hk) * K + ok).to(tl.float32)
        value = tl.load(v + (node * HV + hv) * V + ov).to(tl.float32)
        key *= tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
        query *= tl.rsqrt(tl.sum(query * query, 0) + 1e-6) * scale
        s *= tl.exp(tl.load(log_decay + node * HV + hv))
        wrote = tl.load(beta + node * HV + hv).to(tl.float32) * (value - tl.sum(key[:, None] * s, 0))
        s += key[:, None] * wrote[None, :]
        tl.store(nodes_state + (node.to(tl.int64) * HV + hv) * K * V + tile, s)
        tl.store(out + (node * HV + hv) * V + ov, tl.sum(query[:, None] * s, 0))
        tl.debug_barrier()  # a child may come next


def node_states(
    state: Tensor, nodes_state: Tensor, *, parents: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor,
    out: Tensor,
) -> None:  # fmt: skip
    """state: [HV, K, V]    nodes_state: [N, HV, K, V], written    the rest contiguous, as in `tree_gated_delta` with B = 1."""
    heads, key_dim, value_dim = state.shape
    nodes, key_heads = k.shape[-3:-1]
    _node_states_kernel[(heads, value_dim // 32)](
        state, nodes_state, parents, q, k, v, beta, log_decay, out, nodes, key_dim**-0.5,
        HV=heads, GROUP=heads // key_heads, K=key_dim, V=value_dim, BLOCK_V=32, num_warps=4,
    )  # fmt: skip
