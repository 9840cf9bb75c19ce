"""Mixture of experts, in plain PyTorch: every token's chosen experts one after the other.

N tokens choose C experts each: the router's top_k of E, and where the model has a shared expert that one too, as choice
C - 1 with id E. Choice c of token n is *assignment* n * C + c. For the fast product the assignments are grouped by expert
into *blocks* of BLOCK_M rows, so that a woken expert's weights are read once for up to BLOCK_M tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

BLOCK_M = 16
"""Rows of a block: the fewest that a matrix instruction takes."""


def most_blocks(num_tokens: int, top_k: int, num_experts: int, *, shared: bool) -> int:
    """How many blocks a routing can have at most; a captured launch has room for that many.

    A token never chooses an expert twice, so beyond one block for each woken expert every further one is full.
    """
    assignments = num_tokens * top_k
    woken = min(assignments, num_experts)
    full = (assignments - woken) // BLOCK_M
    return woken + full + (-(-num_tokens // BLOCK_M) if shared else 0)


@dataclass(frozen=True, slots=True)
class Routing:
    """What each token chose, and the same assignments grouped by expert. C = top_k, + 1 with a shared expert.

    Blocks of the shared expert come first, then the others by expert; within an expert rows are in order of tokens.
    Entries of `block_experts` and `block_rows` from `num_blocks` on mean nothing.
    """

    experts: Tensor  # [N, C] int32, best first; the shared expert (id E) last
    weights: Tensor  # [N, C] float32
    block_experts: Tensor  # [most_blocks] int32
    block_rows: Tensor  # [most_blocks, BLOCK_M] int32: assignments, -1 where a block's last rows are unused
    num_blocks: Tensor  # [1] int32

    @classmethod
    def empty(
        cls, num_tokens: int, top_k: int, num_experts: int, *, shared: bool, device: torch.device | str = "cpu"
    ) -> Routing:
        """Room for the routing of `num_tokens` tokens, to be passed as `out`."""

        def ints(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        choices, blocks = top_k + shared, most_blocks(num_tokens, top_k, num_experts, shared=shared)
        weights = torch.empty(num_tokens, choices, dtype=torch.float32, device=device)
        return cls(ints(num_tokens, choices), weights, ints(blocks), ints(blocks, BLOCK_M), ints(1))


def route(
    logits: Tensor,
    top_k: int,
    normalise: bool,
    shared_logit: Tensor | None = None,
    out: Routing | None = None,
) -> Routing:
    """Each token's top_k experts by the softmax of its router's logits, grouped by expert.

    logits: [N, E]; equal ones go to the lower expert id
    normalise: whether the chosen weights are made to add up to 1 (norm_topk_prob)
    shared_logit: [N], the gate of the shared expert, whose weight is its sigmoid; None without one
    out: written and returned instead of a new Routing (`Routing.empty`)
    The softmax is taken in float32 or wider; then the weights are rounded to the logits' dtype, as Transformers rounds
    them (Qwen3MoeTopKRouter, Qwen3NextTopKRouter and Qwen3_5MoeTopKRouter; the last two always normalise).
    """
    tokens, num_experts = logits.shape
    shared = shared_logit is not None
    if out is None:
        out = Routing.empty(tokens, top_k, num_experts, shared=shared, device=logits.device)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    experts = wide.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = wide.softmax(-1).gather(1, experts)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights.to(logits.dtype)
    if shared:
        gate = shared_logit.to(wide.dtype).sigmoid().to(shared_logit.dtype)
        experts = torch.cat([experts, torch.full_like(experts[:, :1], num_experts)], dim=1)
        weights = torch.cat([weights.to(wide.dtype), gate.to(wide.dtype)[:, None]], dim=1)
    out.experts.copy_(experts)
    out.weights.copy_(weights)
    return _group(out, num_experts)


@dataclass(frozen=True, slots=True)
class RouterScratch:
    """Scratch of the fast twin of `route_tokens`; what it holds before a call does not matter."""

    sums: Tensor  # [N, shares, at least R] float32: a token's logits, each share's products added up
    marks: Tensor | None  # [words, E] int32: bit n % 32 of word n // 32 where token n chose the expert; None: one token


def route_tokens(
    x: Tensor,
    router: Tensor,
    num_experts: int,
    top_k: int,
    normalise: bool,
    shared: bool = False,
    out: Routing | None = None,
    scratch: RouterScratch | None = None,
) -> Routing:
    """`route` of the router's logits, which are rounded to x's dtype.

    x: [N, H]    router: [R, H], a row for each of the E experts, then one for the gate of the shared expert
    num_experts: E    shared: whether there is that row; any further ones mean nothing
    top_k, normalise, out: as in `route`    scratch: from `router_scratch_for`; only the fast twin needs it
    """
    logits, gate = router_logits(x, router, num_experts, shared=shared)
    return route(logits, top_k, normalise, gate, out)


def router_logits(x: Tensor, router: Tensor, num_experts: int, *, shared: bool) -> tuple[Tensor, Tensor | None]:
    """The library's product: logits [N, E], and the shared expert's [N] if there is one. Arguments as in `route_tokens`."""
    # One token takes the rows that mean something; for more the library's product is faster with rows of zeros behind.
    logits = linear(x, router[: num_experts + shared] if len(x) == 1 else router)
    return logits[:, :num_experts], logits[:, num_experts] if shared else None


def _group(routing: Routing, num_experts: int) -> Routing:
    """Fill in the blocks of a routing whose choices are known."""
    chosen = routing.experts.flatten().cpu()
    blocks: list[tuple[int, list[int]]] = []
    for expert in sorted(chosen.unique().tolist(), key=lambda e: (e != num_experts, e)):
        rows = (chosen == expert).nonzero()[:, 0].tolist()
        for start in range(0, len(rows), BLOCK_M):
            block = rows[start : start + BLOCK_M]
            blocks.append((expert, block + [-1] * (BLOCK_M - len(block))))
    routing.block_experts[: len(blocks)] = torch.tensor([expert for expert, _ in blocks], dtype=torch.int32)
    routing.block_rows[: len(blocks)] = torch.tensor([rows for _, rows in blocks], dtype=torch.int32)
    routing.num_blocks.fill_(len(blocks))
    return routing


def scratch_for(x: Tensor, routing: Routing, gate_up: Tensor, shared_gate_up: Tensor | None = None) -> Tensor:
    """The scratch that `expert_mlp` needs with these arguments: every assignment's activations, in x's dtype."""
    width = max(w.shape[-2] // 2 for w in (gate_up, shared_gate_up) if w is not None)
    return x.new_empty(*routing.experts.shape, width)


def expert_mlp(
    x: Tensor,
    routing: Routing,
    gate_up: Tensor,
    down: Tensor,
    shared_gate_up: Tensor | None = None,
    shared_down: Tensor | None = None,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """Each token's products with its chosen experts, weighted, not yet summed: `combine` does that.

    x: [N, H]    routing: from `route`
    gate_up: [E, 2 I, H], gate rows before up rows    down: [E, H, I]: as Transformers' experts hold them, in any strides
    shared_gate_up: [2 Is, H], shared_down: [H, Is]: of the shared expert, if the routing has one
    out: [N, C, H], written and returned instead of a new tensor in x's dtype; it may be wider
    scratch: from `scratch_for`; only the fast twin needs it
    Returns weights * down(silu(gate) * up), products summed in float32 or wider, activations rounded to x's dtype.
    """
    num_experts = gate_up.shape[0]
    if out is None:
        out = x.new_empty(*routing.experts.shape, x.shape[1])
    wide = torch.promote_types(x.dtype, torch.float32)
    for expert in routing.experts.unique().tolist():
        is_shared = expert == num_experts
        first, second = (shared_gate_up, shared_down) if is_shared else (gate_up[expert], down[expert])
        tokens, choices = (routing.experts == expert).nonzero(as_tuple=True)
        gate, up = linear(x[tokens].to(wide), first.to(wide)).chunk(2, dim=-1)
        activated = (silu(gate) * up).to(x.dtype)
        product = linear(activated.to(wide), second.to(wide))
        out[tokens, choices] = (product * routing.weights[tokens, choices, None].to(wide)).to(out.dtype)
    return out


def combine(parts: Tensor, out: Tensor | None = None) -> Tensor:
    """The sum of every token's weighted parts, choice after choice.

    parts: [N, C, H] from `expert_mlp`    out: [N, H], written and returned instead of a new tensor in parts' dtype
    Summed in float32 or wider, in the order of the choices.
    """
    total = torch.zeros_like(parts[:, 0], dtype=torch.promote_types(parts.dtype, torch.float32))
    for choice in parts.unbind(1):
        total = total + choice
    return total.to(parts.dtype) if out is None else out.copy_(total)
