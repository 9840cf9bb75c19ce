"""The state of one generation: every layer's, with one committed length."""

from __future__ import annotations

import torch
from torch import Tensor

from deltatree.errors import ArchitectureError, TreeError
from deltatree.state.layers import AttentionState, RecurrentState
from deltatree.tree.draft_tree import DraftTree

LAYER_STATES = {
    "full_attention": AttentionState,
    "sliding_attention": AttentionState,
    "linear_attention": RecurrentState,
}


class TreeState:
    """Committed state of one generation, and scratch for one tree at a time.

    Each generation has its own, so that generations on one model cannot mix. It stands in for the library's cache
    where an attention layer calls `update`.
    """

    def __init__(self, layer_kinds: tuple[str, ...]) -> None:
        unknown = sorted(set(layer_kinds) - set(LAYER_STATES))
        if unknown:
            raise ArchitectureError(
                f"layers of kind {', '.join(unknown)} have no tree state here; possible are {', '.join(LAYER_STATES)}"
            )
        self.layers = [LAYER_STATES[kind]() for kind in layer_kinds]
        self.length = 0  # committed tokens
        self._pending: DraftTree | None = None

    def update(self, keys: Tensor, values: Tensor, layer_index: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """What an attention layer calls with the nodes' keys and values: returns committed rows + nodes."""
        return self.layers[layer_index].write_nodes(keys, values, self.length)

    def begin(self, tree: DraftTree) -> None:
        """A verify of `tree` starts: from here on its scratch replaces any earlier tree's."""
        self._pending = None
        for layer in self.layers:
            if isinstance(layer, RecurrentState):
                layer.stash = layer.inputs = None

    def finish(self, tree: DraftTree) -> None:
        """The verify of `tree` is complete: one of its paths may be committed."""
        self._pending = tree

    def advance(self, num_tokens: int) -> None:
        """Prefill has written `num_tokens` tokens into every layer."""
        self.length += num_tokens

    def commit(self, path: list[int]) -> None:
        """Make the nodes of one root-to-node path part of the state: after prefill, the only write.

        path: node indices of the last verified tree, from the root (0) on. Raises TreeError for anything else.
        """
        nodes = self.take(path)
        for layer in self.layers:
            if isinstance(layer, RecurrentState):
                layer.commit(nodes)
            else:
                layer.commit(nodes, self.length)
        self.length += len(path)

    def take(self, path: list[int]) -> torch.Tensor:
        """The path as [P] int64, checked; the verified tree is used up by it. Raises TreeError."""
        tree = self._pending
        if tree is None:
            raise TreeError("nothing to commit: verify a tree first; each verify can be committed once")
        nodes = torch.tensor(path, dtype=torch.int64)
        inside = len(path) > 0 and path[0] == 0 and all(0 <= node < len(tree) for node in path)
        if not inside or not torch.equal(tree.parents[nodes[1:]], nodes[:-1]):
            raise TreeError(f"{path} is not a path from the root of the verified tree of {len(tree)} nodes")
        self._pending = None
        return nodes

    @property
    def num_bytes(self) -> int:
        """Bytes held by all layers, scratch rows of the KV buffers included."""
        return sum(layer.num_bytes for layer in self.layers)
