"""The DFlash drafter against Transformers' own implementation, and the laws of its context cache."""

import pytest
import torch
from checkpoints import drafter_config, save_drafter
from tiny import VOCAB

from deltatree.decode import Ending, Sampler, decode
from deltatree.drafter import load_drafter, read_drafter_config
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
    for accepted in (30, 0, 3, 7, 1, 5, 14):
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
    drafter = tiny_drafter(tmp_path, hybrid)
    assert drafter.start().propose(features_of(4), bonus=1).shape == (7, VOCAB)


def test_B40_the_mask_token_is_the_configs(hybrid, tmp_path):
    drafter = tiny_drafter(tmp_path, hybrid)
    assert torch.equal(drafter.mask_embedding, drafter.target.embed(torch.tensor([120])))


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


def test_B38_taps_are_layer_outputs_and_the_last_one_stands_after_the_norm(hybrid):
    target = ReferenceTarget(hybrid, (0, 1, 4, 8))
    ids = [4, 5, 6]
    hidden = hybrid(torch.tensor([ids]), output_hidden_states=True).hidden_states
    expected = torch.cat([hidden[i][0] for i in (0, 1, 4, 8)], dim=-1)
    torch.testing.assert_close(target.prefill(ids, target.new_state()).features, expected, atol=1e-4, rtol=1e-4)
