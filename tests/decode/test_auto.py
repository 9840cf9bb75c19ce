"""Budget `auto`: lossless whatever it chooses, never far from the best fixed budget, and at rest where drafting does not pay.

Time is counted, not measured: every world has a clock of its own.
"""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from markov import MarkovTarget
from tiny import VOCAB, plain_greedy
from worlds import OftenRight, TextTarget

from deltatree.decode import Conversation, Ending, GenerateOptions, Sampler, decode, sampler_for
from deltatree.decode.acceptance import Drafts
from deltatree.decode.auto import AutoBudget, Experience, Habits
from deltatree.decode.calibration import measure
from deltatree.decode.costs import RoundCosts
from deltatree.decode.methods import plan
from deltatree.drafter import RandomDrafter, RightDrafter, WrongDrafter
from deltatree.models import ReferenceTarget
from deltatree.projection.expected import RoundSeconds, Text, simulate
from deltatree.projection.profiles import PROFILES as REPLAYED
from deltatree.tree import POLICIES, best_first, best_first_scored, chain

PROMPT = [5, 6, 7, 8, 9, 10, 3]


def auto(experience=None, policy=best_first, scored=best_first_scored):
    return AutoBudget(policy, experience or Experience(), scored)


def run(target, drafter, policy, count, budget=255, prompt=PROMPT, sampler=None, conversation=None):
    return list(
        decode(
            target, drafter, prompt, build_tree=policy, budget=budget, ending=Ending(count),
            sampler=sampler or Sampler(), conversation=conversation,
        )
    )  # fmt: skip


def tokens_of(rounds):
    return [token for r in rounds for token in r.token_ids]


class WildCosts(RoundCosts):
    """Says anything."""

    def __init__(self, seed: int, captured: bool) -> None:
        self.random = random.Random(seed)
        super().__init__(captured=captured, clock=self.random.random)

    def plain(self, context):
        return self.random.uniform(0.001, 1)

    def drafted(self, num_nodes, context):
        return np.array([self.random.uniform(0.001, 1) for _ in np.atleast_1d(num_nodes)]).reshape(np.shape(num_nodes))


@pytest.fixture(scope="module")
def hybrid_truth(hybrid):
    return plain_greedy(hybrid, PROMPT, 50)


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    kind=st.sampled_from(["right", "wrong", "random"]),
    tree=st.sampled_from(sorted(POLICIES)),
    captured=st.booleans(),
)
def test_the_text_is_plain_decodings_whatever_rounds_are_said_to_cost(hybrid, hybrid_truth, seed, kind, tree, captured):
    drafter = {
        "right": lambda: RightDrafter(PROMPT + hybrid_truth, VOCAB),
        "wrong": lambda: WrongDrafter(PROMPT + hybrid_truth, VOCAB),
        "random": lambda: RandomDrafter(VOCAB, seed=seed),
    }[kind]()
    make = POLICIES[tree]
    policy = AutoBudget(make() if isinstance(make, type) else make, Experience(WildCosts(seed, captured)))
    target = ReferenceTarget(hybrid)
    for _ in range(2):  # the second generation knows what the first has learned
        assert tokens_of(run(target, drafter, policy, 50)) == hybrid_truth


@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_seed_gives_the_same_text_for_every_budget(hybrid, seed):
    """One draw an emitted token, whatever the tree: so the text cannot depend on what a round happens to cost."""
    target, texts = ReferenceTarget(hybrid), {}
    for budget in (0, 1, 5, 32, "auto", "auto, wild"):
        options = GenerateOptions(temperature=0.9, top_p=0.95, seed=seed)
        if str(budget).startswith("auto"):
            experience = Experience(WildCosts(seed, False)) if budget != "auto" else Experience()
            policy, most = auto(experience), 255
        else:
            policy, most = best_first, budget
        sampler = sampler_for(options, prompt_length=len(PROMPT))
        texts[budget] = tokens_of(run(target, RandomDrafter(VOCAB), policy, 24, most, sampler=sampler))
    assert len({tuple(text) for text in texts.values()}) == 1
    markov = MarkovTarget()
    for seed in range(10):
        options = [GenerateOptions(temperature=1.0, seed=seed, budget=budget) for budget in (0, 8, "auto")]
        got = []
        for chosen in options:
            drafter, policy, most = plan(chosen, RandomDrafter(12), 12)
            got.append(tokens_of(run(markov, drafter, policy, 30, most, prompt=[1, 2], sampler=sampler_for(chosen))))
        assert got[0] == got[1] == got[2]


