"""The transition tree level by level, and what it learns from a verified tree, in plain PyTorch.

Both are what `transitions.TransitionTree` does on the host, in float32 instead of its float64: trees are equal node for
node unless scores lie within rounding of each other, and what scores exactly alike is ordered alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deltatree.kernels.tree_build.reference import TreeBuffers, check_sizes, fill
from deltatree.transitions.policy import BESIDE, CANDIDATES, CURVATURE, STRENGTHS
from deltatree.transitions.table import TransitionTable


@dataclass(frozen=True, slots=True)
class Transitions:
    """What one generation knows of its target's transitions, on one device; `learn_transitions` writes it."""

    table: TransitionTable
    strengths: Tensor  # [3] float32, exponents: of the root's children, of the argmax spine's, of all others' children
    curvature: Tensor  # [3] float32, how firmly each of them is held
    before: Tensor  # [1] int64, the token before the root
    weights: Tensor  # [2] float32, what an n-gram of the accepted path counts, and a pick beside it; 0 counts nothing

    @classmethod
    def empty(cls, vocab_size: int, *, num_buckets: int, device: torch.device | str) -> Transitions:
        """A table without counts, and the strengths that everything starts with."""
        return cls(
            TransitionTable.empty(vocab_size, num_buckets=num_buckets, device=device),
            torch.tensor(STRENGTHS, dtype=torch.float32, device=device),
            torch.full((len(STRENGTHS),), CURVATURE, device=device),
            torch.full((1,), -1, dtype=torch.int64, device=device),
            torch.zeros(2, device=device),
        )


class _Level(NamedTuple):
    """The nodes of one depth, best first: [F] each."""

    scores: Tensor
    token_ids: Tensor
    parents: Tensor  # position in the level above
    before: Tensor  # the parent's token
    on_spine: Tensor  # bool: every token so far is the drafter's argmax


def build_transition_tree(
    values: Tensor,
    ids: Tensor,
    root: Tensor | int,
    known: Transitions,
    *,
    budget: int,
    chain: bool = False,
    kernel: int = 4,
    out: TreeBuffers | None = None,
    scratch: Tensor | None = None,
) -> TreeBuffers:
    """The tree of the best `budget` prefixes over marginals and transitions, as `TransitionTree` builds it.

    values, ids: [D, C] from `top_candidates`, C at most CANDIDATES: log-probabilities float32, best first, and tokens,
        int32 or int64
    root: the bonus token of the last round, an int or one integer on the device    known: read only
    budget: drafted nodes, root not counted    chain: the greedy descent instead of a tree
    kernel: taps of the convolution, 1 without one
    out: buffers of N = budget + 1 nodes, written and returned instead of new ones; they say the kernel then
    scratch: only the fast twin needs it
    Candidates of probability 0 are no nodes, so that there may be fewer than the budget. Of equal scores the shallower
    node comes first, then the one whose parent does, then the better candidate. Raises ValueError for a size out of
    range.
    """
    check_sizes(values, budget, out)
    check_candidates(values)
    out = TreeBuffers.empty(budget + 1, kernel, values.device) if out is None else out
    values, ids = values.float(), ids.long()
    mass = values.exp().sum(-1).log().clamp(max=0)  # of a depth's candidates
    root = torch.as_tensor(root, device=values.device).reshape(1).long()
    level = _Level(root.new_zeros(1, dtype=torch.float32), root, torch.full_like(root, -1), known.before, root == root)
    levels = [level]
    for depth in range(min(len(values), budget)):
        level = _grow(level, values[depth], ids[depth], mass[depth], known, depth, 1 if chain else budget)
        levels.append(level)
    return fill(out, *_best(levels, budget))


def _grow(
    level: _Level, values: Tensor, ids: Tensor, mass: Tensor, known: Transitions, depth: int, width: int
) -> _Level:
    """The best `width` children of a level."""
    depths = torch.full_like(level.before, depth)
    scores, *_ = _scores(level.before, level.token_ids, level.on_spine, depths, values, ids, known)
    scores = scores - scores.amax(1, keepdim=True)
    scores = scores + mass - scores.exp().sum(1, keepdim=True).log()
    scores = (level.scores[:, None] + scores.clamp(max=0)).flatten()
    order = scores.sort(descending=True, stable=True).indices[:width]
    order = order[scores[order] > -torch.inf]
    parents, rank = order // len(ids), order % len(ids)
    on_spine = level.on_spine[parents] & (rank == 0)
    return _Level(scores[order], ids[rank], parents, level.token_ids[parents], on_spine)


