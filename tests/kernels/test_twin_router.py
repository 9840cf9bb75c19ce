"""The Triton router is the reference one; a token's choices do not depend on its neighbours, nor on what scratch held."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import DEVICE, INTERPRETED, ON_GPU, TOLERANCE, agrees, needs_kernels, some_examples
from test_twin_experts import same_blocks, unwritten
from torch import Tensor

from deltatree.kernels.experts import Routing, route_tokens
from deltatree.kernels.experts import reference as truth

pytestmark = needs_kernels
if ON_GPU or INTERPRETED:
    from deltatree.kernels.experts.router import SHARE, block_sizes, router_scratch_for


@dataclass(frozen=True, slots=True)
class Case:
    x: Tensor
    router: Tensor  # with rows of NaN behind those that mean something
    num_experts: int
    top_k: int
    normalise: bool
    shared: bool

    @property
    def choice(self) -> tuple:
        return self.num_experts, self.top_k, self.normalise, self.shared

    def first(self, tokens: int) -> Case:
        return replace(self, x=self.x[:tokens])


def make_case(
    tokens: int,
    *,
    experts: int = 12,
    top_k: int = 3,
    hidden: int = 300,
    normalise: bool = True,
    shared: bool = True,
    whole: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """whole: every number is -1, 0 or 1, so that sums are exact and many logits are equal"""
    generator = torch.Generator().manual_seed(seed)
    x, rows = (
        torch.randn(tokens, hidden, generator=generator),
        torch.randn(experts + shared, hidden, generator=generator),
    )
    if whole:
        x, rows = x.round().clamp(-1, 1), rows.round().clamp(-1, 1)
    else:
        rows *= 2 * hidden**-0.5
    router = torch.cat([rows, torch.full((3, hidden), float("nan"))])
    return Case(x.to(DEVICE, dtype), router.to(DEVICE, dtype), experts, top_k, normalise, shared)


def run(case: Case, **options) -> tuple[Routing, Tensor]:
    """The routing, and its logits in float32 as they were before they were rounded."""
    from deltatree.kernels.experts.router import route_tokens as fast

    out = unwritten(len(case.x), case.top_k, case.num_experts, case.shared)
    scratch = router_scratch_for(case.x, case.num_experts, shared=case.shared)
    scratch.sums.fill_(float("nan"))
    if scratch.marks is not None:
        scratch.marks.fill_(-1)
    routing = fast(case.x, case.router, *case.choice, out, scratch, **options)
    logits = scratch.sums[:, 0].clone()
    for share in scratch.sums.unbind(1)[1:]:
        logits += share
    return routing, logits[:, : case.num_experts + case.shared]


def true_routing(case: Case) -> Routing:
    return truth.route_tokens(case.x.double(), case.router.double(), *case.choice)


@some_examples
@given(
    tokens=st.integers(1, 256 if ON_GPU else 40),
    experts=st.integers(4, 512 if ON_GPU else 70),
    top_k=st.integers(1, 4),
    hidden=st.sampled_from([24, 256, 300, 520]),
    normalise=st.booleans(),
    shared=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_agrees_with_float64(tokens, experts, top_k, hidden, normalise, shared, seed):
    """The logits do, and the choices are those of these logits: at a near-tie float64 may choose otherwise."""
    case = make_case(tokens, experts=experts, top_k=top_k, hidden=hidden, normalise=normalise, shared=shared, seed=seed)
    routing, logits = run(case)
    expected = truth.route(
        logits[:, :experts].double(), top_k, normalise, logits[:, experts].double() if shared else None
    )
    assert agrees(logits, case.x.double() @ case.router[: experts + shared].double().T)
    assert torch.equal(routing.experts, expected.experts)
    assert agrees(routing.weights, expected.weights)
    assert same_blocks(routing, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "shared"), [(1, True), (1, False), (7, True), (34, False)])
def test_equal_logits_go_to_the_lower_expert(tokens, shared, dtype):
    case = make_case(tokens, experts=40, top_k=8, shared=shared, whole=True, dtype=dtype)
    routing, logits = run(case)
    expected = true_routing(case)
    assert torch.equal(logits, (case.x.double() @ case.router[: 40 + shared].double().T).float())
    assert logits.abs().max() < 256  # exact in bfloat16 too
    assert (logits[:, :40].sort().values.diff() == 0).any()
    assert torch.equal(routing.experts, expected.experts) and same_blocks(routing, expected)
    assert agrees(routing.weights, expected.weights, TOLERANCE if dtype == torch.float32 else 8e-3)


def test_bfloat16():
    """Logits are rounded before they are compared; the interpreter cuts bits off where a GPU rounds."""
    case = make_case(18, experts=40, top_k=8, hidden=520, dtype=torch.bfloat16)
    routing, logits = run(case)
    rounded = (logits.view(torch.int32) & -(2**16)).view(torch.float32) if INTERPRETED else logits
    rounded = rounded.bfloat16()
    expected = truth.route(rounded[:, :40], 8, True, rounded[:, 40])
    assert agrees(logits, case.x.double() @ case.router[:41].double().T, 5e-5)
    assert torch.equal(routing.experts, expected.experts) and same_blocks(routing, expected)
    assert agrees(routing.weights, expected.weights, 8e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_alone_and_among_others_gets_the_same_bits(dtype):
    everyone = make_case(34, experts=40, dtype=dtype)
    routing, logits = run(everyone, launch={"shares": block_sizes(256, everyone.x.element_size())["shares"]})
    assert block_sizes(256, 2)["shares"] != block_sizes(1, 2)["shares"]
    for tokens in (1, 16, 17):
        few, few_logits = run(everyone.first(tokens))
        assert torch.equal(few_logits, logits[:tokens])
        assert torch.equal(few.experts, routing.experts[:tokens])
        assert torch.equal(few.weights, routing.weights[:tokens])


@pytest.mark.parametrize("tokens", [2, 16, 17, 33])
def test_all_tokens_may_choose_the_same_experts(tokens):
    case = make_case(tokens)
    case = replace(case, x=case.x[:1].expand(tokens, -1))  # rows without a stride
    assert same_blocks(run(case)[0], true_routing(case))


def test_scratch_and_tables_serve_again():
    cases = [make_case(19, seed=seed) for seed in (1, 2)]
    out, scratch = unwritten(19, 3, 12, True), router_scratch_for(cases[0].x, 12, shared=True)
    for case in (*cases, cases[0]):
        again = route_tokens(case.x, case.router, *case.choice, out=out, scratch=scratch, backend="triton")
        expected = true_routing(case)
        assert again is out and torch.equal(out.experts, expected.experts) and same_blocks(out, expected)


def test_other_launches_and_strides():
    case = make_case(20, hidden=2 * SHARE)
    expected = true_routing(case)
    wide = torch.full((20, 3 * 2 * SHARE), float("nan"), device=DEVICE)
    turned = case.router.T.contiguous().T
    moved = replace(case, x=wide[:, 2 * SHARE : 4 * SHARE].copy_(case.x), router=turned)
    sizes = {"shares": {"BLOCK_N": 32, "BLOCK_R": 16, "BLOCK_K": 128}, "group": {"BLOCK_A": 32, "num_warps": 1}}
    for routing in (run(moved)[0], run(case, launch=sizes)[0]):
        assert torch.equal(routing.experts, expected.experts) and same_blocks(routing, expected)


def test_wrong_choices_do_not_pass():
    case = make_case(20)
    routing, expected = run(case)[0], true_routing(case)
    assert torch.equal(routing.experts, expected.experts)
    swapped = replace(case, router=case.router[torch.tensor([1, 0, *range(2, len(case.router))])])
    other = run(swapped)[0]
    assert not torch.equal(other.experts, expected.experts) and not same_blocks(other, expected)


def test_too_many_tokens_are_refused():
    with pytest.raises(ValueError, match="1025 tokens in one routing, at most 1024"):
        route_tokens(
            torch.zeros(1025, 8, device=DEVICE), torch.zeros(8, 8, device=DEVICE), 8, 2, True, backend="triton"
        )
