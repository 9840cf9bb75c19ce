"""The draft tree: a flat node list in which every parent comes before its children."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deltatree.errors import TreeError


@dataclass(frozen=True, slots=True)
class DraftTree:
    """A draft tree, flattened so that every parent comes before its children.

    Node 0 is the root: the last round's bonus token, emitted but not yet part of the state. All three
    tensors live on the CPU; a target moves what it needs.

    Raises TreeError if the list is not such a tree.
    """

    token_ids: Tensor  # [N] int64
    parents: Tensor  # [N] int64, parents[0] == -1
    depths: Tensor  # [N] int64, depths[0] == 0

    def __post_init__(self) -> None:
        n = self.token_ids.numel()
        if n == 0 or self.parents.shape != (n,) or self.depths.shape != (n,):
            raise TreeError(
                f"a draft tree needs one parent and one depth per node and at least the root; got {n} tokens, "
                f"parents {tuple(self.parents.shape)}, depths {tuple(self.depths.shape)}"
            )
        parents, depths = self.parents.numpy(), self.depths.numpy()  # a tensor's small operations take far longer
        if parents[0] != -1 or depths[0] != 0:
            raise TreeError("node 0 is the root: its parent must be -1 and its depth 0")
        before = parents[1:]
        if ((before < 0) | (before >= np.arange(1, n))).any():
            raise TreeError("every parent must come before its children; build the tree in parent-first order")
        if (depths[1:] != depths[before] + 1).any():
            raise TreeError("a node's depth must be its parent's depth + 1")

    @classmethod
    def from_parents(cls, token_ids: Sequence[int], parents: Sequence[int]) -> DraftTree:
        """Build from plain lists; depths follow from the parents."""
        depths: list[int] = []
        for node, parent in enumerate(parents):
            if not -1 <= parent < node or (parent == -1) != (node == 0):
                raise TreeError(
                    f"node {node} has parent {parent}; the root's parent is -1 and every other parent comes first"
                )
            depths.append(0 if parent == -1 else depths[parent] + 1)
        return cls(
            torch.tensor(token_ids, dtype=torch.int64),
            torch.tensor(parents, dtype=torch.int64),
            torch.tensor(depths, dtype=torch.int64),
        )

    def __len__(self) -> int:
        return self.token_ids.numel()

    @property
    def num_drafted(self) -> int:
        """Nodes without the root: what a budget counts."""
        return len(self) - 1

    @property
    def max_depth(self) -> int:
        return int(self.depths.max())


def chain_tree(token_ids: Sequence[int] | Tensor) -> DraftTree:
    """A tree without branches: token_ids[0] is the root, each other token follows the one before it."""
    tokens = torch.as_tensor(token_ids, dtype=torch.int64)
    depths = np.arange(tokens.numel())
    return DraftTree(tokens, torch.from_numpy(depths - 1), torch.from_numpy(depths))


def ancestors(tree: DraftTree) -> Tensor:
    """Which nodes stand on each node's path: [N, N] bool, entry (i, j) is true if j is i or an ancestor of i."""
    n = len(tree)
    if torch.equal(tree.parents, torch.arange(-1, n - 1)):
        return torch.ones(n, n, dtype=torch.bool).tril()
    rows = torch.eye(n, dtype=torch.bool)
    for node, parent in enumerate(tree.parents.tolist()):
        if parent >= 0:
            rows[node] |= rows[parent]
    return rows


def path_to(tree: DraftTree, node: int) -> list[int]:
    """The nodes from the root to `node`, both included."""
    parents = tree.parents.tolist()
    path = []
    while node != -1:
        path.append(node)
        node = parents[node]
    return path[::-1]
