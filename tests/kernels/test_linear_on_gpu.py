"""The linear layer at model sizes: against float64, the same bits at every number of tokens, one captured graph."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import ON_GPU, agrees
from test_twin_linear import expected_of, make_case, run

from deltatree.kernels.linear import linear

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")]
SHAPES = [(257, 2048), (2048, 4096), (5120, 6144), (5120, 17408), (12352, 2048), (16480, 5120)]  # rows, columns


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_model_sizes_agree_with_float64_and_the_number_of_tokens_changes_no_bit(rows, columns):
    x, weight, _ = make_case(256, rows, columns, torch.bfloat16)
    expected, together = expected_of(x, weight), run(x, weight, dtype=torch.float32)
    assert agrees(together, expected, 1e-4)  # sums of 17,408 products in float32
    assert agrees(run(x, weight), expected, 4e-3)
    for tokens in (1, 2, 16, 17, 32, 33, 64, 65, 128, 129, 200):
        assert torch.equal(run(x[:tokens], weight, dtype=torch.float32), together[:tokens]), tokens


@pytest.mark.parametrize("chained", [False, True])
def test_one_captured_graph_serves_every_input(chained):
    """Two layers of one scratch in a row, shares added up by whoever comes last, twenty times over."""
    if chained and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("programmatic dependent launches need compute capability 9.0")
    from deltatree.kernels.linear.triton import scratch_for

    x, weight, _ = make_case(20, 2048, 2048, torch.bfloat16)
    scratch = scratch_for(x, weight)
    middle, out = torch.empty_like(x), torch.empty_like(x)

    def step():
        linear(x, weight, out=middle, scratch=scratch, chained=chained, backend="triton")
        linear(middle, weight, out=out, scratch=scratch, chained=chained, backend="triton")

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(20):
        x.normal_()
        scratch.sums.fill_(float("nan")), out.fill_(float("nan"))
        graph.replay()
        assert not scratch.counters.any()
        assert agrees(middle, expected_of(x, weight), 4e-3) and agrees(out, expected_of(middle, weight), 4e-3)
