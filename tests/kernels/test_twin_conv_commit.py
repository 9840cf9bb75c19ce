"""The Triton convolution and the commits are the reference ones."""

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
    agrees,
    delta_case,
    make_tree,
    needs_kernels,
    path_to,
    some_examples,
    trees,
)

from deltatree.kernels.commit import commit_rows, commit_states, commit_windows
from deltatree.kernels.commit import reference as commit_truth
from deltatree.kernels.conv import commit_window, conv_rows, tree_conv
from deltatree.kernels.conv import reference as truth
from deltatree.kernels.gated_delta import DeltaStash

pytestmark = needs_kernels
CHANNELS = 700 if ON_GPU else 70


def conv_case(parents: list[int], kernel: int, seed: int = 0) -> dict:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    return {
        "window": normal(2, CHANNELS, kernel - 1),
        "x": normal(2, len(parents), CHANNELS),
        "weight": normal(CHANNELS, kernel),
        "bias": normal(CHANNELS) if seed % 2 else None,
        "rows": conv_rows(torch.tensor(parents), kernel).to(DEVICE),
    }


def run(window, x, **rest):
    return tree_conv(window, x, **rest, out=torch.full_like(x, float("nan")), backend="triton")


def expected_of(case):
    wide = {name: x if x is None or name == "rows" else x.double() for name, x in case.items()}
    return truth.tree_conv(**wide)


@some_examples
@given(parents=trees(256 if ON_GPU else 40), kernel=st.integers(2, 4), seed=st.integers(0, 2**20))
def test_convolution_agrees_with_float64(parents, kernel, seed):
    case = conv_case(parents, kernel, seed)
    assert agrees(run(**case), expected_of(case))


@pytest.mark.parametrize("nodes", [1, 3, 17, 65, 257])
def test_a_node_gets_the_same_bits_in_every_launch(nodes):
    """Whatever the launch, and however many nodes stand behind one."""
    from deltatree.kernels.conv.triton import conv_sizes

    case = conv_case(make_tree("wide", nodes, 5, max_depth=15), 4, seed=1)
    case |= {name: case[name][:1] for name in ("window", "x")}
    expected = run(**case)
    assert agrees(expected, expected_of(case))
    three_tiles = {"BLOCK_N": 8, "BLOCK_C": 64, "TILES": 3, "num_warps": 4}
    for launch in (conv_sizes(3), conv_sizes(16), three_tiles):
        if ON_GPU or nodes < 40 * launch["BLOCK_N"]:
            assert torch.equal(run(**case, launch=launch), expected), launch
    fewer = 1 + nodes // 2
    case |= {"x": case["x"][:, :fewer], "rows": case["rows"][:fewer]}
    assert torch.equal(run(**case), expected[:, :fewer])


def test_convolution_of_views_in_bfloat16():
    case = conv_case(FAMILY, 4)
    wide = torch.full((2, len(FAMILY), 3 * CHANNELS), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    x = wide[..., CHANNELS : 2 * CHANNELS]
    x.copy_(case["x"])
    window = case["window"].bfloat16().transpose(1, 2).contiguous().transpose(1, 2)
    case |= {"x": x, "window": window}
    out = tree_conv(**case, backend="triton")
    assert agrees(out, expected_of(case), 4e-3) and out.dtype == torch.bfloat16


def swapped_parents(rows):
    parents = list(FAMILY)
    parents[3], parents[4] = parents[4], parents[3]
    return conv_rows(torch.tensor(parents), 4).to(rows.device)


def dropped_ancestor(rows):
    rows = rows.clone()
    rows[7, 1] = rows[7, 0]  # the grandparent's input is skipped
    return rows


def added_cousin(rows):
    rows = rows.clone()
    rows[7, 1] = 3 + 4  # node 4 in the place of the grandparent 3
    return rows


@pytest.mark.parametrize("mutate", [swapped_parents, dropped_ancestor, added_cousin])
def test_wrong_rows_do_not_pass(mutate):
    case = conv_case(FAMILY, 4)
    expected = expected_of(case)
    assert agrees(run(**case), expected)
    assert not agrees(run(**(case | {"rows": mutate(case["rows"])})), expected, 100 * TOLERANCE)


@pytest.mark.parametrize("kernel", [2, 3, 4])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 7])
def test_window_moves_along_the_path(kernel, steps):
    parents = make_tree("spine", 20, 1)
    case = conv_case(parents, kernel)
    path = path_to(parents, 19)[:steps]
    padded = torch.cat([path, torch.full((9 - len(path),), 999)]).to(DEVICE)
    length = torch.tensor([len(path)], device=DEVICE)
    expected = truth.commit_window(case["window"], case["x"], path)
    assert torch.equal(commit_window(case["window"], case["x"], padded, length=length, backend="triton"), expected)
    window = case["window"].clone()
    commit_window(window, case["x"], padded, length=length, out=window, backend="triton")
    assert torch.equal(window, expected)


@pytest.mark.parametrize("nodes", [[0, 2, 5], [0, 1], [0], [0, 3, 4, 9], list(range(10)), []])
@pytest.mark.parametrize("on_device", [True, False])
def test_rows_of_a_scattered_path_move_together(nodes, on_device):
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(3, 2, 2, 40, 24, generator=generator).to(DEVICE) for _ in range(2))
    expected = keys.clone(), values.clone()
    path = torch.tensor(nodes + [999] * (12 - len(nodes)), device=DEVICE)
    length = torch.tensor([len(nodes)], device=DEVICE)
    commit_truth.commit_rows(*expected, path, committed=17, length=length)
    committed = torch.tensor([17], device=DEVICE) if on_device else 17
    commit_rows(keys, values, path, committed=committed, length=length, backend="triton")
    assert torch.equal(keys, expected[0]) and torch.equal(values, expected[1])


def test_a_path_longer_than_one_block_of_rows():
    keys = torch.randn(1, 1, 1, 200, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    values = keys.clone()
    expected = keys.clone(), values.clone()
    path = torch.arange(0, 120, 2).to(DEVICE)
    commit_truth.commit_rows(*expected, path, committed=50)
    commit_rows(keys, values, path, committed=50, backend="triton")
    assert torch.equal(keys, expected[0]) and torch.equal(values, expected[1])


def test_all_layers_in_one_call():
    cases = [delta_case(make_tree("spine", 20, 2), seed=seed) for seed in range(3)]
    stashes = [commit_truth.DeltaStash(c.k, c.v, -c.log_decay.abs().cumsum(1)) for c in cases]
    states = torch.stack([c.state for c in cases])
    stash = DeltaStash(*(torch.stack([getattr(s, name) for s in stashes]) for name in ("k", "u", "log_decay")))
    path = path_to(cases[0].parents, 19).to(DEVICE)
    wide = DeltaStash(*(getattr(stash, name).double() for name in ("k", "u", "log_decay")))
    expected = commit_truth.commit_states(states.double(), wide, path)
    assert agrees(commit_states(states, stash, path, backend="triton"), expected)

    generator = torch.Generator().manual_seed(0)
    windows, inputs = (torch.randn(shape, generator=generator).to(DEVICE) for shape in ((3, 1, 70, 3), (3, 1, 20, 70)))
    expected = commit_truth.commit_windows(windows.clone(), inputs, path)
    assert torch.equal(commit_windows(windows, inputs, path, backend="triton"), expected)
