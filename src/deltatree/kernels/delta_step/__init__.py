"""The gated delta rule of one token for many sequences, each with a state of its own, which is written at once."""

from deltatree.kernels.delta_step import reference
from deltatree.kernels.dispatch import dispatched

gated_delta_step = dispatched(reference.gated_delta_step, "deltatree.kernels.delta_step.triton")

__all__ = ["gated_delta_step"]
