"""The Triton tree recurrence is the reference one, whatever the tree, the gates and the keys."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import (
    DEVICE,
    FAMILY,
    ON_GPU,
    TOLERANCE,
    added_cousin,
    agrees,
    ancestors_of,
    delta_case,
    dropped_ancestor,
    make_tree,
    needs_kernels,
    path_to,
    relative_error,
    some_examples,
    swapped_parents,
    trees,
)

from deltatree.kernels.gated_delta import DeltaStash, Gates, PendingCommit, commit_gated_delta, tree_gated_delta
from deltatree.kernels.gated_delta import reference as truth

pytestmark = needs_kernels
MAX_NODES = 256 if ON_GPU else 40


def poisoned_like(case) -> dict:
    """Outputs and stash filled with NaN, so that an entry that nobody writes shows."""
    batch, nodes, key_heads, key_dim = case.k.shape
    heads, value_dim = case.v.shape[2:]

    def nans(*shape: int) -> torch.Tensor:
        return torch.full(shape, float("nan"), device=DEVICE)

    return {
        "out": nans(batch, nodes, heads, value_dim),
        "stash": DeltaStash(
            nans(batch, nodes, key_heads, key_dim), nans(batch, nodes, heads, value_dim), nans(batch, nodes, heads)
        ),
    }


def run(case, **changes):
    """With the tree's depth known to the caller, unless a test says otherwise."""
    changes = {"max_depth": int(case.ancestors.sum(1).max()) - 1} | changes
    return tree_gated_delta(case.state, **(case.inputs | poisoned_like(case) | changes), backend="triton")


def expected_of(case, **changes):
    wide = case.double()
    return truth.tree_gated_delta(wide.state, **(wide.inputs | changes))


def assert_same(case, **launch) -> None:
    before = case.state.clone()
    out, stash = run(case, **launch)
    true_out, true_stash = expected_of(case)
    assert agrees(out, true_out), relative_error(out, true_out)
    assert agrees(stash.u, true_stash.u), relative_error(stash.u, true_stash.u)
    assert agrees(stash.k, true_stash.k) and agrees(stash.log_decay, true_stash.log_decay)
    assert torch.equal(case.state, before), "a verify writes no state"


@some_examples
@given(
    parents=trees(MAX_NODES),
    seed=st.integers(0, 2**20),
    gates=st.sampled_from(["any", "near-0", "near-1", "mixed"]),
    beta=st.sampled_from(["any", "near-1"]),
    repeated=st.booleans(),
)
def test_every_node_agrees_with_float64(parents, seed, gates, beta, repeated):
    assert_same(delta_case(parents, seed=seed, gates=gates, beta=beta, repeated=repeated))


@pytest.mark.parametrize("max_depth", [None, 32])
@pytest.mark.parametrize("kind", ["chain", "star", "bushy"])
def test_depth_unknown_or_overestimated(kind, max_depth):
    assert_same(delta_case(make_tree(kind, 30, 1)), max_depth=max_depth)


def test_a_prefill_chunk_is_a_chain_deeper_than_any_tree():
    assert_same(delta_case(make_tree("chain", 64, 0, max_depth=63), heads=(1, 2)))


def test_a_deep_chain_of_repeated_keys_loses_no_digits():
    """Where squaring the whole matrix fails: binomials of depth 32 cancel to numbers of size one."""
    assert_same(delta_case(make_tree("chain", 33, 0), gates="near-1", beta="near-1", repeated=True))


@pytest.mark.parametrize("nodes", [70, 140])
def test_nor_does_one_that_crosses_many_blocks(nodes):
    """A chain as long as the tree, deeper than a draft tree may be, so that every block leans on all before it."""
    parents = make_tree("chain", nodes, 0, max_depth=nodes)
    assert_same(delta_case(parents, heads=(1, 2), gates="near-1", beta="near-1", repeated=True))


@pytest.mark.parametrize("heads", [(2, 6), (4, 4), (1, 2), pytest.param((16, 48), marks=pytest.mark.gpu)])
def test_B37_head_ratios(heads):
    assert_same(delta_case(make_tree("spine", 20, 1), heads=heads))


@pytest.mark.parametrize(
    "dims",
    [
        (8, 8),
        (16, 48),
        (24, 16),
        (64, 64),
        pytest.param((128, 128), marks=pytest.mark.gpu),
        pytest.param((256, 256), marks=pytest.mark.gpu),
    ],
)
def test_key_and_value_sizes(dims):
    assert_same(delta_case(make_tree("bushy", 18, 2), heads=(1, 2), dims=dims))


@pytest.mark.parametrize("nodes", [1, 2, 16, 17, 33, 65, 100, 130] + ([64, 128, 129, 256, 257] if ON_GPU else []))
def test_node_counts_at_block_edges(nodes):
    assert_same(delta_case(make_tree("wide", nodes, 3), heads=(1, 2)))


