"""One token of the gated delta rule, in plain PyTorch: the rule of `gated_delta` without a tree."""

from __future__ import annotations

import torch
from torch import Tensor

from deltatree.kernels.gated_delta.reference import Gates, l2_normalise


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
    """S = exp(g) S;  S = S + k (beta (v - S^T k))^T;  the output S^T q. Each sequence and value head by itself.

    state: [B, HV, K, V] float32 or float64, written in place; its dtype is the dtype of the computation
    q, k: [B, HK, K], not yet normalised (done here; q is also scaled by K^-1/2)    v: [B, HV, V]
    beta, log_decay: [B, HV], or with gates the raw projections b and a
    out: written and returned instead of a new tensor; it may have another dtype
    Returns outputs [B, HV, V] in the state's dtype.
    """
    group = state.shape[1] // q.shape[1]
    q, k, v, beta, log_decay = (x.to(state.dtype) for x in (q, k, v, beta, log_decay))
    if gates is not None:
        beta, log_decay = gates.apply(beta, log_decay)
    q, k = l2_normalise(q) * q.shape[-1] ** -0.5, l2_normalise(k)
    queries, keys = (x.repeat_interleave(group, dim=1) for x in (q, k))
    state.mul_(log_decay.exp()[..., None, None])
    recalled = torch.einsum("bhk,bhkv->bhv", keys, state)
    state.addcmul_(keys[..., None], (beta[..., None] * (v - recalled))[..., None, :])
    outputs = torch.einsum("bhk,bhkv->bhv", queries, state)
    return outputs if out is None else out.copy_(outputs)
