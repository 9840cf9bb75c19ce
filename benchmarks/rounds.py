"""Greedy rounds on the device at published shapes with random weights, as JSON lines: where their milliseconds go.

    python benchmarks/rounds.py --shape qwen3.6-35b-a3b --budgets 0,16,64 --out results.jsonl

A line is about `whole` rounds, as a fixed budget runs them, or about `split` ones, as `auto` runs them: draft, read, choose,
verify. Either way the next draft is launched right behind a verify, before that one's record is waited for; of rounds
without a draft the whole next round is.

| key | what |
|---|---|
| `round_ms` | from one round's record to the next one's by the host's clock |
| `busy_ms` | what its two graphs take on the device |
| `draft_ms` or `rest_ms`, `verify_ms` | the same of its halves |
| `over_ms` | `round_ms` less `busy_ms`, round by round |
| `pauses_us` | from the end of one graph to the start of another: a record's copy, the next launch, what the device waits for |
| `long_pauses` | those over 30 us, a round |
| `ahead` | the share of launches that found the device busy |
| `choice_ms` | the choice between draft and verify, a part of their pause |
| `host_us` | the host's time from a record's arrival to a launch |
| `launch_us` | the host's time for one launch |
| `idle_launch_us` | what of a graph's span an idle device waits for its launch |
| `acceptance_length`, `departed` | tokens a round; whether they were other than planted, and the line void |

Times are medians over rounds; `_p90` stands for the 90th percentile. Spans are those of the real rounds: every graph
stands between two events of its stream. A device that has nothing else to do passes the first one at once, and then waits
for the launch. That wait is measured afterwards: the same graph again and again over the same tree, behind an idle
and behind a busy stream in turns. Of launches that found the device idle the difference, `idle_launch_us`, is taken off the span
and added to the pause before it. The events cost a round some microseconds. Within a graph the device waits
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

from deltatree.decode.auto import AutoBudget, Experience
from deltatree.decode.costs import RoundCosts
from deltatree.device import DeviceRounds
from deltatree.device.launches import REST, Arrival, Half, Span
from deltatree.device.loop import budget_to_build
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
    """One launch of a round's half. Its span knows nothing without a GPU."""

    name: str  # "verify", "draft" or "rest"
    span: Span
    was_ahead: bool  # whether it found the device busy
    waited_us: float  # the host's time since it had read the last record
    host_us: float


def first_half(half: Half) -> str:
    return "rest" if half == REST else "draft"


def is_running(span: Span) -> bool:
    return bool(span._events) and not span._events[1].query()


def pause_us(before: Span, after: Span) -> float:
    """From the end of one to the start of the other, both of them passed."""
    return 1e3 * before._events[1].elapsed_time(after._events[0])


@contextmanager
def watched() -> Iterator[list[Launch]]:
    """Every launch from here on."""
    half, verify, wait, seen = DeviceRounds._launch_half, DeviceRounds._launch_verify, Arrival.wait, []
    arrived, last = time.perf_counter(), None

    def noted(launch: Callable, name: str, rounds: DeviceRounds, *options):
        nonlocal last
        begun = time.perf_counter()
        was_ahead = last is not None and is_running(last)
        done = launch(rounds, *options)
        last = rounds._drafting if done is None else done.spans[1]
        seen.append(Launch(name, last, was_ahead, 1e6 * (begun - arrived), 1e6 * (time.perf_counter() - begun)))
        return done

    def read(arrival: Arrival):
        nonlocal arrived
        found, arrived = wait(arrival), time.perf_counter()
        return found

    DeviceRounds._launch_half = lambda rounds, which: noted(half, first_half(which), rounds, which)
    DeviceRounds._launch_verify = lambda rounds, *which: noted(verify, "verify", rounds, *which)
    Arrival.wait = read
    try:
        yield seen
    finally:
        DeviceRounds._launch_half, DeviceRounds._launch_verify, Arrival.wait = half, verify, wait


