"""The Triton mixture of experts is the reference one, and a token's result does not depend on its neighbours."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import DEVICE, ON_GPU, TOLERANCE, agrees, needs_kernels, some_examples
from torch import Tensor

from deltatree.kernels.experts import Routing, combine, expert_mlp, most_blocks, route, scratch_for
from deltatree.kernels.experts import reference as truth

pytestmark = needs_kernels
TOLERANCE_BF16 = 6e-3 if ON_GPU else 1.5e-2  # the interpreter cuts bits off where a GPU rounds


@dataclass(frozen=True, slots=True)
class Case:
    x: Tensor
    logits: Tensor
    shared_logit: Tensor | None
    gate_up: Tensor
    down: Tensor
    shared_gate_up: Tensor | None
    shared_down: Tensor | None
    top_k: int

    @property
    def weights(self) -> tuple[Tensor | None, ...]:
        return self.gate_up, self.down, self.shared_gate_up, self.shared_down

    def double(self) -> Case:
        wide = {name: getattr(self, name) for name in self.__slots__ if name != "top_k"}
        return replace(self, **{name: x if x is None else x.double() for name, x in wide.items()})

    def first(self, tokens: int) -> Case:
        gate = None if self.shared_logit is None else self.shared_logit[:tokens]
        return replace(self, x=self.x[:tokens], logits=self.logits[:tokens], shared_logit=gate)


def make_case(
    tokens: int,
    *,
    experts: int = 12,
    top_k: int = 3,
    hidden: int = 40,
    width: int = 24,
    shared_width: int | None = 24,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    shared = shared_width is not None
    return Case(
        x=normal(tokens, hidden),
        logits=normal(tokens, experts),
        shared_logit=normal(tokens) if shared else None,
        gate_up=normal(experts, 2 * width, hidden) * hidden**-0.5,
        down=normal(experts, hidden, width) * width**-0.5,
        shared_gate_up=normal(2 * shared_width, hidden) * hidden**-0.5 if shared else None,
        shared_down=normal(hidden, shared_width) * shared_width**-0.5 if shared else None,
        top_k=top_k,
    )


def unwritten(tokens: int, top_k: int, num_experts: int, shared: bool) -> Routing:
    routing = Routing.empty(tokens, top_k, num_experts, shared=shared, device=DEVICE)
    for table in (routing.experts, routing.block_experts, routing.block_rows, routing.num_blocks):
        table.fill_(-(2**30))
    routing.weights.fill_(float("nan"))
    return routing


def routed(case: Case, normalise: bool = True) -> Routing:
    out = unwritten(len(case.x), case.top_k, case.logits.shape[1], case.shared_logit is not None)
    return route(case.logits, case.top_k, normalise, case.shared_logit, out=out, backend="triton")


def run(case: Case, routing: Routing, dtype: torch.dtype | None = None, **launch) -> Tensor:
    scratch = scratch_for(case.x, routing, case.gate_up, case.shared_gate_up).fill_(float("nan"))
    out = torch.full(
        (*routing.experts.shape, case.x.shape[1]), float("nan"), device=DEVICE, dtype=dtype or case.x.dtype
    )
    return expert_mlp(case.x, routing, *case.weights, out=out, scratch=scratch, backend="triton", **launch)


def expected_of(case: Case, routing: Routing) -> Tensor:
    return truth.expert_mlp(case.x.double(), routing, *case.double().weights)


def same_blocks(one: Routing, other: Routing) -> bool:
    used = int(other.num_blocks)
    return int(one.num_blocks) == used and all(
        torch.equal(getattr(one, name)[:used], getattr(other, name)[:used]) for name in ("block_experts", "block_rows")
    )


@some_examples
@given(
    tokens=st.integers(1, 256 if ON_GPU else 40),
    experts=st.integers(4, 512 if ON_GPU else 40),
    top_k=st.integers(1, 4),
    shared=st.booleans(),
    normalise=st.booleans(),
    narrow=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_routing_agrees_with_float64(tokens, experts, top_k, shared, normalise, narrow, seed):
    dtype = torch.bfloat16 if narrow else torch.float32
    case = make_case(tokens, experts=experts, top_k=top_k, shared_width=1 if shared else None, dtype=dtype, seed=seed)
    expected = truth.route(case.logits.double(), top_k, normalise, None if not shared else case.shared_logit.double())
    routing = routed(case, normalise)
    assert torch.equal(routing.experts, expected.experts)
    assert agrees(routing.weights, expected.weights, 8e-3 if narrow else TOLERANCE)
    assert same_blocks(routing, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_logits_go_to_the_lower_expert(dtype):
    logits = torch.tensor([[0.0, -0.0, 1.0, 1.0, -5.0, 0.0], [-2.0, -2.0, -2.0, -2.0, -2.0, -2.0]]).to(DEVICE, dtype)
    for rows in (logits, logits[:1], logits[1:]):
        routing = route(rows, 4, True, out=unwritten(len(rows), 4, 6, False), backend="triton")
        chosen = [[2, 3, 0, 1], [0, 1, 2, 3]]
        first = 0 if len(rows) == 2 or rows[0, 2] == 1 else 1
        assert routing.experts.tolist() == chosen[first : first + len(rows)]


@pytest.mark.parametrize("tokens", [1, 16, 17, 33])
def test_all_tokens_may_choose_the_same_experts(tokens):
    case = make_case(tokens)
    case.logits.copy_(case.logits[:1].clone().expand_as(case.logits))
    routing = routed(case)
    assert same_blocks(routing, truth.route(case.logits, case.top_k, True, case.shared_logit))
    assert agrees(run(case, routing), expected_of(case, routing))


@pytest.mark.parametrize("tokens", [1, 5, 16, 31, 64, 200])
@pytest.mark.parametrize("experts", [8, 128, 512])
def test_no_routing_needs_more_blocks_than_there_is_room_for(tokens, experts):
    top_k = 3
    same = torch.arange(top_k).expand(tokens, -1)
    spread = torch.arange(tokens * top_k).view(tokens, top_k) % experts  # every expert woken, as far as the tokens go
    for choice in (same, spread):
        logits = torch.zeros(tokens, experts).scatter_(1, choice, 1.0)
        routing = truth.route(logits, top_k, True, torch.zeros(tokens))
        assert int(routing.num_blocks) <= most_blocks(tokens, top_k, experts, shared=True)


@some_examples
@given(
    tokens=st.integers(1, 200 if ON_GPU else 24),
    sizes=st.sampled_from([(40, 24), (64, 32), (130, 70)]),
    shared_width=st.sampled_from([None, "same", 16, 50]),
    seed=st.integers(0, 2**20),
)
def test_products_agree_with_float64(tokens, sizes, shared_width, seed):
    hidden, width = sizes
    shared_width = width if shared_width == "same" else shared_width
    case = make_case(tokens, hidden=hidden, width=width, shared_width=shared_width, seed=seed)
    routing = routed(case)
    parts, expected = run(case, routing), expected_of(case, routing)
    assert agrees(parts, expected)
    out = torch.full_like(case.x, float("nan"))
    assert agrees(combine(parts, out=out, backend="triton"), truth.combine(expected))


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("part_dtype", [torch.bfloat16, torch.float32])
def test_bfloat16(tokens, part_dtype):
    case = make_case(tokens, hidden=256, width=128, shared_width=128, dtype=torch.bfloat16)
    routing = routed(case)
    parts = run(case, routing, part_dtype)
    assert parts.dtype == part_dtype
    expected = expected_of(case, routing)
    assert agrees(parts, expected, TOLERANCE_BF16)
    total = combine(parts, out=torch.empty_like(case.x), backend="triton")
    assert agrees(total, truth.combine(expected), TOLERANCE_BF16)


def test_weights_in_other_strides():
    """Stored [E, H, 2 I] and [E, I, H], as some checkpoints have them; the shared expert stays as it is."""
    case = make_case(9)
    turned = [w.transpose(1, 2).contiguous().transpose(1, 2) for w in (case.gate_up, case.down)]
    wide = torch.full((9, 3 * case.x.shape[1]), float("nan"), device=DEVICE)
    x = wide[:, 40:80].copy_(case.x)
    routing = routed(case)
    assert agrees(run(replace(case, x=x, gate_up=turned[0], down=turned[1]), routing), expected_of(case, routing))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_alone_and_among_others_gets_the_same_bits(dtype):
    everyone = make_case(18, experts=5, top_k=2, hidden=160, width=130, shared_width=130, dtype=dtype)
    routing = routed(everyone)
    parts = run(everyone, routing)
    total = combine(parts, backend="triton")
    for tokens in (1, 16, 17):
        case = everyone.first(tokens)
        fewer = routed(case)
        assert torch.equal(fewer.experts, routing.experts[:tokens])
        assert torch.equal(fewer.weights, routing.weights[:tokens])
        few = run(case, fewer)
        assert torch.equal(few, parts[:tokens])
        assert torch.equal(combine(few, backend="triton"), total[:tokens])


def without_a_row(routing: Routing) -> Routing:
    rows = routing.block_rows.clone()
    rows[0, 2] = -1
    return replace(routing, block_rows=rows)


def another_expert(routing: Routing) -> Routing:
    experts = routing.block_experts.clone()
    experts[1] = experts[2]
    return replace(routing, block_experts=experts)


def one_block_less(routing: Routing) -> Routing:
    return replace(routing, num_blocks=routing.num_blocks - 1)


def swapped_weights(routing: Routing) -> Routing:
    return replace(routing, weights=routing.weights.flip(1).contiguous())


@pytest.mark.parametrize("mutate", [without_a_row, another_expert, one_block_less, swapped_weights])
def test_wrong_blocks_do_not_pass(mutate):
    case = make_case(20)
    routing = routed(case)
    expected = expected_of(case, routing)
    assert agrees(run(case, routing), expected)
    assert not agrees(run(case, mutate(routing)), expected, 100 * TOLERANCE)


def test_too_many_tokens_are_refused():
    with pytest.raises(ValueError, match="1025 tokens in one routing, at most 1024"):
        route(torch.zeros(1025, 8, device=DEVICE), 2, True, backend="triton")
