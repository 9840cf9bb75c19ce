"""Rounds on the device are the rounds of the host: same tokens, same paths, same state; uncaptured on a CPU, captured on a GPU."""

import copy
import gc

import pytest
import torch
from checkpoints import drafter_config, save_drafter
from tiny import VOCAB

from deltatree.capture import Captured
from deltatree.decode import Ending, GenerateOptions, Sampler, decode, sampler_for, stream
from deltatree.decode.auto import AutoBudget, Experience, Habits
from deltatree.decode.calibration import capture_choices
from deltatree.decode.costs import RoundCosts
from deltatree.device import DeviceRounds
from deltatree.device.loop import budget_to_build, has_device_tree
from deltatree.drafter import FastDFlashDrafter, NoDrafter, load_drafter, read_drafter_config
from deltatree.models import FastTarget, ReferenceTarget
from deltatree.transitions import TransitionTable, TransitionTree
from deltatree.tree import Calibrated, best_first, chain, no_draft


class WarmedUp(Captured):
    """On a CPU, too, the step runs twice before it counts."""

    def __init__(self, step, device, pool=None, before=lambda: None, what="a step"):
        super().__init__(step, device, pool, before, what)
        for _ in range(2):
            before()
            step()


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PROMPT = [(7 * i + 3) % VOCAB for i in range(30)]


@pytest.fixture(
    params=["uncaptured", "warmed up", pytest.param("captured", marks=[pytest.mark.gpu, needs_gpu])],
)
def model(hybrid, request, monkeypatch):
    """On a CPU with passes before the first real one, as a capture needs them, and without; captured on a GPU."""
    if request.param == "warmed up":
        monkeypatch.setattr("deltatree.device.rounds.Captured", WarmedUp)
    return copy.deepcopy(hybrid).cuda() if request.param == "captured" else hybrid


@pytest.fixture
def pair(model, tmp_path):
    config = read_drafter_config(str(save_drafter(tmp_path, drafter_config())))
    target = FastTarget(
        ReferenceTarget(model, config.taps), context_length=256, buckets=(1, 8, 16, 32, 40), device_rounds=True
    )
    return target, FastDFlashDrafter(load_drafter(config, target), context_length=200)


def rounds_of(target, drafter, policy, budget, count=40):
    """Every round's tokens and nodes."""
    ending = Ending(count)
    rounds = decode(target, drafter, PROMPT, build_tree=policy, budget=budget, ending=ending, sampler=Sampler())
    return [(r.token_ids, r.num_nodes) for r in rounds]


def host_rounds(target, *args):
    """The same, all of them through the host."""
    target.device_rounds = False
    rounds = rounds_of(target, *args)
    target.device_rounds = True
    return rounds


def started(target, drafter):
    state = target.new_state()
    verified = target.prefill(PROMPT, state)
    session = drafter.start() if drafter else None
    return state, DeviceRounds(target, state, session, verified.features, int(verified.logits.argmax()))


@pytest.mark.parametrize("budget, is_chain", [(0, False), (7, True), (1, False), (16, False), (31, False)])
def test_every_round_is_the_hosts(pair, budget, is_chain):
    target, drafter = pair
    policy = chain if is_chain else best_first if budget else no_draft
    expected = host_rounds(target, drafter if budget else NoDrafter(VOCAB), policy, budget)
    state, rounds = started(target, drafter)
    for token_ids, num_nodes in expected[1:-1]:
        ours = rounds.run(budget, chain=is_chain)
        assert ours.token_ids == token_ids and ours.num_nodes == num_nodes
    emitted = sum(len(tokens) for tokens, _ in expected[:-1])
    rounds.finish(rounds.num_uncommitted)
    assert state.length == int(state.buffers.length) == len(PROMPT) + emitted - 1


