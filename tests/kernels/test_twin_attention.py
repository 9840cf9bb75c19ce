"""The Triton tree attention is the reference one, and sees no row it should not."""

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
    depths_of,
    dropped_ancestor,
    make_tree,
    needs_kernels,
    relative_error,
    some_examples,
    swapped_parents,
    trees,
)

from deltatree.kernels.attention import reference as truth
from deltatree.kernels.attention import tree_attention

pytestmark = needs_kernels


def attention_case(parents, length, *, heads=(4, 2), dim=16, seed=0, batch=1, dtype=torch.float32, capacity=None):
    """Rows behind the nodes are NaN: a kernel that reads them shows."""
    generator = torch.Generator().manual_seed(seed)
    nodes = len(parents)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    shape = (batch, heads[1], capacity or length + nodes + 70, dim)
    keys, values = (torch.full(shape, float("nan"), device=DEVICE, dtype=dtype) for _ in range(2))
    keys[:, :, : length + nodes] = normal(batch, heads[1], length + nodes, dim)
    values[:, :, : length + nodes] = normal(batch, heads[1], length + nodes, dim)
    seen = ancestors_of(parents).to(DEVICE)
    return (normal(batch, heads[0], nodes, dim), keys, values), {"ancestors": seen, "length": length}


def run(tensors, options, *, shares=None, launch=None, **changes):
    from deltatree.kernels.attention.triton import scratch_for

    options = options | changes
    options["length"] = torch.tensor([options["length"]], device=DEVICE, dtype=torch.int32)
    scratch = torch.full_like(scratch_for(*tensors[:2], {"shares": shares}), float("nan"))
    out = torch.full_like(tensors[0], float("nan"))
    launch = (launch or {}) | ({"shares": shares} if shares else {})
    return tree_attention(*tensors, **options, scratch=scratch, out=out, launch=launch, backend="triton")


def expected_of(tensors, options):
    return truth.tree_attention(*(x.double() for x in tensors), **options)


@some_examples
@given(
    parents=trees(256 if ON_GPU else 20),
    length=st.integers(0, 3000 if ON_GPU else 150),
    seed=st.integers(0, 2**20),
    shares=st.sampled_from([None, 1, 3]),
)
def test_attention_agrees_with_float64(parents, length, seed, shares):
    tensors, options = attention_case(parents, length, seed=seed)
    assert agrees(run(tensors, options, shares=shares), expected_of(tensors, options))


@pytest.mark.parametrize(
    ("heads", "dim"),
    [((6, 2), 8), ((4, 4), 24), ((3, 1), 64)]
    + [pytest.param((16, 2), d, marks=pytest.mark.gpu) for d in (64, 128, 256)],
)
def test_head_ratios_and_sizes(heads, dim):
    tensors, options = attention_case(make_tree("bushy", 9, 1), 70, heads=heads, dim=dim, batch=2)
    assert agrees(run(tensors, options), expected_of(tensors, options))


@pytest.mark.parametrize("window", [1, 5, 37, 500])
@pytest.mark.parametrize("length", [0, 3, 120])
def test_sliding_window(window, length):
    parents = make_tree("spine", 15, 2)
    tensors, options = attention_case(parents, length)
    options |= {"window": window, "depths": depths_of(parents)}
    for shares in (1, 3):
        assert agrees(run(tensors, options, shares=shares), expected_of(tensors, options))


@pytest.mark.parametrize(("length", "shares"), [(0, None), (23, 6), (24, 2), (88, 5), (324, None)])
def test_a_text_of_any_length_in_buffers_of_333_rows(length, shares):
    """With 9 nodes and blocks of 32 keys: below, at and above the end of a block, up to full buffers."""
    tensors, options = attention_case(make_tree("bushy", 9, 1), length, heads=(3, 3), capacity=333)
    assert agrees(run(tensors, options, shares=shares), expected_of(tensors, options))


