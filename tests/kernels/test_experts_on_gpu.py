"""The mixture of experts at model sizes: against float64, the same bits at every size, one captured graph."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import ON_GPU, agrees
from test_twin_experts import TOLERANCE_BF16, expected_of, make_case, routed, run, same_blocks
from test_twin_router import make_case as router_case
from test_twin_router import run as run_router

from deltatree.kernels.experts import Routing, combine, expert_mlp, route, route_tokens, scratch_for
from deltatree.kernels.experts import reference as truth

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")]
SHAPES = {  # fewer experts than the models have, so that many blocks have several rows and some experts several blocks
    "qwen3.6-35b-a3b": {"experts": 64, "top_k": 8, "hidden": 2048, "width": 512, "shared_width": 512},
    "qwen3-coder-30b-a3b": {"experts": 64, "top_k": 8, "hidden": 2048, "width": 768, "shared_width": None},
    "another shared width": {"experts": 48, "top_k": 10, "hidden": 2048, "width": 512, "shared_width": 1024},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_model_sizes_agree_with_float64(shape, dtype):
    everyone = make_case(512, **SHAPES[shape], dtype=dtype)
    for tokens in (1, 2, 15, 16, 17, 64, 128, 200, 256, 512):
        case = everyone.first(tokens)
        routing = routed(case)
        gate = None if case.shared_logit is None else case.shared_logit.double()
        assert same_blocks(routing, truth.route(case.logits.double(), case.top_k, True, gate))
        parts, expected = run(case, routing), expected_of(case, routing)
        tolerance = TOLERANCE_BF16 if dtype == torch.bfloat16 else 5e-5  # sums of 2,048 in float32
        assert agrees(parts, expected, tolerance), tokens
        assert agrees(combine(parts), truth.combine(expected), tolerance), tokens


@pytest.mark.parametrize("shape", SHAPES)
def test_the_number_of_tokens_changes_no_bit(shape):
    everyone = make_case(256, **SHAPES[shape], dtype=torch.bfloat16)
    routing = routed(everyone)
    parts = run(everyone, routing)
    total = combine(parts)
    for tokens in (1, 2, 16, 17, 64, 100):
        case = everyone.first(tokens)
        few_routing = routed(case)
        few = run(case, few_routing)
        assert torch.equal(few_routing.weights, routing.weights[:tokens])
        assert torch.equal(few, parts[:tokens]) and torch.equal(combine(few), total[:tokens])


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("tokens", [1, 24])
def test_one_captured_graph_serves_every_routing(tokens, chained):
    """Inputs change in the buffers, never in the graph; nothing is allocated while it is captured."""
    if chained and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("programmatic dependent launches need compute capability 9.0")
    case = make_case(tokens, **SHAPES["qwen3.6-35b-a3b"], dtype=torch.bfloat16)
    routing = Routing.empty(tokens, case.top_k, 64, shared=True, device="cuda")
    scratch, out = scratch_for(case.x, routing, case.gate_up), torch.empty_like(case.x)
    parts = case.x.new_empty(tokens, case.top_k + 1, 2048)
    options = {"backend": "triton", "chained": chained}

    def step():
        route(case.logits, case.top_k, True, case.shared_logit, out=routing, **options)
        expert_mlp(case.x, routing, *case.weights, out=parts, scratch=scratch, **options)
        combine(parts, out=out, **options)

    step()
    other = torch.cuda.CUDAGraph()  # kept: the first graph of all takes memory that they share
    with torch.cuda.graph(other):
        torch.ones(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    before = torch.cuda.memory_allocated()
    with torch.cuda.graph(graph):
        step()
    assert torch.cuda.memory_allocated() <= before
    for _ in range(20):
        case.x.normal_(), case.logits.normal_(), case.shared_logit.normal_()
        for tensor in (scratch, parts, out, routing.weights):
            tensor.fill_(float("nan"))
        graph.replay()
        expected = expected_of(case, routed(case))
        assert agrees(parts, expected, TOLERANCE_BF16) and agrees(out, truth.combine(expected), TOLERANCE_BF16)


def test_offsets_beyond_32_bits():
    """Experts so far apart that the last one's weights lie beyond 2^31 elements."""
    case = make_case(3, experts=4, top_k=2, hidden=64, width=64, shared_width=None)
    case.logits.copy_(torch.arange(4.0).expand(3, 4))  # everyone wakes the last two experts
    far = 2**30
    pool = torch.empty(3 * far + 2 * 64 * 64, device="cuda")
    spread = pool.as_strided(case.gate_up.shape, (far, *case.gate_up.stride()[1:])).copy_(case.gate_up)
    routing = routed(case)
    expected = expected_of(case, routing)
    assert agrees(expert_mlp(case.x, routing, spread, case.down), expected)
    spread = pool.as_strided(case.down.shape, (far, *case.down.stride()[1:])).copy_(case.down)
    assert agrees(expert_mlp(case.x, routing, case.gate_up, spread), expected)


