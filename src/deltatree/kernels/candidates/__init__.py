"""The best tokens of every depth, from the drafter's logits."""

from deltatree.kernels.candidates import reference
from deltatree.kernels.dispatch import dispatched

top_candidates = dispatched(reference.top_candidates, "deltatree.kernels.candidates.triton")

__all__ = ["top_candidates"]
