"""How far the target agrees with a draft tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from deltatree.tree.draft_tree import DraftTree


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The accepted path and the token that the target chose after it."""

    path: list[int]  # node indices from the root (always 0) to the accepted leaf
    bonus: int

    @property
    def length(self) -> int:
        """Acceptance length: tokens this round emits = accepted drafted nodes + 1 (the bonus token)."""
        return len(self.path)


def walk(tree: DraftTree, choose: Callable[[int, list[int]], int]) -> Acceptance:
    """Walk down from the root for as long as the target's choice was drafted.

    choose(node, path): the token the target picks after `node`; `path` are the nodes walked so far, `node` last.
    It is called once per *visited* node, in order, so that one random draw is made per emitted token: for a fixed
    set of children that is plain sampling from the target's distribution, hence lossless.
    """
    tokens, parents = tree.token_ids.tolist(), tree.parents.tolist()
    child: dict[tuple[int, int], int] = {}
    for node, edge in enumerate(zip(parents, tokens, strict=True)):
        child.setdefault(edge, node)
    path = [0]
    choice = choose(0, path)
    while (node := child.get((path[-1], choice))) is not None:
        path.append(node)
        choice = choose(node, path)
    return Acceptance(path, bonus=choice)


def accept(tree: DraftTree, target_ids: Tensor) -> Acceptance:
    """Walk with choices that are known for every node, as in greedy decoding.

    target_ids: [N] int64, the token the target picks after each node.
    """
    choices = target_ids.tolist()
    return walk(tree, lambda node, path: choices[node])
