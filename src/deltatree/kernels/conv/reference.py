"""The causal depthwise convolution over a tree, in plain PyTorch.

In a sequence a token sees its own input and the kernel - 1 inputs before it. In a tree it sees its own, its parent's,
its grandparent's, and so on; past the root it sees the committed window.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu


def conv_rows(parents: Tensor, kernel: int) -> Tensor:
    """Where each node finds its inputs in `concat(window, nodes)`.

    parents: [N] int64, parents[0] == -1. Returns [N, kernel] int64, oldest input first; rows 0 .. kernel-2 are the
    window, row kernel-1+i is node i.
    """
    window = kernel - 1
    nodes = parents.numel()
    if torch.equal(parents, torch.arange(-1, nodes - 1)):
        return torch.arange(nodes)[:, None] + torch.arange(kernel)
    # Row r's predecessor in concat(window, nodes): inside the window the column before it, for a node its parent.
    before = torch.cat([torch.arange(-1, window - 1).clamp(min=0), parents + window])
    taps = [torch.arange(window, window + nodes)]
    for _ in range(window):
        taps.append(before[taps[-1]])
    return torch.stack(taps[::-1], dim=1)


def tree_conv(
    window: Tensor, x: Tensor, *, weight: Tensor, bias: Tensor | None, rows: Tensor, out: Tensor | None = None
) -> Tensor:
    """Depthwise convolution and SiLU of every node along its own path.

    window: [B, C, kernel-1], the committed inputs, oldest first; read only
    x: [B, N, C], the nodes' inputs    weight: [C, kernel]    bias: [C] or None
    rows: [N, kernel] from `conv_rows`
    out: written and returned instead of a new tensor
    Returns [B, N, C] in x's dtype, summed in float32 or wider. Writes nothing else.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    inputs = torch.cat([window.transpose(1, 2).to(x.dtype), x], dim=1)  # [B, kernel-1+N, C]
    total = torch.zeros((), dtype=wide, device=x.device) if bias is None else bias.to(wide)
    for tap in range(weight.shape[1]):
        total = total + inputs[:, rows[:, tap]].to(wide) * weight[:, tap].to(wide)
    activated = silu(total).to(x.dtype)
    return activated if out is None else out.copy_(activated)


def commit_window(
    window: Tensor, x: Tensor, path: Tensor, *, length: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """The window after the nodes of one path: its last kernel - 1 inputs, oldest first.

    window: [B, C, kernel-1]    x: [B, N, C]    path: [P] int64
    length: one integer on the device, entries of `path` in use; None for all of them
    out: written and returned instead of a new tensor; may be `window` itself
    Returns a tensor of the window's shape.
    """
    path = path.to(x.device)
    if length is not None:
        path = path[: int(length)]
    walked = torch.cat([window, x[:, path].transpose(1, 2).to(window.dtype)], dim=2)
    moved = walked[:, :, walked.shape[2] - window.shape[2] :]
    return moved if out is None else out.copy_(moved)
