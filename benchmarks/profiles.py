"""`deltatree plan` for several acceptance profiles on one loaded shape: plain, chain, fixed budgets and auto, interleaved.

    python benchmarks/profiles.py --shape qwen3.6-35b-a3b --out results/plan-h200/qwen3.6-35b-a3b.jsonl

Random weights, times of this machine, acceptance by profile: a projection. Every row also has what its measured milliseconds come to
over thousands of rounds (`expected_...`). For rows that were measured before, without a GPU:

    python benchmarks/profiles.py --from MEASURED.jsonl --out FILE --choice-ms 0.37 --draft-ms 0.74 --widest-ms 5.1

A profile that the rows lack takes the times of the first one, which is right for a dense target only: name it with --also. A tree of
--trees that they lack takes those of best-first.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch
import transformers

import deltatree.projection.run as projection
from deltatree.bench.plan import Arm
from deltatree.models.fast import BUCKETS
from deltatree.models.shapes import SHAPES
from deltatree.projection.expected import RoundSeconds, add_expected, seconds_of_rows, tree_of
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


def expect(options: argparse.Namespace) -> None:
    """Add expected figures to rows that were measured before."""
    by_profile: dict[str, list[dict]] = {}
    for line in options.measured.read_text().splitlines():
        row = json.loads(line)
        by_profile.setdefault(row["profile"], []).append(row)
    for name in options.also:
        first = next(iter(by_profile.values()))
        by_profile[name] = [_borrowed(row, name) for row in first]
    command = " ".join(["python benchmarks/profiles.py", *sys.argv[1:]])
    with options.out.open("w") as file:
        for name, rows in by_profile.items():
            rows = _with_trees(_with_fixed(rows, options.fixed), options.trees)
            trees = dict.fromkeys(filter(None, map(tree_of, rows)))
            seconds = {tree: _seconds(rows, tree, options) for tree in trees}
            tokens = rows[0]["max_new_tokens"] - 1
            add_expected(rows, parse_profile(name), seconds, num_tokens=tokens, lives=options.lives)
            for row in rows:
                file.write(json.dumps(row | {"expected_command": command}) + "\n")
                print(
                    f"{name:12} {row['label']:22} {row['expected_milliseconds_per_round']:6.2f} ms/round "
                    f"{row['expected_acceptance_length']:5.2f} tokens {row['expected_tokens_per_second']:7.1f} tok/s "
                    f"+-{100 * row['expected_tokens_per_second_error']:.1f}% {row['expected_speedup']:5.2f}x plain "
                    f"{row['expected_speedup_over_dflash']:5.3f}+-{row['expected_speedup_over_dflash_error']:.3f}x chain "
                    f"{row['expected_share_of_best_fixed']:.3f}+-{row['expected_share_of_best_fixed_error']:.3f} of best",
                    flush=True,
                )


OBSERVED = (
    "tokens_per_second", "speedup", "speedup_over_dflash", "acceptance_length", "nodes_per_round", "departures",
    "seconds", "tokens", "share_of_best_fixed",
)  # fmt: skip


def _seconds(rows: list[dict], tree: str, options: argparse.Namespace) -> RoundSeconds:
    """What rounds took with the trees of one policy."""
    fixed = [row for row in rows if tree_of(row) == tree and row["budget"] != "auto"]
    plain, widest = rows[0], max(fixed, key=lambda row: row["budget"])
    beyond = (1, plain, options.draft_ms), (257, widest, options.widest_ms)
    more = {size: (row["milliseconds_per_round"] + ms) / 1e3 for size, row, ms in beyond}
    return seconds_of_rows(rows, tree, choice=options.choice_ms / 1e3, buckets=BUCKETS, more=more)


def _with_fixed(rows: list[dict], fixed: list[tuple[int, float]]) -> list[dict]:
    """With the budgets that were given, before `auto` of every tree."""
    more = []
    for row in rows:
        if row["budget"] == "auto":
            more += [_at(row, budget, ms) for budget, ms in fixed]
        more.append(row)
    return more


def _with_trees(rows: list[dict], trees: list[str]) -> list[dict]:
    """With the trees that the rows lack, in the times of best-first."""
    lacking = [tree for tree in trees if tree not in map(tree_of, rows)]
    known = [row for row in rows if tree_of(row) == "best-first"]
    return rows + [_of_tree(row, tree) for tree in lacking for row in known]


def _of_tree(row: dict, tree: str) -> dict:
    """A row of another tree with nothing but the times of this one."""
    kept = {key: value for key, value in row.items() if key not in OBSERVED}
    return kept | {"tree": tree, "label": Arm("ddtree", row["budget"], tree).label, "times_of_tree": tree_of(row)}


def _borrowed(row: dict, name: str) -> dict:
    """A row of another profile with nothing but the times of this one."""
    kept = {key: value for key, value in row.items() if key not in OBSERVED}
    return kept | {"profile": name, "all_right": list(PROFILES[name].all_right), "times_of_profile": row["profile"]}


def _at(row: dict, budget: int, ms: float) -> dict:
    """A row of a fixed budget with nothing but the milliseconds that were given for it."""
    kept = {key: value for key, value in row.items() if key not in OBSERVED}
    return kept | {
        "budget": budget,
        "label": Arm("ddtree", budget, tree_of(row)).label,
        "milliseconds_per_round": ms,
        "milliseconds_were_given": True,
    }


def _budget_and_ms(text: str) -> tuple[int, float]:
    budget, ms = text.split("=")
    return int(budget), float(ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--profiles", nargs="*", default=list(PROFILES))
    parser.add_argument("--tokens", type=int, default=48, help="new tokens a prompt and method")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--budgets", default="8,16,32,64,auto")
    parser.add_argument("--trees", nargs="+", default=["best-first"], help="every budget runs once with each")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--from", dest="measured", type=Path, help="rows to add expected figures to, instead of measuring"
    )
    parser.add_argument(
        "--also", nargs="*", default=[], choices=PROFILES, help="profiles to expect at the first one's times"
    )
    parser.add_argument(
        "--fixed", nargs="*", default=[], type=_budget_and_ms, metavar="BUDGET=MS",
        help="budgets that were no arm of the run, with what their rounds took in it, for every profile of a dense target",
    )  # fmt: skip
    parser.add_argument(
        "--choice-ms", type=float, default=0.37, help="what a round takes longer where the host chooses"
    )
    parser.add_argument(
        "--draft-ms", type=float, default=0.74, help="a draft's own, for sizes below the smallest row's"
    )
    parser.add_argument("--widest-ms", type=float, default=5.1, help="a round of 257 nodes beyond the largest row's")
    parser.add_argument("--lives", type=int, default=24, help="of 16 texts each; after one `auto` has forgotten all")
    options = parser.parse_args()
    if (options.shape is None) == (options.measured is None):
        parser.error("give either --shape or --from")
    if options.measured is not None:
        expect(options)
        return
    began = time.monotonic()
    budgets = tuple(b if b == "auto" else int(b) for b in options.budgets.split(","))
    plan = ProjectionPlan(
        budgets=budgets, trees=tuple(options.trees), max_new_tokens=options.tokens, repeats=options.repeats,
        context_length=64,
    )  # fmt: skip
    target, timed = target_and_drafter(options.shape, PROFILES["chat"].depth + 1, backend="fast")
    keep_drafter()
    where = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "versions": {
            "torch": torch.__version__,
            "triton": version("triton"),
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
                    f"{name:12} {row['label']:22} {row['tokens_per_second']:7.1f} tok/s {row['speedup']:5.2f}x "
                    f"{row['speedup_over_dflash']:5.2f}x chain  accept {row['acceptance_length']:5.2f} nodes "
                    f"{row['nodes_per_round']:5.1f} {row['milliseconds_per_round']:6.2f} ms/round "
                    f"of best {row['share_of_best_fixed']:.3f} (expected {row['expected_share_of_best_fixed']:.3f}) departures {row['departures']}",
                    flush=True,
                )
            file.flush()
            print(f"{time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
