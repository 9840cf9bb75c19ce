"""A round's own work on one GPU, as JSON lines: candidates, tree and walk, timed inside CUDA graphs.

    python benchmarks/builder.py --out results.jsonl

15 depths (blocks of 16) over a vocabulary of 248,320. Before anything is timed, the tree is compared with
`best_first` on the host, node for node, the candidates with a full sort and the walk with the one on the host, on
inputs with many equal log-probabilities and on inputs without. Times are medians over replays of one graph, divided
by the calls in it; the logits come from memory, not from cache. Beside it the tree over transitions, compared with
the host's policy in the same way, from a full-sized table: by itself (table in cache), and in a round (between the
logits that drive it out).
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import triton
from kernel_times import BANDWIDTH, graph_us
from torch import Tensor

from deltatree.kernels.candidates import triton as candidates
from deltatree.kernels.transition_tree import CANDIDATES, Transitions
from deltatree.kernels.transition_tree import triton as transition_tree
from deltatree.kernels.tree_build import TreeBuffers
from deltatree.kernels.tree_build import triton as tree_build
from deltatree.kernels.walk import Walked
from deltatree.kernels.walk import triton as walk
from deltatree.transitions import TransitionTable, TransitionTree
from deltatree.transitions.table import MAX_BUCKETS
from deltatree.tree import DraftTree, accept, best_first
from deltatree.tree import top_candidates as candidates_on_host

DEPTH, VOCAB = 15, 248_320
BUDGETS = (16, 64, 256)
TARGET_US = {256: 150}  # of the tree
BEFORE = 3  # the token before the root
ROUNDING = 2e-5  # of a path's score over 1 + its size, in float32 on the device and float64 on the host
COPIES = 8  # logits of 15 MB each: together larger than the L2 cache
CHECKS = 60  # trees a budget


def draft_logits(seed: int, steps: int | None = None) -> Tensor:
    """[D, vocab] float32: some likely tokens over a wide floor. steps: logits are multiples of 1 / steps."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    logits = torch.randn(DEPTH, VOCAB, device="cuda", generator=generator) * 2
    likely = torch.randint(VOCAB, (DEPTH, 20), device="cuda", generator=generator)
    logits.scatter_add_(1, likely, torch.rand(DEPTH, 20, device="cuda", generator=generator) * 12)
    return logits if steps is None else (logits * steps).round() / steps


