"""What is launched before the last round's record is read changes nothing: not the text, not the state, not what comes after."""

import itertools
from contextlib import closing

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from test_device_rounds import PROMPT, host_rounds, model, pair, started, tokens_of  # noqa: F401 - fixtures
from tiny import VOCAB

from deltatree.decode import Ending, Sampler, decode, stream
from deltatree.decode.auto import AutoBudget, Experience
from deltatree.decode.costs import RoundCosts
from deltatree.device import DeviceRounds
from deltatree.device.launches import REST, Arrival, Half
from deltatree.drafter import NoDrafter
from deltatree.tree import best_first, no_draft

WIDEST = 31

steps = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 0, 1, 5, 16, WIDEST]),  # the round's budget
        st.booleans(),  # whether it is a chain
        st.booleans(),  # whether the host chooses it from a tree
        st.sampled_from(["right", "right", "tree", "chain", "offer", "nothing"]),  # what is launched before it
    ),
    min_size=1,
    max_size=9,
)


def truth_of(target, count):
    return tokens_of_rounds(host_rounds(target, NoDrafter(VOCAB), no_draft, 0, count))


def tokens_of_rounds(rounds):
    return [token for tokens, _ in rounds for token in tokens]


OTHERS = {"tree": Half("draft", 8), "chain": Half("draft", 4, True), "offer": Half("offer", 16)}


def launched_before(rounds, step):
    """What the round before launches for this one: what it wants, something else, or nothing."""
    budget, is_chain, looks, what = step
    if what == "right":
        return rounds.half(WIDEST if looks else budget, chain=is_chain and not looks, offer=looks and budget > 0)
    return OTHERS.get(what)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=steps, kept=st.integers(1, 9))
