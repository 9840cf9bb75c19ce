"""First figures for `budget="auto"`: a few seconds of decoding at several sizes, kept beside the Hugging Face cache.

What is measured here only has to be roughly right: every round that follows corrects it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor

from deltatree.decode.acceptance import Drafts
from deltatree.decode.auto import AutoBudget, Choice, Experience
from deltatree.decode.costs import NODE_COUNTS, RoundCosts
from deltatree.decode.sampling import Sampler
from deltatree.decode.stream import Ending, covers_device, decode
from deltatree.drafter.protocol import Drafter
from deltatree.models.protocol import Target
from deltatree.tree import DraftTree, best_first

LIMIT_SECONDS = 4.0
_PASSES = 5  # the first one warms up
_PROMPT = 16  # tokens


def round_costs(target: Target, drafter: Drafter, names: tuple[str, str | None] = ("", None)) -> RoundCosts:
    """Costs of a pair on this machine: from the cache, or measured now (at most some five seconds) and left there.

    names: of target and drafter, as part of what the cache goes by
    """
    buckets = getattr(target, "node_buckets", None)
    costs = RoundCosts(
        _sizes(buckets or NODE_COUNTS, drafter.depth + 1), captured=buckets is not None, clock=_clock(target)
    )
    what = _describe(target, drafter, names, costs)
    file = cache_folder() / f"{hashlib.sha256(json.dumps(what).encode()).hexdigest()[:20]}.json"
    measured = _read(file)
    if measured is None:
        measured = measure(target, drafter, costs)
        _write(file, what, measured)
    if measured is not None:
        costs.set_curves(*measured)
    return costs


def measure(
    target: Target, drafter: Drafter, costs: RoundCosts, limit_seconds: float = LIMIT_SECONDS
) -> tuple[float, dict[int, float]] | None:
    """Seconds of a plain round, and of drafted rounds by their nodes; None where even one round takes too long.

    Decodes a prompt that means nothing, every size in turn, a few times over, until the time is used up. A round that captures
    a graph (and, once on a machine, compiles kernels) is not timed and comes on top: a text would need it too.
    """
    schedule = _Schedule(_spread(costs), costs.clock)
    _run(target, drafter, schedule, int(costs.node_counts[-1]) - 1, limit_seconds)
    return schedule.result()


def capture_choices(
    target: Target,
    drafter: Drafter,
    costs: RoundCosts,
    policy: Callable[..., DraftTree] = best_first,
    sampler: Sampler | None = None,
) -> None:
    """Capture all that `auto` may choose, where rounds are captured, so that none of them takes a capture's time later.

    For comparisons of speed: a single text would seldom need them all.
    policy: whose trees are chosen from    sampler: of the texts to come, greedy if not given
    """
    if not costs.captured:
        return
    sampler = sampler or Sampler()
    on_device = covers_device(target, drafter, AutoBudget(policy, Experience(costs)), sampler)
    visits = _Visits(costs.node_counts.tolist(), drafter.depth, on_device, policy)
    _run(target, drafter, visits, int(costs.node_counts[-1]) - 1, math.inf, sampler)


def _run(
    target: Target,
    drafter: Drafter,
    schedule: _Schedule,
    budget: int,
    limit_seconds: float,
    sampler: Sampler | None = None,
) -> None:
    """Decode a prompt that means nothing until the schedule is done or its time is up."""
    prompt = [(i * 97) % target.vocab_size for i in range(1, _PROMPT + 1)][: max(target.context_length // 4, 1)]
    with closing(
        decode(
            target, drafter, prompt, build_tree=schedule, budget=budget, ending=Ending(1 << 30), sampler=sampler or Sampler()
        )
    ) as rounds:  # fmt: skip
        for _ in rounds:
            if schedule.is_done or schedule.spent + 2 * schedule.longest > limit_seconds:
                break


class _Schedule:
    """A policy that goes through sizes of another one's trees, and notes what their rounds take."""

    def __init__(
        self, node_counts: list[int], clock: Callable[[], float], policy: Callable[..., DraftTree] = best_first
    ) -> None:
        self.clock, self.policy = clock, policy
        self.sizes = [0, *node_counts] * _PASSES  # 0: plain
        self.num_sizes = 1 + len(node_counts)
        self.seconds: list[tuple[int, float]] = []
        self._started = 0.0

    @property
    def is_done(self) -> bool:
        return len(self.seconds) >= len(self.sizes)

    @property
    def spent(self) -> float:
        return sum(seconds for _, seconds in self.seconds)

    @property
    def longest(self) -> float:
        return max((seconds for _, seconds in self.seconds[-self.num_sizes :]), default=0.0)

    def begin(self, prompt_ids: list[int]) -> None:
        if hasattr(self.policy, "begin"):
            self.policy.begin(prompt_ids)

    def wants_draft(self, context: int, num_features: int) -> bool:
        self._started = self.clock()
        return self.sizes[len(self.seconds)] > 0

    def __call__(self, log_probs: Tensor, *, root: int, budget: int) -> DraftTree:
        return self.policy(log_probs, root=root, budget=max(self.sizes[len(self.seconds)] - 1, 0))

    @property
    def widest(self) -> int:
        return max(self.sizes[len(self.seconds)] - 1, 0)

    def prepare(self) -> None:
        """As `AutoBudget.prepare`: there is nothing to compare."""

    def settle(self) -> None:
        """As `AutoBudget.settle`: nothing to note."""

    def choose(self, drafts: Drafts) -> np.ndarray:
        """As `AutoBudget.choose`, where rounds stay on the device: always the tree."""
        self.choice = Choice([], 0.0, is_chain=False)
        return np.arange(min(self.sizes[len(self.seconds)], len(drafts)))

    def habit(self) -> None:
        """None: every round is looked at."""

    def lesson(self, path: list[int], num_nodes: int) -> Callable[[], None]:
        """Nothing: only times count here."""
        return lambda: None

    def finish(self, seconds: float | None = None) -> None:
        """As `AutoBudget.finish`."""
        took = self.clock() - self._started if seconds is None else seconds
        self.seconds.append((self.sizes[len(self.seconds)], took))

    def result(self) -> tuple[float, dict[int, float]] | None:
        by_size: dict[int, list[float]] = {}
        for size, seconds in self.seconds:
            by_size.setdefault(size, []).append(seconds)
        times = {size: median(s[1:] or s) for size, s in by_size.items()}
        plain = times.pop(0, None)
        return (plain, times) if plain and times else None


