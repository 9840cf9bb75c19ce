"""One greedy round on the device at published shapes with random weights, as JSON lines: where its milliseconds go.

    python benchmarks/rounds.py --shape qwen3.6-35b-a3b --budgets 0,16,64 --out results.jsonl

| key | what |
|---|---|
| `round_ms` | a whole round through `DeviceRounds.run`, by the host's clock |
| `split_ms` | the same through `draft` and `verify` with the choice of a budget between them, as `auto` does |
| `choice_ms` | that choice alone |
| `draft_graph_ms`, `verify_graph_ms`, `round_graph_ms` | captured work alone, by device events, launched ahead of its start |
| `round_over_ms`, `split_over_ms` | what a round takes beyond the first two of these |
| `launch_us`, `record_to_launch_us` | the host's part: one launch; from a round's record to the next round's launch |
| `gaps`, `split_gaps` | the device's pauses between kernels of some rounds, as the profiler saw them |

All are medians over rounds. Acceptance follows a profile: the right tokens are planted in the drafter's logits on the device, so that
planting takes no time of the host. Without a GPU only the host's figures are there.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median

import torch
import transformers

from deltatree.capture import Captured
from deltatree.decode.acceptance import Drafts
from deltatree.decode.auto import AutoBudget, Experience
from deltatree.decode.costs import RoundCosts
from deltatree.device import DeviceRounds
from deltatree.device.rounds import WIDEST
from deltatree.drafter import FastDFlashDrafter
from deltatree.drafter.fast_dflash import FastSession
from deltatree.models import FastTarget
from deltatree.models.shapes import SHAPES
from deltatree.projection.profiles import PROFILES, Profile, parse_profile
from deltatree.projection.replay import FastReplayDrafter, ReplayDrafter, planted
from deltatree.projection.shapes import target_and_drafter
from deltatree.tree import best_first

WARM_UP = 5  # rounds
PROFILED = 8  # rounds
REPLAYS = 20
LONG_GAP = 30.0  # microseconds
AHEAD = 4_000_000  # cycles that the device is kept busy while the host launches


class PlantedDrafter(FastReplayDrafter):
    """A replay drafter whose plants for every length lie on the device."""

    def plant(self, profile: Profile, text: list[int]) -> None:
        """text: what the target writes, prompt first"""
        tokens = torch.zeros(len(text), *self.tokens.shape, dtype=torch.int64)
        logits = torch.full((len(text), *self.logits.shape), self.LOWEST)
        for length in range(1, len(text)):
            following = text[length + 1 : length + 1 + profile.depth]
            chosen, chances = planted(profile, following, self.target.vocab_size, f"0 {length}")
            tokens[length, : profile.depth] = torch.tensor(chosen)
            logits[length, : profile.depth] = torch.tensor(chances).clamp_(min=1e-6).log_()
        self.table = tokens.to(self.tokens.device), logits.to(self.logits)

    def start(self) -> FastSession:
        return FastSession(self, self.take_buffers())

    def draft(self, buffers) -> None:
        FastDFlashDrafter.draft(self, buffers)
        tokens, logits = self.table
        place = buffers.length.clamp(max=len(tokens) - 1)
        buffers.logits.fill_(self.LOWEST)
        buffers.logits.scatter_(1, tokens.index_select(0, place)[0], logits.index_select(0, place)[0])


class Bench:
    """A target and a drafter that knows its text, and generations of them that all start from one prompt."""

    def __init__(self, shape: str, profile: Profile, *, context: int, num_tokens: int) -> None:
        self.target, timed = target_and_drafter(shape, profile.depth + 1, backend="fast")
        self.target: FastTarget
        self.on_gpu = self.target.device.type == "cuda"
        vocab_size, device = self.target.vocab_size, self.target.device
        self.drafter = PlantedDrafter(ReplayDrafter(profile, vocab_size, device, timed))
        draw = random.Random(0)
        self.prompt = [draw.randrange(vocab_size) for _ in range(context)]
        self.text: list[int] = []
        rounds = self.start()
        self.text = [*self.prompt, int(rounds.bonus)]
        self.text += [rounds.run(0).token_ids[0] for _ in range(num_tokens)]
        with torch.inference_mode():
            self.drafter.plant(profile, self.text)

    def start(self) -> DeviceRounds:
        state = self.target.new_state()
        verified = self.target.prefill(self.prompt, state)
        return DeviceRounds(self.target, state, self.drafter.start(), verified.features, int(verified.logits.argmax()))


@dataclass
class Watch:
    """When the host launched captured work, and when it had waited for the device."""

    launches: list[tuple[float, float, Captured]] = field(default_factory=list)  # begun, seconds, what
    arrivals: list[float] = field(default_factory=list)

    @contextmanager
    def watching(self) -> Iterator[Watch]:
        launch, stream_wait, event_wait = Captured.__call__, torch.cuda.Stream.synchronize, torch.cuda.Event.synchronize

        def launching(work: Captured) -> None:
            begun = time.perf_counter()
            launch(work)
            self.launches.append((begun, time.perf_counter() - begun, work))

        def waiting(wait: Callable) -> Callable:
            def waited(on) -> None:
                wait(on)
                self.arrivals.append(time.perf_counter())

            return waited

        Captured.__call__ = launching
        torch.cuda.Stream.synchronize, torch.cuda.Event.synchronize = waiting(stream_wait), waiting(event_wait)
        try:
            yield self
        finally:
            Captured.__call__ = launch
            torch.cuda.Stream.synchronize, torch.cuda.Event.synchronize = stream_wait, event_wait

    def host_us(self) -> dict[str, float]:
        if not self.arrivals:
            return {}
        before = [max((at for at in self.arrivals if at < begun), default=None) for begun, _, _ in self.launches]
        pairs = zip(self.launches, before, strict=True)
        pauses = [begun - arrived for (begun, _, _), arrived in pairs if arrived is not None]
        return {
            "launch_us": round(1e6 * median(seconds for _, seconds, _ in self.launches), 1),
            "record_to_launch_us": round(1e6 * median(pauses), 1),
        }


def whole(rounds: DeviceRounds, budget: int) -> list[int]:
    return rounds.run(budget).token_ids


def widest_for(budget: int) -> int:
    """Drafted nodes of the tree from which `auto` would take so many; a plain round drafts none."""
    return next((size for size in WIDEST if size >= budget), budget) if budget else 0


class Split:
    """A round as `auto` runs it: draft, choose, verify; what was chosen is not what is verified, so that rounds are alike."""

    def __init__(self, target: FastTarget) -> None:
        self.policy = AutoBudget(best_first, Experience(RoundCosts(target.node_buckets, captured=True)))
        self.choices: list[float] = []

    def __call__(self, rounds: DeviceRounds, budget: int) -> list[int]:
        widest = widest_for(budget)
        drafted = rounds.draft(widest)
        begun = time.perf_counter()
        self.policy.choose(Drafts.of(drafted.parents, drafted.depths, drafted.scores))
        self.choices.append(time.perf_counter() - begun)
        return rounds.verify(budget).token_ids


def timed_rounds(bench: Bench, budget: int, num_rounds: int, one_round: Callable) -> tuple[dict, Watch]:
    """Median round by the host's clock, and what was emitted."""
    rounds, watch = bench.start(), Watch()
    text = [*bench.prompt, int(rounds.bonus)]
    for _ in range(WARM_UP):
        text += one_round(rounds, budget)
    seconds, emitted = [], []
    with watch.watching():
        for _ in range(num_rounds):
            begun = time.perf_counter()
            tokens = one_round(rounds, budget)
            seconds.append(time.perf_counter() - begun)
            text += tokens
            emitted.append(len(tokens))
    known = bench.text[: len(text)]
    found = {
        "ms": round(1e3 * median(seconds), 4),
        "acceptance_length": round(mean(emitted), 3),
        "departed": text[: len(known)] != known,
    }
    return found, watch