@pytest.mark.parametrize("budget", [3, 16, 31])
def test_trees_that_learn_while_running_are_the_hosts(pair, budget):
    """Calibrated ones: every round's tree follows from all that the rounds before have shown."""
    target, drafter = pair
    expected = host_rounds(target, drafter, Calibrated(), budget, 60)
    ours = rounds_of(target, drafter, Calibrated(), budget, 60)
    assert tokens_of_pairs(ours) == tokens_of_pairs(expected)
    assert target.device_rounds and has_device_tree(Calibrated())
    if target.device.type == "cpu":  # on a GPU rounding may order two nodes otherwise
        assert ours == expected


def tokens_of_pairs(rounds):
    return [token for tokens, _ in rounds for token in tokens]


def test_what_one_generation_has_shown_is_forgotten_in_the_next(pair):
    target, drafter = pair
    texts = [rounds_of(target, drafter, Calibrated(), 16, 40) for _ in range(2)]
    assert texts[0] == texts[1]


def test_plain_decoding_needs_no_drafter(pair):
    target, _ = pair
    expected = [token for tokens, _ in host_rounds(target, NoDrafter(VOCAB), no_draft, 0) for token in tokens]
    _, rounds = started(target, None)
    assert [rounds.run(0).token_ids[0] for _ in range(39)] == expected[1:]


def test_budgets_may_change_and_drafting_may_rest(pair):
    """Chosen between draft and verify, skipped, a chain now and then: the text stays plain decoding's."""
    target, drafter = pair
    truth = [token for tokens, _ in host_rounds(target, NoDrafter(VOCAB), no_draft, 0, 60) for token in tokens]
    _, rounds = started(target, drafter)
    text = truth[:1]
    for budget in (0, 0, 5, 31, 0, 1, 16, 0, 0, 7):
        if budget:
            drafted = rounds.draft(31)
            assert len(drafted) == 32 and (drafted.parents < range(32)).all() and drafted.spine().size > 1
            text += rounds.verify(budget, chain=budget == 7).token_ids
        else:
            text += rounds.run(0).token_ids
    assert text == truth[: len(text)]
    assert rounds.session.length + rounds.session.waiting == len(PROMPT) + len(text) - 1


