"""The Triton norms, rotations and gates are the reference ones."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, ON_GPU, agrees, needs_kernels

from deltatree.kernels import fused
from deltatree.kernels.fused import reference as truth

pytestmark = needs_kernels
NAN = float("nan")


def normal(*shape: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def tolerance(dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 1.6e-2  # three roundings, which the interpreter does by cutting off


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parts", [0, 1, 3])
@pytest.mark.parametrize("zero_centred", [False, True])
def test_add_norm(dtype, parts, zero_centred):
    residual, weight = normal(5, 48, dtype=dtype), normal(48, seed=1, dtype=dtype)
    update = normal(5, parts, 48, seed=2, dtype=dtype) if parts else None
    update = update[:, 0] if parts == 1 else update
    mine, theirs, out = residual.clone(), residual.clone().double(), torch.full_like(residual, NAN)
    options = {"weight": weight, "eps": 1e-6, "zero_centred": zero_centred}
    assert fused.add_norm(mine, update, **options, out=out, backend="triton") is out
    wide = {"weight": weight.double(), "eps": 1e-6, "zero_centred": zero_centred}
    expected = truth.add_norm(theirs, None if update is None else update.double(), **wide)
    assert agrees(out, expected, tolerance(dtype)) and agrees(mine, theirs, tolerance(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_norm_of_slices(dtype):
    wide = normal(4, 6 * 16 * 2 + 5, dtype=dtype)
    x, z, weight = normal(4, 6, 16, seed=1), wide[:, 5:101].unflatten(-1, (6, 16)), normal(16, seed=2, dtype=dtype)
    out = torch.full((4, 96), NAN, dtype=dtype, device=DEVICE)
    fused.gated_norm(x, z, weight=weight, eps=1e-6, out=out, backend="triton")
    expected = truth.gated_norm(x.double(), z.double(), weight=weight.double(), eps=1e-6)
    assert agrees(out, expected, tolerance(dtype))


@pytest.mark.parametrize("nodes", [1, 3, 17, 65, 257])
def test_gated_norm_gives_a_node_the_same_bits_beside_any_others(nodes):
    """Three heads, in every launch, however many nodes stand behind one."""
    from deltatree.kernels.fused.triton import gated_norm_sizes

    dtype = torch.bfloat16 if ON_GPU else torch.float32
    x, z, weight = (normal(*shape, 16, seed=i, dtype=dtype) for i, shape in enumerate(((nodes, 3), (nodes, 3), ())))

    def run(nodes: int, **launch) -> torch.Tensor:
        out = torch.full((nodes, 48), NAN, dtype=dtype, device=DEVICE)
        return fused.gated_norm(x[:nodes], z[:nodes], weight=weight, eps=1e-6, out=out, backend="triton", **launch)

    whole = run(nodes)
    assert agrees(whole, truth.gated_norm(x.double(), z.double(), weight=weight.double(), eps=1e-6), tolerance(dtype))
    for rows in (1, 2000, 10_000) if ON_GPU or nodes < 100 else ():
        assert torch.equal(run(nodes, launch=gated_norm_sizes(rows, 16, True)), whole), rows
    assert torch.equal(run(1 + nodes // 2), whole[: 1 + nodes // 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "num_heads, gated, norms, rotary, length",
    [(4, True, True, 4, 300), (4, False, True, 16, 0), (6, False, False, 16, 5), (0, False, True, 16, 40_000)],
)
def test_norm_rotate(dtype, num_heads, gated, norms, rotary, length):
    nodes, key_heads, dim = 7, 2, 16
    width = num_heads * dim * (2 if gated else 1) + 2 * key_heads * dim
    x = normal(nodes, width + 3, dtype=dtype)[:, :width]
    depths = torch.tensor([0, 1, 1, 2, 2, 3, 4], device=DEVICE)
    frequencies = (10000.0 ** (-torch.arange(rotary // 2) / (rotary // 2))).to(DEVICE)
    options = {
        "depths": depths,
        "frequencies": frequencies,
        "scaling": 1.25,
        "q_weight": normal(dim, seed=1, dtype=dtype) if norms else None,
        "k_weight": normal(dim, seed=2, dtype=dtype) if norms else None,
        "zero_centred": gated,
        "num_heads": num_heads,
        "gated": gated,
    }
    capacity = length + nodes + 4
    mine = [torch.full((key_heads, capacity, dim), NAN, dtype=dtype, device=DEVICE) for _ in range(2)]
    theirs = [torch.full((key_heads, capacity, dim), NAN, dtype=torch.float64, device=DEVICE) for _ in range(2)]
    out = torch.full((nodes, num_heads, dim), NAN, dtype=dtype, device=DEVICE)
    at, more = torch.tensor([length], device=DEVICE), torch.tensor([2], device=DEVICE)
    fused.norm_rotate(x, *mine, **options, length=at, count=more, out=out, backend="triton")
    wide = {n: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for n, v in options.items()}
    expected = truth.norm_rotate(x.double(), *theirs, **wide, length=length + 2)
    if num_heads:
        assert agrees(out, expected, 3 * tolerance(dtype))
    rows = slice(length + 2, length + 2 + nodes)
    for cache, true_cache in zip(mine, theirs, strict=True):
        # float32 angles: at position 40,000 the fastest frequency has 3 digits after the point left
        assert agrees(cache[:, rows], true_cache[:, rows], 3 * tolerance(dtype) + 2e-7 * length)
        assert cache[:, : length + 2].isnan().all() and cache[:, length + 2 + nodes :].isnan().all()


@pytest.mark.parametrize("nodes", [1, 3, 17, 65, pytest.param(257, marks=pytest.mark.gpu)])
def test_norm_rotate_gives_a_node_the_same_bits_beside_any_others(nodes):
    """Three query heads and one of keys, in every launch; no row beside the nodes' own is written."""
    from deltatree.kernels.fused.triton import norm_rotate_sizes

    dtype = torch.bfloat16 if ON_GPU else torch.float32
    x, depths, dim = normal(nodes, 5 * 16, dtype=dtype), torch.arange(nodes, device=DEVICE) % 16, 16
    weights = {"q_weight": normal(dim, seed=1, dtype=dtype), "k_weight": normal(dim, seed=2, dtype=dtype)}
    options = {"frequencies": normal(3, seed=3).abs(), "num_heads": 3, "length": 5}

    def run(nodes: int, **launch) -> list[torch.Tensor]:
        keys, values = (torch.full((1, 5 + nodes + 4, dim), NAN, dtype=dtype, device=DEVICE) for _ in range(2))
        out = torch.full((nodes, 3, dim), NAN, dtype=dtype, device=DEVICE)
        given = {"depths": depths[:nodes], **weights, **options, **launch, "out": out}
        fused.norm_rotate(x[:nodes], keys, values, **given, backend="triton")
        for cache in (keys, values):
            assert cache[:, :5].isnan().all() and cache[:, 5 + nodes :].isnan().all()
        return [out, keys[0, 5 : 5 + nodes], values[0, 5 : 5 + nodes]]

    whole = run(nodes)
    keys, values = (torch.zeros(1, 5 + nodes, dim, dtype=torch.float64, device=DEVICE) for _ in range(2))
    wide = {name: w.double() for name, w in weights.items()} | options
    expected = truth.norm_rotate(x.double(), keys, values, depths=depths, **wide)
    for mine, theirs in zip(whole, (expected, keys[0, 5:], values[0, 5:]), strict=True):
        assert agrees(mine, theirs, 3 * tolerance(dtype))
    for mine, theirs in zip(run(min(nodes, 9)), whole, strict=True):
        assert torch.equal(mine, theirs[: len(mine)])
    for others in (1, 64, 256) if ON_GPU or nodes < 20 else ():
        for mine, theirs in zip(run(nodes, launch=norm_rotate_sizes(others, dim, True)), whole, strict=True):
            assert torch.equal(mine, theirs), others


@pytest.mark.parametrize("change", ["none", "float32", "odd stride", "odd start"])
def test_only_values_in_words_get_blocks_of_several_warps(change):
    from deltatree.kernels.fused.triton import gated_norm_sizes, in_words, norm_rotate_sizes

    dtype = torch.float32 if change == "float32" else torch.bfloat16
    wide = torch.empty(256, 4096 + (3 if change == "odd stride" else 0), dtype=dtype, device=DEVICE)
    begin = 1 if change == "odd start" else 0
    words = in_words(wide[:, begin : begin + 2048])
    assert words == (change == "none")
    for sizes in (gated_norm_sizes(8192, 128, words), norm_rotate_sizes(256, 256, words)):
        assert (sizes["num_warps"] > 1) == words


def test_swiglu():
    x = normal(3, 2 * 70, seed=2)
    out = torch.full((3, 70), NAN, device=DEVICE)
    fused.swiglu(x, out=out, backend="triton")
    assert agrees(out, truth.swiglu(x.double()))
