"""The small kernels of a verify on one GPU: block choices side by side, microseconds a call in a CUDA graph.

    python benchmarks/small_kernels.py

Convolution, gated norm, `norm_rotate` and attention (with its gate, at a short text) for trees of 1, 16, 64 and
256 nodes at the shapes of Qwen3.6-35B-A3B and Qwen3.6-27B. A time is the median over replays of a graph of `CALLS`
chained launches on tensors that stay in the L2 cache, as the ones of a verify do, divided by their number. The table
comes last: a line for each kernel, shape and number of nodes; `<` marks what the tables of launches choose, `!` a
result that is not the reference's. Other processes compile first, side by side, into Triton's cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from deltatree.kernels.attention import reference as attention_truth
from deltatree.kernels.attention import triton as attention
from deltatree.kernels.conv import conv_rows
from deltatree.kernels.conv import reference as conv_truth
from deltatree.kernels.conv import triton as conv
from deltatree.kernels.fused import reference as fused_truth
from deltatree.kernels.fused import triton as fused

DEVICE, CALLS, REPLAYS = "cuda", 20, 12
DEPTH = 15  # of the trees: a drafter with blocks of 16


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads of 128 in recurrent layers, of 256 in attention layers, a quarter of which turns."""

    channels: int
    value_heads: int
    heads: int
    key_heads: int


