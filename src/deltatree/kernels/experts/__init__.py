"""Mixture of experts for a handful of tokens: which experts each token wakes, and their products, each read once."""

import torch
from torch import Tensor

from deltatree.kernels.dispatch import dispatched
from deltatree.kernels.experts import reference
from deltatree.kernels.experts.reference import BLOCK_M, RouterScratch, Routing, most_blocks, scratch_for

_TWIN = "deltatree.kernels.experts.triton"
route = dispatched(reference.route, _TWIN)
expert_mlp = dispatched(reference.expert_mlp, _TWIN)
combine = dispatched(reference.combine, _TWIN)
_route_tokens = dispatched(reference.route_tokens, "deltatree.kernels.experts.router")

MOST_TOKENS = 512
"""Up to how many tokens `route_tokens` takes the router's own kernels; 0: never, always the library's product and `route`."""


def route_tokens(
    x: Tensor,
    router: Tensor,
    num_experts: int,
    top_k: int,
    normalise: bool,
    shared: bool = False,
    out: Routing | None = None,
    scratch: RouterScratch | None = None,
    *,
    backend: str | None = None,
) -> Routing:
    """Each token's experts, from the tokens and the router's weight: as the reference, by the faster way on a GPU."""
    if backend or (len(x) <= MOST_TOKENS and x.dtype == torch.bfloat16):
        return _route_tokens(x, router, num_experts, top_k, normalise, shared, out, scratch, backend=backend)
    logits, gate = reference.router_logits(x, router, num_experts, shared=shared)
    return route(logits, top_k, normalise, gate, out)


__all__ = [
    "BLOCK_M",
    "RouterScratch",
    "Routing",
    "combine",
    "expert_mlp",
    "most_blocks",
    "route",
    "route_tokens",
    "scratch_for",
]
