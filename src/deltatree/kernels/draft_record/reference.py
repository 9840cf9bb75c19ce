"""The record of a draft tree in plain PyTorch. It waits for no device, so that it can be captured, too."""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 5


def draft_record(
    scores: Tensor,
    parents: Tensor,
    depths: Tensor,
    *,
    num_nodes: Tensor,
    max_depth: int,
    limit: float,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """Number of nodes, and each node's log-odds after its parent, parent, depth and kind: [5, N] float64.

    scores: [N] float32, log-probability of each node's prefix, 0 for the root    parents, depths: [N] int64, parents first
    num_nodes: one integer on the device, rows in use    max_depth: of the tree, at least
    limit, scale: log-odds are bounded to +-limit, then divided by scale
    out: written and returned instead of a new tensor
    A node is a first choice if it is the first of its parent's children, and on the spine if all its ancestors are, too.
    Kinds: 0 on the spine (so is the root), 1 another choice beside it, 2 a first choice below such a one, 3 another there.
    """
    out = torch.empty(ROWS, len(scores), dtype=torch.float64, device=scores.device) if out is None else out
    above, scores = parents.clamp(min=0), scores.double()
    given = (scores - scores[above]).clamp(max=-1e-9)
    node = torch.arange(len(scores), device=scores.device)
    is_first = torch.where(parents[:, None] == parents, node, len(scores)).amin(1) == node
    on_spine, at = is_first, above
    for _ in range(max_depth.bit_length()):  # twice as many ancestors every time
        on_spine, at = on_spine & on_spine[at], at[at]
    out[0] = num_nodes
    out[1] = (given - (-given.expm1()).log()).clamp(-limit, limit) / scale
    out[2], out[3], out[4] = parents, depths, 2 * ~on_spine[above] + ~is_first
    return out
