"""What is promised in float32, what in bfloat16, and that both arms run the same computation."""

from pathlib import Path

import pytest
import torch
from tiny import VOCAB, full_logits, plain_greedy, tiny_model

from deltatree.decode import Ending, Sampler, decode
from deltatree.drafter import RandomDrafter, RightDrafter, WrongDrafter
from deltatree.models import ReferenceTarget, reference
from deltatree.tree import best_first, no_draft

PROMPT = [5, 6, 7, 8, 9, 10, 3]


def run(target, drafter, prompt, count, policy=best_first, budget=16):
    rounds = decode(target, drafter, prompt, build_tree=policy, budget=budget, ending=Ending(count), sampler=Sampler())
    return [token for r in rounds for token in r.token_ids]


@pytest.mark.parametrize("name", ["hybrid", "attention_moe"])
def test_B33_float32_is_exact_over_300_tokens(request, name):
    model = request.getfixturevalue(name)
    target, truth = ReferenceTarget(model), plain_greedy(model, PROMPT, 300)
    assert len(set(truth)) > 30  # a text that has not settled
    for drafter in (RightDrafter(PROMPT + truth, VOCAB), WrongDrafter(PROMPT + truth, VOCAB)):
        assert run(target, drafter, PROMPT, 300) == truth


@pytest.mark.parametrize("architecture", ["qwen3_5_text", "qwen3"])
def test_B33_in_bfloat16_only_a_near_tie_may_flip(architecture):
    """The first difference of two texts stands where float32 finds the two tokens close together.

    Dense models: where rounding wakes another expert, the noise has no bound of its own, and `bench` measures it.
    """
    exact, rounded = tiny_model(architecture), tiny_model(architecture).to(torch.bfloat16)
    target, flips = ReferenceTarget(rounded), 0
    for start in range(4):
        prompt = [start, *PROMPT]
        plain = run(target, RandomDrafter(VOCAB), prompt, 40, no_draft)
        for drafter in (RightDrafter(prompt + plain, VOCAB), RandomDrafter(VOCAB)):
            drafted = run(target, drafter, prompt, 40)
            place = next((i for i, (a, b) in enumerate(zip(plain, drafted, strict=True)) if a != b), None)
            if place is not None:
                flips += 1
                logits = full_logits(exact, prompt + plain[:place])[-1]
                assert abs(float(logits[plain[place]] - logits[drafted[place]])) < 0.25, (start, place)
    assert flips < 8  # not every text


def test_B33_the_readme_promises_no_equal_bits_in_bfloat16():
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert "bfloat16: a near tie may fall the other way" in text


@pytest.mark.parametrize("length", [1, 5, 63, 64, 65, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_B35_both_arms_start_from_the_same_bits(hybrid, length, dtype, monkeypatch):
    monkeypatch.setattr(reference, "PREFILL_CHUNK", 64)
    target = ReferenceTarget(hybrid if dtype == torch.float32 else tiny_model("qwen3_5_moe_text").to(dtype))
    prompt = [(11 * i + 5) % VOCAB for i in range(length)]
    logits, borders, first = [], [], []
    prefill, forward = target.prefill, target._forward

    def watched(token_ids, state):
        verified = prefill(token_ids, state)
        logits.append(verified.logits)
        return verified

    target.prefill = watched
    target._forward = lambda tree, seen, state, kind: borders.append(len(tree)) or forward(tree, seen, state, kind)
    for policy in (no_draft, best_first):
        borders.append(-1)
        first.append(run(target, RandomDrafter(VOCAB), prompt, 1, policy)[0])
    chunks = [64] * (length // 64) + [length % 64] * (length % 64 > 0)
    assert borders == [-1, *chunks, -1, *chunks]
    assert torch.equal(*logits) and first[0] == first[1]
