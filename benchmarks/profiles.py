"""`deltatree plan` for several acceptance profiles on one loaded shape: plain, chain, fixed budgets and auto, interleaved.

    python benchmarks/profiles.py --shape qwen3.6-35b-a3b --out results/plan-h200/qwen3.6-35b-a3b.jsonl

Random weights, times of this machine, acceptance by profile: a projection.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path

import torch
import transformers
import triton

import deltatree.projection.run as projection
from deltatree.models.shapes import SHAPES
from deltatree.projection.profiles import PROFILES, parse_profile
from deltatree.projection.run import ProjectionPlan, project
from deltatree.projection.shapes import target_and_drafter


def keep_drafter() -> None:
    """One replay drafter for all profiles, so that what was captured for it is captured once."""
    make, kept = projection.FastReplayDrafter, []

    def again(replay):
        if not kept:
            kept.append(make(replay))
        kept[0].replay = replay
        return kept[0]

    projection.FastReplayDrafter = again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True, choices=SHAPES)
    parser.add_argument("--profiles", nargs="*", default=list(PROFILES))
    parser.add_argument("--tokens", type=int, default=48, help="new tokens a prompt and method")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--budgets", default="8,16,32,64,auto")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    began = time.monotonic()
    budgets = tuple(b if b == "auto" else int(b) for b in options.budgets.split(","))
    plan = ProjectionPlan(budgets=budgets, max_new_tokens=options.tokens, repeats=options.repeats, context_length=64)
    target, timed = target_and_drafter(options.shape, PROFILES["chat"].depth + 1, backend="fast")
    keep_drafter()
    where = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "versions": {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "transformers": transformers.__version__,
        },
        "command": " ".join(["python benchmarks/profiles.py", *sys.argv[1:]]),
    }
    with options.out.open("w") as file:
        for name in options.profiles:
            rows = project(
                target, parse_profile(name), plan, timed=timed, names=(options.shape, "random"),
                on_pass=lambda done, total, arm: print(f"{time.monotonic() - began:.1f} s: {done} of {total}, {arm.label}", flush=True),
            )  # fmt: skip
            best = max(row["tokens_per_second"] for row in rows if row["budget"] != "auto")
            for row in rows:
                row["share_of_best_fixed"] = row["tokens_per_second"] / best
                file.write(json.dumps(row | where) + "\n")
                print(
                    f"{name:12} {row['label']:20} {row['tokens_per_second']:7.1f} tok/s {row['speedup']:5.2f}x "
                    f"{row['speedup_over_dflash']:5.2f}x chain  accept {row['acceptance_length']:5.2f} nodes "
                    f"{row['nodes_per_round']:5.1f} {row['milliseconds_per_round']:6.2f} ms/round "
                    f"of best {row['share_of_best_fixed']:.3f} departures {row['departures']}",
                    flush=True,
                )
            file.flush()
            print(f"{time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
