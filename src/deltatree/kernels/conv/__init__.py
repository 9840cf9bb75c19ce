"""The short depthwise convolution over a tree."""

from deltatree.kernels.conv import reference
from deltatree.kernels.conv.reference import conv_rows
from deltatree.kernels.dispatch import dispatched

_TWIN = "deltatree.kernels.conv.triton"
tree_conv = dispatched(reference.tree_conv, _TWIN)
commit_window = dispatched(reference.commit_window, _TWIN)

__all__ = ["commit_window", "conv_rows", "tree_conv"]
