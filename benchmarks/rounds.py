"""Greedy rounds on the device at published shapes with random weights, as JSON lines: where their milliseconds go.

    python benchmarks/rounds.py --shape qwen3.6-35b-a3b --budgets 0,16,64 --out results.jsonl

A line is about `whole` rounds, one graph each, or about `split` ones, as `auto` runs them: draft, read, choose, verify.

| key | what |
|---|---|
| `round_ms` | a round by the host's clock |
| `busy_ms` | what its graphs take on the device |
| `draft_ms`, `verify_ms` | the same of a split round's halves |
| `over_ms` | `round_ms` less `busy_ms`, round by round |
| `pauses_us` | from the end of one graph to the start of another: a record read, the next launch, what is in between |
| `long_pauses` | those over 30 us, a round |
| `choice_ms` | the choice between draft and verify, a part of their pause |
| `host_us` | the host's time from a record's arrival to the launch that comes next: a pause is this, the launch, and the record's way |
| `launch_us` | the host's time for one launch |
| `idle_launch_us` | what of a graph's span an idle device waits for its launch |
| `acceptance_length`, `departed` | tokens a round; whether they were other than planted, and the line void |

Times are medians over rounds; `_p90` stands for the 90th percentile. Spans are those of the real rounds: every graph
stands between two events of its stream. The device passes the first one at once, for it has nothing else to do, and
then waits for the launch. In a real round nothing can be launched ahead, so that wait is measured afterwards: the same
graph again and again over the same tree, behind an idle and behind a busy stream in turns. The difference,
`idle_launch_us`, is taken off every span and added to the pause before it; a launch that took the host longer
than usual counts the rest as busy. The events cost a round some microseconds. Within a graph the device waits
for no host, and its kernels follow each other directly: there are no pauses but these.

Acceptance follows a profile: the right tokens are planted in the drafter's logits on the device, as a part of the
draft, so that planting takes no time of the host. Without a GPU only the host's figures are there.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, quantiles

import torch
import transformers

from deltatree.capture import Captured
from deltatree.decode.auto import AutoBudget, Experience
from deltatree.decode.costs import RoundCosts
from deltatree.device import DeviceRounds
from deltatree.device.rounds import budget_to_build
from deltatree.models import FastTarget
from deltatree.models.shapes import SHAPES
from deltatree.projection.profiles import PROFILES, Profile, parse_profile
from deltatree.projection.replay import FastReplayDrafter, ReplayDrafter
from deltatree.projection.shapes import target_and_drafter
from deltatree.tree import best_first

WARM_UP = 5  # rounds
PROFILED = 8  # rounds
REPLAYS = 20
LONG_PAUSE = 30.0  # microseconds
AHEAD = 1_000_000  # cycles that the device is kept busy: more than a launch takes


class Bench:
    """A target that counts upwards and a drafter that knows, and generations of them that all start from one prompt."""

    def __init__(self, shape: str, profile: Profile, *, context: int, num_tokens: int) -> None:
        self.target, timed = target_and_drafter(shape, profile.depth + 1, backend="fast")
        self.target: FastTarget
        self.on_gpu = self.target.device.type == "cuda"
        vocab_size, device = self.target.vocab_size, self.target.device
        draw = random.Random(0)
        self.prompt = [draw.randrange(vocab_size) for _ in range(context)]
        upwards = range(self.prompt[-1] + 1, self.prompt[-1] + 2 + num_tokens)
        self.text = [*self.prompt, *(token % vocab_size for token in upwards)]
        self.drafter = FastReplayDrafter(ReplayDrafter(profile, vocab_size, device, timed, text=self.text))
        self.drafter.plant(range(context, len(self.text)))

    def start(self) -> DeviceRounds:
        state = self.target.new_state()
        verified = self.target.prefill(self.prompt, state)
        return DeviceRounds(self.target, state, self.drafter.start(), verified.features, int(verified.logits.argmax()))


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of captured work, between two events of the stream. Without a GPU there are none."""

    work: Captured
    waited_us: float  # the host's time since it had read the last record
    host_us: float
    begin: torch.cuda.Event | None
    end: torch.cuda.Event | None

    @property
    def span_us(self) -> float:
        """From event to event, the launch included that an idle device waits for."""
        return 1e3 * self.begin.elapsed_time(self.end)


def event() -> torch.cuda.Event:
    """A new one on the current stream."""
    made = torch.cuda.Event(enable_timing=True)
    made.record()
    return made


