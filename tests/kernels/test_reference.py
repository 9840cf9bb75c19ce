"""Tree operations against the plain rule along every path, in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import conv1d, silu

from deltatree.kernels.attention import tree_attention_mask, tree_positions
from deltatree.kernels.conv import commit_window, conv_rows, tree_conv
from deltatree.kernels.gated_delta import commit_gated_delta, tree_gated_delta
from deltatree.kernels.gated_delta.reference import l2_normalise
from deltatree.tree import DraftTree, ancestors, path_to


def random_tree(generator: torch.Generator, nodes: int, reach: int = 1 << 30) -> DraftTree:
    """A random parent-first tree; a small `reach` makes it deep, a large one wide."""
    parents = [-1] + [
        max(0, i - 1 - int(torch.randint(0, min(i, reach), (), generator=generator))) for i in range(1, nodes)
    ]
    return DraftTree.from_parents([0] * nodes, parents)


def plain_delta(state, q, k, v, beta, log_decay):
    """The gated delta rule token by token, straight from its definition. Time is dimension 1; batch 1."""
    ratio = state.shape[1] // k.shape[2]
    k, q = l2_normalise(k), l2_normalise(q) * q.shape[-1] ** -0.5
    outs = []
    for t in range(k.shape[1]):
        keys, queries = (x[:, t].repeat_interleave(ratio, dim=1) for x in (k, q))
        state = log_decay[:, t].exp()[..., None, None] * state
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, keys)
        state = state + torch.einsum("bhk,bhv->bhkv", keys, beta[:, t, :, None] * error)
        outs.append(torch.einsum("bhkv,bhk->bhv", state, queries))
    return torch.stack(outs, 1), state


def delta_inputs(generator, nodes, key_heads, value_heads, dim_k=8, dim_v=6, dtype=torch.float64):
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=dtype)  # noqa: E731
    return draw(1, value_heads, dim_k, dim_v), dict(
        q=draw(1, nodes, key_heads, dim_k),
        k=draw(1, nodes, key_heads, dim_k),
        v=draw(1, nodes, value_heads, dim_v),
        beta=draw(1, nodes, value_heads).sigmoid(),
        log_decay=-draw(1, nodes, value_heads).exp(),
    )


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(
    seed=st.integers(0, 10_000),
    nodes=st.integers(1, 40),
    reach=st.sampled_from([1, 2, 5, 100]),
    heads=st.sampled_from([(1, 1), (2, 6), (4, 4)]),
)
def test_every_path_of_a_tree_is_the_plain_recurrence(seed, nodes, reach, heads):
    generator = torch.Generator().manual_seed(seed)
    tree = random_tree(generator, nodes, reach)
    state, inputs = delta_inputs(generator, nodes, *heads)
    before = state.clone()
    out, stash = tree_gated_delta(state, ancestors=ancestors(tree), **inputs)
    assert torch.equal(state, before)
    for node in range(nodes):
        path = path_to(tree, node)
        expected, end = plain_delta(state, **{name: x[:, path] for name, x in inputs.items()})
        torch.testing.assert_close(out[:, node], expected[:, -1], atol=1e-11, rtol=1e-9)
        torch.testing.assert_close(commit_gated_delta(state, stash, torch.tensor(path)), end, atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize("decay", [-1e-9, -1e-3, -30.0, -80.0])
def test_gates_near_zero_and_one_stay_finite_and_right(decay):
    """A sibling's decay difference may overflow the exponential; it must be masked before, not after."""
    generator = torch.Generator().manual_seed(1)
    tree = DraftTree.from_parents([0] * 9, [-1, 0, 0, 1, 2, 3, 4, 5, 6])
    state, inputs = delta_inputs(generator, 9, 2, 4, dtype=torch.float32)
    inputs["log_decay"] = torch.full_like(inputs["log_decay"], decay) * torch.rand(9, 1, generator=generator)
    inputs["beta"] = torch.ones_like(inputs["beta"])
    inputs["k"][:, 3] = inputs["k"][:, 1]  # a repeated key
    out, _ = tree_gated_delta(state, ancestors=ancestors(tree), **inputs)
    for node in range(9):
        path = path_to(tree, node)
        wide = {name: x[:, path].double() for name, x in inputs.items()}
        expected, _ = plain_delta(state.double(), **wide)
        torch.testing.assert_close(out[:, node].double(), expected[:, -1], atol=1e-5, rtol=1e-4)


