"""The gated delta rule over a tree: every node from one read-only state, one path committed."""

from deltatree.kernels.dispatch import dispatched
from deltatree.kernels.gated_delta import reference
from deltatree.kernels.gated_delta.reference import DeltaStash, Gates, PendingCommit

_TWIN = "deltatree.kernels.gated_delta.triton"
tree_gated_delta = dispatched(reference.tree_gated_delta, _TWIN)
commit_gated_delta = dispatched(reference.commit_gated_delta, _TWIN)

__all__ = ["DeltaStash", "Gates", "PendingCommit", "commit_gated_delta", "tree_gated_delta"]
