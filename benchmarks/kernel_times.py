"""Tree kernels on one GPU, as JSON lines: time in a CUDA graph, bytes moved, baselines in the same run.

    python benchmarks/kernel_times.py --out results.jsonl

Every time is the median over replays of one graph that holds the calls of `LAYERS` layers, each on tensors of its own
(together larger than the L2 cache), divided by the number of calls.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

import torch
import triton
from node_states import node_states
from torch import Tensor

from deltatree.kernels.attention import reference as attention_truth
from deltatree.kernels.attention import triton as attention
from deltatree.kernels.commit import triton as commit
from deltatree.kernels.conv import conv_rows
from deltatree.kernels.conv import triton as conv
from deltatree.kernels.gated_delta import DeltaStash, PendingCommit
from deltatree.kernels.gated_delta import reference as delta_truth
from deltatree.kernels.gated_delta import triton as delta
from deltatree.kernels.gated_delta.lean import lean_sizes

LAYERS = 40
PATH = 16  # tokens committed with every call
DEPTH = 15  # of the trees: a drafter with blocks of 16
KEY_DIM = VALUE_DIM = 128
BANDWIDTH = 4.2e12  # bytes a second
MATRIX_RATE = 790e12  # bfloat16 operations a second

TARGETS_US = {(32, 16): 8, (32, 64): 18, (32, 128): 32, (48, 16): 11, (48, 64): 24, (48, 128): 42}
KINDS = {"one": "one launch", "lean": "three launches"}  # of the recurrence
MANY_NODES = {  # launches measured side by side for trees of many nodes
    "three launches": delta.LEAN,
    "three launches, small reads": delta.LEAN | delta.SMALL_READS,
}
CANDIDATES = {  # the same by the nodes of a tree, where it is not that
    16: {"one launch": {"KIND": "one"}},
    32: {"one launch": {"KIND": "one"}} | MANY_NODES,
}


def graph_us(calls: list[Callable[[], object]], replays: int = 20) -> float:
    """Median microseconds a call, all calls captured in one graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(replays + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return median(times[3:])


def num_bytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def make_tree(nodes: int, depth: int = DEPTH) -> list[int]:
    """Parents: a spine of `depth` drafted nodes, the others beside it at random."""
    generator = torch.Generator().manual_seed(0)
    parents, depths = [-1], [0]
    for node in range(1, nodes):
        parent = node - 1
        while node > depth:
            parent = int(torch.randint(0, node, (1,), generator=generator))
            if depths[parent] < depth:
                break
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return parents


def ancestors_of(parents: list[int]) -> Tensor:
    seen = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents[1:], start=1):
        seen[node] |= seen[parent]
    return seen.cuda()


def path_of(nodes: int) -> tuple[Tensor, Tensor]:
    """A path of PATH node indices on the device (the spine), and how many of them exist."""
    length = min(nodes, PATH)
    path = torch.zeros(PATH, dtype=torch.int32)
    path[:length] = torch.arange(length)
    return path.cuda(), torch.tensor([length], dtype=torch.int32).cuda()


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def stash_of(nodes: int, key_heads: int, heads: int) -> DeltaStash:
    return DeltaStash(
        random(1, nodes, key_heads, KEY_DIM) * KEY_DIM**-0.5,
        random(1, nodes, heads, VALUE_DIM),
        -torch.rand(1, nodes, heads, device="cuda").cumsum(1) / 8,
    )


def delta_inputs(nodes: int, heads: int, key_heads: int = 16) -> dict[str, Tensor]:
    """q, k, v are slices of one projection, as in a model."""
    sizes = (key_heads * KEY_DIM, key_heads * KEY_DIM, heads * VALUE_DIM)
    q, k, v = random(1, nodes, sum(sizes), dtype=torch.bfloat16).split(sizes, dim=-1)
    return {
        "q": q.unflatten(-1, (key_heads, KEY_DIM)),
        "k": k.unflatten(-1, (key_heads, KEY_DIM)),
        "v": v.unflatten(-1, (heads, VALUE_DIM)),
        "beta": torch.rand(1, nodes, heads, device="cuda").bfloat16(),
        "log_decay": -torch.rand(1, nodes, heads, device="cuda"),
    }


def sizes_of(kind: str, nodes: int) -> dict[str, int | str | bool]:
    if kind == "one":
        return delta.block_sizes(nodes, KEY_DIM, VALUE_DIM, torch.bfloat16, DEPTH)
    return lean_sizes(nodes, VALUE_DIM, torch.bfloat16)


def candidates() -> Iterator[dict]:
    """The launches of the recurrence side by side, for trees of more than 32 nodes."""
    yield from recurrence(sizes=(128, 64, 256), only_candidates=True)


