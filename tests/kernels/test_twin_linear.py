"""The Triton linear layer is the reference one, however its sums are split and however many tokens there are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import DEVICE, INTERPRETED, ON_GPU, TOLERANCE, agrees, needs_kernels, some_examples
from torch import Tensor

from deltatree.kernels.linear import linear, linear_parts
from deltatree.kernels.linear import reference as truth
from deltatree.kernels.linear.reference import shares_of

pytestmark = needs_kernels
if ON_GPU or INTERPRETED:
    from deltatree.kernels.linear.triton import scratch_for


def make_case(tokens: int, rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    """x, weight, bias"""
    generator = torch.Generator().manual_seed(seed)
    x, weight, bias = (
        torch.randn(s, generator=generator).to(DEVICE) for s in ((tokens, columns), (rows, columns), (rows,))
    )
    return [x.to(dtype), (weight * columns**-0.5).to(dtype), bias.to(dtype)]


def run(x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    scratch = scratch_for(x, weight)
    if scratch is not None:
        scratch.sums.fill_(float("nan"))
    out = torch.full((len(x), len(weight)), float("nan"), device=DEVICE, dtype=dtype or x.dtype)
    linear(x, weight, bias, out=out, scratch=scratch, backend="triton")
    assert scratch is None or not scratch.counters.any()
    return out


def expected_of(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return truth.linear(x.double(), weight.double(), None if bias is None else bias.double())


@some_examples
@given(
    tokens=st.integers(1, 300 if ON_GPU else 40),
    rows=st.integers(1, 700 if ON_GPU else 140),
    columns=st.sampled_from([24, 128, 200, 1024, 1100, 1664]),
    biased=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_agrees_with_float64(tokens, rows, columns, biased, seed):
    x, weight, bias = make_case(tokens, rows, columns, seed=seed)
    bias = bias if biased else None
    assert agrees(run(x, weight, bias), expected_of(x, weight, bias))


def test_both_ways_are_tested():
    assert shares_of(140, 1000) == 1 and shares_of(140, 1100) == 2


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", [256, 1152])
@pytest.mark.parametrize("tokens", [1, 40])
def test_bfloat16(tokens, columns, out_dtype):
    case = make_case(tokens, 100, columns, torch.bfloat16)
    tolerance = 1e-5 if out_dtype == torch.float32 else 4e-3 if ON_GPU else 8e-3  # the interpreter cuts bits off
    result = run(*case, out_dtype)
    assert result.dtype == out_dtype and agrees(result, expected_of(*case), tolerance)


def test_views_and_other_strides():
    x, weight, bias = make_case(5, 70, 1040)
    wide = torch.full((5, 2000), float("nan"), device=DEVICE)
    inside = wide[:, 400:1440].copy_(x)
    turned = weight.t().contiguous().t()
    result = torch.full((5, 200), float("nan"), device=DEVICE)
    linear(inside, turned, bias, out=result[:, 100:170], backend="triton")
    assert agrees(result[:, 100:170], expected_of(x, weight, bias))
    assert result[:, :100].isnan().all() and result[:, 170:].isnan().all()


@pytest.mark.parametrize("columns", [160, 1120])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_alone_and_among_others_gets_the_same_bits(columns, dtype):
    x, weight, bias = make_case(33, 100, columns, dtype)
    together = run(x, weight, bias)
    for tokens in (1, 16, 17):
        assert torch.equal(run(x[:tokens], weight, bias), together[:tokens])


def test_a_share_left_out_does_not_pass():
    """Mutant: a counter that starts one too low, so that no share is the last."""
    x, weight, bias = make_case(3, 70, 1100)
    scratch = scratch_for(x, weight)
    scratch.counters.sub_(1)
    out = torch.full((3, 70), float("nan"), device=DEVICE)
    linear(x, weight, bias, out=out, scratch=scratch, backend="triton")
    assert not agrees(out, expected_of(x, weight, bias), 100 * TOLERANCE)


def run_parts(x: Tensor, weight: Tensor) -> Tensor:
    out = torch.full((len(x), shares_of(*weight.shape), len(weight)), float("nan"), device=DEVICE)
    launch = {"HELD": 128} if INTERPRETED else None  # numpy's order of longer sums depends on the number of tokens
    return linear_parts(x, weight, out=out, launch=launch, backend="triton")


@some_examples
@given(
    tokens=st.integers(1, 100 if ON_GPU else 40),
    rows=st.integers(1, 700 if ON_GPU else 140),
    columns=st.sampled_from([24, 128, 200, 512, 1024, 1100, 1664, 2560]),
    seed=st.integers(0, 2**20),
)
def test_parts_add_up_to_the_product(tokens, rows, columns, seed):
    x, weight, _ = make_case(tokens, rows, columns, seed=seed)
    parts = run_parts(x, weight)
    assert agrees(parts, truth.linear_parts(x.double(), weight.double()))
    assert agrees(parts.double().sum(1), expected_of(x, weight))


@pytest.mark.parametrize("columns", [160, 1120, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_a_token_alone_and_among_others_are_the_same_bits(columns, dtype):
    x, weight, _ = make_case(40, 100, columns, dtype)
    together = run_parts(x, weight)
    for tokens in (1, 16, 17):
        assert torch.equal(run_parts(x[:tokens], weight), together[:tokens])


def test_a_share_of_more_columns_than_are_held():
    x, weight, _ = make_case(3, 64, 4096)
    launch = {"HELD": 64, "BLOCK_K": 32}
    out = torch.full((3, shares_of(64, 4096), 64), float("nan"), device=DEVICE)
    assert agrees(
        linear_parts(x, weight, out=out, launch=launch, backend="triton").double().sum(1), expected_of(x, weight)
    )
