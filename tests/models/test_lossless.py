"""The law: any drafter, any tree, the same tokens; and the state is read-only until a commit."""

import pytest
import torch
from tiny import ARCHITECTURES, VOCAB, full_logits, plain_greedy, tiny_model

from deltatree.decode import Ending, Sampler, decode
from deltatree.drafter import RandomDrafter, RightDrafter, WrongDrafter
from deltatree.models import ReferenceTarget
from deltatree.state import RecurrentState
from deltatree.tree import DraftTree, best_first, chain, chain_tree, no_draft, path_to

PROMPTS = ([5, 6, 7, 8, 9, 10, 3], [40], [90, 2], [11, 12, 13], [1, 1, 1, 1], [100, 3, 60, 7, 7])  # 1 to 7 tokens
BRANCHING = DraftTree.from_parents([5, 6, 7, 8, 9, 10, 6, 7], [-1, 0, 1, 2, 1, 4, 0, 6])


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request):
    return tiny_model(request.param)


def run(target, drafter, prompt, count, policy=best_first, budget=8):
    ending = Ending(count)
    rounds = list(decode(target, drafter, prompt, build_tree=policy, budget=budget, ending=ending, sampler=Sampler()))
    return [token for r in rounds for token in r.token_ids], rounds


def snapshot(state):
    """Every committed byte: recurrent matrices, windows, and the KV rows below the committed length."""
    held = []
    for layer in state.layers:
        if isinstance(layer, RecurrentState):
            held += [layer.matrix.clone(), layer.window.clone()]
        else:
            held += [layer.keys[:, :, : state.length].clone(), layer.values[:, :, : state.length].clone()]
    return held


def relative(a, b):
    return float((a - b).norm() / b.norm().clamp_min(1e-12))


def test_any_drafter_and_budget_gives_the_tokens_of_plain_transformers(target_of, model):
    target = target_of(model)
    few = target_of.__name__ == "fast_target"  # its prefill is the reference target's, so prompts differ less
    trees = [(chain, 7), *((best_first, budget) for budget in (1, 8, 64, 200))]
    for place, prompt in enumerate(PROMPTS[:2] if few else PROMPTS):
        truth = plain_greedy(model, prompt, 14)
        text = prompt + truth
        assert run(target, RightDrafter(text, VOCAB), prompt, 14, no_draft)[0] == truth
        for number, drafter in enumerate((RightDrafter(text, VOCAB), WrongDrafter(text, VOCAB), RandomDrafter(VOCAB))):
            # Every tree after the longest and the shortest prompt, one after each other.
            for policy, budget in trees if place < 2 else [trees[(place + number) % len(trees)]]:
                assert run(target, drafter, prompt, 14, policy, budget)[0] == truth


def test_a_right_drafter_is_accepted_in_full(target_of, model):
    prompt = PROMPTS[0]
    text = prompt + plain_greedy(model, prompt, 33)
    _, rounds = run(target_of(model), RightDrafter(text, VOCAB), prompt, 33, budget=16)
    assert [r.acceptance_length for r in rounds[1:]] == [8, 8, 8, 8]


def test_every_path_of_a_tree_has_the_logits_of_its_plain_forward(target_of, model):
    target = target_of(model)
    prompt = [21, 22, 23, 24, 25]
    state = target.new_state()
    target.prefill(prompt, state)
    logits = target.verify(BRANCHING, state).logits
    for node in range(len(BRANCHING)):
        path = BRANCHING.token_ids[path_to(BRANCHING, node)].tolist()
        torch.testing.assert_close(logits[node], full_logits(model, prompt + path)[-1], atol=1e-4, rtol=1e-4)


def test_siblings_change_nothing(target_of, model):
    target = target_of(model)
    state = target.new_state()
    target.prefill([21, 22, 23], state)
    whole = target.verify(BRANCHING, state).logits
    for leaf in (3, 5, 7):
        path = path_to(BRANCHING, leaf)
        alone = target.verify(chain_tree(BRANCHING.token_ids[path]), state).logits
        torch.testing.assert_close(whole[path], alone, atol=1e-4, rtol=1e-4)


def test_verify_leaves_every_committed_byte_and_can_be_called_again(target_of, model):
    target = target_of(model)
    state = target.new_state()
    target.prefill([21, 22, 23, 24], state)
    before, length = snapshot(state), state.length
    first = target.verify(BRANCHING, state).logits
    target.verify(chain_tree([9, 8, 7]), state)
    again = target.verify(BRANCHING, state).logits
    assert torch.equal(first, again)
    assert state.length == length
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(state), strict=True))