def graph_ms(works: list[Captured], before: Callable[[], object]) -> float:
    """Median device time of captured works in a row, launched while the device is still busy with something else."""
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before()
        torch.cuda._sleep(AHEAD)
        start.record()
        for work in works:
            work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return round(median(times), 4)


@torch.inference_mode()
def graphs_alone(bench: Bench, budget: int) -> dict[str, float]:
    """Draft, verify and whole round as they were captured. What is committed meanwhile has no meaning, only a length."""
    rounds, watch, widest = bench.start(), Watch(), widest_for(budget)
    rounds.draft(widest), rounds.verify(budget)  # captured now, with what that takes
    for _ in range(50):
        rounds.run(budget)
        if rounds.num_uncommitted >= 3:  # a path as long as usual
            break
    steps = rounds.num_uncommitted
    registers = rounds.buffers.steps, rounds.session.buffers.count

    def a_path_to_commit() -> None:
        for register in registers:
            register.fill_(steps)

    with watch.watching():
        rounds.draft(widest)
        num_draft = len(watch.launches)
        rounds.verify(budget)
        num_verify = len(watch.launches)
        rounds.run(budget)
    works = [work for _, _, work in watch.launches]
    return {
        "draft_graph_ms": graph_ms(works[:num_draft], a_path_to_commit),
        "verify_graph_ms": graph_ms(works[num_draft:num_verify], lambda: None),
        "round_graph_ms": graph_ms(works[num_verify:], lambda: None),
    }