def test_a_cut_path_leaves_the_state_of_its_kept_nodes(pair):
    target, drafter = pair
    state, rounds = started(target, drafter)
    emitted = rounds.run(16).token_ids
    features = rounds.finish(1)
    fresh = target.new_state()
    first = int(target.prefill(PROMPT, fresh).logits.argmax())
    expected = target.prefill([first], fresh)
    assert state.length == fresh.length == len(PROMPT) + 1 and emitted
    torch.testing.assert_close(features, expected.features, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(state.buffers.matrices, fresh.buffers.matrices, atol=1e-4, rtol=1e-4)


def tokens_of(rounds):
    return [token for r in rounds for token in r.token_ids]


@pytest.mark.parametrize("budget", ["auto", 0, 5, 31])
def test_decode_takes_the_device_and_gives_the_hosts_text(pair, budget, monkeypatch):
    """Through `decode`: stops in mid-round, caps, and a second turn on the held state."""
    target, drafter = pair
    truth = [token for tokens, _ in host_rounds(target, NoDrafter(VOCAB), no_draft, 0, 60) for token in tokens]
    taken = []
    monkeypatch.setattr(
        stream, "device_loop", lambda *a, _make=stream.device_loop, **k: taken.append(1) or _make(*a, **k)
    )

    def run(prompt, count, conversation=None, stop=frozenset()):
        auto = AutoBudget(best_first, Experience(RoundCosts(target.node_buckets, captured=True)), None)
        policy, most = (auto, 31) if budget == "auto" else (best_first if budget else no_draft, budget)
        return list(
            decode(
                target, drafter, prompt, build_tree=policy, budget=most, ending=Ending(count, stop), sampler=Sampler(),
                conversation=conversation,
            )
        )  # fmt: skip

    for count in (1, 2, 7, 60):
        assert tokens_of(run(PROMPT, count)) == truth[:count]
    ends = run(PROMPT, 60, stop=frozenset([truth[20]]))
    assert tokens_of(ends) == truth[: truth.index(truth[20]) + 1] and ends[-1].ended == "stop"
    assert taken

    talk = stream.Conversation()
    first = tokens_of(run(PROMPT, 9, talk))
    following = [*PROMPT, *first, 5, 6]
    assert tokens_of(run(following, 20, talk)) == tokens_of(run(following, 20))
    assert talk.reused_length == len(PROMPT) + len(first) - 1


def test_past_the_drafters_context_decoding_goes_on_plainly(model, tmp_path):
    config = read_drafter_config(str(save_drafter(tmp_path, drafter_config())))
    target = FastTarget(ReferenceTarget(model, config.taps), context_length=120, buckets=(1, 8, 24), device_rounds=True)
    drafter = FastDFlashDrafter(load_drafter(config, target), context_length=60)
    truth = [token for tokens, _ in host_rounds(target, NoDrafter(VOCAB), no_draft, 0, 89) for token in tokens]
    rounds = list(
        decode(target, drafter, PROMPT, build_tree=best_first, budget=16, ending=Ending(200), sampler=Sampler())
    )
    assert tokens_of(rounds)[:89] == truth and len(tokens_of(rounds)) == 90
    assert {r.num_nodes for r in rounds[1:]} == {1, 17} and rounds[-1].ended == "length"


def test_buffers_are_lent_again(pair):
    """The captured work, which stays with the buffers, holds no generation alive."""
    target, drafter = pair
    for _ in range(3):
        run = decode(target, drafter, PROMPT, build_tree=best_first, budget=7, ending=Ending(9), sampler=Sampler())
        assert len(tokens_of(run)) == 9
        del run
        gc.collect()
        assert len(target._free) == 1 and len(drafter._free) == 1


POLICIES = {
    "best-first": lambda: best_first,
    "transitions": lambda: TransitionTree(TransitionTable.empty(VOCAB, num_buckets=64)),
    "transitions-chain": lambda: TransitionTree(TransitionTable.empty(VOCAB, num_buckets=64), is_chain=True),
    "calibrated": Calibrated,
}


class Always(Habits):
    """A habit from the first round on."""

    def __init__(self, *, is_chain: bool) -> None:
        super().__init__()
        self.last, self.lasts = (1, is_chain), 1000


@pytest.mark.parametrize(
    ("tree", "is_greedy"), [*((tree, True) for tree in POLICIES), ("best-first", False), ("transitions", False)]
)
def test_all_that_auto_may_choose_can_be_captured_ahead(pair, tree, is_greedy):
    """On the device and, for policies and samplers that it does not know, through the host."""
    target, drafter = pair
    costs, sampler = RoundCosts(target.node_buckets, captured=True), Sampler()
    if not is_greedy:
        sampler = sampler_for(GenerateOptions(temperature=0.7, seed=1))
    policy = POLICIES[tree]()
    capture_choices(target, drafter, costs, policy, sampler)
    target.capture_host_steps(drafter.depth + 1)
    captured = target.num_captured + drafter.num_captured
    habits = Habits(), Always(is_chain=tree == "best-first")  # the second text begins with one
    for experience in (Experience(costs, habits=habits[0]), Experience(costs, habits=habits[1])):
        auto = AutoBudget(policy, experience)
        rounds = decode(target, drafter, PROMPT, build_tree=auto, budget=39, ending=Ending(60), sampler=sampler)
        assert len({r.num_nodes for r in rounds}) > 1
    assert target.num_captured + drafter.num_captured == captured


def test_trees_to_choose_from_have_few_sizes():
    assert [budget_to_build(wanted, 255) for wanted in (1, 15, 16, 127, 128, 200, 380)] == [
        15,
        15,
        31,
        127,
        255,
        255,
        255,
    ]
    assert {budget_to_build(wanted, 39) for wanted in range(1, 90)} == {15, 31, 39}
