"""The gated delta rule over a tree: every node from one read-only state, one path committed."""

from deltatree.kernels.gated_delta.reference import DeltaStash, commit_gated_delta, tree_gated_delta

__all__ = ["DeltaStash", "commit_gated_delta", "tree_gated_delta"]