SHAPES = {"35B-A3B": Shape(8192, 32, 16, 2), "27B": Shape(10240, 48, 24, 4)}
NODES = (1, 16, 64, 256)


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel at one size: what runs, by the name of the choice, and what the first call should give."""

    kernel: str
    kinds: dict[str, list[Callable[[], Tensor]]]  # a call for each set of tensors
    expected: Tensor
    chosen: str = "chosen"


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def parents_of(nodes: int) -> list[int]:
    """A spine of DEPTH drafted nodes, the others beside it at random."""
    generator = torch.Generator().manual_seed(0)
    parents, depths = [-1], [0]
    for node in range(1, nodes):
        parent = node - 1
        while node > DEPTH:
            parent = int(torch.randint(0, node, (1,), generator=generator))
            if depths[parent] < DEPTH:
                break
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return parents


def ancestors_of(nodes: int) -> Tensor:
    seen = torch.eye(nodes, dtype=torch.uint8)
    for node, parent in enumerate(parents_of(nodes)[1:], start=1):
        seen[node] |= seen[parent]
    return seen.to(DEVICE)


def convolution(shape: Shape, nodes: int) -> Case:
    width = shape.channels + 128 * shape.value_heads + 2 * shape.value_heads
    weight, rows = random(shape.channels, 4), conv_rows(torch.tensor(parents_of(nodes)), 4).to(DEVICE)
    inputs = [(random(1, shape.channels, 3), random(1, nodes, width)[..., : shape.channels]) for _ in range(2)]
    launches = {
        "before": conv.SMALL_TILES,
        "chosen": None,
        "4x256": conv.SMALL_TILES | {"HELD": True},
        "4x256 x4": conv.SMALL_TILES | {"HELD": True, "TILES": 4},
        "8x256 x2": {"BLOCK_N": 8, "BLOCK_C": 256, "TILES": 2, "HELD": True, "num_warps": 8},
        "8x256 x8": {"BLOCK_N": 8, "BLOCK_C": 256, "TILES": 8, "HELD": True, "num_warps": 8},
        "16x128 x2": {"BLOCK_N": 16, "BLOCK_C": 128, "TILES": 2, "HELD": True, "num_warps": 8},
    }

    def call(window: Tensor, x: Tensor, launch: dict | None) -> Callable[[], Tensor]:
        out = torch.empty(1, nodes, shape.channels, dtype=x.dtype, device=DEVICE)
        return partial(conv.tree_conv, window, x, weight=weight, bias=None, rows=rows, out=out, launch=launch)

    window, x = inputs[0]
    expected = conv_truth.tree_conv(window.double(), x.double(), weight=weight.double(), bias=None, rows=rows)
    return Case("conv", {name: [call(*pair, launch) for pair in inputs] for name, launch in launches.items()}, expected)


def gated_norm(shape: Shape, nodes: int) -> Case:
    heads, weight = shape.value_heads, random(128)
    width = shape.channels + 128 * heads + 2 * heads
    inputs = [
        (random(nodes, heads, 128), random(nodes, width)[:, shape.channels : -2 * heads].unflatten(-1, (heads, 128)))
        for _ in range(2)
    ]
    launches = {
        "before": {"BLOCK_R": 1, "num_warps": 1},
        "chosen": None,
        "2 rows": {"BLOCK_R": 2, "num_warps": 1},
        "16, 4 warps": {"BLOCK_R": 16, "num_warps": 4},
        "16, 8 warps": {"BLOCK_R": 16, "num_warps": 8},
        "32, 8 warps": {"BLOCK_R": 32, "num_warps": 8},
        "32, 4 warps": {"BLOCK_R": 32, "num_warps": 4},
    }

    def call(x: Tensor, z: Tensor, launch: dict | None) -> Callable[[], Tensor]:
        out = torch.empty(nodes, heads * 128, dtype=x.dtype, device=DEVICE)
        return partial(fused.gated_norm, x, z, weight=weight, eps=1e-6, out=out, launch=launch)

    expected = fused_truth.gated_norm(*(x.double() for x in inputs[0]), weight=weight.double(), eps=1e-6)
    kinds = {name: [call(*pair, launch) for pair in inputs] for name, launch in launches.items()}
    return Case("gated_norm", kinds, expected)


def norm_rotate(shape: Shape, nodes: int) -> Case:
    width = 512 * (shape.heads + shape.key_heads)
    weights = {"q_weight": random(256), "k_weight": random(256)}
    depths = torch.arange(nodes, device=DEVICE) % DEPTH
    options = {
        "frequencies": (1e7 ** (-torch.arange(32) / 32)).to(DEVICE), "zero_centred": True,
        "num_heads": shape.heads, "gated": True,
    }  # fmt: skip
    length = torch.tensor([1024]).to(DEVICE)
    inputs = [(random(nodes, width), *(random(shape.key_heads, 1024 + nodes, 256) for _ in range(2))) for _ in range(2)]
    launches = {
        "before": fused.ONE_HEAD,
        "chosen": None,
        "1 head": {"BLOCK_H": 1, "num_warps": 1},
        "4 heads": {"BLOCK_H": 4, "num_warps": 4},
        "8 heads": {"BLOCK_H": 8, "num_warps": 4},
        "16 heads": {"BLOCK_H": 16, "num_warps": 4},
    }

    def call(x: Tensor, keys: Tensor, values: Tensor, launch: dict | None) -> Callable[[], Tensor]:
        given = {"depths": depths, "length": length, **weights, **options, "launch": launch}
        out = torch.empty(nodes, shape.heads, 256, dtype=x.dtype, device=DEVICE)
        return partial(fused.norm_rotate, x, keys, values, **given, out=out)

    wide = {"depths": depths, "length": 1024, **{name: w.double() for name, w in weights.items()}, **options}
    expected = fused_truth.norm_rotate(*(x.double() for x in inputs[0]), **wide)
    kinds = {name: [call(*given, launch) for given in inputs] for name, launch in launches.items()}
    return Case("norm_rotate", kinds, expected)


def one_row(work: Callable[[], Tensor], rows_at_once: bool, combined: bool) -> Tensor:
    """A call with the combining kernel of before, or without any."""
    kept = attention.ROWS_AT_ONCE, attention._combine_kernel, attention._combine_rows_kernel
    attention.ROWS_AT_ONCE = rows_at_once
    if not combined:
        attention._combine_kernel = attention._combine_rows_kernel = Nothing()
    try:
        return work()
    finally:
        attention.ROWS_AT_ONCE, attention._combine_kernel, attention._combine_rows_kernel = kept


class Nothing:
    """Stands in for a kernel."""

    def __getitem__(self, grid):
        return lambda *args, **options: None


def tree_attention(shape: Shape, nodes: int, context: int = 1024) -> Case:
    """`alone`: without the kernel that combines."""
    capacity, seen = max(32768, context), ancestors_of(nodes)
    length = torch.tensor([context]).to(DEVICE)
    inputs = []
    for _ in range(4):
        q, gate = (random(1, nodes, shape.heads, 256).transpose(1, 2) for _ in range(2))
        keys, values = (random(1, shape.key_heads, capacity + nodes, 256) for _ in range(2))
        inputs.append({"q": q, "keys": keys, "values": values, "gate": gate, "out": torch.empty_like(q)})
    before = {"APART": False, "by_row": False}
    kinds = {  # launch, whether a few rows are combined at once, whether at all
        "before": (before, False, True),
        "before alone": (before, False, False),
        "mask": ({"by_row": False}, False, True),
        "by row": ({}, False, True),
        "chosen": ({}, True, True),
        "chosen alone": ({}, True, False),
        "2 blocks": ({"least": 2}, True, True),
        "4 blocks": ({"least": 4}, True, True),
    }
    if nodes >= 16:
        smaller = {"BLOCK_M": 64, "BLOCK_KEYS": 32, "num_warps": 4, "num_stages": 2, "AHEAD": 0}
        kinds["64 rows, 2 at once"] = (smaller | {"residents": 2}, True, True)

    def call(given: dict, launch: dict, *how: bool) -> Callable[[], Tensor]:
        work = partial(attention.tree_attention, **given, ancestors=seen, length=length, launch=launch)
        return partial(one_row, work, *how)

    wide = {
        name: (x[:, :, : context + nodes] if name in ("keys", "values") else x).float()
        for name, x in inputs[0].items()
        if name != "out"
    }
    expected = attention_truth.tree_attention(**wide, ancestors=seen.bool(), length=context)
    calls = {name: [call(given, *kind) for given in inputs] for name, kind in kinds.items()}
    return Case("attention", calls, expected)


KERNELS = {"conv": convolution, "gated_norm": gated_norm, "norm_rotate": norm_rotate, "attention": tree_attention}


def graph_us(calls: list[Callable[[], Tensor]]) -> float:
    """Median microseconds a call."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            calls[i % len(calls)]()
    times = []
    for _ in range(REPLAYS + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / CALLS)
    return median(times[2:])


