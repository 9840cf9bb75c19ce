"""The gated delta rule over a tree, in plain PyTorch.

With `G` the log decay summed from the root to a node, `S0` the committed state and `X` strictly lower triangular in
parent-first order,

    X_ij = beta_i exp(G_i - G_j) (k_i . k_j)                          j an ancestor of i, else 0
    u    = (I + X)^-1 diag(beta) (V - diag(exp G) K S0)               pseudo-values: what each node writes
    o_i  = exp(G_i) S0^T q_i + sum_j exp(G_i - G_j) (q_i . k_j) u_j   j an ancestor of i, or i

A node's own state is never formed. What a commit needs later is the stash `(k, u, G)`: HK*K + HV*V + HV numbers a node
instead of HV*K*V. Rule: Yang et al. 2024, arXiv:2412.06464; here over a tree's ancestor relation instead of time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus


@dataclass(frozen=True, slots=True)
class DeltaStash:
    """What the nodes of one verify leave behind so that any path can be committed."""

    k: Tensor  # [B, N, HK, K], L2-normalised
    u: Tensor  # [B, N, HV, V], pseudo-values
    log_decay: Tensor  # [B, N, HV], summed from the root to the node, <= 0

    @property
    def bytes_per_node(self) -> int:
        return sum(t[:, :1].numel() * t.element_size() for t in (self.k, self.u, self.log_decay))


@dataclass(frozen=True, slots=True)
class PendingCommit:
    """A path of the last tree that is not part of the state yet: the next verify commits it while it reads the state."""

    stash: DeltaStash  # of the last tree; its tensors must not be those that the next verify writes
    path: Tensor  # [P] integers, node indices from the root on
    length: Tensor | None = None  # one integer on the device, entries of `path` in use, 0 for none; None: all of them


@dataclass(frozen=True, slots=True)
class Gates:
    """A GatedDeltaNet layer's gate parameters, for beta and log_decay that come raw from their projections."""

    a_log: Tensor  # [HV]
    dt_bias: Tensor  # [HV]

    def apply(self, b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        """beta and log_decay from the projections: sigmoid(b), -exp(a_log) * softplus(a + dt_bias)."""
        return b.sigmoid(), -self.a_log.to(b.dtype).exp() * softplus(a + self.dt_bias.to(b.dtype))


def l2_normalise(x: Tensor) -> Tensor:
    """x / |x| over the last dimension, with the models' epsilon of 1e-6 under the root."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _per_value_head(x: Tensor, num_value_heads: int) -> Tensor:
    """[B, N, HK, K] -> [B, HV, N, K]: each key head serves HV / HK value heads that stand side by side."""
    return x.transpose(1, 2).repeat_interleave(num_value_heads // x.shape[2], dim=1)


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
) -> tuple[Tensor, DeltaStash]:
    """Outputs of all nodes of a tree, each computed as if its path had been fed token by token.

    state: [B, HV, K, V] float32 or float64; its dtype is the dtype of the computation. Read only, unless `pending` names
        a path to commit first
    q, k: [B, N, HK, K], not yet normalised (done here; q is also scaled by K^-1/2)
    v: [B, N, HV, V]    beta, log_decay: [B, N, HV], log_decay <= 0 and not yet summed
    ancestors: [N, N] bool, (i, j) true if j is i or an ancestor of i; parent-first order
    max_depth: no node is deeper than this, if the caller knows; only the fast twin makes use of it
    gates: with them, beta and log_decay are the raw projections b and a
    pending: a path of the last tree, made part of `state` in place before anything is read
    out, stash: written and returned instead of new tensors; out may have another dtype
    Returns outputs [B, N, HV, V] in the state's dtype, and the stash. Writes nothing else.
    """
    heads = state.shape[1]
    if pending is not None:
        commit_gated_delta(state, pending.stash, pending.path, length=pending.length, out=state)
    q, k, v, beta, log_decay = (x.to(state.dtype) for x in (q, k, v, beta, log_decay))
    if gates is not None:
        beta, log_decay = gates.apply(beta, log_decay)
    q, k = l2_normalise(q) * q.shape[-1] ** -0.5, l2_normalise(k)
    mask = ancestors.to(device=state.device)
    total = torch.einsum("ij,bjh->bih", mask.to(state.dtype), log_decay)

    queries, keys = _per_value_head(q, heads), _per_value_head(k, heads)  # [B, HV, N, K]
    summed = total.transpose(1, 2)  # [B, HV, N]
    # Masked before the exponential: for a pair that is not on one path the difference may be positive and overflow.
    decay = (summed[..., :, None] - summed[..., None, :]).masked_fill(~mask, -torch.inf).exp()
    gate = beta.transpose(1, 2)[..., None]  # [B, HV, N, 1]
    carried = summed.exp()[..., None]

    x = gate * decay * (keys @ keys.mT)
    rhs = gate * (v.transpose(1, 2) - carried * (keys @ state))
    u = torch.linalg.solve_triangular(x, rhs, upper=False, unitriangular=True)  # the diagonal is taken as ones
    outputs = carried * (queries @ state) + (decay * (queries @ keys.mT)) @ u
    left = DeltaStash(k, u.transpose(1, 2), total)
    if stash is not None:
        stash.k.copy_(left.k), stash.u.copy_(left.u), stash.log_decay.copy_(left.log_decay)
    outputs = outputs.transpose(1, 2)
    return outputs if out is None else out.copy_(outputs), left if stash is None else stash


def commit_gated_delta(
    state: Tensor, stash: DeltaStash, path: Tensor, *, length: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """The state after the nodes of one root-to-leaf path.

        S = exp(G_leaf) S0 + sum over j in path of exp(G_leaf - G_j) k_j u_j^T

    state: [B, HV, K, V]    path: [P] int64, node indices from the root on
    length: one integer on the device, entries of `path` in use (0: the state stays); None for all of them
    out: written and returned instead of a new tensor; may be `state` itself
    Returns a tensor of the state's shape. Writes nothing else.
    """
    path = path.to(state.device)
    if length is not None:
        path = path[: int(length)]
    if not path.numel():
        return state.clone() if out is None else out.copy_(state)
    k, u, total = stash.k[:, path], stash.u[:, path], stash.log_decay[:, path]
    remaining = (total[:, -1:] - total).exp()  # [B, P, HV]
    keys = k.repeat_interleave(state.shape[1] // k.shape[2], dim=2)
    update = torch.einsum("bphk,bphv->bhkv", keys, remaining[..., None] * u)
    committed = total[:, -1].exp()[..., None, None] * state + update
    return committed if out is None else out.copy_(committed)
