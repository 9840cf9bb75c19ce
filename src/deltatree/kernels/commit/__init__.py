"""Commit of one path in all layers at once, for targets that keep the layers' states in one tensor."""

from deltatree.kernels.commit import reference
from deltatree.kernels.dispatch import dispatched

_TWIN = "deltatree.kernels.commit.triton"
commit_states = dispatched(reference.commit_states, _TWIN)
commit_windows = dispatched(reference.commit_windows, _TWIN)
commit_rows = dispatched(reference.commit_rows, _TWIN)

__all__ = ["commit_rows", "commit_states", "commit_windows"]
