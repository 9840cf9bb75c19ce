"""Attention over a tree: the mask and the positions, in plain PyTorch.

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
