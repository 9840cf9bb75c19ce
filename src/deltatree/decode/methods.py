"""A method is a tree policy: which drafter, which tree, how many nodes."""

from __future__ import annotations

from collections.abc import Callable

from deltatree.decode.auto import AutoBudget, Experience
from deltatree.decode.options import AUTO, TRANSITION_TREES, GenerateOptions
from deltatree.drafter.protocol import Drafter
from deltatree.drafter.scripted import NoDrafter
from deltatree.errors import OptionError
from deltatree.transitions import TransitionTable, TransitionTree
from deltatree.tree import POLICIES, DraftTree, best_first_scored, chain, no_draft


def plan(
    options: GenerateOptions,
    drafter: Drafter | None,
    vocab_size: int,
    experience: Experience | None = None,
    transitions: TransitionTable | None = None,
) -> tuple[Drafter, Callable[..., DraftTree], int]:
    """Drafter, policy and budget of a method. Raises OptionError if it needs a drafter or a table and there is none.

    experience: what earlier generations have taught, for budget `auto`; goes on learning
    transitions: for the trees that score by them
    """
    if options.method == "ar" or (options.method == "ddtree" and options.budget == 0):
        return NoDrafter(vocab_size), no_draft, 0
    if drafter is None:
        raise OptionError(f"method {options.method!r} needs a drafter; load one, or use method 'ar'")
    if options.method == "dflash":
        return drafter, chain, drafter.depth
    policy = _policy(options, transitions)
    if options.budget != AUTO:
        return drafter, policy, options.budget
    experience = experience or Experience()
    scored = best_first_scored if options.tree == "best-first" else None
    return drafter, AutoBudget(policy, experience, scored), int(experience.costs.node_counts[-1]) - 1


def _policy(options: GenerateOptions, transitions: TransitionTable | None) -> Callable[..., DraftTree]:
    """A policy for one generation; one that learns is a new object."""
    if options.uses_transitions:
        if transitions is None:
            raise OptionError(
                f"tree {options.tree!r} needs a table of transitions here; give one, or transitions='none'"
            )
        return TransitionTree(transitions, is_chain=options.tree == "transitions-chain")
    policy = POLICIES[TRANSITION_TREES.get(options.tree, options.tree)]
    return policy() if isinstance(policy, type) else policy