COSTS = {
    "dense": lambda nodes, context: 0.0124 + 0.00001 * nodes,
    "experts": lambda nodes, context: 0.0014 + 0.0013 * nodes**0.55,
    "processor": lambda nodes, context: 0.018 + 0.0004 * nodes,
    "cliff": lambda nodes, context: 0.010 if nodes <= 16 else 0.030,
}
PROFILES = {
    "strong": (0.95, 0.94, 0.93, 0.92, 0.92, 0.91, 0.9, 0.9),
    "chat": (0.712, 0.678, 0.704, 0.747, 0.776, 0.782, 0.792, 0.787),
    "weak": (0.35, 0.3, 0.25, 0.2, 0.2, 0.2, 0.2, 0.2),
    "hopeless": (0.02,) * 8,
}


def seconds_per_token(policy, costs, profile, *, budget=255, draft=0.002, count=900, skip=300, overconfident=False):
    """Counted time of the tokens after the first ones, in which an experience is made."""
    target = TextTarget(costs, seed=7)
    drafter = OftenRight(target, profile, (0.97,) * len(profile) if overconfident else None, seconds=draft)
    if policy == "auto":
        costs = RoundCosts(captured=costs is COSTS["cliff"], clock=target.clock)
        costs.set_curves(*measure(target, drafter, costs))
        policy = auto(Experience(costs))
    emitted, marks = 0, []
    for done in decode(
        target, drafter, PROMPT, build_tree=policy, budget=budget, ending=Ending(count), sampler=Sampler()
    ):
        emitted += len(done.token_ids)
        marks.append((emitted, target.now))
    first = next(mark for mark in marks if mark[0] >= skip)
    return (marks[-1][1] - first[1]) / (marks[-1][0] - first[0])


@pytest.mark.parametrize(
    ("costs", "profile", "overconfident"),
    [
        ("dense", "strong", False),
        ("dense", "chat", True),
        ("experts", "chat", False),
        ("experts", "weak", True),
        ("processor", "hopeless", True),
        ("cliff", "chat", False),
    ],
)
def test_auto_is_close_to_the_best_fixed_choice_or_better(costs, profile, overconfident):
    arguments = dict(costs=COSTS[costs], profile=PROFILES[profile], overconfident=overconfident)
    fixed = {"plain": COSTS[costs](1, 0), "chain": seconds_per_token(chain, **arguments)}
    for budget in (4, 15, 63):
        fixed[budget] = seconds_per_token(best_first, **arguments, budget=budget)
    got = seconds_per_token("auto", **arguments)
    assert got <= min(fixed.values()) / 0.92, (got, fixed)


GPU = {  # milliseconds: of a draft, of a plain round, of a verify by nodes
    "experts": (1.0, {1: 2.8, 2: 4.2, 4: 5.7, 8: 7.2, 16: 8.8, 64: 16.5, 257: 24.5}),
    "dense": (1.5, {1: 14.1, 16: 15.2, 64: 17.2, 257: 31.0}),
}
BUCKETS = (1, 2, 4, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128, 129, 192, 256, 257)


@pytest.mark.parametrize(
    ("costs", "profile"),
    [("experts", "own-domain"), ("experts", "very-weak"), ("dense", "chat"), ("dense", "very-strong")],
)
def test_on_captured_sizes_auto_keeps_up_with_the_best_fixed_choice_within_short_texts(costs, profile):
    """Generations of 48 tokens after one that makes the experience; a choice by the host costs 0.35 ms."""
    draft, verify = GPU[costs]
    trees = {nodes: (draft + seconds) / 1e3 for nodes, seconds in verify.items()}
    times = RoundSeconds(verify[1] / 1e3, 0.0, trees, choice=0.00035, buckets=BUCKETS)
    times = replace(times, chain=times.tree(9))
    text, fixed = Text(REPLAYED[profile]), {}
    arguments = dict(num_tokens=47, lives=1, generations=40)
    for budget in (0, 8, 16, 32):
        fixed[budget] = simulate(budget, text, times, **arguments)
    chained = simulate(8, text, times, is_chain=True, **arguments)
    got = simulate("auto", text, times, **arguments)
    assert (
        min(got.over(one) for one in (*fixed.values(), chained)) >= 0.93
    )  # two standard errors below what it comes to
    assert got.over(chained) >= 0.97


