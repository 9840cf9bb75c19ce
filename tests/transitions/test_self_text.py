"""The text that the target writes by itself."""

import torch
from tiny import plain_greedy

from deltatree.transitions import write_self_text


def test_self_text_is_what_the_target_writes(hybrid, monkeypatch):
    monkeypatch.setattr("deltatree.transitions.self_text.TEMPERATURE", 1e-4)
    monkeypatch.setattr("deltatree.transitions.self_text.SEQUENCE_LENGTH", 12)
    counted = []
    text = write_self_text(hybrid, num_tokens=40, batch=2, opening=[5, 6, 7], on_tokens=counted.append)
    assert text.shape == (4, 12) and sum(counted) == 2 * 9 + 2 * 11
    assert text[:2, :3].tolist() == [[5, 6, 7]] * 2  # a chat's opening, then random tokens
    for row, start in zip(text.tolist(), (3, 3, 1, 1), strict=True):
        assert row[start:] == plain_greedy(hybrid, row[:start], 12 - start)


def test_the_same_seed_writes_the_same_text(hybrid, monkeypatch):
    monkeypatch.setattr("deltatree.transitions.self_text.SEQUENCE_LENGTH", 8)
    texts = [write_self_text(hybrid, num_tokens=1, batch=3, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])
