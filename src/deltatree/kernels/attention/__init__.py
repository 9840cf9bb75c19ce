"""What a node may attend to, and where it stands."""

from deltatree.kernels.attention.reference import tree_attention_mask, tree_positions

__all__ = ["tree_attention_mask", "tree_positions"]
