"""The small kernels of a verify on one GPU, microseconds a call in a CUDA graph: a table by shape and nodes.

    python benchmarks/small_kernels.py --out results.jsonl

Convolution, gated norm, `norm_rotate` and attention (with its gate, at a short text) for trees of 1, 16, 64 and
256 nodes at the shapes of Qwen3.6-35B-A3B and Qwen3.6-27B. A time is the median over replays of a graph of `CALLS`
chained launches on tensors that stay in the L2 cache, as the ones of a verify do, divided by their number. `!` marks a
result that is not the reference's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from kernel_times import DEPTH, ancestors_of, graph_us, make_tree, random, relative_error
from torch import Tensor

from deltatree.kernels.attention import reference as attention_truth
from deltatree.kernels.attention import triton as attention
from deltatree.kernels.conv import conv_rows
from deltatree.kernels.conv import reference as conv_truth
from deltatree.kernels.conv import triton as conv
from deltatree.kernels.fused import reference as fused_truth
from deltatree.kernels.fused import triton as fused

CALLS, CONTEXT = 20, 1024
half = partial(random, dtype=torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads of 128 in recurrent layers, of 256 in attention layers, a quarter of which turns."""

    channels: int
    value_heads: int
    heads: int
    key_heads: int

    @property
    def width(self) -> int:
        """Of a recurrent layer's projection."""
        return self.channels + 128 * self.value_heads + 2 * self.value_heads


SHAPES = {"35B-A3B": Shape(8192, 32, 16, 2), "27B": Shape(10240, 48, 24, 4)}
NODES = (1, 16, 64, 256)


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel at one size: a call for each set of tensors, and what the first should give."""

    calls: list[Callable[[], Tensor]]
    expected: Tensor


def convolution(shape: Shape, nodes: int) -> Case:
    options = {"bias": None, "rows": conv_rows(torch.tensor(make_tree(nodes)), 4).cuda()}
    weight, out = half(shape.channels, 4), half(1, nodes, shape.channels)
    inputs = [(half(1, shape.channels, 3), half(1, nodes, shape.width)[..., : shape.channels]) for _ in range(2)]
    wide = [x.double() for x in inputs[0]]
    expected = conv_truth.tree_conv(*wide, weight=weight.double(), **options)
    return Case([partial(conv.tree_conv, *given, weight=weight, **options, out=out) for given in inputs], expected)


def gated_norm(shape: Shape, nodes: int) -> Case:
    heads, weight, out = shape.value_heads, half(128), half(nodes, 128 * shape.value_heads)
    gates = slice(shape.channels, -2 * heads)
    inputs = [
        (half(nodes, heads, 128), half(nodes, shape.width)[:, gates].unflatten(-1, (heads, 128))) for _ in range(2)
    ]
    expected = fused_truth.gated_norm(*(x.double() for x in inputs[0]), weight=weight.double(), eps=1e-6)
    return Case([partial(fused.gated_norm, *given, weight=weight, eps=1e-6, out=out) for given in inputs], expected)


def norm_rotate(shape: Shape, nodes: int) -> Case:
    weights, out = {"q_weight": half(256), "k_weight": half(256)}, half(nodes, shape.heads, 256)
    options = {
        "depths": torch.arange(nodes).cuda() % DEPTH, "frequencies": (1e7 ** (-torch.arange(32) / 32)).cuda(),
        "zero_centred": True, "num_heads": shape.heads, "gated": True,
    }  # fmt: skip
    inputs = [
        (
            half(nodes, 512 * (shape.heads + shape.key_heads)),
            *(half(shape.key_heads, CONTEXT + nodes, 256) for _ in range(2)),
        )
        for _ in range(2)
    ]
    wide = {name: x.double() for name, x in weights.items()}
    expected = fused_truth.norm_rotate(*(x.double() for x in inputs[0]), length=CONTEXT, **wide, **options)
    length = torch.tensor([CONTEXT]).cuda()
    calls = [partial(fused.norm_rotate, *given, length=length, **weights, **options, out=out) for given in inputs]
    return Case(calls, expected)


def tree_attention(shape: Shape, nodes: int, capacity: int = 32768) -> Case:
    """capacity: committed rows of the buffers"""
    options = {"ancestors": ancestors_of(make_tree(nodes)), "length": torch.tensor([CONTEXT]).cuda()}
    inputs = []
    for _ in range(4):
        q, gate = (half(1, nodes, shape.heads, 256).transpose(1, 2) for _ in range(2))
        keys, values = (half(1, shape.key_heads, capacity + nodes, 256) for _ in range(2))
        inputs.append({"q": q, "keys": keys, "values": values, "gate": gate, "out": torch.empty_like(q)})
    wide = {name: x.float() for name, x in inputs[0].items() if name != "out"}
    expected = attention_truth.tree_attention(**wide, **options)
    return Case([partial(attention.tree_attention, **given, **options) for given in inputs], expected)


KERNELS = {"conv": convolution, "gated_norm": gated_norm, "norm_rotate": norm_rotate, "attention": tree_attention}


def records(kernels: list[str], nodes: list[int]) -> Iterator[dict]:
    for kernel in kernels:
        for name, shape in SHAPES.items():
            for count in nodes:
                case = KERNELS[kernel](shape, count)
                error = relative_error(case.calls[0](), case.expected)
                us = graph_us([case.calls[i % len(case.calls)] for i in range(CALLS)])
                yield {"kernel": kernel, "shape": name, "nodes": count, "us": round(us, 3), "error": error}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--nodes", nargs="*", type=int, default=list(NODES))
    parser.add_argument("--out", type=Path, help="file of JSON lines to write")
    options = parser.parse_args()
    torch.manual_seed(0)
    where = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    lines = []
    with torch.inference_mode():
        for record in records(options.only, options.nodes):
            right = " " if record["error"] < 1e-2 else "!"
            print(
                f"{record['kernel']:12}{record['shape']:8}{record['nodes']:5}{record['us']:8.1f} us{right}", flush=True
            )
            lines.append(json.dumps(record | where) + "\n")
    if options.out:
        options.out.write_text("".join(lines))


if __name__ == "__main__":
    main()
