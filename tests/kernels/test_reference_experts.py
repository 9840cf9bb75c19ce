"""The reference mixture of experts is that of Transformers' models."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3_5MoeTextConfig, Qwen3MoeConfig, Qwen3NextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

from deltatree.kernels import experts
from deltatree.kernels.experts import combine, expert_mlp, route, route_tokens

SIZES = {"hidden_size": 32, "moe_intermediate_size": 16, "num_experts": 12, "num_experts_per_tok": 3}
SHARED = {"shared_expert_intermediate_size": 24}


def block_of(architecture: str, **options):
    kind, config = {
        "qwen3_moe": (Qwen3MoeSparseMoeBlock, lambda: Qwen3MoeConfig(**SIZES, **options)),
        "qwen3_next": (Qwen3NextSparseMoeBlock, lambda: Qwen3NextConfig(**SIZES, **SHARED, **options)),
        "qwen3_5_moe": (Qwen3_5MoeSparseMoeBlock, lambda: Qwen3_5MoeTextConfig(**SIZES, **SHARED)),
    }[architecture]
    torch.manual_seed(0)
    block = kind(config()).requires_grad_(False)
    for weight in block.parameters():
        weight.normal_(std=0.3)
    return block


def ours(block, x: torch.Tensor, *, normalise: bool) -> torch.Tensor:
    shared = getattr(block, "shared_expert", None)
    logits = x @ block.gate.weight.T
    if shared is None:
        routing, weights = route(logits, 3, normalise), ()
    else:
        routing = route(logits, 3, normalise, block.shared_expert_gate(x)[:, 0])
        weights = torch.cat([shared.gate_proj.weight, shared.up_proj.weight]), shared.down_proj.weight
    return combine(expert_mlp(x, routing, block.experts.gate_up_proj, block.experts.down_proj, *weights))


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize(
    ("architecture", "normalise"),
    [("qwen3_moe", True), ("qwen3_moe", False), ("qwen3_next", True), ("qwen3_next", False), ("qwen3_5_moe", True)],
)
def test_the_block_of_a_model(architecture, normalise, tokens):
    block = block_of(architecture, **({} if architecture == "qwen3_5_moe" else {"norm_topk_prob": normalise}))
    x = torch.randn(tokens, 32)
    expected = block(x[None])
    expected = expected[0] if isinstance(expected, tuple) else expected
    torch.testing.assert_close(ours(block, x, normalise=normalise), expected[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("most", [0, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "shared"), [(1, True), (7, True), (7, False)])
def test_tokens_are_routed_by_their_rounded_logits(tokens, shared, dtype, most, monkeypatch):
    """Whichever way is taken; rows of the router behind those of the experts and the shared one mean nothing."""
    monkeypatch.setattr(experts, "MOST_TOKENS", most)
    x, router = torch.randn(tokens, 32).to(dtype), torch.randn(9 + 7, 32).to(dtype)
    logits = torch.nn.functional.linear(x, router[:10] if tokens == 1 else router)
    expected = route(logits[:, :9], 3, True, logits[:, 9] if shared else None)
    routing = route_tokens(x, router, 9, 3, True, shared=shared)
    assert torch.equal(routing.experts, expected.experts) and torch.equal(routing.weights, expected.weights)
    assert torch.equal(routing.block_rows[: int(expected.num_blocks)], expected.block_rows[: int(expected.num_blocks)])
    assert route_tokens(x, router, 9, 3, True, shared=shared, out=routing) is routing


def test_written_where_asked():
    x, logits = torch.randn(5, 8), torch.randn(5, 4)
    gate_up, down = torch.randn(4, 12, 8), torch.randn(4, 8, 6)
    routing = route(logits, 2, True)
    again = route(logits.flip(0), 2, True, out=routing)
    assert again is routing and torch.equal(routing.experts, route(logits.flip(0), 2, True).experts)
    parts = torch.full((5, 2, 8), torch.nan)
    assert expert_mlp(x, routing, gate_up, down, out=parts) is parts and not parts.isnan().any()
    total = torch.full((5, 8), torch.nan)
    assert combine(parts, out=total) is total and not total.isnan().any()
