"""Acceptance with and without transitions, on texts of the shipped pair.

`record` writes the target's texts and what the drafter proposes after every prefix; `replay` walks tree policies along them (see
`deltatree.bench.replay`, which says why this is exact).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import deltatree
from deltatree.bench.replay import Recording, load_recordings, record, rounds_of, save_recordings
from deltatree.bench.samples import load_samples
from deltatree.decode.options import GenerateOptions
from deltatree.transitions import TransitionTable, TransitionTree
from deltatree.tree import best_first, chain

CANDIDATES = 64
CHAIN = 15  # the budget that means the chain: the shipped drafter's depth
ARMS = ("marginals", "transitions", "refined")


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def texts_of(
    pair, source: str, count: int, temperature: float, max_new_tokens: int
) -> Iterator[tuple[list[int], list[int]]]:
    """`count` prompts of a data set with the target's answers; later turns of a sample follow the answers before them."""
    done, turns = 0, len(load_samples(source, 1)[0].turns)
    for sample in load_samples(source, -(-count // turns)):
        messages = []
        for turn in sample.turns:
            messages.append({"role": "user", "content": turn})
            prompt_ids = pair.encode(messages)
            options = GenerateOptions(
                max_new_tokens=max_new_tokens, method="ddtree", budget=16, temperature=temperature, seed=done
            )
            answer = pair.collect(prompt_ids, options)
            messages.append({"role": "assistant", "content": answer.text})
            if len(answer.token_ids) > 1:  # a text that prefill ends has no rounds
                yield prompt_ids, answer.token_ids
            done += 1
            if done == count:
                return


def write(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    pair = deltatree.load(args.target, args.drafter, device="cpu", dtype="float32")
    args.out.mkdir(parents=True, exist_ok=True)
    for source in args.datasets:
        name = Path(source.partition("=")[0]).stem
        for temperature in args.temperatures:
            begun, recordings = time.perf_counter(), list[Recording]()
            for prompt_ids, text_ids in texts_of(pair, source, args.samples, temperature, args.max_new_tokens):
                recordings.append(record(pair.target, pair.drafter, prompt_ids, text_ids, CANDIDATES))
            save_recordings(recordings, args.out / f"{name}-t{temperature:g}.safetensors")
            tokens = sum(len(r.text_ids) for r in recordings)
            log(
                f"{name} t={temperature:g}: {len(recordings)} texts, {tokens} tokens, {time.perf_counter() - begun:.0f} s"
            )


def policy_of(arm: str, is_chain: bool, table: TransitionTable):
    """A fresh policy for one text. Refinement counts prompt and answer alone: a replay does not know other picks."""
    if arm == "marginals":
        return chain if is_chain else best_first
    return TransitionTree(table, is_chain=is_chain, refines=arm == "refined", counts_picks=False)


def replay(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    table = TransitionTable.load(args.table)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("a") as out:
        for file in args.recordings:
            recordings = load_recordings(file)[: args.texts]
            for budget in args.budgets:
                for arm in ARMS:
                    begun, emitted, rounds = time.process_time(), 0, 0
                    for recording in recordings:
                        lengths = rounds_of(recording, policy_of(arm, budget == CHAIN, table), budget, table.vocab_size)
                        emitted, rounds = emitted + sum(lengths), rounds + len(lengths)
                    dataset, _, temperature = file.stem.rpartition("-t")
                    row = {"dataset": dataset, "temperature": float(temperature), "texts": len(recordings)}
                    row |= {"tree": "chain" if budget == CHAIN else "tree", "nodes": budget, "scores": arm}
                    row |= {"tokens": emitted, "rounds": rounds, "acceptance_length": round(emitted / rounds, 4)}
                    out.write(json.dumps(row) + "\n")
                    out.flush()
                    log(f"{row}, {(time.process_time() - begun) / rounds * 1e3:.1f} ms of processor a round")


def report(args: argparse.Namespace) -> None:
    """A markdown table: acceptance length by the marginals alone, and the gain of the other two arms in percent."""
    rows = [json.loads(line) for line in args.rows.read_text().splitlines()]
    cells: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        for dataset in (row["dataset"], "all"):  # "all" pools tokens and rounds
            cell = cells.setdefault((row["temperature"], dataset, row["nodes"]), {})
            held = cell.setdefault(row["scores"], {"tokens": 0, "rounds": 0})
            held["tokens"] += row["tokens"]
            held["rounds"] += row["rounds"]
    budgets = sorted({key[2] for key in cells}, key=lambda nodes: (nodes != CHAIN, nodes))
    heads = ["chain" if nodes == CHAIN else f"{nodes} nodes" for nodes in budgets]
    print(f"| prompts | temperature | {' | '.join(heads)} |\n|---|---|{'---|' * len(budgets)}")
    for temperature, dataset in dict.fromkeys(key[:2] for key in sorted(cells, key=lambda k: (k[0], k[1] == "all", k))):
        texts = []
        for nodes in budgets:
            cell = cells[temperature, dataset, nodes]
            plain, *others = (cell[arm]["tokens"] / cell[arm]["rounds"] for arm in ARMS)
            texts.append(f"{plain:.2f} " + " ".join(f"{(other / plain - 1) * 100:+.1f}" for other in others))
        print(f"| {dataset} | {temperature:g} | {' | '.join(texts)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(required=True)
    recording = verbs.add_parser("record")
    recording.add_argument("datasets", nargs="+", help="NAME=FILE.jsonl, as for `deltatree bench --dataset`")
    recording.add_argument("--out", type=Path, required=True, help="folder for the recordings")
    recording.add_argument("--target", default="shipped")
    recording.add_argument("--drafter", default="shipped")
    recording.add_argument("--samples", type=int, default=100)
    recording.add_argument("--max-new-tokens", type=int, default=128)
    recording.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    recording.set_defaults(run=write)
    replaying = verbs.add_parser("replay")
    replaying.add_argument("recordings", type=Path, nargs="+", help="files that `record` wrote")
    replaying.add_argument("--table", type=Path, required=True, help="what `deltatree transitions` wrote")
    replaying.add_argument("--budgets", type=int, nargs="+", default=[CHAIN, 8, 16, 32, 64], help="15 is the chain")
    replaying.add_argument("--texts", type=int, help="the first so many of each file [default: all]")
    replaying.add_argument("--out", type=Path, required=True, help="JSON lines, appended to")
    replaying.set_defaults(run=replay)
    reporting = verbs.add_parser("report")
    reporting.add_argument("rows", type=Path, help="what `replay` wrote")
    reporting.set_defaults(run=report)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
