"""Verify and draft of the fast target at published shapes with random weights, as JSON lines: time, floor, ratio.

    python benchmarks/latency.py --shape qwen3.6-35b-a3b --out results/latency-h200/qwen3.6-35b-a3b.jsonl

`floor_ms` is the bytes of the weights that the N nodes touch over the copy bandwidth measured in the same run; experts are
counted as this run's random routing woke them, which is more than real text wakes. Times are medians over replays of the
captured graph, between device events. `--profile` adds the kernels that take the time.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
import transformers
import triton

from deltatree.drafter import FastDFlashDrafter
from deltatree.models import FastTarget, fast
from deltatree.models.packed import PackedExperts
from deltatree.models.shapes import SHAPES, random_target
from deltatree.projection.shapes import random_drafter
from deltatree.tree import DraftTree

TARGETS = {
    "qwen3.6-35b-a3b": {1: 2.8, 16: 8.2, 64: 14.5, 256: 19.0},  # ms
    "qwen3.6-27b": {1: 1.2, 16: 1.25, 64: 1.35, 256: 2.0},  # times the floor
    "qwen3-coder-30b-a3b": {1: 2.0, 16: 1.3, 64: 1.2, 256: 1.3},  # times the floor
}
DEPTH = 15


def random_tree(num_nodes: int, vocab_size: int) -> DraftTree:
    """A spine of DEPTH nodes and branches beside it."""
    generator = torch.Generator().manual_seed(0)
    parents, depths = [-1], [0]
    for node in range(1, num_nodes):
        parent = node - 1
        while node > DEPTH:
            parent = int(torch.randint(0, node, (1,), generator=generator))
            if depths[parent] < DEPTH:
                break
        parents.append(parent)
        depths.append(depths[parent] + 1)
    tokens = torch.randint(0, vocab_size, (num_nodes,), generator=generator).tolist()
    return DraftTree.from_parents(tokens, parents)


def median_ms(work, replays: int = 15) -> tuple[float, float]:
    """Median and spread (interquartile range) of replays, between device events."""
    times = []
    for _ in range(replays + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    quarters = statistics.quantiles(times[3:], n=4)
    return quarters[1], quarters[2] - quarters[0]


def copy_bandwidth() -> float:
    """Bytes a second, read and written."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_()
    copy = torch.empty_like(source)
    ms, _ = median_ms(lambda: copy.copy_(source), 10)
    return 2 * source.numel() / ms * 1e3


