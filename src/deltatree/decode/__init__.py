"""The algorithm: one round, one loop, and how a token is chosen. Knows a target and a drafter only by protocol."""

from deltatree.lazy import lazy_names

_HOMES = {
    "METHODS": "deltatree.decode.options",
    "Conversation": "deltatree.decode.stream",
    "Ending": "deltatree.decode.stream",
    "GenerateOptions": "deltatree.decode.options",
    "Round": "deltatree.decode.round",
    "Sampler": "deltatree.decode.sampling",
    "decode": "deltatree.decode.stream",
    "decode_round": "deltatree.decode.round",
    "sampler_for": "deltatree.decode.sampling",
}
__all__ = sorted(_HOMES)
__getattr__ = lazy_names(__name__, _HOMES)