@pytest.mark.parametrize(
    ("heads", "nodes", "shares"),
    [
        ((16, 2), 1, 128),  # 64 a head, more are not combined at once
        ((16, 2), 64, 32),  # beside 4 blocks of rows
        ((16, 2), 256, 8),
        ((24, 4), 1, 132),
        ((24, 4), 256, 11),  # 8 would leave 36 processors idle
    ],
)
def test_shares_fill_132_processors(heads, nodes, shares, monkeypatch):
    from deltatree.kernels.attention import triton as twin

    monkeypatch.setattr(twin, "_num_processors", lambda device: 132)
    q, keys = torch.empty(1, heads[0], nodes, 256, device="meta"), torch.empty(1, heads[1], 32768, 256, device="meta")
    sizes = twin.block_sizes(heads[0] // heads[1] * nodes, 256, 2, 232448)
    assert twin.num_shares(q, keys, sizes) == shares


ROWS, ONE_ROW = (
    {"BLOCK_R": 4, "BLOCK_D": 16, "num_warps": 4},
    {"BLOCK_ALL": 16, "BLOCK_S": 4, "BLOCK_D": 16, "num_warps": 1},
)
KINDS = {
    "as chosen": {},
    "rows at once": {"shares": 12, "combine": ROWS},
    "a row at a time": {"shares": 12, "combine": ONE_ROW},
    "two blocks a share": {"least": 2, "shares": 12},
    "over two heads": {"least": 3, "shares": 4, "combine": ROWS},
    "a share a head": {"shares": 3},
    "one share": {"shares": 1},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nodes", [1, 3, *([17, 65, 257] if ON_GPU else [])])
def test_every_kind_of_launch(nodes, kind):
    """Three key heads, six query heads; a text that ends in the middle of a block, one that ends with it, and none."""
    launch = dict(KINDS[kind])
    shares = launch.pop("shares", None)
    for length in (96, 75, 0) if nodes == 3 or ON_GPU else (75,):
        tensors, options = attention_case(make_tree("wide", nodes, 7, max_depth=15), length, heads=(6, 3), seed=nodes)
        assert agrees(run(tensors, options, shares=shares, launch=launch), expected_of(tensors, options)), length
    options |= {"window": 20, "depths": depths_of(make_tree("wide", nodes, 7, max_depth=15))}
    assert agrees(run(tensors, options, shares=shares, launch=launch), expected_of(tensors, options))


@pytest.mark.parametrize("nodes", [17, 65, 257])
def test_odd_numbers_of_nodes(nodes):
    """Fewer heads, so that a wide tree is quick where kernels are interpreted."""
    tensors, options = attention_case(make_tree("wide", nodes, 7, max_depth=15), 40, heads=(1, 1), seed=nodes)
    assert agrees(run(tensors, options), expected_of(tensors, options))


def test_larger_buffers_change_nothing():
    """Shares follow the text, not the buffers: the same bits, whatever the capacity, and every time."""
    tensors, options = attention_case(make_tree("bushy", 9, 1), 70, capacity=200)
    wider = [torch.nn.functional.pad(x, (0, 0, 0, 1000), value=float("nan")) for x in tensors[1:]]
    attended = run(tensors, options, shares=4)
    assert torch.equal(attended, run(tensors, options, shares=4))
    assert torch.equal(attended, run((tensors[0], *wider), options, shares=4))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, TOLERANCE), (torch.float16, 2e-3)])
@pytest.mark.parametrize("shares", [1, 3])
def test_a_gate_of_a_wide_projection(dtype, tolerance, shares):
    tensors, options = attention_case(FAMILY, 40, dtype=dtype)
    projected = torch.randn(len(FAMILY), 4, 2, 16, device=DEVICE).to(dtype)
    options["gate"] = projected[:, :, 1].transpose(0, 1)[None]
    attended = run(tensors, options, shares=shares)
    assert agrees(attended, expected_of(tensors, options | {"gate": options["gate"].double()}), tolerance)
    assert not agrees(attended, expected_of(tensors, options | {"gate": None}), tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("shared_bytes", [166_000, 232_000])
@pytest.mark.parametrize(
    ("nodes", "heads"),
    [(1, (16, 2)), (8, (16, 2)), (16, (16, 2)), (17, (16, 2)), (256, (16, 2)), (1, (24, 4)), (256, (24, 4))],
)
def test_both_tables_of_blocks_at_model_size(nodes, heads, shared_bytes, monkeypatch):
    """Texts that fill no block, one, and every share of the chip, in buffers of 32k rows, in bfloat16."""
    monkeypatch.setattr("deltatree.kernels.attention.triton._shared_bytes", lambda device: shared_bytes)
    for length in (0, 63, 1024, 30001):
        tensors, options = attention_case(
            make_tree("wide", nodes, 3, max_depth=15),
            length,
            heads=heads,
            dim=256,
            dtype=torch.bfloat16,
            capacity=32768,
        )
        attended = run(tensors, options)
        assert relative_error(attended, expected_of(tensors, options)) <= 6e-3, length
        assert torch.equal(attended, run(tensors, options)), length


@pytest.mark.parametrize("mutate", [swapped_parents, dropped_ancestor, added_cousin])
def test_a_wrong_mask_does_not_pass(mutate):
    tensors, options = attention_case(FAMILY, 40)
    expected = expected_of(tensors, options)
    assert agrees(run(tensors, options), expected)
    assert not agrees(run(tensors, options, ancestors=mutate(options["ancestors"])), expected, 100 * TOLERANCE)


def test_a_sibling_changes_nothing():
    """Another token at node 1 leaves every node that is not below it bit for bit as it was."""
    tensors, options = attention_case(FAMILY, 300 if ON_GPU else 40)
    before = run(tensors, options)
    for cache in tensors[1:]:
        cache[:, :, options["length"] + 1] = 9.0
    after = run(tensors, options)
    below = options["ancestors"][:, 1]
    assert torch.equal(before[:, :, ~below], after[:, :, ~below])
    assert not torch.equal(before[:, :, below], after[:, :, below])


def test_views_of_one_wide_projection_in_float16():
    tensors, options = attention_case(FAMILY, 40, dim=32, dtype=torch.float16)
    q = tensors[0].transpose(1, 2).contiguous().transpose(1, 2)  # [B, HQ, N, D] as a projection leaves it
    tensors = (q, *tensors[1:])
    expected = expected_of(tensors, options)
    assert relative_error(run(tensors, options), expected) <= 2e-3
    assert relative_error(run(tensors, options, shares=2), expected) <= 2e-3
