"""What a generation did, round by round: a policy that lets another one decide, and writes down what came of it.

One dict a round:

| key | what |
|---|---|
| `round`, `context` | its number from 1, and the committed tokens before it |
| `tokens`, `parents` | the verified tree: token ids and parents by node, the root (node 0, parent -1) first |
| `scores` | by node, the drafter's log-probability of its prefix, the root's 0; after the sampler's processing |
| `path`, `bonus` | the accepted nodes from the root on, and the token that the target chose after them |
| `budget` | drafted nodes; `drafted` is false where the round did not ask the drafter |
| `probabilities`, `expected`, `expected_seconds`, `shape` | of budget `auto`: calibrated acceptance by node, the acceptance length expected, the time expected, and "chain" or "tree" |
| `seconds` | by stage: draft, build, verify (the walk included), commit. Nothing is waited for in between, so that on a GPU a stage may pay for the one before it |
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from deltatree.tree import Acceptance, DraftTree, scores_of


class Trace:
    """Notes of one generation. write: given one dict a round, ready for JSON."""

    def __init__(self, write: Callable[[dict], object]) -> None:
        self.write = write

    def follow(self, policy: Callable[..., DraftTree]) -> _Followed:
        """The policy, observed."""
        return _Followed(policy, self.write)


class _Followed:
    def __init__(self, policy: Callable[..., DraftTree], write: Callable[[dict], object]) -> None:
        self.policy, self.write = policy, write
        self.num_rounds = self.context = 0
        self.marks: dict[str, float] = {}
        self.log_probs: Tensor | None = None
        self.row: dict = {}

    def begin(self, prompt_ids: list[int]) -> None:
        if hasattr(self.policy, "begin"):
            self.policy.begin(prompt_ids)

    def wants_draft(self, context: int, num_features: int) -> bool:
        self.num_rounds, self.context, self.log_probs = self.num_rounds + 1, context, None
        self.marks = {"begun": time.perf_counter()}
        return not hasattr(self.policy, "wants_draft") or self.policy.wants_draft(context, num_features)

    def __call__(self, log_probs: Tensor, *, root: int, budget: int) -> DraftTree:
        self.marks["draft"] = time.perf_counter()
        tree = self.policy(log_probs, root=root, budget=budget)
        self.log_probs = log_probs
        self.marks["build"] = time.perf_counter()
        return tree

    def observe(self, tree: DraftTree, accepted: Acceptance, logits: Tensor) -> None:
        self.marks["verify"] = time.perf_counter()
        self.row = {
            "round": self.num_rounds,
            "context": self.context,
            "tokens": tree.token_ids.tolist(),
            "parents": tree.parents.tolist(),
            "scores": [round(score, 4) for score in scores_of(tree, self.log_probs).tolist()],
            "path": accepted.path,
            "bonus": accepted.bonus,
            "budget": tree.num_drafted,
            "drafted": self.log_probs.shape[0] > 0,
        }
        choice = getattr(self.policy, "choice", None)
        if choice is not None:
            self.row |= {
                "probabilities": [round(p, 4) for p in choice.probabilities],
                "expected": round(choice.expected, 3),
                "expected_seconds": choice.seconds,
                "shape": "chain" if choice.is_chain else "tree",
            }
        if hasattr(self.policy, "observe"):
            self.policy.observe(tree, accepted, logits)
        self.marks["observed"] = time.perf_counter()

    def finish(self, seconds: float | None = None) -> None:
        ended = time.perf_counter()
        if hasattr(self.policy, "finish"):
            self.policy.finish(seconds)
        marks = self.marks
        self.row["seconds"] = {
            "draft": marks["draft"] - marks["begun"],
            "build": marks["build"] - marks["draft"],
            "verify": marks["verify"] - marks["build"],
            "commit": ended - marks["observed"],
        }
        self.write(self.row)
