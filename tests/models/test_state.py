"""The state against the library's own, token by token; and what must be refused."""

import pytest
import torch
from tiny import VOCAB, assert_same_state, one_by_one, plain_greedy

from deltatree.decode import Ending, Sampler, decode
from deltatree.drafter import RandomDrafter, ScriptedDrafter
from deltatree.drafter.scripted import one_hot_log_probs
from deltatree.errors import ArchitectureError, TreeError
from deltatree.models import ReferenceTarget
from deltatree.state import RecurrentState, TreeState
from deltatree.tree import DraftTree, best_first, chain, chain_tree

TREE = DraftTree.from_parents([5, 6, 7, 8], [-1, 0, 0, 2])
PROMPT = [5, 6, 7, 8, 9, 10, 3]


@pytest.fixture
def ready(target_of, hybrid):
    target = target_of(hybrid)
    state = target.new_state()
    target.prefill([1, 2, 3], state)
    return target, state


@pytest.mark.parametrize("path", [[], [1], [0, 3], [0, 1, 2], [0, 9], [0, -1], [0, 2, 3, 3]])
def test_only_a_path_of_the_verified_tree_can_be_committed(ready, path):
    target, state = ready
    target.verify(TREE, state)
    with pytest.raises(TreeError, match="not a path"):
        target.commit(path, state)
    target.commit([0, 2, 3], state)
    assert state.length == 6


def test_a_commit_needs_a_verify_and_uses_it_up(ready):
    target, state = ready
    with pytest.raises(TreeError, match="verify"):
        target.commit([0], state)
    target.verify(TREE, state)
    target.commit([0], state)
    with pytest.raises(TreeError, match="verify"):
        target.commit([0], state)


@pytest.mark.parametrize("accepted", [7, 3, 0])
def test_B01_rejected_drafts_leave_no_trace(target_of, hybrid, accepted):
    """Accept all, some, none of every block; the rest of it is token 7 in one run and token 90 in the other."""
    text = PROMPT + plain_greedy(hybrid, PROMPT, 25)
    logits, _ = one_by_one(hybrid, text)
    for rejected in (7, 90):
        target, states = target_of(hybrid), []
        new_state = target.new_state
        target.new_state = lambda new=new_state, kept=states: kept.append(new()) or kept[-1]

        def script(done, bonus, rejected=rejected):
            right = text[done + 1 : done + 1 + accepted]
            return one_hot_log_probs((right + [rejected] * 7)[:7], VOCAB)

        rounds = decode(
            target, ScriptedDrafter(script), PROMPT, build_tree=chain, budget=7, ending=Ending(24), sampler=Sampler()
        )
        for done in rounds:
            after = target.verify(chain_tree([done.bonus]), states[0]).logits[0]
            torch.testing.assert_close(after, logits[states[0].length], atol=1e-4, rtol=1e-4)
        assert states[0].length == len(PROMPT) + 23