@pytest.mark.parametrize(
    ("usual", "of_late", "loses"),
    [
        (1.3, 0.95, False),  # a hard passage, of a drafter that pays
        (1.3, 0.7, True),  # no longer
        (0.95, 0.95, True),  # no chance any more, after so many rounds
        (1.05, 1.05, False),
    ],
)
def test_drafting_rests_where_it_clearly_loses_of_late_or_by_little_in_the_long_run(usual, of_late, loses):
    known = Experience()
    for tokens in [usual] * 150 + [of_late] * 40:
        known.learn(tokens, 1.0)
    assert known.drafting_loses(1.0) == loses
    known.try_again()  # a few good rounds bring it back, bad ones do not
    for _ in range(2):
        known.learn(2.0 if loses else 0.3, 1.0)
    assert known.rate() > 0.9 if loses else known.drafting_loses(1.0)


def test_where_drafting_does_not_pay_it_rests_for_ever_longer_stretches():
    target = TextTarget(COSTS["processor"])
    drafter = OftenRight(target, PROFILES["hopeless"], second=0.1, seconds=0.01)  # more often, and small trees pay
    rounds = run(target, drafter, auto(Experience(RoundCosts(clock=target.clock))), 1500)
    assert sum(r.num_nodes > 1 for r in rounds[500:]) < 30
    assert len(drafter.seen) > 1000  # it still comes back to look


def test_the_drafter_gets_every_committed_token_once_and_in_order_however_long_it_rested():
    target = TextTarget(COSTS["processor"])
    drafter = OftenRight(target, PROFILES["hopeless"], seconds=0.01)
    run(target, drafter, auto(Experience(RoundCosts(clock=target.clock))), 900)
    assert drafter.seen == list(range(len(drafter.seen))) and len(drafter.seen) > 600


