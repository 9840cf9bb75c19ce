"""A projection over the fast target keeps its rounds on the device, and accepts what the host's rounds accept."""

import pytest
import torch

import deltatree.projection.run as projection
from deltatree.decode import Ending, Sampler, decode
from deltatree.projection.profiles import PROFILES, Profile
from deltatree.projection.replay import FastReplayDrafter, ReplayDrafter
from deltatree.projection.run import ProjectionPlan, project
from deltatree.projection.shapes import target_and_drafter
from deltatree.tree import best_first


@pytest.mark.parametrize("name", ["chat"])
def test_the_device_accepts_what_the_host_accepts(name):
    profile = PROFILES[name]
    plan = ProjectionPlan(
        budgets=(8, 16), trees=("best-first", "calibrated"), max_new_tokens=24, repeats=1, context_length=12,
        expected_texts=2,
    )  # fmt: skip
    rows = []
    for backend in ("reference", "fast"):
        target, timed = target_and_drafter("tiny", profile.depth + 1, device="cpu", backend=backend)
        rows.append(project(target, profile, plan, timed=timed))
    for host, device in zip(*rows, strict=True):
        assert device["departures"] == host["departures"] == 0
        assert device["label"] == host["label"]
        assert device["acceptance_length"] == pytest.approx(host["acceptance_length"], rel=0.15)
    assert rows[1][1]["acceptance_length"] > 1.5


@pytest.fixture(scope="module")
def fast():
    return target_and_drafter("tiny", PROFILES["chat"].depth + 1, device="cpu", backend="fast")


def drafts_of(drafter):
    """Every draft from here on: the context's length, and the three first candidates by their logits, [D, 3] each."""
    seen, draft = [], drafter.draft

    def drafting(buffers):
        draft(buffers)
        top = buffers.logits.topk(3)
        seen.append((int(buffers.length), top.indices.clone(), top.values.clone()))

    drafter.draft = drafting
    return seen


def on_host(replay, length):
    """The same of the host's drafter, in one step from nothing to this length."""
    top = replay.start().propose(torch.zeros(length, 0), bonus=0).topk(3)
    return top.indices, top.values


def counting(target, start, count):
    return [(start + step) % target.vocab_size for step in range(count)]


def test_every_draft_of_a_generation_is_the_hosts(fast):
    target, timed = fast
    prompt = [5, 3, 40]
    text = prompt + counting(target, 41, 60)  # which is what it writes
    replay = ReplayDrafter(PROFILES["chat"], target.vocab_size, target.device, text=text, seed=3)
    drafter = FastReplayDrafter(ReplayDrafter(**(vars(replay) | {"timed": timed})))
    drafter.plant(range(len(prompt), len(text)))
    seen = drafts_of(drafter)
    policy = dict(build_tree=best_first, budget=12, ending=Ending(40), sampler=Sampler())
    rounds = list(decode(target, drafter, prompt, **policy))
    emitted = [len(done.token_ids) for done in rounds]
    assert [token for done in rounds for token in done.token_ids] == text[3:43]
    committed = [len(prompt) + sum(emitted[1:number]) for number in range(1, len(emitted))]  # before each round
    assert [length for length, _, _ in seen][: len(committed)] == committed and max(emitted) > 2
    for length, tokens, logits in seen:
        expected, log_probs = on_host(replay, length)
        is_planted = log_probs > -11  # the others are the host's floor, over which any token stands
        assert torch.equal(tokens[is_planted], expected[is_planted]) and is_planted.float().mean() > 0.9
        torch.testing.assert_close(logits[is_planted], log_probs[is_planted])


def test_plants_are_written_anew_in_place(fast):
    target, timed = fast
    replay = ReplayDrafter(PROFILES["chat"], target.vocab_size, target.device, timed, text=counting(target, 7, 30))
    drafter = FastReplayDrafter(replay)
    places = drafter.tokens.data_ptr(), drafter.logits.data_ptr()
    drafter.plant(range(2, 30))
    kept = drafter.tokens.clone()
    assert drafter.tokens[2:30].any() and not drafter.tokens[:2].any() and not drafter.tokens[30:].any()
    drafter.tokens.zero_()
    drafter.plant(range(2, 30))  # the same again costs nothing
    assert not drafter.tokens.any()
    replay.text = replay.text[:20] + counting(target, 60, 10)
    drafter.plant(range(19, 30))
    assert not drafter.tokens[:19].any() and not torch.equal(drafter.tokens[19:30], kept[19:30])
    assert drafter.tokens[19:30].tolist() == [replay.at(length)[0] for length in range(19, 30)]
    drafter.replay = ReplayDrafter(Profile("short", (0.5,)), target.vocab_size, target.device, timed, text=replay.text)
    drafter.plant(range(2, 10**6))  # no further than the drafter's context
    assert (drafter.logits[2:, 1:] == drafter.LOWEST).all() and (drafter.logits[2:, 0] > drafter.LOWEST).all()
    assert (drafter.tokens.data_ptr(), drafter.logits.data_ptr()) == places


def test_where_the_text_departs_on_the_device_its_drafts_know_the_new_one(fast, monkeypatch):
    """What it is told at first has a gap of a token in it."""
    target, timed = fast
    continuation, drafters = projection._Projection.continuation, []

    def mistaken(self, token_ids, count):
        drafters.append(self.drafts)
        told = continuation(self, token_ids, count)
        return told[:10] + told[11:] + [0] if len(token_ids) == 12 else told

    monkeypatch.setattr(projection._Projection, "continuation", mistaken)
    plan = ProjectionPlan(budgets=(8,), max_new_tokens=60, repeats=1, context_length=12, expected_texts=2)
    plain, *drafted = project(target, PROFILES["very-strong"], plan, timed=timed)
    assert all(row["departures"] == 1 and row["acceptance_length"] > 3 for row in drafted)
    assert isinstance(drafters[0], FastReplayDrafter) and plain["acceptance_length"] == 1


def test_one_drafter_serves_several_profiles(fast, monkeypatch):
    """As benchmarks/profiles.py keeps it, so that what was captured for it is captured once."""
    target, timed = fast
    kept = FastReplayDrafter(ReplayDrafter(PROFILES["chat"], target.vocab_size, target.device, timed))
    monkeypatch.setattr(projection, "FastReplayDrafter", lambda replay: vars(kept).update(replay=replay) or kept)
    plan = ProjectionPlan(budgets=(8,), max_new_tokens=40, repeats=1, context_length=12, expected_texts=2)
    lengths = [
        project(target, PROFILES[name], plan, timed=timed)[2]["acceptance_length"]
        for name in ("very-strong", "very-weak", "very-strong")
    ]
    assert lengths[0] == lengths[2] > 3 > 2.5 > lengths[1]
