"""The DFlash drafter against Transformers' own implementation, and the laws of its context cache."""

import json

import pytest
import torch
from checkpoints import drafter_config, save_drafter, save_target
from tiny import VOCAB, plain_greedy, tiny_model

import deltatree
from deltatree.decode import Conversation, Ending, Sampler, decode
from deltatree.drafter import load_drafter, read_drafter_config
from deltatree.drafter.scripted import one_hot_log_probs
from deltatree.errors import MismatchError
from deltatree.models import ReferenceTarget
from deltatree.tree import best_first

RENAMED = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}


def tiny_drafter(folder, model, config=None, **kwargs):
    config = read_drafter_config(str(save_drafter(folder, config, **kwargs)))
    return load_drafter(config, ReferenceTarget(model, config.taps))


def features_of(rows, seed=0):
    return torch.randn(rows, 3 * 64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("window", [None, 6])
def test_it_computes_what_transformers_own_drafter_computes(hybrid, tmp_path, window):
    transformers = pytest.importorskip("transformers.models.muse_glimmer_assistant")
    kinds = ["sliding_attention", "full_attention"] if window else ["full_attention"] * 2
    config = drafter_config("transformers", layer_types=kinds, sliding_window=window or 4096)
    drafter = tiny_drafter(tmp_path, hybrid, config, rename=lambda name: RENAMED.get(name, name))
    settings = {k: v for k, v in config.items() if k != "architectures"}
    theirs = transformers.MuseGlimmerAssistantModel(transformers.MuseGlimmerAssistantConfig(**settings)).eval()
    from safetensors.torch import load_file

    theirs.load_state_dict(load_file(tmp_path / "model.safetensors"))
    context, bonus = features_of(11), 5
    block = drafter.target.embed(torch.tensor([bonus] + [120] * 7))[None]
    # Their sliding layers take a mask from their own cache, which the window test replaces by its meaning.
    distance = torch.arange(11, 19)[:, None] - torch.arange(19)
    masks = {"full_attention": None, "sliding_attention": (distance.abs() < (window or 99))[None, None]}
    hidden = theirs(noise_embeds=block, context_hidden_states=context[None], attention_mask=masks).last_hidden_state
    expected = drafter.target.head(hidden[0, 1:]).float().log_softmax(-1)
    torch.testing.assert_close(drafter.start().propose(context, bonus=bonus), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "changes", [{}, {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}, {"is_causal": True}]
)
def test_B44_the_context_is_appended_never_recomputed(hybrid, tmp_path, changes):
    drafter = tiny_drafter(tmp_path, hybrid, drafter_config(**changes))
    features = features_of(60)
    session, done = drafter.start(), 0
    for accepted in (20, 0, 3, 7, 1, 1, 5, 2, 8, 1, 4, 8):  # the prompt, then eleven rounds
        done += accepted
        ours = session.propose(features[done - accepted : done], bonus=9)
        fresh = drafter.start().propose(features[:done], bonus=9)
        torch.testing.assert_close(ours, fresh, atol=1e-4, rtol=1e-4)
        assert session.length == done


def test_a_sliding_layer_really_forgets(hybrid, tmp_path):
    config = drafter_config(layer_types=["sliding_attention"] * 2, sliding_window=16)
    drafter = tiny_drafter(tmp_path, hybrid, config)
    features = features_of(60)
    changed = features.clone()
    changed[:40] += 1.0  # farther than 15 back from every slot
    session, other = drafter.start(), drafter.start()
    assert torch.equal(session.propose(features, bonus=9)[-1], session.drafter.start().propose(features, bonus=9)[-1])
    torch.testing.assert_close(other.propose(changed, bonus=9), drafter.start().propose(features, bonus=9))


def test_B41_slot_zero_is_never_a_draft(hybrid, tmp_path):
    """A drafter whose slot 0 says token 13 with certainty, and whose other slots say the text."""
    from deltatree.drafter import DFlashDrafter

    prompt = [5, 6, 7, 8]
    text = prompt + plain_greedy(hybrid, prompt, 40)
    assert 13 not in text
    drafter = tiny_drafter(tmp_path, hybrid)

    class Says(torch.nn.Module):
        config = drafter.config

        def project(self, features):
            return features

        def context_of(self, projected, positions):
            return [(projected[:, None], projected[:, None])]

        def forward(self, block, positions, context, masks):
            start = int(positions[0])
            tokens = [13, *text[start + 1 : start + 8]]
            return one_hot_log_probs((tokens + [13] * 8)[:8], VOCAB)[None]

    class Headless:
        def __init__(self, target):
            self.embed, self.device, self.head = target.embed, target.device, lambda hidden: hidden

    says, trees = DFlashDrafter(Says(), Headless(drafter.target)), []

    def watched(log_probs, *, root, budget):
        trees.append(best_first(log_probs, root=root, budget=budget))
        return trees[-1]

    rounds = list(
        decode(drafter.target, says, prompt, build_tree=watched, budget=7, ending=Ending(25), sampler=Sampler())
    )
    assert [token for r in rounds for token in r.token_ids] == text[4:29]
    assert [r.acceptance_length for r in rounds[1:]] == [8, 8, 8]
    assert all(tree.max_depth == 7 and 13 not in tree.token_ids[1:] for tree in trees)
    assert drafter.start().propose(features_of(4), bonus=1).shape == (7, VOCAB)


def test_B40_the_mask_token_is_the_configs(tmp_path):
    """Not the tokenizer's pad or mask token."""
    target = save_target(tmp_path / "target")
    settings = json.loads((target / "tokenizer_config.json").read_text())
    names = {"pad_token": "$", "mask_token": "$"}  # token 3 of the tiny tokenizer
    (target / "tokenizer_config.json").write_text(json.dumps(settings | names))
    pair = deltatree.load(str(target), str(save_drafter(tmp_path / "drafter")), device="cpu")
    assert pair.tokenizer.pad_token_id == pair.tokenizer.mask_token_id == 3
    assert torch.equal(pair.drafter.mask_embedding, pair.target.embed(torch.tensor([120])))


@pytest.mark.parametrize("block", [1, 2, 8])
def test_B18_any_budget_with_any_block_is_lossless(hybrid, tmp_path, block):
    drafter = tiny_drafter(tmp_path, hybrid, drafter_config(block_size=block))
    prompt = [5, 6, 7]
    truth = plain_greedy(hybrid, prompt, 4)
    for budget in (0, 1, 2, 7, 8, 64, 1000):
        rounds = list(
            decode(
                drafter.target,
                drafter,
                prompt,
                build_tree=best_first,
                budget=budget,
                ending=Ending(4),
                sampler=Sampler(),
            )
        )
        assert [token for r in rounds for token in r.token_ids] == truth, (block, budget)
        exist = sum(VOCAB**depth for depth in range(1, block))
        assert all(r.num_nodes == min(budget, exist) + 1 for r in rounds[1:2]), (block, budget)


def test_B18_a_vocabulary_of_five_has_five_nodes_a_depth(tmp_path):
    model = tiny_model("qwen3_5_text", vocab_size=5)
    taps = {"target_layer_ids": [0, 3, 6], "mask_token_id": 4}
    drafter = tiny_drafter(tmp_path, model, drafter_config(vocab_size=5, block_size=2, dflash_config=taps))
    rounds = list(
        decode(
            drafter.target, drafter, [1, 2, 3], build_tree=best_first, budget=64, ending=Ending(12), sampler=Sampler()
        )
    )
    assert [token for r in rounds for token in r.token_ids] == plain_greedy(model, [1, 2, 3], 12)
    assert {r.num_nodes for r in rounds[1:]} == {6} and {r.acceptance_length for r in rounds[1:-1]} == {2}


def test_B27_past_its_own_context_the_drafter_rests(tmp_path):
    model = tiny_model("qwen3_5_moe_text", max_position_embeddings=64)
    drafter = tiny_drafter(tmp_path, model, drafter_config(max_position_embeddings=32))
    prompt = [(3 * i) % VOCAB for i in range(12)]
    rounds = list(
        decode(drafter.target, drafter, prompt, build_tree=best_first, budget=16, ending=Ending(99), sampler=Sampler())
    )
    assert [token for r in rounds for token in r.token_ids] == plain_greedy(model, prompt, 52)
    assert rounds[-1].ended == "length" and rounds[1].num_nodes == 17 and rounds[-1].num_nodes == 1


def recording(drafter):
    """The drafter with a list of every features tensor its sessions receive."""
    received = []
    start = drafter.start

    def watched():
        session = start()
        propose = session.propose

        def record(features, *, bonus):
            received.append(features)
            return propose(features, bonus=bonus)

        session.propose = record
        return session

    drafter.start = watched
    return received


def test_B16_B45_the_drafter_gets_every_committed_token_once_and_in_order(hybrid, tmp_path):
    drafter = tiny_drafter(tmp_path, hybrid)
    received = recording(drafter)
    prompt = [(3 * i) % VOCAB for i in range(100)]
    ending = Ending(40)
    rounds = decode(drafter.target, drafter, prompt, build_tree=best_first, budget=32, ending=ending, sampler=Sampler())
    tokens = prompt + [token for r in rounds for token in r.token_ids]
    features = torch.cat(received)
    expected = drafter.target.prefill(tokens[: len(features)], drafter.target.new_state()).features
    assert len(received[0]) == 100
    torch.testing.assert_close(features, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("chunk", [32, 33, 100])
def test_B45_chunked_prefill_gives_the_same_features(hybrid, chunk, monkeypatch):
    from deltatree.models import reference

    target = ReferenceTarget(hybrid, (1, 4, 8))
    prompt = [(3 * i) % VOCAB for i in range(100)]
    whole = target.prefill(prompt, target.new_state()).features
    monkeypatch.setattr(reference, "PREFILL_CHUNK", chunk)
    torch.testing.assert_close(target.prefill(prompt, target.new_state()).features, whole, atol=1e-4, rtol=1e-4)


def test_B45_a_continued_turn_leaves_no_gap_in_the_features(hybrid, tmp_path):
    """The second turn's first tokens are not prefilled again; the drafter has had their features."""
    drafter = tiny_drafter(tmp_path, hybrid)
    received, held = recording(drafter), Conversation()
    first = [(3 * i) % VOCAB for i in range(70)]

    def turn(prompt, count):
        rounds = decode(
            drafter.target, drafter, prompt, build_tree=best_first, budget=8, ending=Ending(count), sampler=Sampler(),
            conversation=held,
        )  # fmt: skip
        return [token for r in rounds for token in r.token_ids]

    second = [*first, *turn(first, 11), 40, 41, 42]
    answer = turn(second, 10)
    assert held.reused_length == 80
    features = torch.cat(received)
    expected = drafter.target.prefill((second + answer)[: len(features)], drafter.target.new_state()).features
    assert len(features) > len(second)
    torch.testing.assert_close(features, expected, atol=1e-3, rtol=1e-3)


def test_B38_taps_are_layer_outputs_and_the_last_one_stands_after_the_norm(tmp_path):
    """Layers that add a known constant each, so that an output one layer too early is another number."""
    model = tiny_model("qwen3_5_moe_text")
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda module, args, out, index=index: args[0] + 10.0**index)
    config = drafter_config(dflash_config={"target_layer_ids": [0, 3, 7], "mask_token_id": 120})
    (tmp_path / "config.json").write_text(json.dumps(config))
    target = ReferenceTarget(model, read_drafter_config(str(tmp_path)).taps)
    ids = [4, 5, 6]
    embedded = model.model.embed_tokens(torch.tensor(ids))
    outputs = [embedded + 1.0, embedded + 1111.0, model.model.norm(embedded + 11111111.0)]
    features = target.prefill(ids, target.new_state()).features
    torch.testing.assert_close(features, torch.cat(outputs, dim=-1), atol=1e-3, rtol=1e-5)
    reversed_taps = ReferenceTarget(model, target.taps[::-1])
    features = reversed_taps.prefill(ids, reversed_taps.new_state()).features
    torch.testing.assert_close(features, torch.cat(outputs[::-1], dim=-1), atol=1e-3, rtol=1e-5)
    with pytest.raises(MismatchError, match=r"\[9\] are not among the target's 0 \.\. 8"):
        ReferenceTarget(model, (1, 9))


def test_B38_taps_are_the_librarys_hidden_states(hybrid):
    target = ReferenceTarget(hybrid, (0, 1, 4, 8))
    ids = [4, 5, 6]
    hidden = hybrid(torch.tensor([ids]), output_hidden_states=True).hidden_states
    expected = torch.cat([hidden[i][0] for i in (0, 1, 4, 8)], dim=-1)
    torch.testing.assert_close(target.prefill(ids, target.new_state()).features, expected, atol=1e-4, rtol=1e-4)
