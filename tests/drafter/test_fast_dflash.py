"""The drafter over static buffers drafts what the plain one drafts."""

import pytest
import torch
from checkpoints import drafter_config
from test_dflash import features_of, tiny_drafter

from deltatree.drafter import FastDFlashDrafter
from deltatree.drafter import fast_dflash as module

CONFIGS = [{}, {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}, {"is_causal": True}]


@pytest.mark.parametrize("changes", CONFIGS)
def test_every_round_has_the_plain_drafters_proposals(hybrid, tmp_path, changes, monkeypatch):
    monkeypatch.setattr(module, "PROMPT_CHUNK", 7)
    plain = tiny_drafter(tmp_path, hybrid, drafter_config(**changes))
    features, expected, session, done = features_of(60), [], plain.start(), 0
    rounds = (30, 0, 3, 7, 1, 5, 14)
    for accepted in rounds:
        done += accepted
        expected.append(session.propose(features[done - accepted : done], bonus=9))
    fast = FastDFlashDrafter(plain, context_length=100, most_new=9)
    assert FastDFlashDrafter.covers(plain)
    for _ in range(2):  # the second session gets the first one's buffers
        session, done = fast.start(), 0
        for accepted, proposals in zip(rounds, expected, strict=True):
            done += accepted
            ours = session.propose(features[done - accepted : done], bonus=9)
            torch.testing.assert_close(ours, proposals, atol=1e-4, rtol=1e-4)
            assert session.length == done == int(session.buffers.length)
        del session
    assert len(fast._free) == 1


def test_sessions_do_not_share_buffers(hybrid, tmp_path):
    fast = FastDFlashDrafter(tiny_drafter(tmp_path, hybrid), context_length=64)
    one, two = fast.start(), fast.start()
    alone = one.propose(features_of(5), bonus=3)
    two.propose(features_of(9, seed=1), bonus=4)
    assert one.buffers is not two.buffers
    torch.testing.assert_close(one.propose(features_of(0), bonus=3), alone, atol=1e-5, rtol=1e-5)


def test_what_is_not_covered_is_said(hybrid, tmp_path):
    narrow = drafter_config(layer_types=["sliding_attention"] * 2, sliding_window=6)
    assert not FastDFlashDrafter.covers(tiny_drafter(tmp_path, hybrid, narrow))


def test_buffers_that_were_made_first_are_lent_first(hybrid, tmp_path):
    """So that they meet the target's again that they were captured with, whoever ended first."""
    fast = FastDFlashDrafter(tiny_drafter(tmp_path, hybrid), context_length=64)
    one, two = fast.start(), fast.start()
    first = one.buffers
    del one
    del two  # the last one that came back
    assert fast.start().buffers is first
