"""The best-first draft tree, from the candidates of every depth to what a verify needs."""

from deltatree.kernels.dispatch import dispatched
from deltatree.kernels.tree_build import reference
from deltatree.kernels.tree_build.reference import MAX_BUDGET, MAX_DEPTH, TreeBuffers

build_tree = dispatched(reference.build_tree, "deltatree.kernels.tree_build.triton")

__all__ = ["MAX_BUDGET", "MAX_DEPTH", "TreeBuffers", "build_tree"]
