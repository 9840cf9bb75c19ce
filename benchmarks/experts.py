"""The mixture of experts of one layer on one GPU, as JSON lines: time in a CUDA graph against the bytes of woken experts.

    python benchmarks/experts.py --out results.jsonl                        # three shapes, 1 to 256 tokens
    python benchmarks/experts.py --tune --shapes qwen3.6-35b-a3b            # launches side by side, a table last
    python benchmarks/experts.py --routes                                   # both ways from tokens to blocks, a table

Every time is the median over replays of one graph that holds CALLS layers' calls, each with a routing of its own, over
LAYERS sets of weights (together far larger than the L2 cache), divided by the number of calls. Routing is random, which
wakes more experts than text does. `floor_us` is the weights of the experts woken, each read once, over 4.2 TB/s.
Before anything is timed, one call of every size is checked against the reference in float64.
Kernels are compiled first, in processes of their own.

With --routes a graph holds ROUTERS layers, each with a router of its own: a norm, as in a model, and then the library's product
and `route`, or `route_tokens`' own kernels, or nothing; the table shows what is added to the norm. `same` says how many of
the chosen experts are those of the other way, whose logits are rounded sums in another order.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from kernel_times import BANDWIDTH, graph_us, num_bytes, relative_error
from torch import Tensor

from deltatree.kernels.experts import Routing, reference, router
from deltatree.kernels.experts import triton as experts
from deltatree.kernels.fused import add_norm

CALLS = 8
LAYERS = 4
ROUTERS = 40
TOLERANCE = 6e-3  # relative, bfloat16 activations and results against float64
COMPILERS = 10  # processes


@dataclass(frozen=True, slots=True)
class Shape:
    experts: int
    top_k: int
    hidden: int
    width: int
    shared: bool  # one more expert of the same width

    @property
    def bytes_per_expert(self) -> int:
        return 3 * self.width * self.hidden * 2


SHAPES = {
    "qwen3.6-35b-a3b": Shape(256, 8, 2048, 512, True),
    "qwen3-coder-30b-a3b": Shape(128, 8, 2048, 768, False),
    "qwen3-next-80b-a3b": Shape(512, 10, 2048, 512, True),
}
TOKENS = (1, 4, 16, 64, 128, 256)


def variant(block_n: int, block_k: int, num_warps: int, num_stages: int) -> dict[str, int]:
    return {"BLOCK_N": block_n, "BLOCK_K": block_k, "num_warps": num_warps, "num_stages": num_stages}


VARIANTS = {
    "gate_up": [
        variant(16, 128, 2, 5),
        variant(16, 256, 4, 4),
        variant(32, 64, 4, 6),
        variant(32, 128, 2, 4),
        variant(32, 128, 4, 4),
        variant(32, 128, 4, 5),
        variant(32, 256, 4, 3),
        variant(64, 64, 4, 5),
        variant(64, 128, 4, 3),
        variant(64, 128, 4, 4),
        variant(64, 128, 8, 4),
    ],
    "down": [
        variant(32, 128, 2, 4),
        variant(32, 256, 4, 3),
        variant(64, 64, 4, 5),
        variant(64, 128, 4, 3),
        variant(64, 128, 4, 5),
        variant(64, 256, 4, 3),
        variant(128, 64, 4, 4),
        variant(128, 128, 4, 3),
        variant(128, 128, 4, 4),
        variant(128, 128, 8, 4),
    ],
}


ROUTES = {  # launches of `route_tokens`; "share": columns of a share
    "table": {},
    "share 128": {"share": 128},
    "share 512": {"share": 512},
    "16 rows": {"shares": {"BLOCK_R": 16, "num_warps": 2}},
    "64 rows": {"shares": {"BLOCK_R": 64}},
    "16 tokens": {"shares": {"BLOCK_N": 16}},
    "32 tokens": {"shares": {"BLOCK_N": 32}},
    "32 tokens, 64 rows": {"shares": {"BLOCK_N": 32, "BLOCK_R": 64}},
    "choose 2 warps": {"choose": {"num_warps": 2}},
    "group 1 warp": {"group": {"BLOCK_A": 64, "num_warps": 1}},
    "group 2 warps": {"group": {"BLOCK_A": 64, "num_warps": 2}},
    "group 8 warps": {"group": {"BLOCK_A": 256, "num_warps": 8}},
}


def weights_of(shape: Shape, num_experts: int) -> tuple[Tensor | None, ...]:
    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, device="cuda", dtype=torch.bfloat16).mul_(sizes[-1] ** -0.5)

    hidden, width = shape.hidden, shape.width
    shared = (normal(2 * width, hidden), normal(hidden, width)) if shape.shared else (None, None)
    return normal(num_experts, 2 * width, hidden), normal(num_experts, hidden, width), *shared


class Call:
    """One layer's call: its inputs, and room for all it writes."""

    def __init__(self, shape: Shape, weights: tuple[Tensor | None, ...], tokens: int) -> None:
        def random(*sizes: int) -> Tensor:
            return torch.randn(sizes, device="cuda", dtype=torch.bfloat16)

        num_experts = weights[0].shape[0]
        self.shape, self.weights = shape, weights
        self.x, self.logits = random(tokens, shape.hidden), random(tokens, num_experts)
        self.shared_logit = random(tokens) if shape.shared else None
        self.routing = Routing.empty(tokens, shape.top_k, num_experts, shared=shape.shared, device="cuda")
        self.scratch = reference.scratch_for(self.x, self.routing, weights[0], weights[2])
        self.parts = self.x.new_empty(*self.routing.experts.shape, shape.hidden)
        self.out = torch.empty_like(self.x)

    def route(self, chained: bool = False) -> None:
        experts.route(self.logits, self.shape.top_k, True, self.shared_logit, self.routing, chained=chained)

    def multiply(self, launch: dict | None = None, chained: bool = False) -> None:
        experts.expert_mlp(
            self.x, self.routing, *self.weights, self.parts, self.scratch, launch=launch, chained=chained
        )

    def combine(self, chained: bool = False) -> None:
        experts.combine(self.parts, self.out, chained=chained)

    def everything(self, chained: bool = False) -> None:
        self.route(chained)
        self.multiply(chained=chained)
        self.combine(chained)

    def woken_bytes(self) -> int:
        return self.routing.experts.unique().numel() * self.shape.bytes_per_expert

    def check(self) -> dict[str, float]:
        """Errors against float64; raises if one is out of tolerance or a token's experts are not the best ones."""
        for tensor in (self.scratch, self.parts, self.out, self.routing.weights):
            tensor.fill_(float("nan"))
        self.everything()
        gate = None if self.shared_logit is None else self.shared_logit.double()
        true_routing = reference.route(self.logits.double(), self.shape.top_k, True, gate)
        blocks = int(true_routing.num_blocks)
        assert torch.equal(self.routing.experts, true_routing.experts)
        assert int(self.routing.num_blocks) == blocks
        assert torch.equal(self.routing.block_rows[:blocks], true_routing.block_rows[:blocks])
        true_parts = reference.expert_mlp(self.x.double(), self.routing, *self.weights)
        errors = {
            "error_parts": relative_error(self.parts, true_parts),
            "error_sums": relative_error(self.out, reference.combine(true_parts)),
        }
        assert max(errors.values()) < TOLERANCE, errors
        return errors


