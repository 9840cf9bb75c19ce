"""What a target remembers: committed state per layer, scratch for the nodes of one tree, commit of one path."""

from deltatree.state.layers import AttentionState, RecurrentState
from deltatree.state.static import Nodes, StateShapes, StaticBuffers, StaticState
from deltatree.state.tree_state import TreeState

__all__ = ["AttentionState", "Nodes", "RecurrentState", "StateShapes", "StaticBuffers", "StaticState", "TreeState"]
