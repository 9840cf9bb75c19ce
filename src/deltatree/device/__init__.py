"""Rounds that stay on the device: where the fast target, the fast drafter and the kernels of a round come together."""

from deltatree.device.rounds import DeviceLoop, DeviceRound, DeviceRounds

__all__ = ["DeviceLoop", "DeviceRound", "DeviceRounds"]