def compile_one(name: str, tokens: int, launch: dict | None, chained: bool) -> None:
    """In a process of its own: fills Triton's cache with what a call needs. Few experts stand for many."""
    shape = SHAPES[name]
    call = Call(shape, weights_of(shape, 16), tokens)
    call.route(chained)
    call.multiply(launch, chained)
    call.combine(chained)


def compile_all(jobs: list[tuple]) -> None:
    start = time.monotonic()
    with ProcessPoolExecutor(min(COMPILERS, len(jobs)), multiprocessing.get_context("spawn")) as pool:
        for job in [pool.submit(compile_one, *job) for job in jobs]:
            job.result()
    print(f"compiled {len(jobs)} calls in {time.monotonic() - start:.0f} s", file=sys.stderr)


def same_bits(calls: list[Call], alone: Call) -> bool:
    """Whether the first token of the first call comes out the same when it is the only one."""
    first = calls[0]
    alone.x.copy_(first.x[:1]), alone.logits.copy_(first.logits[:1])
    if alone.shared_logit is not None:
        alone.shared_logit.copy_(first.shared_logit[:1])
    first.everything(), alone.everything()
    return torch.equal(alone.parts[0], first.parts[0]) and torch.equal(alone.out[0], first.out[0])


def measure(name: str, layers: list[tuple], tokens: int, chainable: bool) -> dict:
    shape = SHAPES[name]
    calls = [Call(shape, layers[i % LAYERS], tokens) for i in range(CALLS)]
    record = {"benchmark": "experts", "shape": name, "tokens": tokens, **calls[0].check()}
    for call in calls:
        call.route()
    moved = sum(call.woken_bytes() for call in calls) / CALLS
    sizes = experts.block_sizes(tokens, 2, experts._shared_bytes(calls[0].x.device))
    record |= {
        "same_bits_alone": same_bits(calls, Call(shape, layers[0], 1)),
        "launch": sizes,
        "woken_experts": sum(call.routing.experts.unique().numel() for call in calls) / CALLS,
        "bytes": moved,
        "floor_us": moved / BANDWIDTH * 1e6,
        "us_products": graph_us([call.multiply for call in calls]),
        "us_route": graph_us([call.route for call in calls]),
        "us_combine": graph_us([call.combine for call in calls]),
        "us": graph_us([call.everything for call in calls]),
    }
    if chainable:  # launches that overlap the end of the one before
        record["us_products_chained"] = graph_us([lambda c=c: c.multiply(chained=True) for c in calls])
        record["us_chained"] = graph_us([lambda c=c: c.everything(chained=True) for c in calls])
    record["part_bytes"] = num_bytes(calls[0].parts)
    return record | {"ratio_products": record["us_products"] / record["floor_us"]}