ROUTERS = {
    "qwen3.6-35b-a3b": {"experts": 256, "top_k": 8, "hidden": 2048},
    "qwen3-coder-30b-a3b": {"experts": 128, "top_k": 8, "hidden": 2048, "shared": False},
    "qwen3-next-80b-a3b": {"experts": 512, "top_k": 10, "hidden": 2048},
}


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("shape", ROUTERS)
def test_tokens_are_routed_the_same_at_every_number(shape, chained):
    """By the rounded sums, which agree with float64; and not a bit depends on the number of tokens."""
    everyone = router_case(512, **ROUTERS[shape], dtype=torch.bfloat16)
    experts, shared = everyone.num_experts, everyone.shared
    routing, logits = run_router(everyone, chained=chained)
    exact = everyone.x.double() @ everyone.router[: experts + shared].double().T
    assert agrees(logits, exact, 5e-5)  # sums of 2,048 in float32
    for tokens in (1, 2, 8, 16, 17, 33, 64, 65, 129, 256, 257, 512):
        few, few_logits = run_router(everyone.first(tokens), chained=chained)
        rounded = few_logits.bfloat16()
        expected = truth.route(rounded[:, :experts], everyone.top_k, True, rounded[:, experts] if shared else None)
        assert torch.equal(few_logits, logits[:tokens]), tokens
        assert torch.equal(few.experts, expected.experts) and same_blocks(few, expected), tokens
        assert torch.equal(few.experts, routing.experts[:tokens]), tokens
        assert torch.equal(few.weights, routing.weights[:tokens]) and agrees(few.weights, expected.weights, 8e-3), (
            tokens
        )


@pytest.mark.parametrize("tokens", [1, 24, 256])
def test_a_captured_router_feeds_the_products(tokens):
    """Replayed with other tokens each time: nothing of the replay before is left, and tables are read in time."""
    case = make_case(tokens, **SHAPES["qwen3.6-35b-a3b"], dtype=torch.bfloat16)
    router = router_case(1, experts=64, top_k=8, hidden=2048, dtype=torch.bfloat16).router
    routing = Routing.empty(tokens, 8, 64, shared=True, device="cuda")
    parts = torch.empty(tokens, 9, 2048, device="cuda", dtype=torch.bfloat16)

    def step():
        for _ in range(3):  # the next one overlaps the end of the one before
            route_tokens(case.x, router, 64, 8, True, shared=True, out=routing)
            expert_mlp(case.x, routing, *case.weights, out=parts)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(20):
        case.x.normal_()
        for tensor in (parts, routing.weights):
            tensor.fill_(float("nan"))
        graph.replay()
        expected = Routing.empty(tokens, 8, 64, shared=True, device="cuda")
        route_tokens(case.x, router, 64, 8, True, shared=True, out=expected)
        assert torch.equal(routing.experts, expected.experts) and torch.equal(routing.weights, expected.weights)
        assert same_blocks(routing, truth._group(expected, 64))
        assert agrees(parts, expected_of(case, expected), TOLERANCE_BF16)
