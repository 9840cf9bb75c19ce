"""Linear layers of the models' shapes on one GPU, as JSON lines: this repository's kernel and cuBLAS (torch.mm) in one run.

    python benchmarks/linear.py --out results.jsonl
    python benchmarks/linear.py --tune --shapes 9216x2048 5120x17408        # launches side by side, a table last

Every time is the median over replays of one graph that holds one call for each copy of the weight (together far larger than
the L2 cache), divided by the number of calls. `floor_us` is the weight's bytes over 4.2 TB/s. Before anything is
timed, the result is checked against float64, and that the first token's bits do not depend on the number of tokens.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import triton
from kernel_times import BANDWIDTH, graph_us, num_bytes, relative_error
from torch import Tensor

from deltatree.kernels.linear import triton as kernel

SHAPES = {  # rows x columns of the weight
    "12352x2048": "35B-A3B: recurrent layer, all projections in",
    "9216x2048": "35B-A3B: attention layer, all projections in",
    "2048x4096": "35B-A3B: projection out",
    "248320x2048": "35B-A3B: head",
    "16480x5120": "27B: recurrent layer, all projections in",
    "5120x6144": "27B: projection out",
    "34816x5120": "27B: gate and up",
    "5120x17408": "27B: down",
}
TOKENS = (1, 16, 64, 256)
ENOUGH_BYTES = 400e6  # of weights in one graph
COMPILERS = 10  # processes


def variant(block_w: int, block_k: int, num_warps: int, num_stages: int) -> dict[str, int]:
    return {"BLOCK_W": block_w, "BLOCK_K": block_k, "num_warps": num_warps, "num_stages": num_stages}


VARIANTS = {  # by BLOCK_N, at most 10 each
    16: [(64, 64, 4, 6), (64, 128, 4, 3), (64, 128, 4, 4), (64, 128, 4, 6), (128, 64, 4, 6), (128, 128, 4, 4)],
    64: [(64, 64, 4, 6), (64, 128, 4, 4), (128, 64, 4, 4), (128, 64, 4, 6), (128, 128, 4, 4), (128, 64, 8, 6)],
    256: [(64, 64, 4, 4), (128, 64, 8, 3), (128, 64, 8, 4), (128, 32, 8, 6)],
}


def case_of(shape: str, tokens: int) -> tuple[Tensor, list[Tensor], Tensor, kernel.Partials | None]:
    """x, enough copies of a weight, out, scratch"""
    rows, columns = map(int, shape.split("x"))
    copies = max(2, int(ENOUGH_BYTES // (2 * rows * columns)))
    x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
    weights = torch.randn(copies, rows, columns, device="cuda", dtype=torch.bfloat16).mul_(columns**-0.5)
    return x, list(weights), x.new_empty(tokens, rows), kernel.scratch_for(x, weights[0])


def compile_one(shape: str, tokens: int, launch: dict | None, chained: bool) -> None:
    """In a process of its own: fills Triton's cache with what a call needs."""
    rows, columns = map(int, shape.split("x"))
    x, weight = (torch.zeros(n, columns, device="cuda", dtype=torch.bfloat16) for n in (tokens, rows))
    try:
        kernel.linear(x, weight, launch=launch, chained=chained)
    except triton.OutOfResources as error:
        print(f"{shape}, {tokens} tokens, {launch}: {error}", file=sys.stderr)


def compile_all(jobs: list[tuple]) -> None:
    start = time.monotonic()
    with ProcessPoolExecutor(min(COMPILERS, len(jobs)), multiprocessing.get_context("spawn")) as pool:
        for job in [pool.submit(compile_one, *job) for job in jobs]:
            job.result()
    print(f"compiled {len(jobs)} calls in {time.monotonic() - start:.0f} s", file=sys.stderr)