def tune(name: str, layers: list[tuple], tokens: int) -> Iterator[dict]:
    """Both products' time with one of them launched otherwise; the other one as the table has it."""
    calls = [Call(SHAPES[name], layers[i % LAYERS], tokens) for i in range(CALLS)]
    for call in calls:
        call.route()
    floor = sum(call.woken_bytes() for call in calls) / CALLS / BANDWIDTH * 1e6
    calls[0].check()
    for product, variants in {"table": [{}], **VARIANTS}.items():
        for launch in variants:
            record = {
                "benchmark": "experts tune",
                "shape": name,
                "tokens": tokens,
                "product": product,
                "launch": launch,
            }
            override = {product: launch}
            try:
                us = graph_us([lambda c=c: c.multiply(override) for c in calls], replays=9)
            except triton.OutOfResources as error:
                print(f"{product} {launch}: {error}", file=sys.stderr)
                continue
            yield record | {"us_products": us, "floor_us": floor, "ratio_products": us / floor}


def print_tuned(records: list[dict]) -> None:
    """Rows: launches; columns: tokens; entries: microseconds of both products, the best of a column and product starred."""
    for name in dict.fromkeys(r["shape"] for r in records):
        mine = [r for r in records if r["shape"] == name]
        columns = list(dict.fromkeys(r["tokens"] for r in mine))
        us = {(r["product"], json.dumps(r["launch"]), r["tokens"]): r["us_products"] for r in mine}
        print(f"\n{name}, us of both products; BLOCK_N BLOCK_K num_warps num_stages; * best of its product")
        print(f"{'tokens':>24} " + " ".join(f"{n:>8}" for n in columns))
        floors = {r["tokens"]: r["floor_us"] for r in mine}
        print(f"{'floor':>24} " + " ".join(f"{floors[n]:8.1f}" for n in columns))
        for product, launch in dict.fromkeys((p, text) for p, text, _ in us):
            best = {n: min(v for (p, _, m), v in us.items() if (p, m) == (product, n)) for n in columns}
            cells = [us.get((product, launch, n), float("nan")) for n in columns]
            stars = ["*" if v == best[n] else " " for v, n in zip(cells, columns, strict=True)]
            sizes = " ".join(f"{v:>3}" for v in json.loads(launch).values())
            print(f"{product + ' ' + sizes:>24} " + " ".join(f"{v:7.1f}{s}" for v, s in zip(cells, stars, strict=True)))


def print_measured(records: list[dict]) -> None:
    names = (
        "floor_us",
        "us_products",
        "ratio_products",
        "us_route",
        "us_combine",
        "us",
        "us_products_chained",
        "us_chained",
    )
    print(f"\n{'shape':>20} {'tokens':>6} " + " ".join(f"{name:>14}" for name in names))
    for r in records:
        print(f"{r['shape']:>20} {r['tokens']:>6} " + " ".join(f"{r.get(n, float('nan')):14.2f}" for n in names))


def run(options: argparse.Namespace, chainable: bool) -> Iterator[dict]:
    for name in options.shapes:
        layers = [weights_of(SHAPES[name], SHAPES[name].experts) for _ in range(LAYERS)]
        for tokens in options.tokens:
            if options.tune:
                yield from tune(name, layers, tokens)
            else:
                yield measure(name, layers, tokens, chainable)
        del layers
        torch.cuda.empty_cache()