def _scores(
    before: Tensor, last: Tensor, on_spine: Tensor, depths: Tensor, values: Tensor, ids: Tensor, known: Transitions
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the children of nodes: scores and log-ratios of the transitions, [F, C], and which strength holds, [F].

    depths: [F] of the nodes, the root's is 0    values, ids: [C] or [F, C]
    """
    which = torch.where(on_spine, (depths > 0).long(), 2)
    ratios = known.table.scores(before, last, ids)
    factors = torch.where(on_spine, 1.0, BESIDE)[:, None]
    return factors * values + known.strengths[which][:, None] * ratios, ratios, which


def _best(levels: list[_Level], budget: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores, tokens, parents and depths of the root and the best `budget` nodes of all levels, best first."""
    starts = [0]
    for level in levels:
        starts.append(starts[-1] + len(level.scores))
    scores, tokens = (torch.cat([getattr(level, name) for level in levels]) for name in ("scores", "token_ids"))
    parents = torch.cat([level.parents + start for level, start in zip(levels, (0, *starts), strict=False)])
    depths = torch.cat([torch.full_like(level.parents, depth) for depth, level in enumerate(levels)])
    kept = torch.cat([depths[:1], 1 + scores[1:].sort(descending=True, stable=True).indices[:budget]])
    place = torch.zeros_like(parents)
    place[kept] = torch.arange(len(kept), device=kept.device)
    parents = parents[kept]
    return scores[kept], tokens[kept], torch.where(parents < 0, parents, place[parents]), depths[kept]


def learn_transitions(
    token_ids: Tensor,
    parents: Tensor,
    target_ids: Tensor,
    *,
    num_nodes: Tensor,
    path: Tensor,
    steps: Tensor,
    known: Transitions,
    drafted: tuple[Tensor, Tensor] | None = None,
    scratch: Tensor | None = None,
) -> None:
    """Learn from a verified tree, as `TransitionTree.observe` does. Writes `known`.

    token_ids, parents: [N] int64    target_ids: [N] int64, the token the target picks after each node
    num_nodes: one integer on the device, rows in use
    path, steps: of the walk: accepted nodes, and one integer, how many they are
    drafted: candidates (values, ids) that the tree was built of; None where nothing was drafted, so that strengths stay
    scratch: only the fast twin needs it
    The strengths take one Newton step on the log-likelihood of the tokens after the path's nodes; then the n-grams that
    end in the target's picks are counted, those of the path and those beside it by `known.weights`.
    """
    count, path = int(num_nodes), path[: int(steps)].long()
    tokens, picks = token_ids[:count].long(), target_ids[:count].long()
    above = parents[:count].long()
    before = torch.where(above < 0, known.before, tokens[above.clamp(min=0)])
    if drafted is not None:
        _fit(before[path], tokens[path], picks[path], *drafted, known)
    weights = known.weights[1].repeat(count)
    weights[path] = known.weights[0]
    counted = weights > 0
    known.table.add(before[counted], tokens[counted], picks[counted], weights[counted])
    known.before.copy_(tokens[path[-1:]])


def _fit(before: Tensor, last: Tensor, chosen: Tensor, values: Tensor, ids: Tensor, known: Transitions) -> None:
    """Move the strengths to where the chosen tokens become more probable among the candidates."""
    count = min(len(last), len(values))
    before, last, values, ids = before[:count], last[:count], values[:count].float(), ids[:count].long()
    hit = ids == chosen[:count, None]
    found = hit.any(1).float()
    matches = torch.ones_like(last)
    matches[1:] = (last[1:] == ids[: max(count - 1, 0), 0]).long()
    depths = torch.arange(count, device=last.device)
    scores, ratios, which = _scores(before, last, matches.cumprod(0) > 0, depths, values, ids, known)
    probs = scores.softmax(1)
    mean = (probs * ratios).sum(1)
    variance = (probs * ratios**2).sum(1) - mean**2
    slope = torch.zeros_like(known.strengths).index_add_(0, which, ((ratios * hit).sum(1) - mean) * found)
    known.curvature.index_add_(0, which, variance * found)
    known.strengths.copy_((known.strengths + slope / known.curvature).clamp(0, 1))


def check_candidates(values: Tensor) -> None:
    if values.shape[1] > CANDIDATES:
        raise ValueError(f"{values.shape[1]} candidates a depth are more than {CANDIDATES}; pass the best {CANDIDATES}")
