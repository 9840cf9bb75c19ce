"""The mixture of experts at model sizes: against float64, the same bits at every size, one captured graph."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import ON_GPU, agrees
from test_twin_experts import TOLERANCE_BF16, expected_of, make_case, routed, run, same_blocks

from deltatree.kernels.experts import Routing, combine, expert_mlp, route, scratch_for
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