@contextmanager
def watched(on_gpu: bool = True) -> Iterator[list[Launch]]:
    """Every launch of captured work from here on."""
    launch, read, seen = Captured.__call__, DeviceRounds._read, []
    arrived = time.perf_counter()

    def launching(work: Captured) -> None:
        waited = time.perf_counter() - arrived
        begin, begun = event() if on_gpu else None, time.perf_counter()
        launch(work)
        seconds = time.perf_counter() - begun
        seen.append(Launch(work, 1e6 * waited, 1e6 * seconds, begin, event() if on_gpu else None))

    def reading(rounds: DeviceRounds, *record):
        nonlocal arrived
        found, arrived = read(rounds, *record), time.perf_counter()
        return found

    Captured.__call__, DeviceRounds._read = launching, reading
    try:
        yield seen
    finally:
        Captured.__call__, DeviceRounds._read = launch, read


class Whole:
    """A round as a fixed budget runs it."""

    kind, graphs = "whole", ("round",)

    def __call__(self, rounds: DeviceRounds, budget: int) -> list[int]:
        return rounds.run(budget).token_ids


class Split:
    """A round as `auto` runs it, its learning included. What was chosen is not what is verified, so that rounds are alike."""

    kind, graphs = "split", ("draft", "verify")

    def __init__(self, target: FastTarget) -> None:
        self.policy = AutoBudget(best_first, Experience(RoundCosts(target.node_buckets, captured=True)))
        self.choices: list[float] = []  # seconds
        self._learn: Callable[[], None] = lambda: None

    def __call__(self, rounds: DeviceRounds, budget: int) -> list[int]:
        policy = self.policy
        policy.wants_draft(rounds.state.length + rounds.num_uncommitted, 1)
        policy.habit()
        widest = budget_to_build(budget, max(rounds.target.node_buckets) - 1)  # from which `auto` would take so many
        drafted = rounds.draft(widest, meanwhile=self._take_in_and_prepare)
        begun = time.perf_counter()
        size = len(policy.choose(drafted))
        self.choices.append(time.perf_counter() - begun)
        token_ids = rounds.verify(budget, meanwhile=policy.settle).token_ids
        self._learn = policy.lesson([0], size)
        policy.finish()
        return token_ids

    def _take_in_and_prepare(self) -> None:
        self._learn()
        self.policy.prepare()


def kinds_of(target: FastTarget, budget: int) -> list[Whole | Split]:
    return [Whole(), Split(target)] if budget else [Whole()]  # `auto` runs plain rounds whole


def warm_rounds(bench: Bench, budget: int, one_round: Whole | Split) -> tuple[DeviceRounds, list[int]]:
    """A generation whose graphs are captured, and what it has emitted."""
    rounds = bench.start()
    text = [int(rounds.bonus)]
    for _ in range(WARM_UP):
        text += one_round(rounds, budget)
    return rounds, text


def measure(bench: Bench, budget: int, num_rounds: int, one_round: Whole | Split) -> dict:
    """One line."""
    rounds, text = warm_rounds(bench, budget, one_round)
    milliseconds, emitted, launches = [], [], []
    with watched(bench.on_gpu) as seen:
        for _ in range(num_rounds):
            begun = time.perf_counter()
            tokens = one_round(rounds, budget)
            milliseconds.append(1e3 * (time.perf_counter() - begun))
            text += tokens
            emitted.append(len(tokens))
            launches.append(dict(zip(one_round.graphs, seen, strict=True)))
            seen.clear()
    known = bench.text[len(bench.prompt) :]
    found = {
        "benchmark": "rounds",
        "kind": one_round.kind,
        "budget": budget,
        "acceptance_length": round(mean(emitted), 3),
        "departed": text != known[: len(text)],
        **spread("round_ms", milliseconds),
    }
    found["host_us"] = {name: round(median(of[name].waited_us for of in launches), 1) for name in one_round.graphs}
    if isinstance(one_round, Split):
        found |= spread("choice_ms", [1e3 * seconds for seconds in one_round.choices[WARM_UP:]])
    return found | (by_events(rounds, milliseconds, launches) if bench.on_gpu else {})