class RouterCall:
    """One layer's way from a residual to blocks: the norm, then one of the two ways."""

    def __init__(self, shape: Shape, tokens: int) -> None:
        def normal(*sizes: int) -> Tensor:
            return torch.randn(sizes, device="cuda", dtype=torch.bfloat16)

        self.shape, rows = shape, shape.experts + shape.shared
        self.residual, self.weight = normal(tokens, shape.hidden), normal(shape.hidden)
        self.router = torch.zeros(-(-rows // 64) * 64, shape.hidden, device="cuda", dtype=torch.bfloat16)
        self.router[:rows] = normal(rows, shape.hidden) * shape.hidden**-0.5
        self.x = torch.empty_like(self.residual)
        self.routing = Routing.empty(tokens, shape.top_k, shape.experts, shared=shape.shared, device="cuda")

    def norm(self) -> None:
        add_norm(self.residual, None, weight=self.weight, eps=1e-6, out=self.x)

    def present(self) -> None:
        """The library's product and `route`."""
        self.norm()
        logits, gate = reference.router_logits(self.x, self.router, self.shape.experts, shared=self.shape.shared)
        experts.route(logits, self.shape.top_k, True, gate, self.routing)

    def fused(self, launch: dict | None = None) -> None:
        """`route_tokens` in kernels of its own."""
        self.norm()
        shape = self.shape
        router.route_tokens(
            self.x, self.router, shape.experts, shape.top_k, True, shape.shared, self.routing, launch=launch
        )

    def chosen(self) -> Tensor:
        return self.routing.experts.sort(-1).values.clone()


def routes(options: argparse.Namespace) -> Iterator[dict]:
    """Both ways, and with --tune further launches of the second."""
    for name in options.shapes:
        for tokens in options.tokens:
            calls = [RouterCall(SHAPES[name], tokens) for _ in range(ROUTERS)]
            norm = graph_us([call.norm for call in calls])
            present = graph_us([call.present for call in calls]) - norm
            calls[0].present()
            expected = calls[0].chosen()
            record = {"benchmark": "routes", "shape": name, "tokens": tokens, "us_norm": norm, "us_present": present}
            for kind, launch in ROUTES.items() if options.tune else [("table", {})]:
                launch = dict(launch)
                usual, router.SHARE = router.SHARE, launch.pop("share", router.SHARE)
                launch["shares"] = {"BLOCK_K": router.SHARE} | launch.get("shares", {})
                try:
                    us = graph_us([lambda c=c, launch=launch: c.fused(launch) for c in calls]) - norm
                    calls[0].fused(launch)
                    same = (calls[0].chosen() == expected).double().mean().item()
                    yield record | {"launch": kind, "us_fused": us, "same": same}
                except triton.OutOfResources as error:
                    print(f"{kind}: {error}", file=sys.stderr)
                router.SHARE = usual


def print_routes(records: list[dict]) -> None:
    names = ("us_norm", "us_present", "us_fused", "same")
    print(f"\n{'shape':>20} {'tokens':>6} {'launch':>20} " + " ".join(f"{name:>10}" for name in names))
    for r in records:
        cells = " ".join(f"{r[name]:10.3f}" for name in names)
        print(f"{r['shape']:>20} {r['tokens']:>6} {r['launch']:>20} {cells}")


def jobs_of(options: argparse.Namespace, chainable: bool) -> list[tuple]:
    """The calls to compile: those of the table for every size, or of every variant."""
    plain = [(n, t, None, c) for n in options.shapes for t in options.tokens for c in {False, chainable}]
    if not options.tune:
        return plain
    most = max(options.tokens)
    varied = [(n, most, {p: v}, False) for n in options.shapes for p, variants in VARIANTS.items() for v in variants]
    return [job for job in plain if not job[3]] + varied


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file of JSON lines to write; they are printed too")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS))
    parser.add_argument("--tune", action="store_true", help="compare launches instead of measuring the table's")
    parser.add_argument("--routes", action="store_true", help="the ways from tokens to blocks, instead of the products")
    options = parser.parse_args()
    chainable = torch.cuda.get_device_capability() >= (9, 0)
    if not options.routes:
        compile_all(jobs_of(options, chainable))
    torch.manual_seed(0)
    where = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
        "command": " ".join(["python benchmarks/experts.py", *sys.argv[1:]]),
    }
    records = []
    with open(options.out, "w") if options.out else open("/dev/null", "w") as file:
        for record in routes(options) if options.routes else run(options, chainable):
            records.append(record)
            rounded = {k: round(v, 3) if isinstance(v, float) and v > 0.01 else v for k, v in record.items()}
            print(json.dumps(rounded), flush=True)
            file.write(json.dumps(rounded | where) + "\n")
            file.flush()
    show: Callable[[list[dict]], None] = print_tuned if options.tune else print_measured
    if options.routes:
        show = print_routes
    show(records)


if __name__ == "__main__":
    main()