class Whole:
    """A round as a fixed budget runs it."""

    kind = "whole"

    def __call__(self, rounds: DeviceRounds, budget: int) -> list[int]:
        return rounds.run(budget, then=rounds.half(budget)).token_ids


class Split:
    """A round as `auto` runs it, its learning included. What was chosen is not what is verified, so that rounds are alike."""

    kind = "split"

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
        done = rounds.verify(budget, then=rounds.half(widest, offer=True), meanwhile=policy.settle)
        self._learn = policy.lesson([0], size)
        policy.finish(rounds.seconds)
        return done.token_ids

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
    for name in ("_first_spans", "_second_spans"):  # one for each launch, since all are looked at in the end
        setattr(rounds, name, iter([Span(bench.on_gpu) for _ in range(num_rounds + 1)]))
    ended = time.perf_counter()
    with watched() as seen:
        for _ in range(num_rounds):
            tokens = one_round(rounds, budget)
            begun, ended = ended, time.perf_counter()
            milliseconds.append(1e3 * (ended - begun))
            text += tokens
            emitted.append(len(tokens))
            launches.append({launch.name: launch for launch in seen})
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
    names = launches[0]
    found["host_us"] = {name: round(median(of[name].waited_us for of in launches), 1) for name in names}
    if isinstance(one_round, Split):
        found |= spread("choice_ms", [1e3 * seconds for seconds in one_round.choices[WARM_UP:]])
    return found | (by_events(rounds, budget, milliseconds, launches) if bench.on_gpu else {})


def by_events(rounds: DeviceRounds, budget: int, milliseconds: list[float], launches: list[dict[str, Launch]]) -> dict:
    """The device's share of rounds.

    milliseconds: by the host's clock    launches: by name, of each round: its verify, and the first half of the next one
    """
    torch.cuda.synchronize()
    names = list(launches[0])
    idle = {name: idle_launch_us(rounds, budget, name) for name in names}

    def wait_us(launch: Launch) -> float:
        return 0.0 if launch.was_ahead else idle[launch.name]

    busy = {name: [1e3 * of[name].span.seconds - wait_us(of[name]) / 1e3 for of in launches] for name in names}
    all_busy = [sum(of_round) for of_round in zip(*busy.values(), strict=True)]
    over = [whole - part for whole, part in zip(milliseconds, all_busy, strict=True)]
    found = spread("busy_ms", all_busy) | spread("over_ms", over)
    found |= {key: value for name in busy for key, value in spread(f"{name}_ms", busy[name]).items()}
    pauses = defaultdict(list)
    for before, after in pairwise(launch for of in launches for launch in of.values()):
        pauses[f"{before.name} -> {after.name}"].append(pause_us(before.span, after.span) + wait_us(after))
    num_long = sum(mean(pause > LONG_PAUSE for pause in those) for those in pauses.values())
    return found | {
        "pauses_us": {where: round(median(those), 1) for where, those in pauses.items()},
        "pauses_us_p90": {where: round(p90(those), 1) for where, those in pauses.items()},
        "long_pauses": round(num_long, 2),
        "launch_us": {name: round(median(of[name].host_us for of in launches), 1) for name in names},
        "ahead": {name: round(mean(of[name].was_ahead for of in launches), 2) for name in names},
        "idle_launch_us": {name: round(wait, 1) for name, wait in idle.items()},
    }


@torch.inference_mode()
def idle_launch_us(rounds: DeviceRounds, budget: int, name: str) -> float:
    """How long an idle device waits for a half's launch. Every replay has the same to do, and commits nothing."""
    counts, bonus = (rounds.buffers.steps, rounds.session.buffers.count), rounds.bonus.clone()
    half = rounds.half(budget)
    work = rounds._captured("verify", half.count) if name == "verify" else rounds._captured(*half)

    def span_us(*, is_busy: bool) -> float:
        for count in counts:
            count.zero_()
        rounds.bonus.copy_(bonus)
        torch.cuda.synchronize()
        if is_busy:
            torch.cuda._sleep(AHEAD)
        with Span(is_gpu=True) as span:
            work()
        torch.cuda.synchronize()
        return 1e6 * span.seconds

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
