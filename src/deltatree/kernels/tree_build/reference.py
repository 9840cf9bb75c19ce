"""The best-first draft tree, level by level, in plain PyTorch.

The nodes of a tree of n nodes are the n best prefixes under the product of the per-depth probabilities; equal ones are
ordered by their ranks on the way down, as tuples are. No child outranks its parent, so the n best prefixes of at most
d + 1 tokens are among the n best of at most d tokens and the children of those.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from deltatree.kernels.conv.reference import conv_rows

MAX_BUDGET = 511
"""Drafted nodes that the fast twin can number."""

MAX_DEPTH = 31
"""Depths that the fast twin can number."""


@dataclass(frozen=True, slots=True)
class TreeBuffers:
    """A draft tree in tensors of a fixed size N, on one device: node 0 is the root, parents come before children.

    Rows from num_nodes on are padding that disturbs nothing: token 0, parent 0, depth 0, score -inf, an ancestor of nobody.
    Nodes stand best first, so the first n rows (of `ancestors` also the first n columns) are the tree of n - 1 nodes.
    The tensors of one dimension are contiguous.
    """

    token_ids: Tensor  # [N] int64
    parents: Tensor  # [N] int64, parents[0] == -1
    depths: Tensor  # [N] int64
    scores: Tensor  # [N] float32, log-probability of the path from the root; 0 for the root
    ancestors: Tensor  # [N, N] uint8, (i, j) is 1 if j is i or an ancestor of i
    rows: Tensor  # [N, kernel] int64, as `conv_rows` gives them
    num_nodes: Tensor  # [1] int32, the root included

    @classmethod
    def empty(cls, nodes: int, kernel: int, device: torch.device | str) -> TreeBuffers:
        """Buffers for `nodes` nodes, the root included, and a convolution of `kernel` taps (1 without one)."""

        def new(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            new(nodes), new(nodes), new(nodes), new(nodes, dtype=torch.float32), new(nodes, nodes, dtype=torch.uint8),
            new(nodes, kernel), new(1, dtype=torch.int32),
        )  # fmt: skip

    def first(self, nodes: int) -> TreeBuffers:
        """The first `nodes` nodes of these buffers, as a view."""
        named = {field.name: getattr(self, field.name)[:nodes] for field in fields(self)}
        return TreeBuffers(**named | {"ancestors": self.ancestors[:nodes, :nodes], "num_nodes": self.num_nodes})


def build_tree(
    values: Tensor,
    ids: Tensor,
    root: Tensor | int,
    *,
    budget: int,
    kernel: int = 4,
    out: TreeBuffers | None = None,
) -> TreeBuffers:
    """The tree that `tree.best_first` builds of the same candidates, node for node.

    values, ids: [D, C] from `top_candidates`: log-probabilities float32, never above 0, best first, and tokens, int32 or
        int64. C >= budget leaves nothing out: a node of rank r has r better siblings. values may also be [2, D, C], from
        `corrected`: for children on the *spine*, where every token before was the best candidate, and for all others
    root: the bonus token of the last round, an int or one integer on the device
    budget: drafted nodes, root not counted    kernel: taps of the convolution, 1 without one
    out: buffers of N = budget + 1 nodes, written and returned instead of new ones; they say the kernel then
    A prefix scores its parent's score + its token's value, rounded to float32. There are fewer nodes than the budget only
    where there are fewer prefixes. Raises ValueError for a budget, a depth or buffers out of range.
    """
    check_sizes(values, budget, out)
    out = TreeBuffers.empty(budget + 1, kernel, values.device) if out is None else out
    by_place, ids = values[..., :budget].float().reshape(-1, *ids[:, :budget].shape), ids[:, :budget].long()
    width, device = ids.shape[1], values.device

    # One entry a node, in the order of their ranks as tuples: a node's descendants follow it at once.
    scores = torch.zeros(1, device=device)
    tokens = torch.as_tensor(root, device=device).reshape(1).long()
    parents, depths, branched = torch.full_like(tokens, -1), torch.zeros_like(tokens), torch.zeros_like(tokens)
    for depth in range(len(ids)):
        leaves = (depths == depth).nonzero()[:, 0]
        steps = by_place[:, depth][branched[leaves] % len(by_place)]  # [leaves, width]
        offered = (scores[leaves, None] + steps).flatten()
        behind = torch.arange(1, width + 1, device=device)
        places = torch.arange(len(scores), device=device) * (width + 1)
        order = torch.cat([places, (places[leaves, None] + behind).flatten()]).argsort()
        scores = torch.cat([scores, offered])
        tokens = torch.cat([tokens, ids[depth].repeat(len(leaves))])
        parents = torch.cat([parents, leaves.repeat_interleave(width)])
        depths = torch.cat([depths, torch.full_like(offered, depth + 1, dtype=torch.int64)])
        is_other = (behind > 1).long()
        branched = torch.cat([branched, (branched[leaves, None] | is_other).flatten()])
        best = scores[order].sort(descending=True, stable=True).indices[: budget + 1]
        kept = order[best.sort().values]
        branched = branched[kept]
        scores, tokens, parents, depths = _kept(kept, scores, tokens, parents, depths)
    best = scores.sort(descending=True, stable=True).indices
    return fill(out, *_kept(best, scores, tokens, parents, depths))


def _kept(kept: Tensor, scores: Tensor, tokens: Tensor, parents: Tensor, depths: Tensor) -> tuple[Tensor, ...]:
    """These entries in this order, with parents renumbered. A kept entry's parent is kept, for it ranks higher."""
    place = torch.empty_like(parents)
    place[kept] = torch.arange(len(kept), device=kept.device)
    parents = parents[kept]
    return scores[kept], tokens[kept], torch.where(parents < 0, parents, place[parents]), depths[kept]


def fill(out: TreeBuffers, scores: Tensor, tokens: Tensor, parents: Tensor, depths: Tensor) -> TreeBuffers:
    """Write these nodes, [n] each with n at most N, their relations and the padding."""
    for field in fields(out):
        getattr(out, field.name).fill_(-torch.inf if field.name == "scores" else 0)
    count = len(tokens)
    named = {"scores": scores, "token_ids": tokens, "parents": parents, "depths": depths}
    for name, known in named.items():
        getattr(out, name)[:count] = known
    out.num_nodes.fill_(count)
    out.rows.copy_(conv_rows(out.parents.cpu().long(), out.rows.shape[1]))
    nodes = torch.arange(len(out.parents), device=out.parents.device)
    at = nodes.clone()
    while bool((at >= 0).any()):  # every node one step up
        out.ancestors[nodes[at >= 0], at[at >= 0]] = 1
        at = torch.where((at < 0) | (nodes >= count), -1, out.parents[at].long())
    return out


def check_sizes(values: Tensor, budget: int, out: TreeBuffers | None) -> None:
    """values: [..., D, C]"""
    if not 0 <= budget <= MAX_BUDGET or values.shape[-2] > MAX_DEPTH:
        raise ValueError(
            f"budget={budget} with {values.shape[-2]} depths is out of range; trees of 0 to {MAX_BUDGET} drafted nodes and "
            f"at most {MAX_DEPTH} depths can be built"
        )
    if out is not None and len(out.token_ids) != budget + 1:
        raise ValueError(
            f"budget={budget} needs buffers of {budget + 1} nodes, these hold {len(out.token_ids)}; "
            f"pass buffers made for this budget"
        )
