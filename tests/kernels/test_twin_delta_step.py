"""The Triton step of one token is the reference one, and both are the tree rule of a root that is committed at once."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, agrees, needs_kernels

from deltatree.kernels.delta_step import gated_delta_step
from deltatree.kernels.delta_step import reference as truth
from deltatree.kernels.gated_delta import Gates
from deltatree.kernels.gated_delta import reference as tree_truth

pytestmark = needs_kernels


def make_case(batch: int, heads: tuple[int, int], dims: tuple[int, int], *, dtype=torch.float32, raw: bool) -> dict:
    generator = torch.Generator().manual_seed(batch)

    def normal(*shape: int, dtype=dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    (key_heads, value_heads), (key_dim, value_dim) = heads, dims
    wide = normal(batch, 2 * key_heads * key_dim + value_heads * (value_dim + 2) + 3)  # slices, as the models have them
    sizes = [key_heads * key_dim] * 2 + [value_heads * value_dim, value_heads, value_heads, 3]
    q, k, v, beta, log_decay, _ = wide.split(sizes, dim=-1)
    gates = Gates(normal(value_heads, dtype=torch.float32), normal(value_heads, dtype=torch.float32)) if raw else None
    return {
        "state": normal(batch, value_heads, key_dim, value_dim, dtype=torch.float32),
        "q": q.unflatten(-1, (key_heads, -1)),
        "k": k.unflatten(-1, (key_heads, -1)),
        "v": v.unflatten(-1, (value_heads, -1)),
        "beta": beta if raw else beta.sigmoid(),
        "log_decay": log_decay if raw else -log_decay.abs(),
        "gates": gates,
    }


def in_float64(case: dict) -> dict:
    gates = case["gates"] and Gates(case["gates"].a_log.double(), case["gates"].dt_bias.double())
    return {name: x.double() for name, x in case.items() if name != "gates"} | {"gates": gates}


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("batch, heads, dims", [(1, (2, 6), (16, 16)), (3, (2, 2), (24, 40)), (2, (1, 3), (128, 128))])
def test_step_agrees_with_float64(batch, heads, dims, raw):
    case = make_case(batch, heads, dims, raw=raw)
    wide = in_float64(case)
    out = torch.full((batch, heads[1], dims[1]), float("nan"), device=DEVICE)
    assert gated_delta_step(**case, out=out, backend="triton") is out
    assert agrees(out, truth.gated_delta_step(**wide)) and agrees(case["state"], wide["state"])


def test_bfloat16_inputs_and_output():
    case = make_case(2, (2, 4), (32, 32), dtype=torch.bfloat16, raw=True)
    wide = in_float64(case)
    out = torch.full((2, 4, 32), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    gated_delta_step(**case, out=out, backend="triton")
    assert agrees(out, truth.gated_delta_step(**wide), 8e-3) and agrees(case["state"], wide["state"])


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_steps_are_the_tree_rules_chain(backend):
    """Five tokens one after the other: the outputs and the state of a chain of five that is committed."""
    cases = [make_case(2, (2, 6), (16, 16), raw=True) for _ in range(5)]
    for place, case in enumerate(cases):
        for name in ("q", "k", "v", "beta", "log_decay"):
            case[name] = case[name].roll(place, dims=-1)
    gates, state = cases[0]["gates"], cases[0]["state"].clone()
    inputs = {name: torch.stack([c[name] for c in cases], 1) for name in ("q", "k", "v", "beta", "log_decay")}
    causal = torch.ones(5, 5, dtype=torch.bool, device=DEVICE).tril()
    expected, stash = tree_truth.tree_gated_delta(state, **inputs, gates=gates, ancestors=causal)
    committed = tree_truth.commit_gated_delta(state, stash, torch.arange(5))
    steps = [gated_delta_step(**case | {"state": state}, backend=backend) for case in cases]
    assert agrees(torch.stack(steps, 1), expected) and agrees(state, committed)
