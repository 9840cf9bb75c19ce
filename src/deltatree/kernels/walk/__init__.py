"""The accepted path of a verified tree."""

from deltatree.kernels.dispatch import dispatched
from deltatree.kernels.walk import reference
from deltatree.kernels.walk.reference import Walked

walk = dispatched(reference.walk, "deltatree.kernels.walk.triton")

__all__ = ["Walked", "walk"]
