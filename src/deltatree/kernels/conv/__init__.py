"""The short depthwise convolution over a tree."""

from deltatree.kernels.conv.reference import commit_window, conv_rows, tree_conv

__all__ = ["commit_window", "conv_rows", "tree_conv"]