def num_bytes(*tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def touched_bytes(target: FastTarget, buffers, count: int) -> tuple[int, float]:
    """Bytes of the weights that the nodes in the buffers touch, and the mean of woken experts a layer."""
    woken, route = [], fast.route_tokens

    def counting(x, router, num_experts, top_k, *args, **kwargs):
        routing = route(x, router, num_experts, top_k, *args, **kwargs)
        woken.append(routing.experts[:, :top_k].unique().numel())
        return routing

    fast.route_tokens = counting
    try:
        target.step(buffers, buffers.nodes(count), DEPTH)
    finally:
        fast.route_tokens = route
    total, seen = num_bytes(target.model.get_output_embeddings().weight), iter(woken)
    for layer in target.layers:
        total += num_bytes(layer.mixer.projection, layer.mixer.output)
        if isinstance(layer.mlp, PackedExperts):
            total += num_bytes(layer.mlp.router)
            total += next(seen) * num_bytes(layer.mlp.gate_up[0], layer.mlp.down[0])
            if layer.mlp.shared is not None:
                total += num_bytes(layer.mlp.shared.gate_up, layer.mlp.shared.down)
        else:
            total += num_bytes(layer.mlp.gate_up, layer.mlp.down)
    return total, sum(woken) / max(len(woken), 1)


def prepare(target: FastTarget, state, tree: DraftTree, context: int) -> int:
    """Put the tree in the buffers behind `context` committed rows of noise."""
    buffers, count = state.buffers, target.bucket(len(tree))
    buffers.length.fill_(context)
    buffers.place(tree, count)
    return count


def profile(work, replays: int = 3, top: int = 14) -> dict:
    """The kernels of one replay: microseconds and launches by name, and the gaps between launches."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    work()
    torch.cuda.synchronize()
    with profiler(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(replays):
            work()
        torch.cuda.synchronize()
    events = sorted(
        (e.time_range.start, e.time_range.end, e.name) for e in seen.events() if "CUDA" in str(e.device_type)
    )
    by_name, gaps = defaultdict(lambda: [0.0, 0]), []
    for (start, end, name), following in zip(events, [*events[1:], None], strict=True):
        by_name[name.split("(")[0][:70]][0] += end - start
        by_name[name.split("(")[0][:70]][1] += 1
        if following is not None:
            gaps.append(following[0] - end)
    busy = sum(us for us, _ in by_name.values())
    ranked = sorted(by_name.items(), key=lambda item: -item[1][0])[:top]
    small = [gap for gap in gaps if 0 < gap < 100]
    return {
        "busy_us": round(busy / replays, 1),
        "gaps_us": round(sum(small) / replays, 1),
        "launches": len(events) // replays,
        "kernels": [[name, round(us / replays, 1), n // replays, round(us / n, 2)] for name, (us, n) in ranked],
    }


def verify_lines(
    target: FastTarget, shape: str, bandwidth: float, contexts: list[int], nodes: list[int], profiled: list[int]
):
    state = target.new_state()
    state.buffers.keys.normal_(), state.buffers.values.normal_(), state.buffers.matrices.normal_(std=0.1)
    for context in contexts:
        for num_nodes in nodes:
            began = time.monotonic()
            count = prepare(target, state, random_tree(num_nodes, target.vocab_size), context)
            work = target.captured_verify(state.buffers, count)
            captured = time.monotonic() - began
            touched, woken = touched_bytes(target, state.buffers, count)
            ms, spread = median_ms(work)
            floor = touched / bandwidth * 1e3
            aim = TARGETS[shape].get(num_nodes)
            line = {
                "benchmark": "verify", "shape": shape, "nodes": num_nodes, "context": context, "ms": round(ms, 3),
                "spread_ms": round(spread, 3), "floor_ms": round(floor, 3), "ratio": round(ms / floor, 3),
                "target_ms": aim if shape == "qwen3.6-35b-a3b" else None,
                "target_ratio": None if shape == "qwen3.6-35b-a3b" else aim,
                "woken_experts": round(woken, 1), "weights_touched_bytes": touched, "capture_seconds": round(captured, 1),
            }  # fmt: skip
            if num_nodes in profiled and context == contexts[0]:
                line["profile"] = profile(work)
            yield line
    for path_length in (1, 16):
        buffers = state.buffers
        buffers.path.copy_(torch.arange(len(buffers.path)))

        def commit(path_length=path_length, buffers=buffers):
            buffers.steps.fill_(path_length)
            target.captured_commit(buffers, path_length)()

        commit()
        buffers.length.fill_(contexts[0])
        ms, _ = median_ms(commit, 10)
        yield {"benchmark": "commit", "shape": shape, "path": path_length, "us": round(ms * 1e3, 1)}
    free, total = torch.cuda.mem_get_info()
    weights = num_bytes(*target.model.parameters())
    yield {
        "benchmark": "memory", "shape": shape, "context_length": target.context_length,
        "max_nodes": state.buffers.max_nodes, "weights_bytes": weights, "static_buffers_bytes": state.buffers.num_bytes,
        "allocated_bytes": torch.cuda.memory_allocated(), "reserved_bytes": torch.cuda.memory_reserved(),
        "device_used_bytes": total - free,
        "reserved_over_weights_and_buffers": round(torch.cuda.memory_reserved() / (weights + state.buffers.num_bytes), 3),
    }  # fmt: skip


PUBLISHED_DRAFTER = {
    "intermediate_size": 6144, "num_layers": 8, "num_heads": 32, "num_kv_heads": 4, "head_dim": 128, "rope_theta": 1e7,
    "context_length": 40_960,
}  # fmt: skip
"""About 0.9 GB of weights beside the 35B-A3B."""


def draft_lines(target: FastTarget, bandwidth: float, context: int = 4096):
    drafter = FastDFlashDrafter(random_drafter(target, 16, **PUBLISHED_DRAFTER), context_length=context + 64)
    session = drafter.start()
    buffers = session.buffers
    buffers.keys.normal_(), buffers.values.normal_(), buffers.features.normal_()
    work = drafter.captured(buffers)

    def draft():
        buffers.length.fill_(context)
        buffers.count.fill_(5)
        work()

    ms, spread = median_ms(draft)
    touched = num_bytes(*drafter.model.parameters(), target.model.get_output_embeddings().weight)
    yield {
        "benchmark": "draft", "block": drafter.config.block_size, "context": context, "ms": round(ms, 3),
        "spread_ms": round(spread, 3), "floor_ms": round(touched / bandwidth * 1e3, 3), "target_ms": 1.0,
        "drafter_bytes": num_bytes(*drafter.model.parameters()), "profile": profile(draft),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True, choices=TARGETS)
    parser.add_argument("--nodes", type=lambda s: [int(x) for x in s.split(",")], default=[1, 16, 64, 256])
    parser.add_argument("--contexts", type=lambda s: [int(x) for x in s.split(",")], default=[1024, 32_000])
    parser.add_argument("--profile", type=lambda s: [int(x) for x in s.split(",")], default=[], help="node counts")
    parser.add_argument("--drafter", action="store_true", help="also a draft with a drafter of the published size")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has, for a trial")
    parser.add_argument("--out", type=Path, help="file of JSON lines to write; they are printed too")
    options = parser.parse_args()
    began = time.monotonic()
    changes = {}
    if options.layers:
        changes = {"num_hidden_layers": options.layers}
        kinds = SHAPES[options.shape][1].get("layer_types")
        changes |= {"layer_types": kinds[: options.layers]} if kinds else {}
    where = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "transformers": transformers.__version__,
                     "python": platform.python_version()},
        "command": " ".join(["python benchmarks/latency.py", *(a for a in sys.argv[1:])]),
    }  # fmt: skip
    with torch.inference_mode(), open(options.out or "/dev/null", "w") as file:
        bandwidth = copy_bandwidth()
        torch.cuda.empty_cache()
        taps = (2, 11, 20, 29, 38) if options.drafter and not options.layers else ()
        reference = random_target(options.shape, taps=taps, **changes)
        target = FastTarget(reference, context_length=max(options.contexts) + 16)
        print(
            f"{options.shape}: loaded in {time.monotonic() - began:.0f} s, {bandwidth / 1e12:.2f} TB/s", file=sys.stderr
        )

        def lines():
            yield from verify_lines(target, options.shape, bandwidth, options.contexts, options.nodes, options.profile)
            if options.drafter:
                yield from draft_lines(target, bandwidth)

        for line in lines():
            file.write(json.dumps(line | {"copy_bandwidth": round(bandwidth)} | where) + "\n")
            file.flush()
            kernels = line.pop("profile", {}).pop("kernels", [])
            print(json.dumps(line), flush=True)
            for kernel in kernels:
                print("   ", *kernel, flush=True)
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