@some_examples
@given(
    parents=trees(MAX_NODES),
    seed=st.integers(0, 2**20),
    gates=st.sampled_from(["any", "near-0", "near-1", "mixed"]),
    repeated=st.booleans(),
)
def test_lean_launches_agree_with_float64(parents, seed, gates, repeated):
    case = delta_case(parents, seed=seed, gates=gates, beta="near-1" if repeated else "any", repeated=repeated)
    assert_same(case, launch={"KIND": "lean"})


@pytest.mark.parametrize(
    ("nodes", "heads", "dims"),
    [
        (1, (1, 1), (16, 16)),
        (33, (2, 6), (24, 48)),
        (66, (1, 3), (64, 16)),
        (34, (1, 7), (16, 16)),
        *(pytest.param(n, (2, 4), d, marks=pytest.mark.gpu) for n in (64, 130, 256) for d in ((128, 128), (256, 256))),
    ],
)
def test_lean_launches_take_any_sizes(nodes, heads, dims):
    case = delta_case(make_tree("wide", nodes, 3), heads=heads, dims=dims)
    assert_same(case, launch={"KIND": "lean"})


@pytest.mark.parametrize("parts", [1, 2])
def test_lean_launches_lose_no_digits_in_a_deep_chain(parts):
    """Deeper than a draft tree may be. Two parts a factor, as for bfloat16 inputs, keep 16 bits of it."""
    parents = make_tree("chain", 70, 0, max_depth=70)
    case = delta_case(parents, heads=(1, 2), gates="near-1", beta="near-1", repeated=True)
    out, stash = run(case, launch={"KIND": "lean", "PARTS": parts})
    true_out, true_stash = expected_of(case)
    tolerance = TOLERANCE if parts == 1 else 2 * TOLERANCE
    assert agrees(out, true_out, tolerance) and agrees(stash.u, true_stash.u, tolerance)


def test_the_table_of_launches_reaches_every_size():
    from deltatree.kernels.gated_delta.triton import launch_of

    for heads in (1, 32, 48, 1000):
        for nodes in (1, 16, 17, 64, 65, 256, 4096):
            assert launch_of(heads, nodes)["KIND"] in ("one", "lean")


@pytest.mark.parametrize(
    ("nodes", "launch"),
    [
        (33, {"KIND": "one"}),
        (65, {"KIND": "one"}),
        (20, {"KIND": "lean"}),
        (70, {"KIND": "lean"}),
        (130, {"KIND": "lean"}),
        (70, {"KIND": "lean", "READ_V": 16, "SOLVE_V": 32, "SOLVE_WARPS": 2, "ROWS": 32, "BLOCK_SUM": 32}),
    ],
)
def test_every_kind_of_launch_and_its_sizes(nodes, launch):
    """Those that the tables do not choose here: what they choose differs by node count and by chip."""
    assert_same(delta_case(make_tree("spine", nodes, 2), heads=(1, 2), dims=(16, 32)), launch=launch)


@pytest.mark.parametrize("kind", ["one", "lean"])
def test_a_batch_keeps_its_members_apart(kind):
    case = delta_case(make_tree("bushy", 9, 4), batch=3)
    out, _ = run(case, launch={"KIND": kind})
    for b in range(3):
        alone = delta_case(case.parents)
        alone = type(case)(
            case.parents, *(getattr(case, n)[b : b + 1] for n in ("state", "q", "k", "v", "beta", "log_decay"))
        )
        assert agrees(out[b : b + 1], expected_of(alone)[0])


@pytest.mark.parametrize("kind", ["one", "lean"])
def test_B37_slices_of_one_wide_projection(kind):
    """Inputs that are views with a larger row stride, in a state that is a slice of a pool."""
    case = delta_case(make_tree("bushy", 13, 5), heads=(2, 6))
    wide = torch.full((1, 13, 4 * 64 + 6 * 16 * 2), float("nan"), device=DEVICE)
    q, k, v = wide[..., :32], wide[..., 40:72], wide[..., 100:196]
    q.copy_(case.q.flatten(2)), k.copy_(case.k.flatten(2)), v.copy_(case.v.flatten(2))
    pool = torch.full((1, 16, 6, 16, 3), float("nan"), device=DEVICE)
    state = pool[..., 1].permute(0, 2, 3, 1)
    state.copy_(case.state)
    beta = torch.stack([case.beta] * 2, dim=-1)[..., 0]
    strided = type(case)(
        case.parents,
        state,
        q.unflatten(-1, (2, 16)),
        k.unflatten(-1, (2, 16)),
        v.unflatten(-1, (6, 16)),
        beta,
        case.log_decay,
    )
    assert not any(x.is_contiguous() for x in (strided.q, strided.state, strided.beta))
    assert_same(strided, launch={"KIND": kind})


@pytest.mark.parametrize("kind", ["one", "lean"])
@pytest.mark.parametrize("mutate", [swapped_parents, dropped_ancestor, added_cousin])
def test_a_wrong_mask_does_not_pass(mutate, kind):
    case, launch = delta_case(FAMILY), {"KIND": kind}
    out, stash = run(case, ancestors=mutate(case.ancestors), launch=launch)
    true_out, true_stash = expected_of(case)
    assert agrees(run(case, launch=launch)[0], true_out)
    assert not agrees(out, true_out, 100 * TOLERANCE), f"{mutate.__name__} went unnoticed in the outputs"
    assert not agrees(stash.u, true_stash.u, 100 * TOLERANCE), f"{mutate.__name__} went unnoticed in the stash"


