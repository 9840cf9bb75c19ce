"""Sequences side by side on a GPU: the captured step gives the library's logits and text, and makes room for itself."""

import gc

import pytest
import torch
from tiny import ARCHITECTURES, VOCAB, full_logits, tiny_model

from deltatree.models import FastTarget, ReferenceTarget, lock_step
from deltatree.transitions import write_self_text
from deltatree.transitions.self_text import LibrarySequences, sequences_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_captured_steps_give_the_librarys_logits_and_text(architecture, monkeypatch):
    monkeypatch.setattr("deltatree.transitions.self_text.SEQUENCE_LENGTH", 48)
    model = tiny_model(architecture)
    tokens = torch.arange(70 * 20).view(70, 20) % VOCAB
    expected = torch.stack([full_logits(model, row.tolist())[-1] for row in tokens[::23]])
    target = FastTarget(ReferenceTarget(model.cuda()), context_length=64, buckets=(1, 9))
    steps = sequences_of(target, 70)
    assert isinstance(steps, lock_step.LockStep) and steps.length == 48
    for _ in range(2):
        steps.restart()
        logits = steps.logits(tokens.cuda())
        torch.testing.assert_close(logits[::23].cpu(), expected, atol=1e-3, rtol=1e-3)
    options = {"num_tokens": 2 * 70 * 48, "batch": 70, "opening": [5, 6, 7, 8], "seed": 3}
    text = write_self_text(target, **options, sequences=steps)
    expected = write_self_text(target, **options, sequences=LibrarySequences(target.model, 70))
    assert (text == expected).all(1).float().mean() > 0.97  # from a near tie on, a row is another one


def test_in_bfloat16_the_text_is_repeatable_and_nothing_is_kept(monkeypatch):
    monkeypatch.setattr("deltatree.transitions.self_text.SEQUENCE_LENGTH", 32)
    target = FastTarget(ReferenceTarget(tiny_model("qwen3_5_moe_text").cuda().bfloat16()), context_length=64)
    texts = [write_self_text(target, num_tokens=1, batch=300) for _ in range(2)]
    assert torch.equal(*texts) and texts[0].shape == (300, 32)
    assert not any(isinstance(thing, lock_step.LockStep) for thing in gc.get_objects())


def test_fewer_sequences_where_memory_is_short(monkeypatch):
    target = FastTarget(ReferenceTarget(tiny_model("qwen3_5_moe_text").cuda()), context_length=64)
    each = lock_step.bytes_per_sequence(target.shapes, 32, 4)
    monkeypatch.setattr(lock_step, "free_bytes", lambda device: 100 * each)
    assert target.lock_step(512, 32).batch == 64
    monkeypatch.setattr(lock_step, "free_bytes", lambda device: each)
    assert target.lock_step(512, 32) is None