def measure(shape: str, tokens: int, chainable: bool) -> dict:
    x, weights, out, scratch = case_of(shape, tokens)
    weight = weights[0]
    few = slice(0, min(4096, len(weight)))  # float64 of a whole head would not fit
    exact = x.double() @ weight[few].double().T
    kernel.linear(x, weight, out=out, scratch=scratch)
    error = relative_error(out[:, few], exact)
    assert error < 4e-3, error
    record = {
        "benchmark": "linear",
        "shape": shape,
        "tokens": tokens,
        "error": error,
        "error_mm": relative_error(torch.mm(x, weight.T)[:, few], exact),
        "same_bits_alone": torch.equal(kernel.linear(x[:1], weight), out[:1]),
        "same_bits_alone_mm": torch.equal(torch.mm(x[:1], weight.T), torch.mm(x, weight.T)[:1]),
        "launch": kernel.block_sizes(tokens, 2, kernel._shared_bytes(x.device)),
        "shares": kernel.shares_of(*weight.shape),
        "bytes": num_bytes(weight),
        "floor_us": num_bytes(weight) / BANDWIDTH * 1e6,
        "us": graph_us([lambda w=w: kernel.linear(x, w, out=out, scratch=scratch) for w in weights]),
        "us_mm": graph_us([lambda w=w: torch.mm(x, w.T, out=out) for w in weights]),
    }
    if chainable:
        calls = [lambda w=w: kernel.linear(x, w, out=out, scratch=scratch, chained=True) for w in weights]
        record["us_chained"] = graph_us(calls)
    return record | {
        "ratio": record["us"] / record["floor_us"],
        "ratio_mm": record["us_mm"] / record["floor_us"],
    }


def variants_of(tokens: int) -> list[dict[str, int]]:
    block_n = next(n for n in VARIANTS if tokens <= n or n == 256)
    return [{}, *(variant(*sizes) for sizes in VARIANTS[block_n])]


def tune(shape: str, tokens: int) -> Iterator[dict]:
    x, weights, out, _ = case_of(shape, tokens)
    floor = num_bytes(weights[0]) / BANDWIDTH * 1e6
    for launch in variants_of(tokens):
        scratch = kernel.scratch_for(x, weights[0], launch)
        calls = [lambda w=w: kernel.linear(x, w, out=out, scratch=scratch, launch=launch) for w in weights]
        try:
            us = graph_us(calls, replays=9)
        except triton.OutOfResources:
            continue
        yield {
            "benchmark": "linear tune",
            "shape": shape,
            "tokens": tokens,
            "launch": launch,
            "us": us,
            "floor_us": floor,
        }


def print_tuned(records: list[dict]) -> None:
    """One line for each size: the launches, best first, with their times."""
    print("\nus by launch, best first: BLOCK_W,BLOCK_K,num_warps,num_stages")
    for key in dict.fromkeys((r["shape"], r["tokens"]) for r in records):
        mine = sorted((r for r in records if (r["shape"], r["tokens"]) == key), key=lambda r: r["us"])
        names = [",".join(map(str, r["launch"].values())) or "table" for r in mine]
        listed = "  ".join(f"{name} {r['us']:.1f}" for name, r in zip(names, mine, strict=True))
        print(f"{key[0]:>12} N={key[1]:<4} floor {mine[0]['floor_us']:.1f}: {listed}")


def print_measured(records: list[dict]) -> None:
    names = ("floor_us", "us", "us_chained", "us_mm", "ratio", "ratio_mm")
    print(f"\n{'shape':>12} {'tokens':>6} " + " ".join(f"{name:>10}" for name in names) + "  same bits alone: ours, mm")
    for r in records:
        cells = " ".join(f"{r.get(name, float('nan')):10.2f}" for name in names)
        print(f"{r['shape']:>12} {r['tokens']:>6} {cells}  {r['same_bits_alone']}, {r['same_bits_alone_mm']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file of JSON lines to write; they are printed too")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS))
    parser.add_argument("--tune", action="store_true", help="compare launches instead of measuring the table's")
    options = parser.parse_args()
    chainable = torch.cuda.get_device_capability() >= (9, 0)
    sizes = [(shape, tokens) for shape in options.shapes for tokens in options.tokens]
    if options.tune:
        compile_all([(*size, launch, False) for size in sizes for launch in variants_of(size[1])])
    else:
        compile_all([(*size, None, chained) for size in sizes for chained in {False, chainable}])
    torch.manual_seed(0)
    where = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
        "command": " ".join(["python benchmarks/linear.py", *sys.argv[1:]]),
    }
    records = []
    with open(options.out, "w") if options.out else open("/dev/null", "w") as file:
        for size in sizes:
            for record in tune(*size) if options.tune else [measure(*size, chainable)]:
                records.append(record)
                rounded = {k: round(v, 3) if isinstance(v, float) and v > 0.01 else v for k, v in record.items()}
                print(json.dumps(rounded), flush=True)
                file.write(json.dumps(rounded | where) + "\n")
                file.flush()
    (print_tuned if options.tune else print_measured)(records)


if __name__ == "__main__":
    main()