@pytest.mark.parametrize("accepted", range(5))
def test_B02_the_convolution_window_after_any_number_of_accepted_drafts(target_of, hybrid, accepted):
    target = target_of(hybrid)
    state, drafted = target.new_state(), [11, 12, 13, 14]
    target.prefill(PROMPT, state)
    block = [4, *drafted[:accepted], *[99] * (7 - accepted)]  # a block of 8 with its root
    target.verify(chain_tree(block), state)
    target.commit(list(range(accepted + 1)), state)
    before = one_by_one(hybrid, PROMPT)[1]
    layers = one_by_one(hybrid, PROMPT + block[: accepted + 1])[1]
    assert_same_state(state, layers)
    for layer, (_, old) in zip(state.layers, before, strict=True):
        if isinstance(layer, RecurrentState) and accepted == 1:  # the oldest two inputs are dropped
            torch.testing.assert_close(layer.window[..., 0], old[..., 2], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("length", [1, 2, 3, 4])
@pytest.mark.parametrize("budget", [1, 8])
def test_B04_prompts_shorter_than_the_kernel(target_of, hybrid, length, budget):
    target, prompt = target_of(hybrid), PROMPT[:length]
    state = target.new_state()
    target.prefill(prompt, state)
    for layer in state.layers:
        if isinstance(layer, RecurrentState):
            assert layer.window.shape[-1] == 3 and not layer.window[..., : max(3 - length, 0)].any()
    assert_same_state(state, one_by_one(hybrid, prompt)[1])
    rounds = decode(
        target, RandomDrafter(VOCAB), prompt, build_tree=best_first, budget=budget, ending=Ending(12), sampler=Sampler()
    )
    assert [token for r in rounds for token in r.token_ids] == plain_greedy(hybrid, prompt, 12)


def test_B07_a_layer_kind_without_a_state_is_refused_by_name(hybrid):
    with pytest.raises(ArchitectureError, match="chunked_attention"):
        TreeState(("full_attention", "chunked_attention"))
    target = ReferenceTarget(hybrid)
    target.layer_kinds = (*target.layer_kinds[:-1], "rotating_attention")
    target.verify = target.prefill = None  # nothing runs before the refusal
    loop = decode(
        target, RandomDrafter(VOCAB), PROMPT, build_tree=best_first, budget=8, ending=Ending(8), sampler=Sampler()
    )
    with pytest.raises(ArchitectureError, match="rotating_attention"):
        next(loop)


def test_B09_padding_never_reaches_the_state(hybrid):
    """Padded prompts are refused; and a tree's mask is for attention layers alone."""
    import deltatree
    from deltatree.errors import OptionError, PromptError

    prompt = torch.tensor([[*PROMPT, 1, 2]])
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.int64), prompt], dim=1)
    attended = (torch.arange(14) >= 5).long()[None]
    options = dict(
        max_new_tokens=8, do_sample=False, pad_token_id=0, custom_generate=deltatree.custom_generate, method="ar"
    )
    bare = hybrid.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    assert bare[0, 9:].tolist() == plain_greedy(hybrid, prompt[0].tolist(), 8)
    with pytest.raises(PromptError, match="padded"):
        hybrid.generate(padded, attention_mask=attended, **options)
    both = torch.cat([padded, torch.full((1, 14), 3)])
    with pytest.raises(OptionError, match="one at a time"):
        hybrid.generate(both, attention_mask=torch.cat([attended, torch.ones_like(attended)]), **options)

    masks, hooks = [], []
    for layer in hybrid.model.layers:
        if hasattr(layer, "linear_attn"):
            watch = lambda module, args, kwargs: masks.append(kwargs.get("attention_mask"))  # noqa: E731
            hooks.append(layer.linear_attn.register_forward_pre_hook(watch, with_kwargs=True))
    target = ReferenceTarget(hybrid)
    state = target.new_state()
    target.prefill(PROMPT, state)
    target.verify(TREE, state)
    for hook in hooks:
        hook.remove()
    assert masks == [None] * 12


ROOTED = [4, 20, 21, 22, 23, 24, 25, 26, 27, 28]
BUSHY = DraftTree.from_parents(ROOTED, [-1, 0, 0, 0, 3, 2, 5, 1, 0, 4])


@pytest.mark.parametrize("path", [[0, 2, 5], [0, 1], [0], [0, 3, 4, 9], "all"])
@pytest.mark.parametrize("name", ["hybrid", "attention_moe"])
def test_B15_only_the_accepted_nodes_stay_wherever_they_stood(target_of, request, name, path):
    model = request.getfixturevalue(name)
    tree = chain_tree(ROOTED) if path == "all" else BUSHY
    path = list(range(10)) if path == "all" else path
    target = target_of(model)
    state = target.new_state()
    target.prefill(PROMPT, state)
    bonus = int(target.verify(tree, state).logits[path[-1]].argmax())
    target.commit(path, state)
    text = PROMPT + tree.token_ids[path].tolist()
    assert state.length == len(text)
    assert_same_state(state, one_by_one(model, text)[1])
    with torch.inference_mode():
        for layer in state.layers:
            if not isinstance(layer, RecurrentState):  # whatever still stands behind the committed rows
                layer.keys[:, :, state.length :] = layer.values[:, :, state.length :] = float("nan")
    new = [bonus]
    while len(new) < 20:
        logits = target.verify(DraftTree.from_parents([new[-1], 9, 8], [-1, 0, 1]), state).logits
        target.commit([0], state)
        new.append(int(logits[0].argmax()))
    assert new == plain_greedy(model, text, 20)
