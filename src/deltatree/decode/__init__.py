"""The algorithm: one round, one loop, and how a token is chosen. Knows a target and a drafter only by protocol."""

from deltatree.decode.options import METHODS, GenerateOptions
from deltatree.decode.round import Round, decode_round
from deltatree.decode.sampling import Sampler, sampler_for
from deltatree.decode.stream import Ending, decode

__all__ = [
    "METHODS",
    "Ending",
    "GenerateOptions",
    "Round",
    "Sampler",
    "decode",
    "decode_round",
    "sampler_for",
]
