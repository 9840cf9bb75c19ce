"""Tree policies at equal nodes, by exact replay on a CPU, as JSON lines.

    python -m benchmarks.policies --datasets gsm8k=gsm8k.jsonl,humaneval=humaneval.jsonl,mt-bench=mt-bench.jsonl \\
        --samples 20 --out results.jsonl

A greedy text of the target is the same whatever is drafted, so which path of a tree is accepted follows from the text alone.
Each text is written once, the drafter is asked once at every place of it, and every policy then decodes it round by round
from what was recorded (the best 64 tokens a depth and place): its tokens a round are those of a real run. See `bench.replay`.

Drafters: the shipped one; `weak`, its log-probabilities with noise of standard deviation 3 added before they are normalised; and
`overconfident`, those of the weak one doubled before they are normalised.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import deltatree
from deltatree.bench.replay import Recording, record, rounds_of
from deltatree.bench.samples import load_samples
from deltatree.drafter import Drafter, DraftSession
from deltatree.tree import POLICIES, DraftTree

BUDGETS = (8, 16, 32, 64)
WIDTH = 64  # recorded tokens a depth: no smaller tree reaches further
NOISE = 3.0
MAX_NEW_TOKENS = 128
VOCAB = 4096  # of the shipped target


@dataclass(frozen=True, slots=True)
class Bent:
    """A drafter whose log-probabilities are bent before they are normalised again. seed: of the noise, with the round's number"""

    drafter: Drafter
    factor: float
    seed: int

    def start(self) -> BentSession:
        return BentSession(self, self.drafter.start())


@dataclass
class BentSession:
    drafter: Bent
    session: DraftSession
    rounds: int = 0

    def propose(self, features: Tensor, *, bonus: int) -> Tensor:
        log_probs = self.session.propose(features, bonus=bonus)
        generator = torch.Generator().manual_seed(self.drafter.seed + self.rounds)
        self.rounds += 1
        noise = NOISE * torch.randn(log_probs.shape, generator=generator)
        return (self.drafter.factor * (log_probs + noise)).log_softmax(-1)


def record_texts(datasets: str, samples: int) -> dict[tuple[str, str], list[Recording]]:
    """Write every text and ask the drafters at each of its places: by drafter and data set."""
    pair, texts = deltatree.load("shipped", device="cpu"), defaultdict(list)
    for number, sample in enumerate(load_samples(datasets, samples)):
        prompt_ids = pair.encode(sample.turns[0])
        new_ids = pair.generate(prompt_ids, max_new_tokens=MAX_NEW_TOKENS).token_ids
        weak, overconfident = (Bent(pair.drafter, factor, 1000 * number) for factor in (1, 2))
        for name, drafter in (("shipped", pair.drafter), ("weak", weak), ("overconfident", overconfident)):
            texts[name, sample.dataset].append(record(pair.target, drafter, prompt_ids, new_ids, WIDTH))
        print(f"{number + 1}: {sample.dataset} {sample.id}, {len(new_ids)} tokens", file=sys.stderr)
    return texts


def policy_of(name: str) -> Callable[..., DraftTree]:
    return POLICIES[name]() if isinstance(POLICIES[name], type) else POLICIES[name]


def records(texts: dict[tuple[str, str], list[Recording]], vocab_size: int) -> Iterator[dict]:
    """One a drafter, data set, node count and policy."""
    for (drafter, dataset), recordings in texts.items():
        for budget in BUDGETS:
            runs = {
                name: [emitted for r in recordings for emitted in rounds_of(r, policy_of(name), budget, vocab_size)]
                for name in POLICIES
            }
            for name, emitted in runs.items():
                yield {
                    "drafter": drafter,
                    "dataset": dataset,
                    "nodes": budget,
                    "policy": name,
                    "texts": len(recordings),
                    "tokens": sum(emitted),
                    "rounds": len(emitted),
                    "tokens_per_round": sum(emitted) / len(emitted),
                    "ratio_to_best_first": len(runs["best-first"]) / len(emitted),
                }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", required=True, help="as `deltatree bench --dataset` takes them")
    parser.add_argument("--samples", type=int, default=20, help="texts a data set")
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines to write")
    options = parser.parse_args()
    start = time.monotonic()
    texts = record_texts(options.datasets, options.samples)
    where = {"versions": {"torch": torch.__version__, "python": platform.python_version()}}
    with open(options.out, "w") as file:
        for line in records(texts, VOCAB):
            rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in line.items()}
            print(json.dumps(rounded), flush=True)
            file.write(json.dumps(rounded | where) + "\n")
    print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
