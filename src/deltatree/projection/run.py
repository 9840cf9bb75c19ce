"""The projection: every method on the same random prompts, interleaved, with a drafter that replays the target's own text."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from statistics import median

import torch

from deltatree.bench.plan import Arm
from deltatree.decode import Ending, GenerateOptions, Sampler, decode
from deltatree.decode.auto import LOOK, Experience
from deltatree.decode.calibration import capture_choices, round_costs
from deltatree.decode.costs import RoundCosts
from deltatree.decode.methods import plan as plan_method
from deltatree.decode.options import AUTO, TRANSITION_TREES
from deltatree.drafter import FastDFlashDrafter
from deltatree.drafter.protocol import Drafter
from deltatree.errors import OptionError
from deltatree.models.protocol import Target
from deltatree.projection.expected import RoundSeconds, add_expected, seconds_of_rows
from deltatree.projection.profiles import Profile
from deltatree.projection.replay import FastReplayDrafter, ReplayDrafter
from deltatree.tree import no_draft

NOTE = (
    "a projection: times are measured on this machine, acceptance follows the profile and not a real drafter; "
    "random weights route to more experts than real text does, so that trees look dearer here on a mixture of experts"
)

LEARNING = 256
"""Tokens, of an unknown text, that the rounds stay below in which costs are measured and choices captured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionPlan:
    """Options of a projection, checked when made. Raises OptionError."""

    budgets: tuple[int | str, ...] = (8, 16, 32, 64, AUTO)
    trees: tuple[str, ...] = ("best-first",)  # policies of ddtree: every budget runs once with each
    max_new_tokens: int = 128
    repeats: int = 3  # prompts; figures are medians over them
    context_length: int = 256  # tokens of each prompt
    seed: int = 0
    expected_texts: int = 64  # without a target, over which expected figures are counted

    def __post_init__(self) -> None:
        for name, least in (
            ("max_new_tokens", 2),
            ("repeats", 1),
            ("context_length", 1),
            ("seed", 0),
            ("expected_texts", 2),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise OptionError(f"{name}={value!r} is not possible; give a whole number of at least {least}")
        for budget in self.budgets:
            GenerateOptions(budget=budget)
        if not self.trees:
            raise OptionError("a projection needs at least one tree, e.g. best-first")
        for tree in self.trees:
            GenerateOptions(tree=tree)
            if tree in TRANSITION_TREES:
                raise OptionError(
                    f"tree {tree!r} scores by what the target writes, and a projection's random text teaches it nothing; "
                    "give best-first or calibrated"
                )
            if tree == "chain":
                raise OptionError(
                    "tree 'chain' is DFlash, which a projection has anyway; give best-first or calibrated"
                )

    def arms(self, depth: int) -> list[Arm]:
        """Plain decoding, the chain, and the trees one policy after the other. depth: the drafter's"""
        budgets, trees = dict.fromkeys(self.budgets), dict.fromkeys(self.trees)
        return [
            Arm("ar", 0), Arm("dflash", depth), *(Arm("ddtree", budget, tree) for tree in trees for budget in budgets)
        ]  # fmt: skip


@dataclass
class _Pass:
    """One generation of one arm."""

    seconds: float = 0.0
    tokens: int = 0  # without the first, which prefill emits
    lengths: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    round_seconds: list[float] = field(default_factory=list)
    departures: int = 0  # where the text left plain decoding's, and the drafter was told how it goes on


def project(
    target: Target,
    profile: Profile,
    plan: ProjectionPlan,
    *,
    timed: Drafter | None = None,
    names: tuple[str, str] = ("", ""),
    on_pass: Callable[[int, int, Arm], object] = lambda done, total, arm: None,
) -> list[dict]:
    """One row of figures an arm, and what they come to in the long run (`expected_...`).

    All of them first run once to warm up, and `auto` to learn.

    timed: a drafter whose work each draft does besides, for its time    names: of target and drafter, for the rows
    """
    room = target.context_length - plan.context_length - plan.max_new_tokens - profile.depth
    if room < 1:
        raise OptionError(
            f"a prompt of {plan.context_length} tokens and {plan.max_new_tokens} new ones do not fit into the target's context "
            f"of {target.context_length}; lower --context or --max-new-tokens"
        )
    drafter = ReplayDrafter(profile, target.vocab_size, target.device, timed, plan.seed)
    arms = plan.arms(drafter.depth)
    projection = _Projection(target, drafter, plan, names)
    passes: dict[Arm, list[_Pass]] = {arm: [] for arm in arms}
    total = (plan.repeats + 1) * len(arms)
    for repeat in range(plan.repeats + 1):
        prompt = projection.prompt(repeat)
        text = prompt + projection.continuation(prompt, plan.max_new_tokens + drafter.depth + 1)
        start = repeat % len(arms)
        for place, arm in enumerate(arms[start:] + arms[:start]):
            passes[arm].append(projection.run(arm, prompt, text))
            on_pass(repeat * len(arms) + place + 1, total, arm)
    rows = [_row(arm, passes, profile, plan, target, names, timed is not None) for arm in arms]
    _expect(rows, passes, projection, profile)
    return rows


def _expect(rows: list[dict], passes: dict[Arm, list[_Pass]], projection: _Projection, profile: Profile) -> None:
    """Add what the measured rounds come to in the long run."""
    plan = projection.plan
    seconds = {tree: _seconds(rows, passes, projection, tree) for tree in plan.trees}
    add_expected(
        rows, profile, seconds, num_tokens=plan.max_new_tokens - 1, lives=1, generations=plan.expected_texts
    )  # fmt: skip


def _seconds(
    rows: list[dict], passes: dict[Arm, list[_Pass]], projection: _Projection, tree: str
) -> RoundSeconds:  # fmt: skip
    """What rounds took with the trees of one policy."""
    target, experience = projection.target, projection.experiences.get(tree)
    more = {}
    if experience is not None:  # sizes that no arm runs, as `auto` has learned them
        sizes = experience.costs.node_counts
        learned = experience.costs.drafted(sizes, projection.plan.context_length)
        more = dict(zip(sizes.tolist(), learned.tolist(), strict=True))
    seconds = seconds_of_rows(rows, tree, buckets=getattr(target, "node_buckets", None), more=more)
    if not projection.is_on_device:
        return seconds
    over = [
        took - seconds.tree(nodes + 1)
        for one in passes.get(Arm("ddtree", AUTO, tree), [])[1:]
        for nodes, took in zip(one.nodes, one.round_seconds, strict=True)
        if nodes
    ]
    return replace(seconds, choice=max(median(over), 0.0) if over else LOOK)


@dataclass
class _Projection:
    target: Target
    drafter: ReplayDrafter
    plan: ProjectionPlan
    names: tuple[str, str]
    costs: RoundCosts | None = None  # as they were measured, before any text
    experiences: dict[str, Experience] = field(default_factory=dict)  # of `auto`, by tree: none learns from another's

    def __post_init__(self) -> None:
        self.is_on_device = isinstance(self.drafter.timed, FastDFlashDrafter) and self.target.device_rounds
        self.drafts = FastReplayDrafter(self.drafter) if self.is_on_device else self.drafter

    def prompt(self, repeat: int) -> list[int]:
        draw = random.Random(f"{self.plan.seed} {repeat}")
        return [draw.randrange(self.target.vocab_size) for _ in range(self.plan.context_length)]

    def continuation(self, token_ids: list[int], count: int) -> list[int]:
        """What plain decoding emits after these tokens."""
        from deltatree.drafter.scripted import NoDrafter

        rounds = decode(
            self.target,
            NoDrafter(self.target.vocab_size),
            token_ids,
            build_tree=no_draft,
            budget=0,
            ending=Ending(count),
            sampler=Sampler(),
        )
        return [token for done in rounds for token in done.token_ids]

    def run(self, arm: Arm, prompt: list[int], text: list[int]) -> _Pass:
        """One generation. What it takes to tell the drafter of a departure is not counted."""
        result, emitted, rounds = _Pass(), list(prompt), self._rounds(arm, prompt)
        self._tell(text, range(len(prompt), len(text)))
        while True:
            captured, started = self._num_captured(), self._now()
            done = next(rounds, None)
            seconds = self._now() - started
            if done is None:
                return result
            emitted += done.token_ids
            if done.num_nodes and self._num_captured() == captured:  # else its time was a capture's
                result.seconds += seconds
                result.tokens += len(done.token_ids)
                result.lengths.append(done.acceptance_length)
                result.nodes.append(done.num_nodes - 1)
                result.round_seconds.append(seconds)
            known = self.drafter.text
            if emitted[-len(done.token_ids) :] != known[len(emitted) - len(done.token_ids) : len(emitted)]:
                result.departures += 1
                missing = len(text) - len(emitted)
                known = emitted + (self.continuation(emitted, missing) if missing > 0 else [])
                self._tell(known, range(len(emitted) - 1, len(known)))

    def _tell(self, text: list[int], lengths: range) -> None:
        """Tell the drafter the text. lengths: of committed tokens, at which it will draft

        Where rounds stay on the device, the next draft may have begun already, and then it knows the former text only.
        """
        self.drafter.text = text
        if self.is_on_device:
            self.drafts.plant(lengths)

    def _rounds(self, arm: Arm, prompt: list[int]) -> Iterator:
        """A generation that has not begun. Before the first one of `auto` with a tree, its choices are captured."""
        options = GenerateOptions(
            method=arm.method, budget=arm.budget, tree=arm.tree, max_new_tokens=self.plan.max_new_tokens
        )
        is_first = arm.budget == AUTO and arm.tree not in self.experiences
        if is_first:
            self._tell([], range(LEARNING))
            self.experiences[arm.tree] = Experience(self._costs())
        experience = self.experiences.get(arm.tree)
        drafter, policy, budget = plan_method(options, self.drafts, self.target.vocab_size, experience)
        if is_first:
            capture_choices(self.target, self.drafts, experience.costs, policy.policy)
        return decode(
            self.target,
            drafter,
            prompt,
            build_tree=policy,
            budget=budget,
            ending=Ending(self.plan.max_new_tokens),
            sampler=Sampler(),
        )

    def _costs(self) -> RoundCosts:
        """What rounds cost: measured once, a copy for everyone who goes on learning."""
        if self.costs is None:
            self.costs = round_costs(self.target, self.drafts, (*self.names, "projection"))
        return deepcopy(self.costs)

    def _num_captured(self) -> int:
        return sum(getattr(part, "num_captured", 0) for part in (self.target, self.drafts))

    def _now(self) -> float:
        """The time when all work is done. Rounds on the device end when their record arrives: the next draft may run on."""
        if self.target.device.type == "cuda" and not self.is_on_device:
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()


def _row(
    arm: Arm,
    passes: dict[Arm, list[_Pass]],
    profile: Profile,
    plan: ProjectionPlan,
    target: Target,
    names: tuple[str, str],
    is_timed: bool,
) -> dict:
    """Medians over the prompts; speedups are medians of each prompt's own."""
    own, plain, chain = (passes[other][1:] for other in (arm, *list(passes)[:2]))

    def speedup(base: list[_Pass]) -> float:
        pairs = zip(own, base, strict=True)
        return median((mine.tokens / mine.seconds) / (theirs.tokens / theirs.seconds) for mine, theirs in pairs)

    rounds = sum(len(one.lengths) for one in own)
    return {
        "projection": True,
        "note": NOTE,
        "target": names[0],
        "drafter": names[1] if is_timed else None,
        "device": str(target.device),
        "profile": profile.name,
        "all_right": list(profile.all_right),
        "context_length": plan.context_length,
        "max_new_tokens": plan.max_new_tokens,
        "repeats": plan.repeats,
        "method": arm.method,
        "budget": arm.budget,
        "tree": arm.tree if arm.method == "ddtree" else None,
        "label": arm.label,
        "tokens_per_second": median(one.tokens / one.seconds for one in own),
        "speedup": speedup(plain),
        "speedup_over_dflash": speedup(chain),
        "acceptance_length": sum(sum(one.lengths) for one in own) / rounds,
        "nodes_per_round": sum(sum(one.nodes) for one in own) / rounds,
        "milliseconds_per_round": 1e3 * sum(one.seconds for one in own) / rounds,
        "departures": sum(one.departures for one in own),
        "seconds": [one.seconds for one in own],
        "tokens": [one.tokens for one in own],
    }
