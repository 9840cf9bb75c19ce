"""How far a drafter's probabilities are off on its spine and below siblings: corrected scores, and what a verified tree teaches."""

from deltatree.kernels.calibration import reference
from deltatree.kernels.calibration.reference import Seen
from deltatree.kernels.dispatch import dispatched

corrected = dispatched(reference.corrected, "deltatree.kernels.calibration.triton")
learn_calibration = dispatched(reference.learn_calibration, "deltatree.kernels.calibration.triton")

__all__ = ["Seen", "corrected", "learn_calibration"]