class _Visits(_Schedule):
    """Every choice once: trees of all sizes, and chains where rounds stay on the device."""

    def __init__(self, node_counts: list[int], depth: int, on_device: bool, policy: Callable[..., DraftTree]) -> None:
        super().__init__([], time.perf_counter, policy)
        chains = [(count, True) for count in node_counts if 1 < count <= depth + 1]
        self.visits = [(0, False), *((count, False) for count in node_counts), *(chains if on_device else [])]
        self.sizes = [size for size, _ in self.visits]

    def choose(self, drafts: Drafts) -> np.ndarray:
        size, is_chain = self.visits[len(self.seconds)]
        self.choice = Choice([], 0.0, is_chain)
        return np.arange(min(size, len(drafts)))


def _sizes(buckets: Iterable[int], chain: int) -> list[int]:
    """Node counts to choose from. Those of one node more than another are for budgets that a user names, and for the chain.

    chain: nodes of the whole chain, root included; it must not be thought to cost as much as the next larger tree
    """
    return [count for count in buckets if count <= 2 or count - 1 not in buckets or count == chain]


def _spread(costs: RoundCosts) -> list[int]:
    """Sizes to measure, enough to draw a line through; on a GPU each of them is captured first."""
    wanted = (2, 8, 16, 32, 64, 128) if costs.captured else (2, 4, 8, 16, 32, 64, 128)
    return [count for count in costs.node_counts.tolist() if count in wanted] or costs.node_counts.tolist()


def _clock(target: Target) -> Callable[[], float]:
    """On one CPU thread, the time that this thread ran: other programs do not disturb it."""
    alone = target.device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if alone else time.perf_counter


def cache_folder() -> Path:
    """Where costs are kept: under `$HF_HOME`, by Hugging Face's own rules."""
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME) / "deltatree" / "costs"


def _describe(target: Target, drafter: Drafter, names: tuple[str, str | None], costs: RoundCosts) -> dict:
    """What must agree for costs to hold: machine, libraries, models."""
    import transformers

    device = target.device
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "version": 4,
        "machine": hashlib.sha256(platform.node().encode()).hexdigest()[:16],
        "device": [device.type, chip, os.cpu_count(), torch.get_num_threads()],
        "versions": [torch.__version__, transformers.__version__],
        "names": list(names),
        "target": [type(target).__name__, target.vocab_size, target.context_length, str(getattr(target, "dtype", ""))],
        "device_rounds": getattr(target, "device_rounds", False),
        "drafter": [type(drafter).__name__, drafter.depth],
        "node_counts": costs.node_counts.tolist(),
    }


def _read(file: Path) -> tuple[float, dict[int, float]] | None:
    """What the cache holds; whatever is wrong with it, measuring again mends it."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        held = json.loads(file.read_text(encoding="utf-8"))
        plain, drafted = float(held["plain_seconds"]), {int(n): float(s) for n, s in held["drafted_seconds"].items()}
        if plain > 0 and drafted and min(drafted.values()) > 0:
            return plain, drafted
    return None


def _write(file: Path, what: dict, measured: tuple[float, dict[int, float]] | None) -> None:
    """Leave figures in the cache. A cache that cannot be written costs time at the next start and nothing else."""
    if measured is None:
        return
    plain, drafted = measured
    held = json.dumps({"what": what, "plain_seconds": plain, "drafted_seconds": drafted}, indent=1)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}.part")
        part.write_text(held, encoding="utf-8")
        os.replace(part, file)
