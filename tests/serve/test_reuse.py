"""A second turn that extends the first is prefilled from its end, and answers as a fresh server would."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from byte_tokenizer import VOCAB
from serving import make_pair
from tiny import tiny_model

from deltatree import GenerateOptions, Pair, ReferenceTarget
from deltatree.decode import Conversation
from deltatree.drafter.dflash import DFlashDrafter, DFlashModel
from deltatree.drafter.dialects import DFlashConfig
from deltatree.drafter.scripted import RightDrafter

METHODS = ("ar", "dflash", "ddtree")


def options(**changes) -> GenerateOptions:
    return GenerateOptions(**{"max_new_tokens": 12, "budget": 12} | changes)


@pytest.fixture(scope="module")
def dflash_pair(pair):
    """With a drafter whose context must go on with the state."""
    torch.manual_seed(0)
    target = ReferenceTarget(tiny_model("qwen3_5_text", vocab_size=VOCAB), (1, 4))
    config = DFlashConfig(
        source="tiny", folder=Path("."), dialect="z-lab", hidden_size=64, intermediate_size=96, num_layers=2,
        num_heads=4, num_kv_heads=2, head_dim=16, rms_norm_eps=1e-6, rope_theta=10000.0, attention_bias=False,
        block_size=6, mask_token_id=0, taps=(1, 4), vocab_size=VOCAB, context_length=4096, windows=(None, 16),
        causal=(False, False),
    )  # fmt: skip
    drafter = DFlashDrafter(DFlashModel(config).eval().requires_grad_(False), target)
    return Pair(target, pair.tokenizer, drafter, pair.stop_ids)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("which", ["random", "dflash"])
def test_B55_turns_that_extend_each_other_are_as_cold(pair, dflash_pair, method, which):
    chosen, held = dflash_pair if which == "dflash" else pair, Conversation()
    prompt, reused = chosen.encode("once upon a time", raw=True), 0
    for turn in range(4):
        how = options(method=method, temperature=turn % 2 * 0.9, seed=turn)
        cold = chosen.collect(prompt, how)
        warm = chosen.collect(prompt, how, conversation=held)
        assert warm.token_ids == cold.token_ids and warm.text == cold.text
        assert warm.reused_length == reused and cold.reused_length == 0
        assert warm.acceptance_lengths == cold.acceptance_lengths  # the drafter's context is the same, too
        reused = len(prompt) + max(len(warm.token_ids), 1) - 1
        assert len(held.token_ids) == reused
        prompt = prompt + warm.token_ids + chosen.encode(f" turn {turn}", raw=True)


def test_B55_anything_else_starts_afresh(pair):
    first = pair.encode("tell me about rivers", raw=True)
    answer = pair.collect(first, options()).token_ids
    held_length = len(first) + len(answer) - 1
    whole = first + answer + [5, 6, 7]
    cases = {
        "the same prompt again": (first, 0),
        "another prompt": (whole[::-1], 0),
        "a shorter prefix": ([*whole[: held_length - 1], 9, 9], 0),
        "exactly what is held": (whole[:held_length], 0),
        "one token differs": ([*whole[:4], (whole[4] + 1) % 200, *whole[5:]], 0),
        "an extension": (whole, held_length),
    }
    for name, (prompt, reused) in cases.items():
        held = Conversation()
        pair.collect(first, options(), conversation=held)
        got = pair.collect(prompt, options(), conversation=held)
        assert got.reused_length == reused, name
        assert got.token_ids == pair.collect(prompt, options()).token_ids, name


@pytest.mark.parametrize("shared", [10, 63, 64, 65])
def test_B55_a_shared_beginning_alone_is_not_reused(pair, shared):
    first = [(7 * i) % 250 for i in range(80)]
    held = Conversation()
    pair.collect(first, options(), conversation=held)
    other = [*first[:shared], 1, 2, 3]
    got = pair.collect(other, options(), conversation=held)
    assert got.reused_length == 0 and got.token_ids == pair.collect(other, options()).token_ids


def test_B55_a_turn_that_ended_by_a_stop_inside_a_block(pair):
    """The right drafter's block goes far beyond the stop; nothing of it is in the state."""
    prompt = pair.encode("count with me", raw=True)
    plain = pair.collect(prompt, options(max_new_tokens=20)).token_ids
    right = make_pair(RightDrafter(prompt + plain, pair.target.vocab_size))
    for stop in plain[2:6]:
        held = Conversation()
        first = right.collect(prompt, options(stop_token_ids=[stop]), conversation=held)
        follow = prompt + first.token_ids + [33, 34]
        warm = right.collect(follow, options(), conversation=held)
        assert warm.reused_length == len(prompt) + len(first.token_ids) - 1
        assert warm.token_ids == right.collect(follow, options()).token_ids


def test_B50_after_an_early_close_or_an_error_only_whole_rounds_are_held(pair):
    prompt, held = pair.encode("close me", raw=True), Conversation()
    running = pair.start(prompt, options(), held)
    for count, _ in enumerate(running):
        if count == 3:
            running.close()
            break
    follow = [*held.token_ids, 40, 41]
    assert len(follow) > len(prompt) + 2
    warm = pair.collect(follow, options(), conversation=held)
    assert warm.reused_length == len(follow) - 2 and warm.token_ids == pair.collect(follow, options()).token_ids

    broken = make_pair()
    verify, calls = broken.target.verify, []

    def fails(tree, state):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("midway")
        return verify(tree, state)

    broken.target.verify = fails
    with pytest.raises(RuntimeError):
        broken.collect(prompt, options(), conversation=held)
    assert held.token_ids == []


def test_B50_long_short_long_and_turns(pair):
    """Requests of every length one after another, and two in turns: each as alone."""
    prompts = [[(3 * i) % 250 for i in range(60)], [1, 2, 3, 4, 5]]
    alone = [pair.collect(p, options()).token_ids for p in prompts]
    held = Conversation()
    for index in (0, 1, 0, 0, 1):
        assert pair.collect(prompts[index], options(), conversation=held).token_ids == alone[index]
    both = [pair.rounds(p, options()) for p in prompts]
    got = [[], []]
    while any(both):
        for index, rounds in enumerate(both):
            done = next(rounds, None) if rounds else None
            both[index] = rounds if done else None
            got[index] += done.token_ids if done else []
    assert got == alone


def test_the_server_continues_a_conversation(start):
    """Text that grows by its own answers; where its tokens extend the last ones exactly, they are not prefilled again."""
    server = start(keep_conversations=2)
    how = dict(
        max_new_tokens=10, logit_bias={token: 100.0 for token in (64, 65, 66)}
    )  # letters, so that ids survive as text
    prompt_ids, committed = server.pair.encode("once upon a time", raw=True), []
    for turn in range(3):
        status, got = server.complete(
            prompt_ids, max_tokens=10, temperature=0, logit_bias={"64": 100, "65": 100, "66": 100}
        )
        assert status == 200
        alone = server.pair.collect(prompt_ids, GenerateOptions(budget=12, **how))
        assert got["choices"][0]["text"] == alone.text
        assert got["usage"]["prompt_tokens_details"]["cached_tokens"] == len(committed)
        assert server.complete([9, 9, turn], max_tokens=2, temperature=0)[0] == 200  # another client in between
        committed = prompt_ids + alone.token_ids[:-1]
        prompt_ids = prompt_ids + alone.token_ids + server.pair.encode(" and then", raw=True)
    figures = server.send("GET", "/metrics")[2].decode()
    assert "deltatree_prompt_tokens_reused_total 0.0" not in figures