def measure(case: Case) -> Iterator[dict]:
    """A record for every kind; a kind that fails leaves the others their figures."""
    for name, calls in case.kinds.items():
        record = {"kernel": case.kernel, "kind": name, "chosen": name == case.chosen}
        try:
            actual = calls[0]().double()
            error = ((actual - case.expected.double()).norm() / case.expected.double().norm()).item()
            yield record | {"error": error, "us": graph_us(calls)}
        except Exception as failure:
            yield record | {"failed": str(failure)[:300]}


def cell(record: dict) -> str:
    if "us" not in record:
        return f"{record['kind']} FAILED"
    right = record["error"] < 1e-2 or record["kind"].endswith("alone")
    return f"{record['kind']} {record['us']:.1f}{'' if right else '!'}{'<' if record['chosen'] else ''}"


def table(records: list[dict]) -> str:
    """A line for each kernel, shape and number of nodes."""
    lines: dict[tuple, list[str]] = {}
    for record in records:
        key = (f"{record['kernel']:11}", f"{record['shape']:8}", f"{record['nodes']:4}")
        lines.setdefault(key, []).append(cell(record))
    return "\n".join(" ".join(key) + "  " + " | ".join(cells) for key, cells in lines.items())


def compile_all(options: argparse.Namespace) -> None:
    """Every kernel's launches, a process for each kernel and shape, and for each size of the slow ones."""
    jobs = []
    for kernel in options.only:
        counts = [str(n) for n in options.nodes]
        sizes = [[count] for count in counts] if kernel == "attention" else [counts]
        shapes = SHAPES if kernel == "attention" else list(SHAPES)[:1]  # the others' kernels are the same
        jobs += [[kernel, shape, *nodes] for shape in shapes for nodes in sizes]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--warm"]
    running = [subprocess.Popen([*command, *job], env=environment, stdout=subprocess.DEVNULL) for job in jobs]
    for process in running:
        process.wait()


def warm(kernel: str, shape: str, *nodes: str) -> None:
    for count in nodes:
        for calls in KERNELS[kernel](SHAPES[shape], int(count)).kinds.values():
            calls[0]()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--nodes", nargs="*", type=int, default=NODES)
    parser.add_argument("--out", type=Path, help="file of JSON lines to write")
    parser.add_argument("--warm", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    with torch.inference_mode():
        if options.warm:
            return warm(*options.warm)
        start, records = time.monotonic(), []
        compile_all(options)
        print(f"compiled: {time.monotonic() - start:.0f} s", file=sys.stderr)
        torch.manual_seed(0)
        for kernel in options.only:
            for name, shape in SHAPES.items():
                for nodes in options.nodes:
                    size = {"shape": name, "nodes": nodes}
                    records += [size | record for record in measure(KERNELS[kernel](shape, nodes))]
            print(f"{kernel}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    if options.out:
        where = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        options.out.write_text("".join(json.dumps(record | where) + "\n" for record in records))
    print(table(records))


if __name__ == "__main__":
    main()
