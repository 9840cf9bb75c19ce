"""What is the fast target's own: buckets, buffers lent and taken back, weights without a second copy, the choice of backend."""

import gc

import pytest
import torch
from tiny import ARCHITECTURES, VOCAB, full_logits, tiny_model

import deltatree
from deltatree.errors import ArchitectureError, OptionError, TreeError
from deltatree.models import FastTarget, ReferenceTarget
from deltatree.pair_api import choose_backend
from deltatree.tree import DraftTree, chain_tree


def fast(model, taps=(), **options):
    return FastTarget(ReferenceTarget(model, taps), **({"context_length": 64, "buckets": (1, 4, 12)} | options))


def storage_bytes(model) -> int:
    """Bytes of the distinct storages behind a model's parameters."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return sum(storages.values())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packing_makes_no_second_copy_and_leaves_the_model_as_it_was(architecture):
    model = tiny_model(architecture)
    ids, before, size = torch.tensor([[5, 6, 7, 8]]), None, storage_bytes(model)
    before = model(ids).logits
    target = fast(model)
    assert torch.equal(model(ids).logits, before)
    assert storage_bytes(model) == size
    kept = {p.untyped_storage().data_ptr() for p in model.parameters()}
    for layer in target.layers:
        assert layer.mixer.projection.untyped_storage().data_ptr() in kept


def test_features_are_the_reference_targets(hybrid):
    taps = (0, 3, 8)
    reference, target = ReferenceTarget(hybrid, taps), fast(hybrid, taps)
    verified = []
    for t in (reference, target):
        state = t.new_state()
        t.prefill([4, 5, 6], state)
        verified.append(t.verify(DraftTree.from_parents([7, 8, 9], [-1, 0, 0]), state).features)
    torch.testing.assert_close(*verified, atol=1e-4, rtol=1e-4)


def test_outputs_stay_when_the_buffers_are_written_again(hybrid):
    target = fast(hybrid, (0, 8))
    state = target.new_state()
    target.prefill([4, 5, 6], state)
    first = target.verify(chain_tree([7, 8]), state)
    kept = first.logits.clone(), first.features.clone()
    target.verify(chain_tree([1, 2]), state)
    assert torch.equal(first.logits, kept[0]) and torch.equal(first.features, kept[1])


def test_B56_buckets_change_from_round_to_round_and_padding_writes_nothing_real(hybrid):
    """Widths up and down, two requests of different length on the same buffers: always the logits of a whole forward."""
    target = fast(hybrid)
    for prompt in ([3, 1, 4, 1, 5, 9, 2, 6], [2, 7]):
        state = target.new_state()
        target.prefill(prompt, state)
        text = list(prompt)
        for width in (12, 1, 4, 3, 9, 2, 1, 5):
            tokens = [(11 * len(text) + i) % VOCAB for i in range(width)]
            logits = target.verify(chain_tree(tokens), state).logits
            assert torch.isfinite(logits).all()
            torch.testing.assert_close(logits[-1], full_logits(hybrid, text + tokens)[-1], atol=1e-4, rtol=1e-4)
            kept = max(1, width // 2)
            target.commit(list(range(kept)), state)
            text += tokens[:kept]
        assert state.length == len(text)
        del state
        gc.collect()
    assert len(target._free) == 1, "both requests used the same buffers"


def test_states_that_live_at_the_same_time_have_buffers_of_their_own(hybrid):
    target = fast(hybrid)
    states = [target.new_state() for _ in range(2)]
    for state, prompt in zip(states, ([5, 6, 7], [90, 8]), strict=True):
        target.prefill(prompt, state)
    for state, prompt in zip(states, ([5, 6, 7], [90, 8]), strict=True):
        logits = target.verify(chain_tree([4]), state).logits
        torch.testing.assert_close(logits[0], full_logits(hybrid, [*prompt, 4])[-1], atol=1e-4, rtol=1e-4)


def test_what_was_not_captured_is_refused_by_number(hybrid):
    target = fast(hybrid)
    state = target.new_state()
    target.prefill([1], state)
    with pytest.raises(TreeError, match="13 nodes needs more than the 12 captured; use a budget of at most 11"):
        target.verify(chain_tree(range(13)), state)
    deep = fast(hybrid, buckets=(64,))
    state = deep.new_state()
    deep.prefill([1], state)
    with pytest.raises(TreeError, match="depth 33 is deeper than the 32 captured"):
        deep.verify(chain_tree(range(34)), state)


def test_a_budget_beyond_the_buckets_is_refused_before_anything_runs():
    pair = deltatree.load(backend="fast", context_length=128)
    assert isinstance(pair.target, FastTarget)
    with pytest.raises(OptionError, match="budget=300 needs 301 nodes, captured for 257; pass budget<=256"):
        pair.generate("hello", budget=300, max_new_tokens=4)
    plain = deltatree.load(backend="reference")
    ours, theirs = (
        p.generate("Tom has 3 apples and buys 4 more. How many?", max_new_tokens=24, budget=12) for p in (pair, plain)
    )
    assert ours.token_ids == theirs.token_ids and ours.acceptance_lengths == theirs.acceptance_lengths


def test_a_quantised_layer_falls_back_with_a_reason():
    class Quantised(torch.nn.Linear):
        def __init__(self, linear):
            super().__init__(linear.in_features, linear.out_features, bias=False)
            self.weight = torch.nn.Parameter(linear.weight.to(torch.int8), requires_grad=False)

    model = tiny_model("qwen3")
    model.model.layers[1].self_attn.o_proj = Quantised(model.model.layers[1].self_attn.o_proj)
    reference = ReferenceTarget(model)
    with pytest.raises(ArchitectureError, match="Quantised is not a plain linear layer"):
        choose_backend(reference, None, "fast", None)
    assert choose_backend(reference, None, "reference", None) == (reference, None)
    assert choose_backend(reference, None, None, None) == (reference, None)  # a CPU


@pytest.mark.parametrize(
    "options, message",
    [
        ({"backend": "quick"}, "possible are fast, fast-host, reference"),
        ({"context_length": 1}, "whole number of tokens from 2"),
    ],
)
def test_a_mistake_is_reported_before_weights_load(options, message):
    with pytest.raises(OptionError, match=message):
        deltatree.load(**options)


def test_a_round_that_captured_is_not_timed(hybrid):
    """`finish` tells a policy that a round's time counts; the first round at a size, and its first commit, do not."""
    from deltatree.decode import Ending, Sampler, decode
    from deltatree.drafter import RandomDrafter
    from deltatree.tree import best_first

    class Timed:
        finished = 0

        def __call__(self, *args, **kwargs):
            return best_first(*args, **kwargs)

        def finish(self, seconds=None):
            self.finished += 1

    target, policy = fast(hybrid), Timed()
    for expected in (0, 1):  # all rounds of the second text are timed, for its buffers are the first one's
        rounds = decode(
            target,
            RandomDrafter(VOCAB, depth=2),
            [3, 4],
            build_tree=policy,
            budget=3,
            ending=Ending(6),
            sampler=Sampler(),
        )
        before = policy.finished
        number = sum(1 for _ in rounds) - 1
        gc.collect()
        assert (policy.finished - before == number) == bool(expected) and policy.finished < 2 * number
