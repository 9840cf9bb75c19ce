"""Prefill of the fast target at published shapes with random weights, as JSON lines: seconds, tokens/s, peak memory.

    python benchmarks/prefill.py --shape qwen3.6-35b-a3b --out results/latency-h200/prefill.jsonl

One line for each prompt length and rule of the recurrent layers: `own`, and `fla` where flash-linear-attention is installed.
Seconds are those of the faster of two prompts after a short one that compiles; `first_seconds` is the first prompt of that
length. `beside_bytes` is the peak without weights, static buffers and the features that prefill returns. With more than one
rule, `state_difference` is how far the recurrent states of a rule are from those of the first one (relative).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import sys
import time
from pathlib import Path

import torch
import transformers
import triton

from deltatree.models import FastTarget
from deltatree.models.shapes import SHAPES, random_target
from deltatree.verify.chain import chain_rule

TAPS = (2, 11, 20, 29, 38)


def numbers(text: str) -> list[int]:
    """`1k,8k` or `1024,8192`."""
    return [1024 * int(part[:-1]) if part.endswith("k") else int(part) for part in text.split(",")]


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def seconds_of(target: FastTarget, tokens: list[int]) -> tuple[float, dict]:
    """Seconds of one prefill, and what it took and left."""
    state = target.new_state()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    began = time.perf_counter()
    verified = target.prefill(tokens, state)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    features = verified.features.numel() * verified.features.element_size()
    peak = torch.cuda.max_memory_allocated()
    return seconds, {
        "peak_bytes": peak,
        "beside_bytes": peak - before - features,
        "features_bytes": features,
        "finite": bool(torch.isfinite(verified.logits).all()),
        "matrices": state.buffers.matrices.clone(),
    }


def lines(target: FastTarget, shape: str, lengths: list[int], rules: list[str]):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(target.vocab_size, (max(lengths),), generator=generator).tolist()
    of_first: dict[int, torch.Tensor] = {}
    for name in rules:
        target.reference.chain_rule = chain_rule(name, target.device)
        began = time.perf_counter()
        seconds_of(target, tokens[:200])
        yield {
            "benchmark": "prefill-first",
            "shape": shape,
            "rule": name,
            "seconds": round(time.perf_counter() - began, 2),
        }
        for length in lengths:
            first, _ = seconds_of(target, tokens[:length])
            again, left = seconds_of(target, tokens[:length])
            seconds, matrices = min(first, again), left.pop("matrices")
            line = {
                "benchmark": "prefill", "shape": shape, "rule": name, "length": length, "seconds": round(seconds, 4),
                "first_seconds": round(first, 4), "tokens_per_second": round(length / seconds), **left,
            }  # fmt: skip
            if matrices.numel() and length in of_first:
                line["state_difference"] = float((matrices - of_first[length]).norm() / of_first[length].norm())
            of_first.setdefault(length, matrices)
            yield line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True, choices=SHAPES)
    parser.add_argument("--lengths", type=numbers, default=numbers("1k,8k,32k,128k"), help="tokens; k is 1,024")
    parser.add_argument("--rules", type=lambda s: s.split(","), help="own, fla [default: those that are installed]")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has, for a trial")
    parser.add_argument("--no-taps", action="store_true", help="without the features that a drafter reads")
    parser.add_argument("--out", type=Path, help="file of JSON lines to write; they are printed too")
    options = parser.parse_args()
    has_fla = importlib.util.find_spec("fla") is not None
    rules = options.rules or (["own", "fla"] if has_fla else ["own"])
    changes = {"max_position_embeddings": max(262_144, max(options.lengths) + 1)}
    kinds = SHAPES[options.shape][1].get("layer_types")
    layers = options.layers or SHAPES[options.shape][1]["num_hidden_layers"]
    if options.layers:
        changes |= {"num_hidden_layers": layers} | ({"layer_types": kinds[:layers]} if kinds else {})
    if not kinds:
        rules = rules[:1]  # no layer takes a rule
    taps = () if options.no_taps else tuple(tap for tap in TAPS if tap <= layers)
    where = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "transformers": transformers.__version__,
                     "fla": version_of("fla-core"), "python": platform.python_version()},
        "command": " ".join(["python benchmarks/prefill.py", *sys.argv[1:]]),
    }  # fmt: skip
    began = time.monotonic()
    reference = random_target(options.shape, taps=taps, **changes)
    target = FastTarget(reference, context_length=max(options.lengths) + 1, buckets=(1, 16))
    where["layers"], where["weights_bytes"] = (
        layers,
        sum(p.numel() * p.element_size() for p in target.model.parameters()),
    )
    print(f"{options.shape}: made in {time.monotonic() - began:.0f} s", file=sys.stderr)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
    with open(options.out or "/dev/null", "w") as file:
        for line in lines(target, options.shape, options.lengths, rules):
            file.write(json.dumps(line | where) + "\n")
            file.flush()
            print(json.dumps(line), flush=True)
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