@pytest.mark.parametrize("path", [[0], [0, 1], [0, 6, 7], [0, 1, 4, 5], [0, 1, 2, 3]])
def test_B15_a_commit_is_the_state_of_plain_decoding(target_of, model, path):
    target = target_of(model)
    prompt = [21, 22, 23, 24]
    state, plain = target.new_state(), target.new_state()
    target.prefill(prompt, state)
    target.verify(BRANCHING, state)
    target.commit(path, state)
    target.prefill(prompt, plain)
    for token in BRANCHING.token_ids[path].tolist():
        target.verify(chain_tree([token]), plain)
        target.commit([0], plain)
    assert state.length == plain.length == len(prompt) + len(path)
    for ours, theirs in zip(snapshot(state), snapshot(plain), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    following = [target.verify(chain_tree([3, 4]), s).logits for s in (state, plain)]
    torch.testing.assert_close(*following, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("splits", [[17], [12, 5], [12, 2, 3], [1, 16], [1] * 17])
def test_B03_any_split_of_the_prompt_gives_the_same_state(target_of, model, splits):
    target = target_of(model)
    tokens = [(7 * i) % VOCAB for i in range(17)]
    state, whole = target.new_state(), target.new_state()
    done = 0
    for size in splits:
        verified = target.prefill(tokens[done : done + size], state)
        done += size
    expected = target.prefill(tokens, whole)
    torch.testing.assert_close(verified.logits, expected.logits, atol=1e-4, rtol=1e-4)
    for ours, theirs in zip(snapshot(state), snapshot(whole), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("prompt_length", [*range(1, 21), 64, 65, 72, 73])
def test_B06_no_prompt_length_is_special(target_of, hybrid, prompt_length, monkeypatch):
    """Lengths around the width of a verify, and last chunks of 1, 8 and 9 tokens."""
    monkeypatch.setattr("deltatree.models.reference.PREFILL_CHUNK", 64)
    target = target_of(hybrid)
    prompt = [(11 * i + 5) % VOCAB for i in range(prompt_length)]
    truth = plain_greedy(hybrid, prompt, 16)
    for drafter in (RightDrafter(prompt + truth, VOCAB), RandomDrafter(VOCAB)):
        assert run(target, drafter, prompt, 16)[0] == truth


def test_eager_attention_honours_the_tree(attention_moe):
    kept = attention_moe.config._attn_implementation
    state = ReferenceTarget(attention_moe).new_state()
    target = ReferenceTarget(attention_moe)
    target.prefill([3, 4, 5], state)
    expected = target.verify(BRANCHING, state).logits
    try:
        attention_moe.config._attn_implementation = "eager"
        torch.testing.assert_close(target.verify(BRANCHING, state).logits, expected, atol=1e-4, rtol=1e-4)
    finally:
        attention_moe.config._attn_implementation = kept


def test_B07_sliding_window_layers_forget_what_plain_decoding_forgets(target_of):
    model = tiny_model("qwen3", use_sliding_window=True, sliding_window=9, max_window_layers=2)
    assert "sliding_attention" in model.config.layer_types
    prompt = [(5 * i) % VOCAB for i in range(20)]
    truth = plain_greedy(model, prompt, 24)
    target = target_of(model)  # the window has wrapped before the first draft is rejected
    for drafter in (RightDrafter(prompt + truth, VOCAB), RandomDrafter(VOCAB), WrongDrafter(prompt + truth, VOCAB)):
        assert run(target, drafter, prompt, 24, budget=20)[0] == truth


def test_the_stock_forward_of_an_opened_model_is_untouched(hybrid):
    ids = torch.tensor([[5, 6, 7, 8]])
    fresh = tiny_model("qwen3_5_moe_text")
    ReferenceTarget(hybrid)
    assert torch.equal(hybrid(ids).logits, fresh(ids).logits)
    assert type(fresh.model.layers[0].linear_attn).__name__.startswith("Qwen")  # the class itself stays as it was


def test_the_state_after_two_thousand_tokens_is_that_of_a_fresh_prefill(target_of, hybrid):
    target = target_of(hybrid)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (2006,), generator=generator).tolist()
    state, fresh = target.new_state(), target.new_state()
    target.prefill(tokens[:6], state)
    done = 6
    while done < 2006:  # a right branch of random length beside wrong ones, every round
        right = tokens[done : done + 1 + int(torch.randint(12, (), generator=generator))]
        nodes, parents = list(right), [-1, *range(len(right) - 1)]
        for parent in (0, len(right) - 1):
            nodes.append((nodes[parent] + 1) % VOCAB)
            parents.append(parent)
        target.verify(DraftTree.from_parents(nodes, parents), state)
        target.commit(list(range(len(right))), state)
        done += len(right)
    target.prefill(tokens, fresh)
    assert state.length == fresh.length == 2006
    assert max(relative(a, b) for a, b in zip(snapshot(state), snapshot(fresh), strict=True)) < 1e-3
