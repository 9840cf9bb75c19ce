"""A method is a tree policy: which drafter, which tree, how many nodes."""

from __future__ import annotations

from collections.abc import Callable

from deltatree.decode.options import GenerateOptions
from deltatree.drafter.protocol import Drafter
from deltatree.drafter.scripted import NoDrafter
from deltatree.errors import OptionError
from deltatree.tree import POLICIES, DraftTree, chain, no_draft


def plan(
    options: GenerateOptions, drafter: Drafter | None, vocab_size: int
) -> tuple[Drafter, Callable[..., DraftTree], int]:
    """Drafter, policy and budget of a method. Raises OptionError if the method needs a drafter and there is none."""
    if options.method == "ar" or (options.method == "ddtree" and options.budget == 0):
        return NoDrafter(vocab_size), no_draft, 0
    if drafter is None:
        raise OptionError(f"method {options.method!r} needs a drafter; load one, or use method 'ar'")
    if options.method == "dflash":
        return drafter, chain, drafter.depth
    policy = POLICIES[options.tree]
    if isinstance(policy, type):  # it learns: each generation has its own
        policy = policy()
    return drafter, policy, options.budget
