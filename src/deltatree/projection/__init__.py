"""What drafting would bring on this machine, before there are weights: real costs, acceptance by a profile.

A projection, not a measurement of a model: only its times are measured.
"""

from deltatree.lazy import lazy_names

_HOMES = {
    "PROFILES": "deltatree.projection.profiles",
    "Profile": "deltatree.projection.profiles",
    "ProjectionPlan": "deltatree.projection.run",
    "ReplayDrafter": "deltatree.projection.replay",
    "project": "deltatree.projection.run",
    "target_and_drafter": "deltatree.projection.shapes",
}

__all__ = sorted(_HOMES)

__getattr__ = lazy_names(__name__, _HOMES)
