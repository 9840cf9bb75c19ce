"""One forward over a tree: what every node sees, and where it stands."""

import pytest
import torch
from checkpoints import wrapped_model
from tiny import VOCAB, full_logits, plain_greedy, tiny_model

from deltatree.decode import Sampler, decode_round
from deltatree.decode.round import Round
from deltatree.drafter import NoDrafter
from deltatree.errors import ArchitectureError, TreeError
from deltatree.models import FastTarget, ReferenceTarget
from deltatree.tree import DraftTree, chain_tree, path_to

PROMPT = [21, 22, 23, 24, 25]
MODELS = ("hybrid", "attention_moe")


@pytest.fixture(params=MODELS)
def model(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def backend(attention_moe):
    """Set the attention backend of the tiny attention model for one test."""
    kept = attention_moe.config._attn_implementation

    def choose(name: str) -> None:
        attention_moe.config._attn_implementation = name

    yield choose
    choose(kept)


def verified(target, tree, prompt=PROMPT):
    state = target.new_state()
    target.prefill(prompt, state)
    return target.verify(tree, state).logits


def assert_every_node_is_full(model, tree, logits, prompt=PROMPT):
    for node in range(len(tree)):
        path = tree.token_ids[path_to(tree, node)].tolist()
        torch.testing.assert_close(logits[node], full_logits(model, prompt + path)[-1], atol=1e-4, rtol=1e-4)


def test_B10_a_second_child_starts_from_its_parent_not_from_its_sibling(target_of, model):
    tree = DraftTree.from_parents([4, 5, 6, 7, 8, 9, 10], [-1, 0, 0, 1, 2, 1, 5])
    assert_every_node_is_full(model, tree, verified(target_of(model), tree))
    for parents in ([-1, 0, 3, 1], [-1, 0, 2, 1], [-1, 0, 7, 1]):  # after its child, of itself, out of range
        with pytest.raises(TreeError):
            DraftTree.from_parents([4, 5, 6, 7], parents)


STAR = DraftTree.from_parents([4, 5, 6, 7, 8, 9, 10], [-1, 0, 0, 0, 0, 0, 0])
LAST_LEAF = DraftTree.from_parents([4, 5, 6, 7, 8, 9], [-1, 0, 1, 0, 3, 4])


@pytest.mark.parametrize("tree", [STAR, LAST_LEAF], ids=["star", "last leaf"])
def test_B12_a_nodes_position_is_its_depth_not_its_row(target_of, model, tree):
    assert_every_node_is_full(model, tree, verified(target_of(model), tree))
    target, positions = ReferenceTarget(model), []
    watch = lambda module, args, kwargs: positions.append([*args, *kwargs.values()][1])  # noqa: E731
    hook = target.text.rotary_emb.register_forward_pre_hook(watch, with_kwargs=True)
    verified(target, tree)
    hook.remove()
    expected = len(PROMPT) + tree.depths
    assert all(torch.equal(axis.flatten(), expected) for axis in positions[-1].view(-1, len(tree)))


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "flex_attention", "paged|sdpa"])
def test_B13_an_attention_backend_that_ignores_masks_is_refused(attention_moe, backend, name):
    backend(name)
    with pytest.raises(ArchitectureError, match=name.replace("|", r"\|")):
        ReferenceTarget(attention_moe)