class Round:
    """The buffers of one round."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.logits = [draft_logits(seed) for seed in range(COPIES)]
        self.scratch = candidates.scratch_for(self.logits[0], budget)
        self.candidates = (
            torch.empty(DEPTH, budget, device="cuda"),
            torch.empty(DEPTH, budget, dtype=torch.int64, device="cuda"),
        )
        self.root = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.tree = TreeBuffers.empty(budget + 1, 4, "cuda")
        self.target_ids = torch.zeros(budget + 1, dtype=torch.int64, device="cuda")
        self.walked = Walked.empty(DEPTH, "cuda")

    def choose(self, copy: int = 0) -> None:
        candidates.top_candidates(self.logits[copy], self.budget, out=self.candidates, scratch=self.scratch)

    def build(self) -> None:
        tree_build.build_tree(*self.candidates, self.root, budget=self.budget, out=self.tree)

    def walk(self) -> None:
        walk.walk(
            self.tree.token_ids, self.tree.parents, self.target_ids, num_nodes=self.tree.num_nodes, max_depth=DEPTH,
            out=self.walked,
        )  # fmt: skip

    def all(self, copy: int) -> None:
        self.choose(copy)
        self.build()
        self.walk()

    def accept_a_leaf(self) -> None:
        """Let the target choose the path to the deepest node, so that the walk goes all the way."""
        node = int(self.tree.depths.argmax())
        self.target_ids.fill_(-1)
        while node > 0:
            parent = int(self.tree.parents[node])
            self.target_ids[parent] = self.tree.token_ids[node]
            node = parent

    def record(self) -> dict:
        """Times, after the walk has been sent down to the deepest node."""
        self.logits[0].copy_(draft_logits(0))
        self.all(0)
        self.accept_a_leaf()
        self.walk()
        copies = range(COPIES)
        return {
            "accepted_depth": int(self.walked.steps) - 1,
            "us_candidates": graph_us([lambda copy=copy: self.choose(copy) for copy in copies]),
            "us_tree": graph_us([self.build] * COPIES),
            "us_walk": graph_us([self.walk] * COPIES),
            "us_round": graph_us([lambda copy=copy: self.all(copy) for copy in copies]),
        }

    def on_host(self) -> DraftTree:
        count = int(self.tree.num_nodes)
        return DraftTree(*(x[:count].cpu() for x in (self.tree.token_ids, self.tree.parents, self.tree.depths)))


class TransitionRound(Round):
    """The same over the target's transitions; learning from the verified tree is part of the round."""

    def __init__(self, budget: int, table: TransitionTable, *, chain: bool = False) -> None:
        super().__init__(budget)
        self.chain = chain
        self.scratch = candidates.scratch_for(self.logits[0], CANDIDATES)
        self.candidates = tuple(
            torch.empty(DEPTH, CANDIDATES, device="cuda", dtype=held.dtype) for held in self.candidates
        )
        self.known = Transitions.empty(VOCAB, num_buckets=table.num_buckets, device="cuda")
        for mine, new in zip(self.known.table.tensors(), table.tensors(), strict=True):
            mine.copy_(new)
        self.known.before.fill_(BEFORE)
        self.tree_scratch = transition_tree.scratch_for(self.candidates[0], budget)
        self.learning_scratch = transition_tree.learning_scratch_for(self.tree.token_ids)

    def choose(self, copy: int = 0) -> None:
        candidates.top_candidates(self.logits[copy], CANDIDATES, out=self.candidates, scratch=self.scratch)

    def build(self) -> None:
        transition_tree.build_transition_tree(
            *self.candidates, self.root, self.known, budget=self.budget, chain=self.chain, out=self.tree,
            scratch=self.tree_scratch,
        )  # fmt: skip

    def learn(self) -> None:
        transition_tree.learn_transitions(
            self.tree.token_ids, self.tree.parents, self.target_ids, num_nodes=self.tree.num_nodes,
            path=self.walked.path, steps=self.walked.steps, known=self.known, drafted=self.candidates,
            scratch=self.learning_scratch,
        )  # fmt: skip

    def all(self, copy: int) -> None:
        super().all(copy)
        self.learn()

    def record(self) -> dict:
        self.known.weights.copy_(torch.tensor([6.0, 1.0]))
        return super().record() | {"us_learn": graph_us([self.learn] * COPIES)}


def some_table() -> TransitionTable:
    """As large as they come: of text in the 400 tokens of `check`, and of random text besides."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    text = (torch.rand(2_300, 256, device="cuda", generator=generator) ** 2 * 400).long()
    text[:, 1::2] = (3 * text[:, ::2] + 1) % 400
    text[1_000:] = torch.randint(VOCAB, text[1_000:].shape, device="cuda", generator=generator)
    return TransitionTable.count(text, VOCAB, num_buckets=MAX_BUCKETS)


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """The tokens from the root to each node, in node order."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
        found.append((*(found[parent] if found else ()), token))
    return found


