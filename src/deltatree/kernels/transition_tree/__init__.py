"""The draft tree that reads the target's transitions, and what a verified tree teaches them, without the host."""

from deltatree.kernels.dispatch import dispatched
from deltatree.kernels.transition_tree import reference
from deltatree.kernels.transition_tree.reference import CANDIDATES, Transitions

_TWIN = "deltatree.kernels.transition_tree.triton"
build_transition_tree = dispatched(reference.build_transition_tree, _TWIN)
learn_transitions = dispatched(reference.learn_transitions, _TWIN)

__all__ = ["CANDIDATES", "Transitions", "build_transition_tree", "learn_transitions"]
