"""Rounds that stay on the device: where the fast target, the fast drafter and the kernels of a round come together."""

from deltatree.device.loop import DeviceLoop
from deltatree.device.rounds import DeviceRound, DeviceRounds

__all__ = ["DeviceLoop", "DeviceRound", "DeviceRounds"]
