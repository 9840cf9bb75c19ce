"""Mixture of experts for a handful of tokens: which experts each token wakes, and their products, each read once."""

from deltatree.kernels.dispatch import dispatched
from deltatree.kernels.experts import reference
from deltatree.kernels.experts.reference import BLOCK_M, Routing, most_blocks, scratch_for

_TWIN = "deltatree.kernels.experts.triton"
route = dispatched(reference.route, _TWIN)
expert_mlp = dispatched(reference.expert_mlp, _TWIN)
combine = dispatched(reference.combine, _TWIN)

__all__ = ["BLOCK_M", "Routing", "combine", "expert_mlp", "most_blocks", "route", "scratch_for"]