def by_events(rounds: DeviceRounds, milliseconds: list[float], launches: list[dict[str, Launch]]) -> dict:
    """The device's share of rounds. milliseconds: by the host's clock    launches: by name, of each round"""
    torch.cuda.synchronize()
    idle = {name: idle_launch_us(rounds, launch.work) for name, launch in launches[-1].items()}
    busy = {name: [(of[name].span_us - idle[name]) / 1e3 for of in launches] for name in idle}
    all_busy = [sum(of_round) for of_round in zip(*busy.values(), strict=True)]
    over = [whole - part for whole, part in zip(milliseconds, all_busy, strict=True)]
    found = spread("busy_ms", all_busy) | spread("over_ms", over)
    if len(busy) > 1:
        found |= {key: value for name in busy for key, value in spread(f"{name}_ms", busy[name]).items()}
    pauses = defaultdict(list)
    for (last, before), (name, after) in pairwise(item for of in launches for item in of.items()):
        pauses[f"{last} -> {name}"].append(1e3 * before.end.elapsed_time(after.begin) + idle[name])
    num_long = sum(mean(pause > LONG_PAUSE for pause in those) for those in pauses.values())
    return found | {
        "pauses_us": {where: round(median(those), 1) for where, those in pauses.items()},
        "pauses_us_p90": {where: round(p90(those), 1) for where, those in pauses.items()},
        "long_pauses": round(num_long, 2),
        "launch_us": {name: round(median(of[name].host_us for of in launches), 1) for name in idle},
        "idle_launch_us": {name: round(wait, 1) for name, wait in idle.items()},
    }


@torch.inference_mode()
def idle_launch_us(rounds: DeviceRounds, work: Captured) -> float:
    """How long an idle device waits for a graph's launch. Every replay has the same to do, and commits nothing."""
    counts, bonus = (rounds.buffers.steps, rounds.session.buffers.count), rounds.bonus.clone()

    def span_us(*, is_busy: bool) -> float:
        for count in counts:
            count.zero_()
        rounds.bonus.copy_(bonus)
        torch.cuda.synchronize()
        if is_busy:
            torch.cuda._sleep(AHEAD)
        with watched() as seen:
            work()
        torch.cuda.synchronize()
        return seen[0].span_us

    return max(0.0, median(span_us(is_busy=False) - span_us(is_busy=True) for _ in range(REPLAYS)))


def p90(values: list[float]) -> float:
    return quantiles(values, n=10, method="inclusive")[-1]


def spread(name: str, values: list[float]) -> dict[str, float]:
    """Median and 90th percentile."""
    return {name: round(median(values), 4), f"{name}_p90": round(p90(values), 4)}


def profiled(bench: Bench, budget: int, one_round: Whole | Split) -> dict:
    """Kernels of some rounds as a profiler sees them. Its long gaps are its own: the host's clock knows of none."""
    from torch.profiler import ProfilerActivity, profile

    rounds, _ = warm_rounds(bench, budget, one_round)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(PROFILED):
            one_round(rounds, budget)
        torch.cuda.synchronize()
    kernels = sorted((e.time_range.start, e.time_range.end) for e in seen.events() if "CUDA" in str(e.device_type))
    line = {"benchmark": "kernels of rounds", "kind": one_round.kind, "budget": budget}
    if len(kernels) < 3:
        return line
    gaps = [max(0.0, after[0] - before[1]) for before, after in pairwise(kernels)]
    return line | {"kernels": round(len(kernels) / PROFILED, 1), **spread("gap_us", gaps)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True, choices=SHAPES)
    parser.add_argument("--budgets", type=lambda s: [int(x) for x in s.split(",")], default=[0, 16, 64])
    parser.add_argument("--rounds", type=int, default=60, help="that are timed, of each kind")
    parser.add_argument("--context", type=int, default=256, help="tokens of the prompt")
    parser.add_argument("--acceptance", default="chat", help=f"{', '.join(PROFILES)}, or probabilities by comma")
    parser.add_argument("--profile", action="store_true", help="look at the kernels of some rounds, too")
    parser.add_argument("--out", type=Path, help="file of JSON lines to write; they are printed too")
    options = parser.parse_args()
    began, profile = time.perf_counter(), parse_profile(options.acceptance)
    enough = int((options.rounds + WARM_UP) * (profile.chain_length + 1.5))
    bench = Bench(options.shape, profile, context=options.context, num_tokens=enough)
    print(f"{options.shape}: ready after {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    where = {
        "device": torch.cuda.get_device_name() if bench.on_gpu else platform.machine(),
        "versions": versions | {"python": platform.python_version()},
        "command": " ".join(["python benchmarks/rounds.py", *sys.argv[1:]]),
    }
    about = {"shape": options.shape, "acceptance": profile.name, "context": options.context}
    with open(options.out or "/dev/null", "w") as file:

        def lines() -> Iterator[dict]:
            kinds = [(budget, kind) for budget in options.budgets for kind in kinds_of(bench.target, budget)]
            for budget, kind in kinds:
                yield measure(bench, budget, options.rounds, kind)
            for budget, kind in kinds if options.profile and bench.on_gpu else ():  # last: it may lengthen what follows
                yield profiled(bench, budget, kind)

        for line in lines():
            line |= about | {"seconds_since_start": round(time.perf_counter() - began, 1)}
            file.write(json.dumps(line | where) + "\n")
            file.flush()
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