@pytest.mark.parametrize(
    ("nodes", "launch"),
    [(17, {"KIND": "one"}), (40, {"KIND": "lean"})],
)
def test_gates_from_raw_projections(nodes, launch):
    case = delta_case(make_tree("bushy", nodes, 6))
    generator = torch.Generator().manual_seed(0)
    b, a = (4 * torch.randn(1, nodes, 6, generator=generator).to(DEVICE) for _ in range(2))
    gates = Gates(torch.randn(6, generator=generator).to(DEVICE), torch.randn(6, generator=generator).to(DEVICE))
    out, stash = run(case, beta=b, log_decay=a, gates=gates, launch=launch)
    beta, log_decay = gates.apply(b.double(), a.double())
    true_out, true_stash = expected_of(case, beta=beta, log_decay=log_decay)
    assert agrees(out, true_out) and agrees(stash.u, true_stash.u)


@pytest.mark.parametrize(
    ("length", "nodes", "launch"),
    [(n, 24, {"KIND": kind}) for kind in ("one", "lean") for n in (0, 1, 2, 7, 20)]
    + [(n, 70, {"KIND": "lean"}) for n in (0, 20)],
)
def test_the_pending_path_is_committed_on_the_way(length, nodes, launch):
    first, second = delta_case(make_tree("spine", 24, 7), seed=1), delta_case(make_tree("bushy", nodes, 8), seed=2)
    path = path_to(first.parents, int(ancestors_of(first.parents).sum(1).argmax()))[:length]
    _, stash = run(first)
    padded = torch.cat([path, torch.full((21 - len(path),), 999)]).to(DEVICE)
    pending = PendingCommit(stash, padded, torch.tensor([len(path)], device=DEVICE))
    state = first.state.clone()
    out, new = tree_gated_delta(
        state, **(second.inputs | poisoned_like(second)), pending=pending, launch=launch, backend="triton"
    )

    committed = truth.commit_gated_delta(first.state.double(), expected_of(first)[1], path)
    true_out, true_stash = truth.tree_gated_delta(committed, **second.double().inputs)
    assert agrees(state, committed) and agrees(out, true_out) and agrees(new.u, true_stash.u)
    if not length:
        assert torch.equal(state, first.state)


@some_examples
@given(parents=trees(MAX_NODES), seed=st.integers(0, 2**20), gates=st.sampled_from(["any", "near-1", "mixed"]))
def test_commit_of_any_path(parents, seed, gates):
    case = delta_case(parents, seed=seed, gates=gates)
    _, stash = run(case)
    path = path_to(parents, seed % len(parents))
    expected = truth.commit_gated_delta(case.state.double(), expected_of(case)[1], path)
    assert agrees(commit_gated_delta(case.state, stash, path, backend="triton"), expected)
    inplace = case.state.clone()
    assert commit_gated_delta(inplace, stash, path, out=inplace, backend="triton") is inplace
    assert agrees(inplace, expected)


def test_every_call_gives_the_same_bits():
    """Nothing is tuned on live state and nothing races: the first call is the hundredth."""
    case = delta_case(make_tree("wide", MAX_NODES, 9))
    first = run(case)
    for _ in range(100 if ON_GPU else 2):
        again = run(case)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1].u, again[1].u)


def test_stash_bytes_are_those_of_the_formula():
    case = delta_case(make_tree("star", 5, 0), heads=(2, 6), dims=(16, 32))
    _, stash = run(case)
    assert stash.bytes_per_node == 4 * (2 * 16 + 6 * 32 + 6)


@pytest.mark.parametrize("nodes", [16, 48])
def test_bfloat16_inputs_err_no_more_than_the_plain_recurrence(nodes):
    """Within twice the error of the token-by-token rule in float32 whose outputs are rounded to bfloat16."""
    parents = make_tree("chain", nodes, 0, max_depth=nodes)
    case = delta_case(parents, heads=(2, 4), dims=(64, 64), dtype=torch.bfloat16)
    out, stash = run(case, out=torch.full_like(case.v, float("nan")))
    true_out, true_stash = expected_of(case)

    state, outs = case.state.clone(), []
    q, k = (truth.l2_normalise(x.float()).repeat_interleave(2, dim=2) for x in (case.q, case.k))
    for t in range(nodes):
        state = case.log_decay[:, t].exp()[..., None, None] * state
        recalled = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        wrote = case.beta[:, t, :, None].float() * (case.v[:, t].float() - recalled)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], wrote)
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t] * 64**-0.5, state))
    plain = torch.stack(outs, dim=1).bfloat16()
    assert relative_error(out, true_out) <= 2 * relative_error(plain, true_out)
    assert agrees(stash.u, true_stash.u), "what is kept for the state is not rounded"
