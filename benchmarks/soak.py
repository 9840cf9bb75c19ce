"""Mixed requests for a long time through the public API: does memory grow, does a state drift, does any text change?

    python benchmarks/soak.py --minutes 30 --out results/soak

A fixed set of requests (methods, budgets, temperatures, seeds, stops, lengths, long prompts) is drawn from at random. Each is
run whole, as a stream, as a stream that is cancelled, or in turns with another one, and must repeat the text of its first, lone run;
in float32 greedy texts must also be plain decoding's. A conversation runs alongside: at intervals its committed state must answer
like a fresh prefill of the same tokens, and on a GPU the cache of free blocks is emptied then: what is `held` after that
must not grow. Every request is one line of requests.jsonl; verdict.json tells the end. The exit code is 1 if anything was
wrong. On SIGTERM it ends behind the running request, with a whole verdict.

With --pause FILE the GPU can be lent to others meanwhile: as long as FILE exists, the soak waits between two requests, nothing
runs on the device, and no time counts. While it really waits, FILE.waiting exists, too:

    touch FILE; until [ -e FILE.waiting ]; do sleep 0.1; done; ANOTHER PROGRAM; rm FILE
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

import deltatree
from deltatree import GenerateOptions, Pair
from deltatree.bench import load_samples
from deltatree.bench.provenance import describe_machine, describe_versions
from deltatree.decode import Conversation
from deltatree.tree import chain_tree

MIB = 1 << 20
SETTLING = 0.25  # of the time, before memory is judged
GROWTH_BYTES = {"cuda": 16 * MIB, "cpu": 96 * MIB}  # of the middle of the last quarter over that of the one before it
LOOK_SECONDS = 0.1  # between two looks whether a pause is over
CHECK_EVERY = 15  # requests between two looks at the conversation's state, and at what memory is held
DRIFT = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}  # relative, of the next token's logits


@dataclass(frozen=True, slots=True)
class Request:
    """One entry of the fixed set."""

    prompt_ids: tuple[int, ...]
    options: dict


class Soak:
    """What runs, and what has been seen."""

    def __init__(self, pair: Pair, seed: int) -> None:
        self.pair, self.rng = pair, random.Random(seed)
        self.is_exact = pair.target.dtype == torch.float32
        self.requests = self._requests()
        self.truth: dict[Request, tuple[list[int], str]] = {}  # of each request's first run: tokens and text
        self.plain: dict[tuple, list[int]] = {}  # plain decoding's greedy tokens by prompt and what ends them
        self.conversation, self.turn_ids = Conversation(), []
        self.faults: list[str] = []

    def _requests(self) -> list[Request]:
        texts = [turn for sample in load_samples("demo", 99) for turn in sample.turns]
        prompts = [self.pair.encode(text) for text in texts]
        context = self.pair.target.context_length
        long = list(itertools.chain.from_iterable(itertools.repeat(prompts[0], 1 + context // len(prompts[0]))))
        prompts += [prompts[0][:1], long[: min(context // 2, 6000)], long[: context - 20]]
        drafts = [dict(method="ar"), dict(method="dflash"), *(dict(budget=n) for n in (1, 4, 16, 33, 64))]
        if self.pair.drafter is None:
            drafts = drafts[:1]
        manners = [
            {}, {}, dict(stop=(" the", "\n")), dict(repetition_penalty=1.2), dict(temperature=1.0), dict(temperature=0.7, top_p=0.9),
            dict(temperature=1.3, top_k=20, stop=("e ",)), dict(ignore_eos=True),
        ]  # fmt: skip
        made = []
        for number in range(60):
            options = self.rng.choice(drafts) | self.rng.choice(manners)
            if options.get("temperature"):
                options["seed"] = number
            options["max_new_tokens"] = self.rng.choice([1, 2, 7, 48, 48, 96])
            made.append(Request(tuple(prompts[number % len(prompts)]), _Frozen(options)))
        return made

    def run_one(self) -> dict:
        """One step: a request in one of four ways, or a turn of the conversation. Returns its record."""
        how = self.rng.choice(["whole", "stream", "cancelled", "in turns", "turn"])
        if how == "turn":
            return self._turn()
        request = self.rng.choice(self.requests)
        record = {"how": how, "prompt_length": len(request.prompt_ids), **request.options}
        if request not in self.truth:
            how = record["how"] = "first"
        if how == "in turns":
            self._in_turns(request, self.rng.choice([r for r in self.truth]))
        elif how == "cancelled":
            with closing(self._start(request)) as running:
                text = "".join(itertools.islice(running, self.rng.randrange(1, 6)))
            if not self.truth[request][1].startswith(text):
                self._wrong(request, "a cancelled stream had other text")
        else:
            done, text = self._finish(request)
            record["tokens"] = len(done.token_ids)
            if how == "first":
                self._learn(request, done, text)
            self._compare(request, done, text)
        return record

    def _start(self, request: Request):
        return self.pair.start(list(request.prompt_ids), GenerateOptions(**request.options))

    def _finish(self, request: Request):
        running = self._start(request)
        text = "".join(running)
        return running.generation(), text

    def _learn(self, request: Request, done, text: str) -> None:
        self.truth[request] = done.token_ids, done.text
        if text != done.text:
            self._wrong(request, "its stream joined is not its text")
        if self.is_exact and not request.options.get("temperature"):
            ends = {k: v for k, v in request.options.items() if k not in ("method", "budget")}
            key = request.prompt_ids, repr(sorted(ends.items()))
            if key not in self.plain:
                plain = GenerateOptions(**ends, method="ar")
                self.plain[key] = self.pair.collect(list(request.prompt_ids), plain).token_ids
            if self.plain[key] != done.token_ids:
                self._wrong(request, "its tokens are not plain decoding's")

    def _compare(self, request: Request, done, text: str) -> None:
        if (done.token_ids, text) != self.truth[request]:
            self._wrong(request, "its text is not that of its first run")

    def _in_turns(self, *requests: Request) -> None:
        """Two generations that take turns, round by round."""
        running = [self._start(request) for request in requests]
        texts = ["", ""]
        open_ones = {0: iter(running[0]), 1: iter(running[1])}
        while open_ones:
            for index in list(open_ones):
                piece = next(open_ones[index], None)
                if piece is None:
                    del open_ones[index]
                else:
                    texts[index] += piece
        for request, one, text in zip(requests, running, texts, strict=True):
            self._compare(request, one.generation(), text)

    def _turn(self) -> dict:
        """Go on with the conversation, with another method each time, until half of the context is full."""
        context = self.pair.target.context_length
        if len(self.turn_ids) > min(context // 2, 4000):
            self.turn_ids = []
        self.turn_ids = self.turn_ids + list(self.rng.choice(self.requests[:8]).prompt_ids)
        options = dict(self.rng.choice(self.requests).options) | {"max_new_tokens": 64, "ignore_eos": True, "stop": ()}
        done = self.pair.collect(self.turn_ids, GenerateOptions(**options), conversation=self.conversation)
        self.turn_ids += done.token_ids
        return {"how": "turn", "committed": len(self.conversation.token_ids), "reused": done.reused_length}

    @torch.inference_mode()
    def drift(self) -> float | None:
        """How far the next token's logits stand from those after a fresh prefill, relative; None before the first turn."""
        held = self.conversation._held
        if held is None:
            return None
        target, fresh = self.pair.target, self.pair.target.new_state()
        ids = self.conversation.token_ids
        target.prefill(ids, fresh)
        root = chain_tree([ids[-1]])
        ours, theirs = (target.verify(root, state).logits.clone() for state in (held.state, fresh))
        off = float((ours - theirs).norm() / theirs.norm())
        if off > DRIFT[self.pair.target.dtype] or held.state.length != len(ids):
            self.faults.append(f"the state of {len(ids)} tokens is off by {off:.2g}")
        return off

    def _wrong(self, request: Request, what: str) -> None:
        self.faults.append(f"{what}: {len(request.prompt_ids)} prompt tokens, {dict(request.options)}")


