"""Tables, drafts and targets for the tests of the transition tree."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from deltatree.kernels.transition_tree import CANDIDATES, Transitions
from deltatree.transitions import TransitionTable, TransitionTree
from deltatree.transitions.policy import PICK_WEIGHT, TEXT_WEIGHT
from deltatree.tree import accept, top_candidates

ROUNDING = 2e-5
"""What float32 on the device and float64 on the host may differ by in a path's log-probability, over 1 + its size."""


class Draft(NamedTuple):
    """One round's input."""

    table: TransitionTable
    log_probs: Tensor  # [D, vocab]
    before: int
    root: int


def draft(seed: int, *, vocab: int | None = None, depths: int | None = None) -> Draft:
    """A table of text that has some order, crowded in every third case, and a draft that is sharp or flat."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(3, generator=generator).tolist()
    vocab = vocab or 3 + int(120 * uniform[0])
    depths = depths or 1 + int(15 * uniform[1])
    text = (torch.rand(40, 50, generator=generator) ** 2 * vocab).long()
    text[:, 1::2] = (3 * text[:, ::2] + 1) % vocab
    table = TransitionTable.count(text, vocab, num_buckets=8 if seed % 3 == 2 else 512)
    log_probs = (torch.randn(depths, vocab, generator=generator) * (0.3 + 4 * uniform[2])).log_softmax(-1)
    before, root = torch.randint(vocab, (2,), generator=generator).tolist()
    return Draft(table, log_probs, before if seed % 7 else -1, root)


def known_of(case: Draft, device: torch.device | str = "cpu", *, refines: bool = True) -> Transitions:
    """What the host's policy knows when it begins."""
    known = Transitions.empty(case.log_probs.shape[1], num_buckets=len(case.table.keys), device=device)
    place(known, case.table.to(device))
    known.before.fill_(case.before)
    if refines:
        known.weights.copy_(torch.tensor([TEXT_WEIGHT, PICK_WEIGHT]))
    return known


def place(known: Transitions, table: TransitionTable) -> None:
    for mine, new in zip(known.table.tensors(), table.tensors(), strict=True):
        mine.copy_(new)


def policy_of(case: Draft, **options) -> TransitionTree:
    policy = TransitionTree(case.table, **options)
    policy.begin([case.before])
    return policy


def candidates(log_probs: Tensor, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    values, ids = top_candidates(log_probs, CANDIDATES)
    return values.to(device), ids.to(device)


def paths(tree) -> list[tuple[int, ...]]:
    """The tokens from the root to each node, in node order. tree: a DraftTree or TreeBuffers"""
    count = int(getattr(tree, "num_nodes", len(tree.token_ids)))
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids[:count].tolist(), tree.parents[:count].tolist(), strict=True):
        found.append((*(found[parent] if found else ()), token))
    return found


def agrees(built, tree) -> bool:
    """Whether buffers hold this tree, but for nodes whose scores lie within rounding: those may change places."""
    mine, theirs = paths(built), paths(tree)
    scores = dict(zip(mine, built.scores.tolist(), strict=False))
    order = [scores[path] for path in theirs if path in scores]
    is_ordered = all(after - before < ROUNDING * (1 - before) for before, after in itertools.pairwise(order))
    others = [scores[path] - min(order) for path in mine if path not in set(theirs)]
    return len(mine) == len(theirs) and is_ordered and all(beyond < ROUNDING * (1 - min(order)) for beyond in others)


def verified(tree, vocab: int, seed: int) -> tuple[Tensor, object]:
    """Logits [N, vocab] of a target that often picks a drafted child, and the acceptance."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(tree), vocab, generator=generator)
    for node in range(1, len(tree)):
        if torch.rand(1, generator=generator) < 0.4:
            logits[tree.parents[node], tree.token_ids[node]] += 9
    return logits, accept(tree, logits.argmax(-1))
