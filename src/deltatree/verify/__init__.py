"""A GatedDeltaNet layer over a whole tree."""

from deltatree.verify.gated_delta_net import ChainPass, Projections, TreePass, open_to_trees

__all__ = ["ChainPass", "Projections", "TreePass", "open_to_trees"]