class _Frozen(dict):
    """Options that can be a part of a key."""

    def __hash__(self) -> int:
        return hash(repr(sorted(self.items())))


def memory(device: torch.device) -> dict[str, int]:
    """Bytes held now: the device's, allocated and reserved, or this process's resident ones."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return {"allocated": torch.cuda.memory_allocated(device), "reserved": torch.cuda.memory_reserved(device)}
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"resident": pages * 4096}


def held(device: torch.device) -> dict[str, int]:
    """Bytes of a GPU that the process cannot give back: `memory` once PyTorch's cache of free blocks is empty."""
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()
    return memory(device)


def growth(samples: list[dict[str, int]]) -> dict[str, int]:
    """Of every figure, the median of the last quarter over that of the quarter before it, settling left out."""
    if not samples:
        return {}
    settled = samples[int(len(samples) * SETTLING) :]
    third = max(len(settled) // 3, 1)
    return {
        name: int(
            median(s[name] for s in settled[-third:]) - median(s[name] for s in settled[-2 * third : -third] or settled)
        )
        for name in samples[0]
    }


class Clock:
    """The time that was worked: it stands still while there is a file `pause`."""

    def __init__(self, pause: Path | None, is_stopped: Callable[[], bool]) -> None:
        self.pause, self.is_stopped, self.pauses = pause, is_stopped, []
        self.waiting = pause and pause.with_name(f"{pause.name}.waiting")
        if pause:
            self.waiting.unlink(missing_ok=True)
        self.started = time.monotonic()

    def seconds(self) -> float:
        return time.monotonic() - self.started

    def wait(self, device: torch.device, number: int) -> None:
        """As long as the file is there and nobody stops the soak. number: of the request before"""
        if self.pause is None or not self.pause.exists():
            return
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.monotonic()
        self.waiting.touch()
        while self.pause.exists() and not self.is_stopped():
            time.sleep(LOOK_SECONDS)
        self.waiting.unlink(missing_ok=True)
        took = time.monotonic() - began
        self.started += took
        self.pauses.append({"after_request": number, "seconds": round(took, 3)})


def soak(
    pair: Pair,
    minutes: float,
    seed: int,
    write: Callable[[dict], object],
    *,
    pause: Path | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> dict:
    """Run for so long; `write` takes each record. Returns the verdict.

    pause: a file; while it exists, nothing runs and no time counts    is_stopped: asked after each request: is this the end?

    Growth is judged by the resident memory of every record on a CPU, and by `held` alone on a GPU: there a long prompt
    leaves much in PyTorch's cache, which comes back only when a graph is captured.
    """
    run, clock, samples, drifts, told = Soak(pair, seed), Clock(pause, is_stopped), [], [], []
    device, kept = pair.target.device, []
    for number in itertools.count():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", RuntimeWarning)
            record = run.run_one()
        for warning in caught:
            told.append(str(warning.message))
            if "plain decoding" in told[-1]:
                run.faults.append(told[-1])
        samples.append(memory(device))
        record |= {"number": number, "seconds": round(clock.seconds(), 3), **samples[-1]}
        if number % CHECK_EVERY == CHECK_EVERY - 1:
            record["drift"] = run.drift()
            drifts += [record["drift"]] if record["drift"] is not None else []
            if device.type == "cuda":
                record["held"] = held(device)
                kept.append(record["held"])
        write(record | {"faults": len(run.faults)})
        if is_stopped() or clock.seconds() >= 60 * minutes:
            break
        clock.wait(device, number)
        if is_stopped():
            break
    grown = growth(kept if device.type == "cuda" else samples)
    limit = GROWTH_BYTES[device.type]
    run.faults += [f"{name} memory grew by {by / MIB:.0f} MiB" for name, by in grown.items() if by > limit]
    return {
        "clean": not run.faults,
        "faults": run.faults[:50],
        "minutes": round(clock.seconds() / 60, 2),
        "pauses": clock.pauses,
        "stopped": is_stopped(),
        "requests": number + 1,
        "distinct_requests": len(run.truth),
        "state_checks": len(drifts),
        "largest_drift": max(drifts, default=None),
        "memory_first": samples[0],
        "memory_last": samples[-1],
        "memory_peak": {name: max(s[name] for s in samples) for name in samples[0]},
        "held_first": kept[0] if kept else None,
        "held_last": kept[-1] if kept else None,
        "growth_bytes": grown,
        "growth_limit_bytes": limit,
        "warnings": sorted(set(told))[:20],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--target", default="shipped")
    parser.add_argument("--drafter")
    parser.add_argument("--device")
    parser.add_argument("--backend", help="fast, fast-host or reference; by default as the device wants it")
    parser.add_argument("--dtype", help="float32 by default, in which texts must be identical")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for requests.jsonl and verdict.json")
    parser.add_argument("--pause", type=Path, metavar="FILE", help="wait between two requests while this file exists")
    asked, stopped = parser.parse_args(), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    how = dict(device=asked.device, dtype=asked.dtype or "float32", backend=asked.backend)
    pair = deltatree.load(asked.target, asked.drafter, **how)
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
    with open(asked.out / "requests.jsonl" if asked.out else "/dev/null", "w", encoding="utf-8") as file:
        verdict = soak(
            pair, asked.minutes, asked.seed, lambda record: print(json.dumps(record), file=file, flush=True),
            pause=asked.pause, is_stopped=stopped.is_set,
        )  # fmt: skip
    verdict |= {
        "command": f"python benchmarks/soak.py {' '.join(sys.argv[1:])}",
        "target": asked.target,
        "backend": type(pair.target).__name__,
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        **describe_machine(pair.target.device),
        "versions": describe_versions(),
    }
    text = json.dumps(verdict, indent=1)
    print(text)
    if asked.out:
        (asked.out / "verdict.json").write_text(text + "\n", encoding="utf-8")
    return 0 if verdict["clean"] else 1


if __name__ == "__main__":
    sys.exit(main())
