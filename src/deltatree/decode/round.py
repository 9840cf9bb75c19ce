"""One round of draft-tree decoding: draft, build, verify, accept, commit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from deltatree.decode.guard import verify_within_memory
from deltatree.decode.sampling import Sampler
from deltatree.drafter.protocol import DraftSession
from deltatree.models.protocol import Target
from deltatree.state import TreeState
from deltatree.tree import Acceptance, DraftTree, walk


@dataclass(frozen=True, slots=True)
class Round:
    """What a round emits, and what the next one starts from. Prefill is the round without a tree."""

    token_ids: list[int]  # emitted: accepted drafted tokens, then the bonus token, cut where the text ends
    acceptance_length: int  # accepted drafted nodes + 1, before any cut; 0 for prefill
    features: (
        Tensor  # [n, F], of committed tokens that the drafter has not seen: this round's, and those while it rested
    )
    num_nodes: int  # verified, root included; 0 for prefill
    depth: int = 0  # of the deepest drafted node
    ended: str | None = None  # "stop" or "length" if this round ends the text

    @property
    def bonus(self) -> int:
        """The last emitted token: the root of the next tree."""
        return self.token_ids[-1]


def decode_round(
    target: Target,
    state: TreeState,
    drafter: DraftSession,
    last: Round,
    *,
    build_tree: Callable[..., DraftTree],
    budget: int,
    max_depth: int,
    sampler: Sampler,
    history: list[int],
    cut: Callable[[list[int]], tuple[int, str | None]],
    observe: Callable[[DraftTree, Acceptance, Tensor], None] | None = None,
) -> Round:
    """One round.

    history: all tokens so far, the root last    cut: how many of the new tokens to keep, and why it ends
    observe: told (tree, accepted, logits [N, vocab]) before the commit, for policies that learn while running
    """
    log_probs = drafter.propose(last.features, bonus=last.bonus)  # [D, vocab]
    tree = build_tree(log_probs[:max_depth], root=last.bonus, budget=budget)
    tree, verified = verify_within_memory(target, tree, state, drafter)  # fills scratch; the state stays
    accepted = walk(tree, sampler.bind(tree, verified.logits, history))
    if observe is not None:
        observe(tree, accepted, verified.logits)
    emitted = tokens_of(tree, accepted)
    kept, ended = cut(emitted)
    path = accepted.path[:kept]  # the last emitted token is never part of the state
    target.commit(path, state)  # the one write to the state
    return Round(emitted[:kept], accepted.length, verified.features[path], len(tree), tree.max_depth, ended)


def tokens_of(tree: DraftTree, accepted: Acceptance) -> list[int]:
    """The tokens that an acceptance emits: its drafted nodes' and the bonus token."""
    return [*tree.token_ids[accepted.path[1:]].tolist(), accepted.bonus]
