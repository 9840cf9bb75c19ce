"""The bench run: every arm on every prompt, interleaved, timed alike, judged against plain decoding."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from deltatree.bench.plan import Arm, BenchPlan
from deltatree.bench.provenance import describe_run
from deltatree.bench.ranks import Ranks
from deltatree.bench.records import (
    Key,
    Record,
    RecordWriter,
    index,
    make_folder,
    merge_ranks,
    read_records,
    read_run,
    records_file,
    refuse_other_run,
    write_json,
)
from deltatree.bench.samples import Sample
from deltatree.bench.stages import StageClock, TimedDrafter, TimedTarget
from deltatree.bench.verdict import PlainText, first_divergence, judge, measure_noise, noise_ceiling
from deltatree.decode.calibration import capture_choices
from deltatree.decode.methods import plan as plan_method
from deltatree.decode.options import AUTO
from deltatree.decode.sampling import sampler_for
from deltatree.errors import OptionError, PromptError
from deltatree.text import detokenize

if TYPE_CHECKING:
    import torch

    from deltatree.decode.round import Round
    from deltatree.pair_api import Pair

Progress = Callable[[int, int, Record], None]
"""Called after each new record of this process: records done, records in all, the record."""


@dataclass(frozen=True, slots=True)
class BenchRun:
    """What a run has measured. info: as in run.json."""

    info: dict
    records: list[Record]

    @property
    def num_diverged(self) -> int:
        return sum(record.verdict == "diverged" for record in self.records)


def run_bench(
    pair: Pair,
    samples: list[Sample],
    plan: BenchPlan,
    out: Path | None = None,
    *,
    command: str = "",
    ranks: Ranks = Ranks(),  # noqa: B008 - immutable
    on_record: Progress | None = None,
) -> BenchRun:
    """Decode all samples with all arms of the plan.

    Every arm is warmed up at full length before anything is timed. Then, sample by sample, all arms decode the same
    prompt, each sample starting with another arm, so that drift hits all alike. Later turns of a conversation follow
    plain decoding's answer in every arm. Speeds are taken without stage timing; the first `plan.stage_samples` samples
    are decoded once more with it.

    out: a folder for the records. If it already holds some of this run's, only the missing ones are decoded.
    Raises OptionError, PromptError, and RecordError for another run's folder or one that cannot be written.
    """
    if plan.needs_drafter and pair.drafter is None:
        raise OptionError("methods dflash and ddtree need a drafter; name one, or bench ar alone")
    bench = _Bench(pair, samples, plan)
    bench.check_prompts()
    ranks.open()
    try:
        info, held = ranks.share(_prepare(bench, out, command, ranks) if ranks.is_first else None)
        with _records(out, ranks) as keep:
            bench.noise = info["noise"]
            fresh = bench.decode(ranks.own(list(enumerate(samples))), index(held), keep, on_record)
        ranks.wait()
        if out is None:
            return BenchRun(info, [*held, *fresh])
        if ranks.is_first:
            merge_ranks(out)
        ranks.wait()
        return BenchRun(info, read_records(records_file(out)))
    finally:
        ranks.close()


def _prepare(bench: _Bench, out: Path | None, command: str, ranks: Ranks) -> tuple[dict, list[Record]]:
    """run.json's content and the records that exist already; the folder is ready for more."""
    info = describe_run(bench.pair, bench.samples, bench.plan, command=command, num_processes=ranks.size)
    if out is None:
        return info | {"noise": bench.measure_noise()}, []
    make_folder(out)
    if refuse_other_run(out, info):
        return read_run(out), merge_ranks(out)
    info["noise"] = bench.measure_noise()
    write_json(out / "run.json", info)
    return info, []


@contextmanager
def _records(out: Path | None, ranks: Ranks) -> Iterator[Callable[[Record], None]]:
    """What to do with a finished record."""
    if out is None:
        yield lambda record: None
        return
    writer = RecordWriter(records_file(out, ranks.rank, ranks.size))
    try:
        yield writer.append
    finally:
        writer.close()


