"""The text that the target writes by itself."""

import pytest
import torch
from targets import fast_target, reference_target
from tiny import ARCHITECTURES, plain_greedy, tiny_model

from deltatree.transitions import write_self_text
from deltatree.transitions.self_text import LibrarySequences, sequences_of


def test_self_text_is_what_the_target_writes(hybrid, monkeypatch):
    monkeypatch.setattr("deltatree.transitions.self_text.TEMPERATURE", 1e-4)
    monkeypatch.setattr("deltatree.transitions.self_text.SEQUENCE_LENGTH", 12)
    target, counted = reference_target(hybrid), []
    text = write_self_text(target, num_tokens=40, batch=2, opening=[5, 6, 7], on_tokens=counted.append)
    assert text.shape == (4, 12) and sum(counted) == 2 * 9 + 2 * 11
    assert text[:2, :3].tolist() == [[5, 6, 7]] * 2  # a chat's opening, then random tokens
    for row, start in zip(text.tolist(), (3, 3, 1, 1), strict=True):
        assert row[start:] == plain_greedy(hybrid, row[:start], 12 - start)


def test_the_same_seed_writes_the_same_text(hybrid, monkeypatch):
    monkeypatch.setattr("deltatree.transitions.self_text.SEQUENCE_LENGTH", 8)
    target = reference_target(hybrid)
    texts = [write_self_text(target, num_tokens=1, batch=3, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_side_by_side_it_writes_the_librarys_text_to_the_token(architecture, monkeypatch):
    """Three batches on the same buffers: an opening, random tokens, and the opening again."""
    monkeypatch.setattr("deltatree.transitions.self_text.SEQUENCE_LENGTH", 40)
    target = fast_target(tiny_model(architecture))
    options = {"num_tokens": 3 * 5 * 40, "batch": 5, "opening": [5, 6, 7, 8, 9, 10], "seed": 3}
    expected = write_self_text(target, **options, sequences=LibrarySequences(target.model, 5))
    text = write_self_text(target, **options, sequences=target.lock_step(5, 40))
    assert text.shape == (15, 40) and len(text.unique()) > 50
    assert torch.equal(text, expected)


def test_a_cpu_and_a_target_without_lock_step_take_the_library(hybrid):
    for target in (reference_target(hybrid), fast_target(hybrid)):
        assert isinstance(sequences_of(target, 2), LibrarySequences)


def test_a_gpu_takes_the_lock_step_unless_its_memory_holds_not_one_sequence(hybrid):
    class OnGpu:
        device, model = torch.device("cuda"), hybrid

        def __init__(self, found):
            self.lock_step = lambda batch, length: found

    found = object()
    assert sequences_of(OnGpu(found), 2) is found
    assert isinstance(sequences_of(OnGpu(None), 2), LibrarySequences)