def recurrence(sizes: tuple[int, ...] = (16, 32, 64, 128, 256), only_candidates: bool = False) -> Iterator[dict]:
    """The tree recurrence with the last round's commit in it, against a plain recurrent kernel and states per node."""
    try:
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as plain_recurrence
    except Exception as error:
        print(f"no flash-linear-attention here: {error}", file=sys.stderr)
        plain_recurrence = None
    for heads in (32, 48):
        for nodes in sizes:
            parents = make_tree(nodes)
            seen, (path, length) = ancestors_of(parents), path_of(nodes)
            layers = [
                {
                    "state": random(1, heads, KEY_DIM, VALUE_DIM),
                    "inputs": delta_inputs(nodes, heads),
                    "old": stash_of(nodes, 16, heads),
                    "new": stash_of(nodes, 16, heads),
                    "out": torch.empty(1, nodes, heads, VALUE_DIM, device="cuda", dtype=torch.bfloat16),
                }
                for _ in range(LAYERS)
            ]

            def call(layer: dict, **launch):
                return lambda: delta.tree_gated_delta(
                    layer["state"], **layer["inputs"], ancestors=seen, max_depth=DEPTH, out=layer["out"],
                    stash=layer["new"], pending=PendingCommit(layer["old"], path, length), launch=launch,
                )  # fmt: skip

            one = layers[0]
            start = one["state"].clone()
            true_state = delta_truth.commit_gated_delta(start.double(), one["old"], path, length=length)
            true_out, true_stash = delta_truth.tree_gated_delta(true_state, **one["inputs"], ancestors=seen)
            moved = 2 * num_bytes(start) + int(length) * one["old"].bytes_per_node
            moved += num_bytes(*one["inputs"].values(), one["out"], one["new"].k, one["new"].u, one["new"].log_decay)
            chosen, best = delta.launch_of(heads, nodes), None
            for name, launch in CANDIDATES.get(nodes, MANY_NODES).items():
                one["state"].copy_(start)
                call(one, **launch)()
                kind = launch["KIND"]
                record = {
                    "benchmark": "tree_gated_delta",
                    "name": name,
                    "kind": KINDS[kind],
                    "heads": heads,
                    "nodes": nodes,
                    "depth": DEPTH,
                    "committed_path": int(length),
                    "error_outputs": relative_error(one["out"], true_out),
                    "error_pseudo_values": relative_error(one["new"].u, true_stash.u),
                    "error_state": relative_error(one["state"], true_state),
                    "launch": sizes_of(kind, nodes) | launch,
                    "chosen": launch == chosen,
                    "us": graph_us([call(layer, **launch) for layer in layers]),
                    "us_state_in_cache": graph_us([call(one, **launch)] * LAYERS),
                    "target_us": TARGETS_US.get((heads, nodes)),
                    "bytes": moved,
                    "floor_us": moved / BANDWIDTH * 1e6,
                    "stash_bytes_per_node": one["new"].bytes_per_node,
                }
                yield record
                if record["chosen"] or best is None:
                    best = record
            if only_candidates:
                continue

            dense = [{name: x.contiguous() for name, x in layer["inputs"].items()} for layer in layers]
            if plain_recurrence is not None:
                calls = [
                    lambda layer=layer, x=x: plain_recurrence(
                        q=x["q"], k=x["k"], v=x["v"], g=x["log_decay"], beta=x["beta"], initial_state=layer["state"],
                        output_final_state=True, use_qk_l2norm_in_kernel=True,
                    )
                    for layer, x in zip(layers, dense, strict=True)
                ]  # fmt: skip
                try:
                    us = graph_us(calls)
                    yield {
                        "benchmark": "plain recurrent kernel, flash-linear-attention",
                        "heads": heads,
                        "nodes": nodes,
                        "us": us,
                        "ratio_to_tree": us / best["us"],
                        "bytes": 2 * num_bytes(one["state"]) + num_bytes(*dense[0].values(), one["out"]),
                    }
                except Exception as error:
                    print(f"flash-linear-attention: {error}", file=sys.stderr)
            buffer = torch.empty(nodes, heads, KEY_DIM, VALUE_DIM, device="cuda")
            tree = torch.tensor(parents, dtype=torch.int32).cuda()
            us = graph_us(
                [
                    lambda layer=layer, x=x: node_states(layer["state"][0], buffer, parents=tree, out=layer["out"], **x)
                    for layer, x in zip(layers[:10], dense[:10], strict=True)
                ],
                replays=5,
            )
            yield {
                "benchmark": "state per node, parent pointers",
                "heads": heads,
                "nodes": nodes,
                "us": us,
                "ratio_to_tree": us / best["us"],
                "bytes": 2 * num_bytes(buffer) + num_bytes(*dense[0].values(), one["out"]),
                "commit": "not included",
            }


