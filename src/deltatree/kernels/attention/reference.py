"""Attention over a tree: the mask, the positions and the attention, in plain PyTorch.

Keys and values of the nodes stand behind the committed ones. Node i sees all committed rows, its ancestors and itself;
its position is the committed length + its depth, not its row number.
"""

from __future__ import annotations

import torch
from torch import Tensor


def tree_positions(depths: Tensor, length: int) -> Tensor:
    """[N] int64: committed length + depth, so that siblings share a position."""
    return depths + length


def tree_attention_mask(ancestors: Tensor, depths: Tensor, length: int, window: int | None = None) -> Tensor:
    """[N, length + N] bool, true where a node may look.

    ancestors: [N, N] bool, self included    depths: [N] int64    length: committed rows
    window: tokens that a sliding-window layer sees, the node itself included; None for full attention.
    """
    mask = torch.cat([torch.ones(len(depths), length, dtype=torch.bool), ancestors.cpu()], dim=1)
    if window is not None:
        positions = tree_positions(depths, length)
        keys = torch.cat([torch.arange(length), positions])
        mask &= positions[:, None] - keys[None, :] < window
    return mask


def tree_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    ancestors: Tensor,
    length: Tensor | int,
    scale: float | None = None,
    depths: Tensor | None = None,
    window: int | None = None,
    gate: Tensor | None = None,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """Grouped-query attention of all nodes over the committed rows and their own ancestors.

    q: [B, HQ, N, D]    keys, values: [B, HKV, capacity, D], committed rows first, then the N nodes' rows
    ancestors: [N, N] bool, self included    length: committed rows, an int or one integer on the device
    scale: of the scores, above 0; D^-1/2 if None    depths, window: of a sliding-window layer, as in `tree_attention_mask`
    gate: [B, HQ, N, D], strided or not; the result is rounded to q's dtype, then multiplied by its sigmoid
    out: written and returned instead of a new tensor    scratch: only the fast twin needs it
    Returns [B, HQ, N, D] in q's dtype, summed in float32 or wider.
    """
    length, nodes, head_dim = int(length), q.shape[2], q.shape[3]
    wide = torch.promote_types(q.dtype, torch.float32)
    depths = torch.zeros(nodes, dtype=torch.int64) if depths is None else depths.cpu()
    mask = tree_attention_mask(ancestors, depths, length, window).to(q.device)
    group = q.shape[1] // keys.shape[1]
    k, v = (x[:, :, : length + nodes].to(wide).repeat_interleave(group, dim=1) for x in (keys, values))
    scores = (q.to(wide) @ k.mT) * (head_dim**-0.5 if scale is None else scale)
    attended = (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v).to(q.dtype)
    if gate is not None:
        attended = (attended.to(wide) * torch.sigmoid(gate.to(wide))).to(q.dtype)
    return attended if out is None else out.copy_(attended)