@dataclass
class _Bench:
    """One process's part of a run."""

    pair: Pair
    samples: list[Sample]
    plan: BenchPlan
    noise: dict = field(default_factory=dict)  # as in run.json

    def __post_init__(self) -> None:
        self.arms = self.plan.arms(self.pair.drafter.depth if self.pair.drafter is not None else 0)
        self.clock = StageClock(self._synchronize)
        self.timed_pair = copy.copy(self.pair)
        self.timed_pair.target = TimedTarget(self.pair.target, self.clock)
        if self.pair.drafter is not None:
            self.timed_pair.drafter = TimedDrafter(self.pair.drafter, self.clock)

    def check_prompts(self) -> None:
        """Refuse prompts that cannot be decoded before anything is."""
        from deltatree.decode.stream import check_prompt

        for sample in self.samples:
            with _naming(sample, 0):
                if self.plan.raw and len(sample.turns) > 1:
                    raise PromptError(
                        "a raw prompt has no turns; leave --raw out, or give a data set of single prompts"
                    )
                check_prompt(self.encode(sample, []), self.pair.target)

    def encode(self, sample: Sample, answers: list[str]) -> list[int]:
        """The prompt of the turn that follows these answers."""
        if self.plan.raw:
            return self.pair.encode(sample.turns[0], raw=True)
        messages = []
        for question, answer in zip(sample.turns, answers, strict=False):
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        messages.append({"role": "user", "content": sample.turns[len(answers)]})
        return self.pair.encode(messages, thinking=self.plan.thinking)

    def measure_noise(self) -> dict:
        """The largest noise on the first samples, and what it may at most be to excuse a divergence."""
        if not self.plan.is_greedy or len(self.arms) == 1:
            return {"measured": None, "bound": 0.0, "positions": 0}
        target = self.pair.target
        measured, positions = 0.0, 0
        for sample in self.samples[: self.plan.noise_samples]:
            prompt_ids = self.encode(sample, [])
            rounds = self.pair.rounds(prompt_ids, self.plan.options(self.arms[0]))
            plain = PlainText(target, prompt_ids, [token for r in rounds for token in r.token_ids])
            measured = max(measured, measure_noise(plain, [self._shape(arm) for arm in self.arms[1:]]))
            positions += max(len(plain.token_ids) - 1, 0)
        return {"measured": measured, "bound": min(measured, noise_ceiling(target)), "positions": positions}

    def _shape(self, arm: Arm) -> tuple[int, int]:
        """Depth and number of nodes of an arm's trees; a wide one where the budget is chosen each round."""
        return self.pair.drafter.depth, arm.budget if isinstance(arm.budget, int) else 64

    def decode(
        self,
        numbered: list[tuple[int, Sample]],
        held: dict[Key, Record],
        keep: Callable[[Record], None],
        on_record: Progress | None,
    ) -> list[Record]:
        """All records that are missing. numbered: this process's samples with their places among all."""
        total = sum(len(sample.turns) for _, sample in numbered) * len(self.arms)
        done = sum(
            self._key(s, turn, arm) in held for _, s in numbered for turn in range(len(s.turns)) for arm in self.arms
        )
        if done == total:
            return []
        self._warm_up()
        fresh: list[Record] = []
        for number, sample in numbered:
            answers: list[str] = []
            for turn in range(len(sample.turns)):
                with _naming(sample, turn):
                    for record in self._turn(number, sample, turn, answers, held):
                        keep(record)
                        fresh.append(record)
                        done += 1
                        if on_record is not None:
                            on_record(done, total, record)
        return fresh

    def _key(self, sample: Sample, turn: int, arm: Arm) -> Key:
        return sample.dataset, sample.id, turn, arm.method, arm.budget

    def _warm_up(self) -> None:
        """Every arm at full length, so that compilers, caches and allocators are done before anything counts.

        Budget `auto` measures what rounds cost, and learns its first figures here; all that it may choose is captured, and
        so are commits of paths of any length.
        """
        prompt_ids, pair = self.encode(self.samples[0], []), self.pair
        for arm in self.arms:
            options = self.plan.options(arm)
            if arm.budget == AUTO:
                experience = pair.experience()
                _, auto, _ = plan_method(
                    options, pair.drafter, pair.target.vocab_size, experience, pair.transitions(options)
                )
                capture_choices(pair.target, pair.drafter, experience.costs, auto.policy, sampler_for(options))
            for _ in pair.rounds(prompt_ids, options):
                pass
        if pair.drafter is not None and hasattr(pair.target, "capture_host_steps"):
            pair.target.capture_host_steps(pair.drafter.depth + 1)

    def _turn(
        self, number: int, sample: Sample, turn: int, answers: list[str], held: dict[Key, Record]
    ) -> Iterator[Record]:
        """The missing records of one turn; plain decoding's answer is added to `answers`.

        A record waits until plain decoding is done, because its verdict needs that text.
        """
        prompt_ids = self.encode(sample, answers)
        start = (number + turn) % len(self.arms)
        waiting: list[Record] = []
        plain_record = held.get(self._key(sample, turn, self.arms[0]))
        plain = PlainText(self.pair.target, prompt_ids, plain_record.token_ids) if plain_record else None
        for arm in self.arms[start:] + self.arms[:start]:
            if self._key(sample, turn, arm) in held:
                continue
            record = self._run(number, sample, turn, arm, prompt_ids)
            if arm.method == "ar":
                plain = PlainText(self.pair.target, prompt_ids, record.token_ids)
            waiting.append(record)
            if plain is not None:
                yield from (self._judged(record, plain) for record in waiting)
                waiting.clear()
        answers.append(detokenize(self.pair.tokenizer, plain.token_ids))

    def _judged(self, record: Record, plain: PlainText) -> Record:
        if not self.plan.is_greedy:
            return replace(record, verdict="sampled")
        divergence = first_divergence(plain, record.token_ids)
        return replace(record, divergence=divergence, verdict=judge(divergence, self.noise["bound"]))

    def _run(self, number: int, sample: Sample, turn: int, arm: Arm, prompt_ids: list[int]) -> Record:
        """One generation, timed, not yet judged."""
        options = self.plan.options(arm, request=number * 16 + turn)
        self._reset_peak()
        prefill, rest, prefill_seconds, decode_seconds = self._timed(self.pair.rounds(prompt_ids, options))
        peak_bytes = self._peak()
        stage_seconds = None
        if number < self.plan.stage_samples:
            staged = self.timed_pair.rounds(prompt_ids, options)
            next(staged, None)
            self.clock.restart()
            for _ in staged:
                pass
            stage_seconds = self.clock.seconds
        done = [*prefill, *rest]
        return Record(
            dataset=sample.dataset,
            sample=sample.id,
            turn=turn,
            method=arm.method,
            budget=arm.budget,
            tree=self.plan.tree,
            thinking=self.plan.thinking,
            prompt_length=len(prompt_ids),
            token_ids=[token for r in done for token in r.token_ids],
            prefill_seconds=prefill_seconds,
            decode_seconds=decode_seconds,
            acceptance_lengths=[r.acceptance_length for r in rest],
            num_drafted=sum(r.num_nodes - 1 for r in rest),
            budgets=[r.num_nodes - 1 for r in rest],
            stop_reason=(done[-1].ended if done else None) or "length",
            verdict="identical",
            stage_seconds=stage_seconds,
            peak_bytes=peak_bytes,
        )

    def _timed(self, rounds: Iterator[Round]) -> tuple[list[Round], list[Round], float, float]:
        """Prefill's round, all others, and the seconds of both. The device is waited for at these three borders only."""
        self._synchronize()
        started = time.perf_counter()
        first = next(rounds, None)
        self._synchronize()
        decoding = time.perf_counter()
        rest = [replace(r, features=None) for r in rounds]  # features would fill the memory of a long text
        self._synchronize()
        ended = time.perf_counter()
        return [first] if first else [], rest, decoding - started, ended - decoding

    @property
    def _device(self) -> torch.device:
        return self.pair.target.device

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._device)

    def _reset_peak(self) -> None:
        if self._device.type == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats(self._device)

    def _peak(self) -> int | None:
        if self._device.type != "cuda":
            return None
        import torch

        return torch.cuda.max_memory_allocated(self._device)


@contextmanager
def _naming(sample: Sample, turn: int) -> Iterator[None]:
    """Says in which sample a prompt cannot be decoded."""
    try:
        yield
    except PromptError as error:
        raise PromptError(f"sample {sample.id!r} of {sample.dataset}, turn {turn + 1}: {error}") from error