CONTEXTS = ((1024, 32768), (1024, 1024), (8192, 32768), (32768, 32768), (131072, 131072))  # text, rows of the buffers
TWO_STAGES = {"BLOCK_KEYS": 64, "num_stages": 2, "AHEAD": 0}
BLOCKS = {  # of tree attention, by the most query rows of a key head, to be measured beside `block_sizes`
    16: {
        "64 keys, two stages": TWO_STAGES,
        "32 keys, three stages, two programs a processor": {"num_stages": 3, "residents": 2},
    },
    128: {"64 keys, two stages": TWO_STAGES, "asked for one block ahead": TWO_STAGES | {"AHEAD": 1}},
    4096: {
        "64 keys, two stages": TWO_STAGES,
        "32 keys, four stages": {"BLOCK_KEYS": 32, "num_stages": 4, "AHEAD": 0},
    },
}


def tree_attention() -> Iterator[dict]:
    """16 query and 2 key heads of 256 over short and long texts; 24 and 4 of them where a tree is narrow or wide.

    What `block_sizes` chooses comes first for every case, then the other kinds.
    """
    cases = [((16, 2), nodes, *sizes) for nodes in (1, 16, 64, 256) for sizes in CONTEXTS]
    for case in [*cases, ((24, 4), 1, *CONTEXTS[3]), ((24, 4), 256, *CONTEXTS[3])]:
        yield from attention_records(*case, {"as chosen": {}})
    for case in cases:
        kinds = next(kinds for most, kinds in BLOCKS.items() if 8 * case[1] <= most)
        if case[2:] != CONTEXTS[1]:
            yield from attention_records(*case, kinds)


