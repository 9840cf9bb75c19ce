"""A method is a tree policy: which drafter, which tree, how many nodes."""

from __future__ import annotations

from collections.abc import Callable

from deltatree.decode.options import TRANSITION_TREES, GenerateOptions
from deltatree.drafter.protocol import Drafter
from deltatree.drafter.scripted import NoDrafter
from deltatree.errors import OptionError
from deltatree.transitions import TransitionTable, TransitionTree
from deltatree.tree import POLICIES, DraftTree, chain, no_draft


def plan(
    options: GenerateOptions,
    drafter: Drafter | None,
    vocab_size: int,
    transitions: TransitionTable | None = None,
) -> tuple[Drafter, Callable[..., DraftTree], int]:
    """Drafter, policy and budget of a method. Raises OptionError if it needs a drafter or a table and there is none."""
    if options.method == "ar" or (options.method == "ddtree" and options.budget == 0):
        return NoDrafter(vocab_size), no_draft, 0
    if drafter is None:
        raise OptionError(f"method {options.method!r} needs a drafter; load one, or use method 'ar'")
    if options.method == "dflash":
        return drafter, chain, drafter.depth
    if options.uses_transitions:
        if transitions is None:
            raise OptionError(
                f"tree {options.tree!r} needs a table of transitions here; give one, or transitions='none'"
            )
        return drafter, TransitionTree(transitions, is_chain=options.tree == "transitions-chain"), options.budget
    return drafter, POLICIES[TRANSITION_TREES.get(options.tree, options.tree)], options.budget
