"""Draft trees: what they are, which to build, and how far the target agrees. Torch and NumPy only."""

from deltatree.tree.accept import Acceptance, accept, walk
from deltatree.tree.calibrated import Calibrated
from deltatree.tree.candidates import top_candidates
from deltatree.tree.draft_tree import DraftTree, ancestors, chain_tree, path_to
from deltatree.tree.policies import POLICIES, best_first, best_first_scored, chain, no_draft, scores_of

__all__ = [
    "POLICIES",
    "Acceptance",
    "Calibrated",
    "DraftTree",
    "accept",
    "ancestors",
    "best_first",
    "best_first_scored",
    "chain",
    "chain_tree",
    "no_draft",
    "path_to",
    "scores_of",
    "top_candidates",
    "walk",
]