@pytest.mark.parametrize("name", ["sdpa", "eager"])
@pytest.mark.parametrize("size", ["two siblings", "forty nodes behind 300 tokens"])
def test_B13_a_backend_that_is_taken_honours_the_mask(attention_moe, backend, name, size):
    backend(name)
    target, prompt = ReferenceTarget(attention_moe), PROMPT
    parents = [-1, 0, 0]
    if size != "two siblings":
        prompt = [(7 * i) % VOCAB for i in range(300)]
        parents = [-1, 0, 0, *[(i * 5) % i for i in range(3, 41)]]
    tokens = [(3 * i) % VOCAB for i in range(len(parents))]
    other = [*tokens[:1], (tokens[1] + 1) % VOCAB, *tokens[2:]]
    trees = [DraftTree.from_parents(ids, parents) for ids in (tokens, other)]
    below = [1 in path_to(trees[0], node) for node in range(len(parents))]
    before, after = (verified(target, tree, prompt) for tree in trees)
    for node, is_below in enumerate(below):
        if not is_below:
            torch.testing.assert_close(after[node], before[node], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(after[1], before[1], atol=1e-2)
    assert_every_node_is_full(attention_moe, trees[0], before, prompt)


@pytest.mark.parametrize("name", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_B14_masks_of_changing_size_leave_no_stale_rows_and_no_nan(name, dtype):
    model = tiny_model("qwen3_moe").to(dtype)
    model.config._attn_implementation = name
    target, masks = ReferenceTarget(model), []
    watch = lambda module, args, kwargs: masks.append(kwargs["attention_mask"])  # noqa: E731
    hook = target.text.layers[0].self_attn.register_forward_pre_hook(watch, with_kwargs=True)
    nine = DraftTree.from_parents([4, 5, 6, 7, 8, 9, 10, 11, 12], [-1, 0, 0, 1, 2, 2, 1, 6, 7])
    three = DraftTree.from_parents([4, 30, 31], [-1, 0, 0])
    state = target.new_state()
    target.prefill(PROMPT, state)
    rounds = [target.verify(tree, state).logits for tree in (nine, three, nine)]
    hook.remove()
    assert torch.equal(rounds[0], rounds[2])
    assert all(logits.isfinite().all() for logits in rounds)
    for mask, nodes in zip(masks[1:], (9, 3, 9), strict=True):
        assert mask.shape == (1, 1, nodes, len(PROMPT) + nodes)
        assert mask.dtype in (torch.bool, dtype) and (mask.dtype == torch.bool or mask.isfinite().all())
    for tree, logits in zip((nine, three), rounds, strict=False):
        if dtype == torch.float32:
            assert_every_node_is_full(model, tree, logits)
        for node in range(len(tree)):  # in bfloat16: no worse than what one row more or less in a forward does
            path = tree.token_ids[path_to(tree, node)].tolist()
            alone = verified(target, chain_tree(path))[-1]
            assert float((logits[node] - alone).norm() / alone.norm()) < (1e-5 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_B14_buckets_padded_to_any_width_leave_no_stale_rows_and_no_nan(dtype):
    """The fast target pads its trees: 9 nodes to 16 and to 32, 3 to 16, and 9 again over what they left."""
    model = tiny_model("qwen3_moe").to(dtype)
    nine = DraftTree.from_parents([4, 5, 6, 7, 8, 9, 10, 11, 12], [-1, 0, 0, 1, 2, 2, 1, 6, 7])
    three = DraftTree.from_parents([4, 30, 31], [-1, 0, 0])
    for width in (16, 32):
        target = FastTarget(ReferenceTarget(model), context_length=64, buckets=(width,))
        state = target.new_state()
        target.prefill(PROMPT, state)
        rounds = [target.verify(tree, state).logits for tree in (nine, three, nine)]
        assert torch.equal(rounds[0], rounds[2]) and all(logits.isfinite().all() for logits in rounds)
        assert state.buffers.logits.isfinite().all()  # of the padding, too
        if dtype == torch.float32:
            for tree, logits in zip((nine, three), rounds, strict=False):
                assert_every_node_is_full(model, tree, logits)


def test_B16_the_drafter_gets_the_rows_of_the_accepted_nodes(target_of, hybrid):
    taps = (1, 4, 8)
    target = target_of(hybrid, taps)
    truth = plain_greedy(hybrid, PROMPT, 4)
    wrong = [(token + 1) % VOCAB for token in truth]
    tree = DraftTree.from_parents([truth[0], wrong[1], truth[1], wrong[2], 7, truth[2]], [-1, 0, 0, 1, 1, 2])
    state = target.new_state()
    features = target.prefill(PROMPT, state).features
    done = decode_round(
        target,
        state,
        NoDrafter(VOCAB).start(),
        Round([truth[0]], 0, features, 0),
        build_tree=lambda log_probs, *, root, budget: tree,
        budget=5,
        max_depth=9,
        sampler=Sampler(),
        history=PROMPT + truth[:1],
        cut=lambda tokens: (len(tokens), None),
    )
    assert done.token_ids == truth[1:] and done.acceptance_length == 3
    text = PROMPT + truth[:3]  # committed: the path 0, 2, 5
    hidden = hybrid(torch.tensor([text]), output_hidden_states=True).hidden_states
    expected = torch.cat([hidden[tap][0] for tap in taps], dim=-1)
    torch.testing.assert_close(torch.cat([features, done.features]), expected, atol=1e-4, rtol=1e-4)


def test_B49_text_has_one_position_on_all_three_axes(target_of):
    wrapper = wrapped_model()
    assert_every_node_is_full(wrapper, LAST_LEAF, verified(target_of(wrapper), LAST_LEAF))
    target, positions = ReferenceTarget(wrapper), []
    watch = lambda module, args, kwargs: positions.append([*args, *kwargs.values()][1])  # noqa: E731
    hook = target.text.rotary_emb.register_forward_pre_hook(watch, with_kwargs=True)
    verified(target, LAST_LEAF)
    hook.remove()
    assert positions[-1].shape == (3, 1, len(LAST_LEAF))  # three axes of N positions, not 3 N of them
    assert (positions[-1] == len(PROMPT) + LAST_LEAF.depths).all()