def gaps_of(bench: Bench, budget: int, one_round: Callable) -> dict:
    """The device's pauses in PROFILED rounds, the waits between rounds included."""
    from torch.profiler import ProfilerActivity, profile

    rounds = bench.start()
    for _ in range(WARM_UP):
        one_round(rounds, budget)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(PROFILED):
            one_round(rounds, budget)
        torch.cuda.synchronize()
    events = sorted(
        (e.time_range.start, e.time_range.end, e.name) for e in seen.events() if "CUDA" in str(e.device_type)
    )
    if not events:
        return {}
    gaps, (_, until, last), idle = [], events[0], 0.0
    for start, end, name in events[1:]:
        if start > until:
            gaps.append((start - until, short(last)))
            idle += start - until
        if end > until:
            until, last = end, name
    largest = max(gaps)
    long = Counter(name for gap, name in gaps if gap > LONG_GAP)
    return {
        "rounds": PROFILED,
        "kernels_per_round": round(len(events) / PROFILED, 1),
        "idle_ms_per_round": round(idle / 1e3 / PROFILED, 4),
        "largest_us": round(largest[0], 1),
        "largest_after": largest[1],
        "over_30_us_per_round": round(sum(long.values()) / PROFILED, 2),
        "over_30_us_after": {
            name: {"per_round": round(count / PROFILED, 2), "median_us": round(median(g for g, n in gaps if n == name and g > LONG_GAP), 1)}
            for name, count in long.most_common()
        },
    }  # fmt: skip


def short(kernel: str) -> str:
    return kernel.split("(")[0][:70]


def measure(bench: Bench, budget: int, num_rounds: int) -> dict:
    """One line of times."""
    found, watch = timed_rounds(bench, budget, num_rounds, whole)
    line = {"benchmark": "rounds", "budget": budget, "round_ms": found.pop("ms"), **found, **watch.host_us()}
    if budget:  # `auto` runs plain rounds whole
        split = Split(bench.target)
        line["split_ms"] = timed_rounds(bench, budget, num_rounds, split)[0]["ms"]
        line["choice_ms"] = round(1e3 * median(split.choices), 4)
    if bench.on_gpu:
        line |= graphs_alone(bench, budget)
        for kind in ("round", "split"):
            if f"{kind}_ms" in line:
                over = line[f"{kind}_ms"] - line["draft_graph_ms"] - line["verify_graph_ms"]
                line[f"{kind}_over_ms"] = round(over, 4)
    return line


def profiled(bench: Bench, budget: int) -> dict:
    """One line of gaps. After all times, which a profiler that was attached once may lengthen."""
    line = {"benchmark": "gaps of rounds", "budget": budget, "gaps": gaps_of(bench, budget, whole)}
    return line | ({"split_gaps": gaps_of(bench, budget, Split(bench.target))} if budget else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True, choices=SHAPES)
    parser.add_argument("--budgets", type=lambda s: [int(x) for x in s.split(",")], default=[0, 16, 64])
    parser.add_argument("--rounds", type=int, default=60, help="that are timed, of each kind")
    parser.add_argument("--context", type=int, default=256, help="tokens of the prompt")
    parser.add_argument("--acceptance", default="chat", help=f"{', '.join(PROFILES)}, or probabilities by comma")
    parser.add_argument("--out", type=Path, help="file of JSON lines to write; they are printed too")
    options = parser.parse_args()
    began, profile = time.perf_counter(), parse_profile(options.acceptance)
    enough = int((options.rounds + WARM_UP) * (profile.chain_length + 1.5))
    bench = Bench(options.shape, profile, context=options.context, num_tokens=enough)
    print(f"{options.shape}: ready after {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    where = {
        "device": torch.cuda.get_device_name() if bench.on_gpu else platform.machine(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version()},
        "command": " ".join(["python benchmarks/rounds.py", *sys.argv[1:]]),
    }  # fmt: skip
    about = {"shape": options.shape, "acceptance": profile.name, "context": options.context}
    with open(options.out or "/dev/null", "w") as file:

        def lines() -> Iterator[dict]:
            for budget in options.budgets:
                yield measure(bench, budget, options.rounds)
            for budget in options.budgets if bench.on_gpu else ():
                yield profiled(bench, budget)

        for line in lines():
            line |= about | {"seconds_since_start": round(time.perf_counter() - began, 1)}
            file.write(json.dumps(line | where) + "\n")
            file.flush()
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
