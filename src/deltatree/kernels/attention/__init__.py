"""What a node may attend to, where it stands, and the attention itself."""

from deltatree.kernels.attention import reference
from deltatree.kernels.attention.reference import tree_attention_mask, tree_positions
from deltatree.kernels.dispatch import dispatched

tree_attention = dispatched(reference.tree_attention, "deltatree.kernels.attention.triton")

__all__ = ["tree_attention", "tree_attention_mask", "tree_positions"]
