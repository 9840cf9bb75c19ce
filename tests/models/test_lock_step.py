"""Sequences side by side: each has the logits of a forward over it alone, and as many run as fit."""

import pytest
import torch
from targets import fast_target
from tiny import ARCHITECTURES, VOCAB, full_logits, tiny_model

from deltatree.models.lock_step import LockStep, bytes_per_sequence, most_sequences


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_sequence_has_the_logits_of_a_whole_forward(architecture):
    model = tiny_model(architecture)
    steps = fast_target(model).lock_step(3, 24)
    for start in (0, 1):  # the second round finds what the first one left
        steps.restart()
        tokens = (torch.arange(3 * 24).view(3, 24) * 7 + start) % VOCAB
        for cut in (slice(0, 9), slice(9, 10), slice(10, 24)):
            logits = steps.logits(tokens[:, cut])
            for row, own in zip(tokens, logits, strict=True):
                expected = full_logits(model, row[: cut.stop].tolist())[-1]
                torch.testing.assert_close(own, expected, atol=1e-4, rtol=1e-4)


def test_a_sliding_window_hides_what_lies_before_it():
    model = tiny_model("qwen3", use_sliding_window=True, sliding_window=6, layer_types=["sliding_attention"] * 4)
    steps = fast_target(model).lock_step(2, 16)
    tokens = torch.arange(32).view(2, 16)
    logits = steps.logits(tokens)
    for row, own in zip(tokens, logits, strict=True):
        torch.testing.assert_close(own, full_logits(model, row.tolist())[-1], atol=1e-4, rtol=1e-4)


def test_as_many_sequences_as_fit():
    assert most_sequences(512, 100, 10**6) == 512
    assert most_sequences(512, 100, 40_000) == 256
    assert most_sequences(3, 100, 150) == 1
    assert most_sequences(3, 100, 100) == 0


def test_the_estimate_covers_the_buffers(hybrid):
    target = fast_target(hybrid)
    steps = LockStep(target, 4, 32)
    held = sum(t.nbytes for t in (steps.matrices, steps.windows, steps.keys, steps.values, steps.out))
    estimate = 4 * bytes_per_sequence(target.shapes, 32, 4)
    assert held < estimate < held + 4 * 20 * VOCAB
