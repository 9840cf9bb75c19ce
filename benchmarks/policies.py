"""Tree policies at equal nodes, by exact replay on a CPU, as JSON lines.

    python -m benchmarks.policies --datasets gsm8k=gsm8k.jsonl,humaneval=humaneval.jsonl,mt-bench=mt-bench.jsonl \\
        --samples 20 --out results.jsonl

A greedy text of the target is the same whatever is drafted, so which path of a tree is accepted follows from the text alone.
Each text is written once, the drafter is asked once at every place of it, and every policy then decodes it round by round
from what was recorded: its tokens a round are those of a real run. Recordings (the best 64 tokens a depth and place) are
kept in `--recordings` and used again.

Drafters: the shipped one; `weak`, its log-probabilities with noise of standard deviation 3 added before they are normalised; and
`overconfident`, those of the weak one doubled before they are normalised.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import deltatree
from deltatree.bench.samples import load_samples
from deltatree.decode.options import TREES
from deltatree.tree import POLICIES, DraftTree, walk

BUDGETS = (8, 16, 32, 64)
WIDTH = 64  # recorded tokens a depth: no smaller tree reaches further
NOISE = 3.0
MAX_NEW_TOKENS = 128


@dataclass
class Text:
    """A text with what its drafters propose at every place. Place i has the i-th new token as root."""

    dataset: str
    prompt_ids: list[int]
    new_ids: list[int]
    drafts: dict[str, tuple[Tensor, Tensor]]  # drafter -> values and ids, [places, D, WIDTH]


def record(datasets: str, samples: int) -> list[Text]:
    """Write every text and ask the drafter at each of its places."""
    pair = deltatree.load("shipped", device="cpu")
    texts = []
    for sample in load_samples(datasets, samples):
        prompt_ids = pair.encode(sample.turns[0])
        new_ids = pair.generate(prompt_ids, max_new_tokens=MAX_NEW_TOKENS).token_ids
        state, session = pair.target.new_state(), pair.drafter.start()
        features = pair.target.prefill(prompt_ids + new_ids, state).features
        seen, held = 0, {"shipped": [], "weak": [], "overconfident": []}
        for place, root in enumerate(new_ids):
            committed = len(prompt_ids) + place
            log_probs = session.propose(features[seen:committed], bonus=root)
            seen = committed
            generator = torch.Generator().manual_seed(len(texts) * 1000 + place)
            weak = log_probs + NOISE * torch.randn(log_probs.shape, generator=generator)
            held["shipped"].append(log_probs.topk(WIDTH))
            held["weak"].append(weak.log_softmax(-1).topk(WIDTH))
            held["overconfident"].append((2 * weak).log_softmax(-1).topk(WIDTH))
        drafts = {name: tuple(torch.stack(x) for x in zip(*kept, strict=True)) for name, kept in held.items()}
        texts.append(Text(sample.dataset, prompt_ids, new_ids, drafts))
        print(f"{len(texts)}: {sample.dataset} {sample.id}, {len(new_ids)} tokens", file=sys.stderr)
    return texts


def replay(text: Text, drafter: str, policy: Callable[..., DraftTree], budget: int) -> tuple[int, int]:
    """Tokens after the first one, and rounds, of decoding a text again. A token is its column in the recording here."""
    values, ids = text.drafts[drafter]
    depths, nowhere = values.shape[1], torch.tensor([WIDTH])
    if hasattr(policy, "begin"):
        policy.begin(text.prompt_ids)
    place, rounds = 0, 0
    while place < len(text.new_ids) - 1:
        ahead = torch.tensor(text.new_ids[place + 1 : place + 1 + depths])
        matches = ids[place, : len(ahead)] == ahead[:, None]  # [depths ahead, WIDTH]
        columns = torch.where(matches.any(-1), matches.int().argmax(-1), WIDTH)
        choices = torch.cat([columns, nowhere.expand(depths + 1 - len(columns))]).tolist()
        tree = policy(values[place], root=0, budget=budget)
        accepted = walk(tree, lambda node, path: choices[len(path) - 1])
        if hasattr(policy, "observe"):
            policy.observe(tree, accepted, torch.empty(len(tree), 0))
        place, rounds = place + accepted.length, rounds + 1
    return len(text.new_ids) - 1, rounds


def policy_of(name: str) -> Callable[..., DraftTree]:
    return POLICIES[name]() if isinstance(POLICIES[name], type) else POLICIES[name]


def records(texts: list[Text]) -> Iterator[dict]:
    """One a drafter, data set, node count and policy."""
    for drafter in texts[0].drafts:
        for dataset in dict.fromkeys(text.dataset for text in texts):
            for budget in BUDGETS:
                runs = {}
                for name in TREES:
                    done = [replay(t, drafter, policy_of(name), budget) for t in texts if t.dataset == dataset]
                    runs[name] = tuple(sum(column) for column in zip(*done, strict=True))
                for name, (tokens, rounds) in runs.items():
                    yield {
                        "drafter": drafter,
                        "dataset": dataset,
                        "nodes": budget,
                        "policy": name,
                        "texts": len(done),
                        "tokens": tokens,
                        "rounds": rounds,
                        "tokens_per_round": tokens / rounds,
                        "ratio_to_best_first": runs["best-first"][1] / rounds,
                    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", required=True, help="as `deltatree bench --dataset` takes them")
    parser.add_argument("--samples", type=int, default=20, help="texts a data set")
    parser.add_argument("--recordings", type=Path, default=Path("recordings.pt"), help="written once, then used again")
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines to write")
    options = parser.parse_args()
    start = time.monotonic()
    if options.recordings.exists():
        texts = [Text(**held) for held in torch.load(options.recordings)]
    else:
        texts = record(options.datasets, options.samples)
        torch.save([vars(text) for text in texts], options.recordings)
    where = {"versions": {"torch": torch.__version__, "python": platform.python_version()}}
    with open(options.out, "w") as file:
        for line in records(texts):
            rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in line.items()}
            print(json.dumps(rounded), flush=True)
            file.write(json.dumps(rounded | where) + "\n")
    print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