@example(order=[(0, False, False, "right")] * 5, kept=1)
@example(order=[(16, False, False, "right")] * 5, kept=1)
@example(order=[(16, False, True, "right"), (5, True, False, "offer"), (WIDEST, False, False, "tree")] * 2, kept=2)
def test_any_order_of_rounds_gives_the_text_and_the_state(pair, order, kept):  # noqa: F811
    target, drafter = pair
    truth = truth_of(target, 80)
    state, rounds = started(target, drafter)
    for half in OTHERS.values():
        rounds._captured(*half)  # only what is captured is launched ahead
    text = truth[:1]
    for step, following in itertools.pairwise([*order, order[0]]):  # behind the last one something is in flight, too
        budget, is_chain, looks, _ = step
        then = launched_before(rounds, following)
        if then == REST and following[0] > 0:
            then = None
        if budget and looks:
            assert len(rounds.draft(WIDEST)) == WIDEST + 1
            done = rounds.verify(budget, chain=is_chain, then=then)
        else:
            done = rounds.run(budget, chain=is_chain, then=then)
        text += done.token_ids
        assert text == truth[: len(text)]
    kept = min(kept, len(done.path))
    features = rounds.finish(kept)
    committed = [*PROMPT, *text[: len(text) - len(done.path) + kept - 1]]
    fresh = target.new_state()
    expected = target.prefill(committed, fresh)
    assert state.length == int(state.buffers.length) == len(committed) and int(state.buffers.steps) == 0
    torch.testing.assert_close(state.buffers.matrices, fresh.buffers.matrices, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(state.buffers.windows, fresh.buffers.windows, atol=1e-4, rtol=1e-4)
    for ours, theirs in ((state.buffers.keys, fresh.buffers.keys), (state.buffers.values, fresh.buffers.values)):
        rows = slice(0, len(committed))
        torch.testing.assert_close(ours[..., rows, :], theirs[..., rows, :], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(features, expected.features[len(committed) - len(features) :], atol=1e-4, rtol=1e-4)
    assert rounds.session.length + len(features) == len(committed)
    with torch.inference_mode():  # and the drafter goes on from its context as one that has read all of it at once
        ours, theirs = rounds.session, drafter.start()
        begun = target.prefill(committed, target.new_state()).features
        left, right = (
            session.propose(known, bonus=7) for session, known in ((ours, features), (theirs, begun))
        )  # fmt: skip
        torch.testing.assert_close(left, right, atol=1e-3, rtol=1e-3)


def policy_of(target, budget):
    if budget == "auto":
        return AutoBudget(best_first, Experience(RoundCosts(target.node_buckets, captured=True))), WIDEST
    return (best_first if budget else no_draft), budget


def running(target, drafter, prompt, budget, count, conversation=None):
    policy, most = policy_of(target, budget)
    return decode(
        target, drafter if budget else NoDrafter(VOCAB), prompt, build_tree=policy, budget=most, ending=Ending(count),
        sampler=Sampler(), conversation=conversation,
    )  # fmt: skip


@pytest.mark.parametrize("budget", [0, 5, "auto"])
@pytest.mark.parametrize("num_rounds", [2, 4])
def test_a_text_that_is_closed_can_be_gone_on_with(pair, budget, num_rounds):  # noqa: F811
    """Its next rounds are on the device already when it is closed; a conversation goes on from what was read."""
    target, drafter = pair
    talk, emitted = stream.Conversation(), []
    with closing(running(target, drafter, PROMPT, budget, 50, talk)) as rounds:
        for done in itertools.islice(rounds, num_rounds):
            emitted += done.token_ids
    following = [*PROMPT, *emitted, 5, 6]
    again = tokens_of(running(target, drafter, following, budget, 20, talk))
    assert len(PROMPT) <= talk.reused_length < len(PROMPT) + len(emitted)
    assert again == truth_from(target, following, 20)


def truth_from(target, prompt, count):
    target.device_rounds = False
    found = tokens_of(running(target, NoDrafter(VOCAB), prompt, 0, count))
    target.device_rounds = True
    return found


@pytest.mark.parametrize("budgets", [(0, 0), (5, 16), ("auto", 0)])
def test_texts_in_turns_each_with_a_draft_in_flight(pair, budgets):  # noqa: F811
    target, drafter = pair
    prompts = [PROMPT, PROMPT[::-1]]
    texts = [[], []]
    both = [running(target, drafter, prompt, budget, 30) for prompt, budget in zip(prompts, budgets, strict=True)]
    for pieces in itertools.zip_longest(*both):
        for text, piece in zip(texts, pieces, strict=True):
            text += piece.token_ids if piece is not None else []
    assert texts == [truth_from(target, prompt, 30) for prompt in prompts]


def test_the_last_round_launches_nothing(pair, monkeypatch):  # noqa: F811
    """A text that ends by its length wastes neither a draft nor a plain round."""
    target, drafter = pair
    launched = []
    half, verify = DeviceRounds._launch_half, DeviceRounds._launch_verify
    monkeypatch.setattr(DeviceRounds, "_launch_half", lambda self, h: (launched.append(h.kind), half(self, h))[1])
    monkeypatch.setattr(
        DeviceRounds, "_launch_verify", lambda self, *a: (launched.append("verify"), verify(self, *a))[1]
    )
    assert len(tokens_of(running(target, drafter, PROMPT, 0, 6))) == 6
    assert launched == ["rest", "verify"] * 5


def test_drafts_are_launched_behind_verify(pair, monkeypatch):  # noqa: F811
    """From the second drafted round on the device has its next work before the host reads a record."""
    target, drafter = pair
    order = []
    for name in ("_launch_half", "_launch_verify"):
        real = getattr(DeviceRounds, name)
        monkeypatch.setattr(
            DeviceRounds, name, lambda self, *a, _real=real, _name=name: (order.append(_name), _real(self, *a))[1]
        )
    wait = Arrival.wait
    monkeypatch.setattr(Arrival, "wait", lambda self: (order.append("read"), wait(self))[1])
    rounds = running(target, drafter, PROMPT, 5, 60)
    for _ in range(4):
        next(rounds)
    assert order == [
        "_launch_half",
        "_launch_verify",
        *["_launch_half", "read", "_launch_verify"] * 2,
        "_launch_half",
        "read",
    ]