def test_the_stash_is_as_small_as_promised():
    state, inputs = delta_inputs(torch.Generator().manual_seed(0), 5, 2, 6, dtype=torch.float32)
    _, stash = tree_gated_delta(state, ancestors=torch.ones(5, 5, dtype=torch.bool).tril(), **inputs)
    assert stash.bytes_per_node == 4 * (2 * 8 + 6 * 6 + 6)  # HK*K + HV*V + HV numbers


@pytest.mark.parametrize("mutant", ["sibling's parent swapped", "one ancestor dropped", "a cousin added"])
def test_a_wrong_ancestor_relation_is_caught(mutant):
    generator = torch.Generator().manual_seed(3)
    tree = DraftTree.from_parents([0] * 6, [-1, 0, 0, 1, 2, 3])
    rows = ancestors(tree)
    state, inputs = delta_inputs(generator, 6, 2, 6)
    right, _ = tree_gated_delta(state, ancestors=rows, **inputs)
    wrong = rows.clone()
    if mutant == "sibling's parent swapped":
        wrong[3, 1], wrong[3, 2] = False, True
    elif mutant == "one ancestor dropped":
        wrong[5, 1] = False
    else:
        wrong[4, 3] = True
    changed, _ = tree_gated_delta(state, ancestors=wrong, **inputs)
    assert (changed - right).abs().amax() > 1e-3


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(
    seed=st.integers(0, 10_000),
    nodes=st.integers(1, 30),
    kernel=st.integers(1, 4),
    reach=st.sampled_from([1, 2, 100]),
    with_bias=st.booleans(),
)
def test_every_path_of_a_tree_is_the_plain_convolution(seed, nodes, kernel, reach, with_bias):
    generator = torch.Generator().manual_seed(seed)
    tree = random_tree(generator, nodes, reach)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    window, x, weight = draw(1, 5, kernel - 1), draw(1, nodes, 5), draw(5, kernel)
    bias = draw(5) if with_bias else None
    out = tree_conv(window, x, weight=weight, bias=bias, rows=conv_rows(tree.parents, kernel))
    for node in range(nodes):
        path = path_to(tree, node)
        fed = torch.cat([window, x[:, path].transpose(1, 2)], dim=2)
        expected = silu(conv1d(fed, weight[:, None], bias, groups=5))[:, :, -1]
        torch.testing.assert_close(out[:, node], expected)
        if kernel > 1:
            assert torch.equal(commit_window(window, x, torch.tensor(path)), fed[:, :, -(kernel - 1) :])


def test_mask_and_positions_follow_depth_not_rows():
    tree = DraftTree.from_parents([0] * 5, [-1, 0, 0, 0, 2])
    assert tree_positions(tree.depths, 7).tolist() == [7, 8, 8, 8, 9]
    mask = tree_attention_mask(ancestors(tree), tree.depths, 2)
    assert mask.int().tolist() == [
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 0, 1, 0, 0],
        [1, 1, 1, 0, 0, 1, 0],
        [1, 1, 1, 0, 1, 0, 1],
    ]


def test_a_sliding_window_counts_positions():
    tree = DraftTree.from_parents([0] * 4, [-1, 0, 0, 2])
    mask = tree_attention_mask(ancestors(tree), tree.depths, 3, window=3)
    assert mask.int().tolist() == [
        [0, 1, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 1, 0, 0],
        [0, 0, 1, 1, 0, 1, 0],
        [0, 0, 0, 1, 0, 1, 1],
    ]
