"""Drafters: what proposes log-probabilities for the next tokens."""

from deltatree.drafter.dflash import DFlashDrafter, DFlashModel, load_drafter
from deltatree.drafter.dialects import DFlashConfig, read_drafter_config
from deltatree.drafter.fast_dflash import FastDFlashDrafter
from deltatree.drafter.protocol import Drafter, DraftSession
from deltatree.drafter.scripted import NoDrafter, RandomDrafter, RightDrafter, ScriptedDrafter, WrongDrafter

__all__ = [
    "DFlashConfig",
    "DFlashDrafter",
    "DFlashModel",
    "DraftSession",
    "Drafter",
    "FastDFlashDrafter",
    "NoDrafter",
    "RandomDrafter",
    "RightDrafter",
    "ScriptedDrafter",
    "WrongDrafter",
    "load_drafter",
    "read_drafter_config",
]
