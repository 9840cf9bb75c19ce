"""The product of a handful of tokens with a large weight, at the speed of memory."""

from deltatree.kernels.dispatch import dispatched
from deltatree.kernels.linear import reference
from deltatree.kernels.linear.reference import Partials

linear = dispatched(reference.linear, "deltatree.kernels.linear.triton")

__all__ = ["Partials", "linear"]
