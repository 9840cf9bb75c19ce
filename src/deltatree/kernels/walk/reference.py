"""The walk down a verified tree with choices that are known for every node, in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Walked:
    """What a walk found. All fields are views of one tensor, so that one copy brings a round to the host."""

    record: Tensor  # [2 + 2 * (max_depth + 1)] int32: steps, bonus, path, token_ids
    steps: Tensor  # [1] nodes of the path = tokens emitted: the acceptance length
    bonus: Tensor  # [1] the target's choice after the path
    path: Tensor  # [max_depth + 1] node indices from the root on; 0 from `steps` on
    token_ids: Tensor  # [max_depth + 1] emitted: accepted drafted tokens, then the bonus token; 0 from `steps` on

    @classmethod
    def of(cls, record: Tensor) -> Walked:
        """The fields inside a record, on whichever device it is."""
        places = (record.numel() - 2) // 2
        return cls(record, *record.split([1, 1, places, places]))

    @classmethod
    def empty(cls, max_depth: int, device: torch.device | str) -> Walked:
        return cls.of(torch.empty(2 + 2 * (max_depth + 1), dtype=torch.int32, device=device))


def walk(
    token_ids: Tensor,
    parents: Tensor,
    target_ids: Tensor,
    *,
    num_nodes: Tensor,
    max_depth: int,
    out: Walked | None = None,
) -> Walked:
    """Walk down from the root for as long as the target's choice was drafted, as `tree.accept` does.

    token_ids, parents: [N] int64 or int32, parents before children    target_ids: [N], the token the target picks after
        each node    num_nodes: one integer on the device, rows in use    max_depth: of the tree, at least
    out: written and returned instead of a new record; made for the same max_depth
    Of two children with the same token the first one is taken.
    """
    out = Walked.empty(max_depth, token_ids.device) if out is None else out
    count = int(num_nodes)
    tokens, above, choices = (x[:count].tolist() for x in (token_ids, parents, target_ids))
    child: dict[tuple[int, int], int] = {}
    for node in range(1, count):
        child.setdefault((above[node], tokens[node]), node)
    path = [0]
    while (node := child.get((path[-1], choices[path[-1]]))) is not None and len(path) <= max_depth:
        path.append(node)
    padding = [0] * (max_depth + 1 - len(path))
    emitted = [choices[node] for node in path]
    out.record.copy_(torch.tensor([len(path), emitted[-1], *path, *padding, *emitted, *padding]))
    return out
