"""Targets: one adapter a model family, found through a plain dict of architecture -> adapter."""

from deltatree.models.architectures import ARCHITECTURES, Architecture, architecture_of
from deltatree.models.checkpoint import TargetConfig, load_target, read_target_config
from deltatree.models.fast import FastTarget
from deltatree.models.protocol import Target, Verified
from deltatree.models.reference import ReferenceTarget

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "FastTarget",
    "ReferenceTarget",
    "Target",
    "TargetConfig",
    "Verified",
    "architecture_of",
    "load_target",
    "read_target_config",
]