def check_transitions(work: TransitionRound, table: TransitionTable) -> int:
    """How many of the trees are the host policy's to the last node. Raises AssertionError beyond rounding."""
    exact, on_host = 0, table.on(torch.device("cpu"))
    for seed in range(CHECKS):
        generator = torch.Generator().manual_seed(seed)
        log_probs = (torch.randn(DEPTH, 400, generator=generator) * (1 + seed % 5)).log_softmax(-1)
        for held, new in zip(work.candidates, candidates_on_host(log_probs, CANDIDATES), strict=True):
            held.copy_(new)
        work.build()
        policy = TransitionTree(on_host, is_chain=work.chain, refines=False)
        policy.begin([BEFORE])
        expected, built = policy(log_probs, root=0, budget=work.budget), work.on_host()
        mine, theirs = paths(built), paths(expected)
        scores = dict(zip(mine, work.tree.scores.tolist(), strict=False))
        order = [scores[path] for path in theirs if path in scores]
        assert all(after - before < ROUNDING * (1 - before) for before, after in itertools.pairwise(order)), (
            f"order, seed {seed}"
        )
        others = [scores[path] - min(order) for path in mine if path not in set(theirs)]
        assert len(mine) == len(theirs) and all(beyond < ROUNDING * (1 - min(order)) for beyond in others), (
            f"nodes, seed {seed}"
        )
        exact += mine == theirs
    return exact


def check(work: Round) -> None:
    """Raises AssertionError where device and host disagree."""
    for seed in range(2):
        logits = draft_logits(seed, steps=16)
        work.logits[0].copy_(logits)
        work.all(0)
        values, ids = logits.log_softmax(-1).sort(dim=-1, descending=True, stable=True)
        assert torch.equal(work.candidates[1], ids[:, : work.budget]), "candidates"
        assert (work.candidates[0] - values[:, : work.budget]).abs().max() < 1e-5, "log-probabilities"
        work.accept_a_leaf()
        work.walk()
        steps, accepted = int(work.walked.steps), accept(work.on_host(), work.target_ids)
        assert work.walked.path[:steps].tolist() == accepted.path and int(work.walked.bonus) == accepted.bonus, "walk"
    for seed in range(CHECKS):
        generator = torch.Generator().manual_seed(seed)
        log_probs = (torch.randn(DEPTH, 400, generator=generator) * (1 + seed % 5)).log_softmax(-1)
        if seed % 2:
            log_probs = (2 * log_probs).round() / 2
        for held, new in zip(work.candidates, candidates_on_host(log_probs, work.budget), strict=True):
            held.copy_(new)
        work.build()
        expected, built = best_first(log_probs, root=0, budget=work.budget), work.on_host()
        assert all(
            torch.equal(getattr(built, name), getattr(expected, name)) for name in ("token_ids", "parents", "depths")
        ), f"tree of {work.budget} nodes, seed {seed}"


def records() -> Iterator[dict]:
    table = some_table()
    moved = DEPTH * VOCAB * 4
    for budget in BUDGETS:
        work = Round(budget)
        check(work)
        shared = {"benchmark": "builder", "budget": budget, "depths": DEPTH, "vocab": VOCAB, "checked_trees": CHECKS}
        yield {
            **shared,
            "tree": "best-first",
            **work.record(),
            "us_torch_topk": graph_us([lambda copy=copy: work.logits[copy].topk(budget) for copy in range(COPIES)]),
            "target_us_tree": TARGET_US.get(budget),
            "bytes_candidates": moved,
            "floor_us_candidates": moved / BANDWIDTH * 1e6,
        }
        work = TransitionRound(budget, table)
        exact = check_transitions(work, table)
        yield {
            **shared,
            "tree": "transitions",
            "exact_trees": exact,
            **work.record(),
            "target_us_tree": TARGET_US.get(budget),
        }
    work = TransitionRound(DEPTH, table, chain=True)
    shared["budget"] = DEPTH
    yield {**shared, "tree": "transitions-chain", "exact_trees": check_transitions(work, table), **work.record()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file of JSON lines to write; they are printed too")
    options = parser.parse_args()
    where = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
        "command": "python benchmarks/builder.py",
    }
    start = time.monotonic()
    with open(options.out, "w") if options.out else open("/dev/null", "w") as file:
        for record in records():
            rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in record.items()}
            print(json.dumps(rounded), flush=True)
            file.write(json.dumps(rounded | where) + "\n")
            file.flush()
    print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