def attention_records(
    heads: tuple[int, int], nodes: int, context: int, capacity: int, kinds: dict[str, dict]
) -> Iterator[dict]:
    """One case with its gate, in every kind. heads: query and key heads of 256    capacity: committed rows of the buffers"""
    dim, bfloat16 = 256, torch.bfloat16
    length = torch.tensor([context]).cuda()
    options = {"ancestors": ancestors_of(make_tree(nodes)), "length": length}
    layers = []
    for _ in range(max(2, min(10, 2**28 // (context * heads[1] * 4 * dim)))):
        q, gate = (random(1, nodes, heads[0], dim, dtype=bfloat16).transpose(1, 2) for _ in range(2))
        keys, values = (random(1, heads[1], capacity + nodes, dim, dtype=bfloat16) for _ in range(2))
        layers.append({"q": q, "keys": keys, "values": values, "gate": gate, "out": torch.empty_like(q)})
    wide = {name: x.float() for name, x in layers[0].items() if name != "out"}
    expected = attention_truth.tree_attention(**wide, **options)
    del wide
    moved = (context + nodes) * heads[1] * dim * 2 * keys.element_size()
    operations = 4 * heads[0] * nodes * (context + nodes) * dim
    floor, matrix_floor = moved / BANDWIDTH * 1e6, operations / MATRIX_RATE * 1e6
    for name, launch in kinds.items():
        sizes = attention.block_sizes(heads[0] // heads[1] * nodes, dim, 2, attention._shared_bytes(q.device)) | launch
        record = {
            "benchmark": "tree_attention",
            "blocks": name,
            "heads": heads[0],
            "key_heads": heads[1],
            "nodes": nodes,
            "context": context,
            "capacity": capacity,
            "launch": sizes | {"shares": attention.num_shares(q, keys, sizes)},
        }
        calls = [partial(attention.tree_attention, **layer, **options, launch=launch) for layer in layers]
        try:
            error, us = relative_error(calls[0](), expected), graph_us(calls)
        except Exception as failure:  # the other kinds keep their figures
            yield record | {"failed": str(failure)[:300]}
            continue
        yield record | {
            "us": us,
            "error": error,
            "bytes": moved,
            "floor_us": floor,
            "ratio_to_floor": us / floor,
            "operations": operations,
            "matrix_floor_us": matrix_floor,
            "ratio_to_larger_floor": us / max(floor, matrix_floor),
            "scratch_bytes": num_bytes(attention.scratch_for(q, keys, launch)),
        }


def commit_all_layers() -> Iterator[dict]:
    """A path of 16 tokens in all 40 layers of the 35B-A3B shape: 30 recurrent ones, 10 with keys and values."""
    nodes, (path, length) = 64, path_of(64)
    states = random(30, 1, 32, KEY_DIM, VALUE_DIM)
    layers = [stash_of(nodes, 16, 32) for _ in range(30)]
    stash = DeltaStash(*(torch.stack([getattr(s, name) for s in layers]) for name in ("k", "u", "log_decay")))
    windows, inputs = random(30, 1, 8192, 3, dtype=torch.bfloat16), random(30, 1, nodes, 8192, dtype=torch.bfloat16)
    keys, values = (random(10, 1, 2, 4096, 256, dtype=torch.bfloat16) for _ in range(2))
    committed = torch.tensor([1024], dtype=torch.int32).cuda()
    parts = {
        "states": lambda: commit.commit_states(states, stash, path, length=length),
        "windows": lambda: commit.commit_windows(windows, inputs, path, length=length),
        "rows": lambda: commit.commit_rows(keys, values, path, committed=committed, length=length),
    }
    moved = 2 * num_bytes(states) + PATH * sum(s.bytes_per_node for s in layers) + 3 * num_bytes(windows) // 2
    yield {
        "benchmark": "commit of one path, 40 layers of 35B-A3B",
        "path": PATH,
        "launches": len(parts),
        "us": graph_us([lambda: [part() for part in parts.values()]]),
        "us_each": {name: graph_us([part]) for name, part in parts.items()},
        "target_us": 120,
        "bytes": moved,
        "floor_us": moved / BANDWIDTH * 1e6,
    }


def convolution() -> Iterator[dict]:
    for nodes in (16, 64, 256):
        parents = make_tree(nodes)
        rows, weight = conv_rows(torch.tensor(parents), 4).cuda(), random(8192, 4, dtype=torch.bfloat16)
        calls = []
        for _ in range(LAYERS):
            window, x = random(1, 8192, 3, dtype=torch.bfloat16), random(1, nodes, 8192, dtype=torch.bfloat16)
            out = torch.empty_like(x)
            calls.append(
                lambda window=window, x=x, out=out: conv.tree_conv(
                    window, x, weight=weight, bias=None, rows=rows, out=out
                )
            )
        moved = 2 * num_bytes(x) + num_bytes(window, weight)
        yield {
            "benchmark": "tree_conv",
            "nodes": nodes,
            "channels": 8192,
            "us": graph_us(calls),
            "bytes": moved,
            "floor_us": moved / BANDWIDTH * 1e6,
        }


def memory() -> Iterator[dict]:
    """Scratch of a 256-node verify in the 48 recurrent layers of the 27B shape, measured, against a state per node."""
    nodes, heads, layers = 256, 48, 48
    seen, inputs, state = ancestors_of(make_tree(nodes)), delta_inputs(256, 48), random(1, heads, KEY_DIM, VALUE_DIM)

    def peak_of(work: Callable[[], list]) -> int:
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        kept = work()
        torch.cuda.synchronize()
        del kept
        return torch.cuda.max_memory_allocated() - before

    def ours() -> list:
        out = torch.empty(1, nodes, heads, VALUE_DIM, device="cuda", dtype=torch.bfloat16)
        return [
            delta.tree_gated_delta(state, **inputs, ancestors=seen, max_depth=DEPTH, out=out)[1] for _ in range(layers)
        ]

    def per_node() -> list:
        return [torch.empty(nodes, heads, KEY_DIM, VALUE_DIM, device="cuda") for _ in range(layers)]

    stash, states = peak_of(ours), peak_of(per_node)
    per_layer_and_node = 4 * (16 * KEY_DIM + heads * VALUE_DIM + heads)
    yield {
        "benchmark": "scratch of a 256-node verify, 48 recurrent layers of 27B",
        "peak_bytes": stash,
        "formula_bytes": layers * nodes * per_layer_and_node,
        "peak_bytes_state_per_node": states,
        "formula_bytes_state_per_node": layers * nodes * heads * KEY_DIM * VALUE_DIM * 4,
        "ratio": states / stash,
    }


SECTIONS = {f.__name__: f for f in (recurrence, candidates, tree_attention, commit_all_layers, convolution, memory)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file of JSON lines to write; they are printed too")
    parser.add_argument(
        "--only", nargs="*", choices=SECTIONS, default=[name for name in SECTIONS if name != "candidates"]
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    where = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
        "command": "python benchmarks/kernel_times.py"
        + (f" --only {' '.join(options.only)}" if len(options.only) < 5 else ""),
    }
    with open(options.out, "w") if options.out else open("/dev/null", "w") as file:
        for name in options.only:
            start = time.monotonic()
            for record in SECTIONS[name]():
                rounded = {k: round(v, 3) if isinstance(v, float) and v > 0.01 else v for k, v in record.items()}
                line = json.dumps(rounded | where)
                print(json.dumps(rounded), flush=True)
                file.write(line + "\n")
                file.flush()
            print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