def test_a_long_context_that_makes_drafts_dear_switches_them_off():
    def costs(nodes, context):
        return 0.01 + (0.00002 * context if nodes > 1 else 0.0)

    target = TextTarget(costs)
    drafter = OftenRight(target, PROFILES["chat"], seconds=0.001)
    policy = auto(Experience(RoundCosts(clock=target.clock)))
    at = {}
    for length in (20, 9000):
        rounds = run(target, drafter, policy, 500, prompt=[1] * length)
        at[length] = np.mean([r.num_nodes > 1 for r in rounds[len(rounds) // 2 :]])
    assert at[20] > 0.9 and at[9000] < 0.25


def test_a_captured_target_is_never_asked_for_more_than_its_largest_bucket():
    target = TextTarget(lambda nodes, context: 0.01)
    costs = RoundCosts((1, 4, 8, 12), captured=True, clock=target.clock)
    policy = auto(Experience(costs))
    rounds = run(target, OftenRight(target, PROFILES["strong"]), policy, 400, budget=11)
    assert max(r.num_nodes for r in rounds) == 12
    assert {r.num_nodes for r in rounds} <= {
        0,
        *range(1, 9),
        12,
    }  # chains of any length, trees as large as their bucket


def test_a_conversation_goes_on_with_what_the_resting_drafter_has_not_seen():
    target = TextTarget(COSTS["processor"])
    drafter = OftenRight(target, PROFILES["hopeless"], seconds=0.01)
    experience, held = Experience(RoundCosts(clock=target.clock)), Conversation()
    prompt = [1, 2, 3]
    for _ in range(4):
        rounds = run(target, drafter, auto(experience), 100, prompt=prompt, conversation=held)
        prompt = prompt + tokens_of(rounds) + [4, 5]
    assert held.reused_length > 0
    assert drafter.seen == list(range(len(drafter.seen)))


def test_a_policy_that_learns_is_told_of_every_round():
    class Learner:
        calls: list = []  # noqa: RUF012

        def begin(self, prompt_ids):
            self.calls.append(("begin", len(prompt_ids)))

        def __call__(self, log_probs, *, root, budget):
            self.calls.append("tree")
            return best_first(log_probs, root=root, budget=budget)

        def observe(self, tree, accepted, logits):
            assert self.calls[-1] == "tree"  # never told of a round that it did not see begin
            self.calls.append((len(tree), accepted.length))
            assert logits.shape[0] == len(tree)

    target, learner = TextTarget(), Learner()
    rounds = run(target, OftenRight(target, PROFILES["chat"]), AutoBudget(learner, Experience()), 60)
    assert learner.calls[0] == ("begin", len(PROMPT))
    assert learner.calls[2::2] == [(r.num_nodes, r.acceptance_length) for r in rounds[1:]]


def test_a_grammar_may_take_nodes_out_of_the_tree():
    """The nodes that are left are found again in the tree that was built."""

    class Odd:
        def __call__(self, input_ids, scores):
            return scores

        def prune(self, tree, history):
            from deltatree.tree import DraftTree

            tokens, parents, place = tree.token_ids.tolist(), tree.parents.tolist(), {0: 0}
            for node in range(1, len(tree)):
                if parents[node] in place and (tokens[node] % 7 or node < 3):
                    place[node] = len(place)
            return DraftTree.from_parents([tokens[n] for n in place], [place.get(parents[n], -1) for n in place])

    target = TextTarget(lambda nodes, context: 0.01)
    policy = auto(Experience(RoundCosts(clock=target.clock)))
    rounds = run(target, OftenRight(target, PROFILES["chat"]), policy, 200, sampler=Sampler(constraint=Odd()))
    assert tokens_of(rounds) == target.text[len(PROMPT) : len(PROMPT) + 200]
    assert max(r.acceptance_length for r in rounds) > 2


def test_the_first_token_ends_it_all_the_same():
    target = TextTarget()
    assert len(run(target, OftenRight(target, PROFILES["chat"]), auto(), 1)) == 1
    assert torch.is_tensor(run(target, OftenRight(target, PROFILES["chat"]), auto(), 2)[-1].features)


def test_where_looking_does_not_pay_rounds_go_unseen_for_a_while():
    """Such a round's time and tokens count; the tree, which nobody saw, teaches nothing about acceptance."""
    now = [0.0]
    policy = auto(Experience(RoundCosts((1, 4, 8), captured=True, clock=lambda: now[0])))
    policy.experience.costs.learn_plain(0.02, 50)
    drafts = Drafts.of([-1, 0, 1, 2], [0, 1, 2, 3], [0.0, -0.01, -0.02, -0.03])

    def finish(size, path):
        policy.learn(path, size)
        now[0] += 0.03
        policy.finish()

    for _ in range(16):
        assert policy.wants_draft(50, 1) and policy.habit() is None
        size = len(policy.choose(drafts))
        finish(size, list(range(size)))
    known, costs = policy.experience, policy.experience.costs
    bias, seen, plain = known.acceptance.bias.copy(), costs._drafted_seen[0].sum(), costs.num_plain(50)
    for _ in range(8):
        assert policy.wants_draft(50, 1) and policy.habit() == (size, False)
        finish(size, [0, 1])
    assert (known.acceptance.bias == bias).all() and costs.num_plain(50) == plain
    assert costs._drafted_seen[0].sum() == seen + 8 and known.rounds == 24
    for unseen in (16, 32, 32):  # a look that changes nothing makes the next one later, also over generations
        assert policy.wants_draft(50, 1) and policy.habit() is None
        finish(len(policy.choose(drafts)), [0, 1])
        policy = auto(known)
        for _ in range(unseen):
            assert policy.wants_draft(50, 1) and policy.habit() == (size, False)
            finish(size, [0, 1])
    assert policy.wants_draft(50, 1) and policy.habit() is None


def test_a_look_that_changes_the_habit_is_followed_by_others_soon():
    habits, found = Habits(), [(1, False)] * 4 + [(2, False)] * 2 + [None, (2, False)]
    lasting = []
    for one in found:
        habits.unseen = 5
        habits.review(one)
        assert habits.unseen == 0 and habits.last == one
        lasting.append(habits.lasts)
    assert lasting == [8, 16, 32, 32, 8, 16, 8, 8]


@pytest.mark.parametrize("seed", range(5))
def test_a_habit_brings_most_tokens_a_second_of_all_choices_and_more_than_looks_do(seed):
    draw, habits, seconds = np.random.default_rng(seed), Habits(), np.array([1.0, 1.1, 1.5])
    chosen, taken, always = 0.0, 0.0, np.zeros((2, 3))
    for turn in range(1, 61):
        tokens = draw.uniform(1, 3, (2, 3))
        kind, place = divmod(int((tokens - 1.6 * seconds).argmax()), 3)
        habits.learn(tokens[kind, place], seconds[place], tokens)
        share = max(0.05, 1 / turn)
        chosen += share * (tokens[kind, place] - chosen)
        taken += share * (seconds[place] - taken)
        always += share * (tokens - always)
        if turn < 16:
            assert habits.best(seconds, look=9.0) is None  # too few to know
    rates = always / seconds
    even = chosen / rates.max() - taken  # seconds of a look with which both bring the same
    assert even > 0 and habits.best(seconds, 0.99 * even) is None
    place, is_chain = habits.best(seconds, 1.01 * even)
    assert rates[int(is_chain), place] == pytest.approx(rates.max())


def test_choices_that_gain_much_by_looking_are_not_made_a_habit():
    habits, seconds = Habits(), np.ones(3)
    for turn in range(40):
        habits.learn(2.0, 1.0, np.array([[1.0, 2.0 * (turn % 2), 0.0], [0.5, 2.0 * (1 - turn % 2), 0.0]]))
    assert habits.best(seconds, look=0.5) is None and habits.best(seconds, look=1.2) == (
        1,
        bool(habits.always[1, 1] > habits.always[0, 1]),
    )


@pytest.mark.parametrize("seconds, counted", [(0.02, 0.02), (None, 0.03)])
def test_a_round_counts_with_its_work_where_that_was_measured(seconds, counted):
    """And with all that the clock says where it was not."""
    now = [0.0]
    costs = RoundCosts((1, 4, 8), captured=True, clock=lambda: now[0])
    costs.set_curves(0.01, {1: 0.025, 8: 0.025})
    told = []
    costs.learn_drafted = lambda nodes, took, context: told.append(took)
    policy = auto(Experience(costs))
    policy.wants_draft(50, 1)
    policy.choose(Drafts.of([-1, 0], [0, 1], [0.0, -0.01]))
    now[0] += 0.03
    policy.finish(seconds)
    assert told == [pytest.approx(counted)]


def test_a_rest_is_announced_for_every_round_of_it():
    """Where it is, the next round is launched before this one's outcome is known: it has to be a plain one."""
    known = Experience()
    policy = auto(known)
    known.rounds, known.num_drafted = 6, 50
    known.recent.learn(1.0, 1.0)
    announced = []
    for _ in range(40):
        expected = policy.rests
        wants = policy.wants_draft(50, 1)
        assert not (expected and wants)
        announced.append(expected)
        policy.finish(0.02)
    assert sum(announced) > 5


@pytest.mark.parametrize(("tokens", "between"), [(8.0, (700, 900)), (1.05, (64, 64))])
def test_plain_rounds_are_measured_as_often_as_they_cost_a_thousandth_of_the_tokens(tokens, between):
    now = [0.0]
    policy = auto(Experience(RoundCosts((1, 4, 8), captured=True, clock=lambda: now[0])))
    known = policy.experience
    known.costs.set_curves(0.014, {1: 0.014, 8: 0.0143})
    plain, emitted = [], 0.0
    for turn in range(4065):
        if policy.wants_draft(50, 1):
            policy._drafted, policy._num_nodes = True, 8
            known.learn(tokens, 0.0143)
            emitted += tokens
            now[0] += 0.0143
        else:
            plain.append(turn)
            now[0] += 0.014
        policy.finish()
    assert plain[0] == 64  # the first one tells that they take what was expected
    gaps = np.diff(plain) - 1
    assert between[0] <= gaps.min() and gaps.max() <= between[1]
    lost = gaps.size * (tokens * 0.014 / 0.0143 - 1)
    assert lost <= 0.0011 * emitted


def test_plain_rounds_that_take_another_time_than_expected_are_measured_again_soon():
    now, plain = [0.0], []
    policy = auto(Experience(RoundCosts((1, 4, 8), captured=True, clock=lambda: now[0])))
    policy.experience.costs.set_curves(0.014, {1: 0.014, 8: 0.0143})
    for turn in range(400):
        is_plain = not policy.wants_draft(50, 1)
        if is_plain:
            plain.append(turn)
        else:
            policy._drafted, policy._num_nodes = True, 8
            policy.experience.learn(8.0, 0.0143)
        now[0] += 0.007 if is_plain else 0.0143
        policy.finish()
    assert np.diff(plain)[:3].tolist() == [65, 65, 65]
