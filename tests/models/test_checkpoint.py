"""Loading: the published layouts, and one clear sentence for everything that cannot be loaded."""

import importlib.machinery
import json
import sys
import types

import pytest
import torch
from checkpoints import save_drafter, save_target, save_tokenizer, wrapped_model
from tiny import ARCHITECTURES, plain_greedy, tiny_model

import deltatree
from deltatree.errors import ArchitectureError, CheckpointError, OptionError, PromptError
from deltatree.models import ReferenceTarget
from deltatree.models.checkpoint import straight_to
from deltatree.tree import DraftTree

TREE = DraftTree.from_parents([5, 6, 7, 8], [-1, 0, 0, 2])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_loads_from_its_published_layout(architecture, tmp_path):
    model = tiny_model(architecture)
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    pair = deltatree.load(str(tmp_path), device="cpu")
    prompt = [5, 6, 7, 8]
    truth = plain_greedy(model, prompt, 12)
    assert pair.generate(prompt, method="ar", max_new_tokens=12, ignore_eos=True).token_ids == truth


@pytest.mark.parametrize("moe", [False, True])
def test_B48_a_multimodal_checkpoint_is_opened_to_its_text_model(moe, tmp_path):
    wrapper = wrapped_model(moe)
    wrapper.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    inside = ReferenceTarget(wrapper, taps=(1, 4, 8))
    pair = deltatree.load(str(tmp_path), str(save_drafter(tmp_path / "drafter")), device="cpu")
    results = []
    for target in (inside, ReferenceTarget(pair.target.model, taps=(1, 4, 8))):
        state = target.new_state()
        prefilled = target.prefill([1, 2, 3], state)
        results.append((prefilled.logits, prefilled.features, target.verify(TREE, state).logits))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    truth = plain_greedy(wrapper, [1, 2, 3], 12)
    assert pair.generate([1, 2, 3], max_new_tokens=12, ignore_eos=True).token_ids == truth


def test_B49_two_requests_of_different_length_share_no_offset():
    wrapper = wrapped_model()
    target = ReferenceTarget(wrapper)
    expected = target.prefill([9, 8, 7], target.new_state()).logits
    target.prefill(list(range(1, 40)), target.new_state())
    wrapper(torch.arange(1, 30)[None])  # the wrapper's own forward leaves an offset on the model object
    assert torch.equal(target.prefill([9, 8, 7], target.new_state()).logits, expected)


def test_B48_a_text_model_and_its_wrapper_are_one_model(tmp_path):
    """The same weights, bare and wrapped, through every public entry point; nothing of the image side runs."""
    wrapper = wrapped_model()
    bare = tiny_model("qwen3_5_text")
    bare.model.load_state_dict(wrapper.model.language_model.state_dict())
    bare.lm_head.load_state_dict(wrapper.lm_head.state_dict())
    wrapper.model.visual.forward = None
    targets = [ReferenceTarget(model, taps=(1, 4, 8)) for model in (bare, wrapper)]
    features = [target.prefill([1, 2, 3, 4], target.new_state()).features for target in targets]
    assert torch.equal(*features)
    drafter = str(save_drafter(tmp_path / "drafter"))
    results = []
    for name, model in (("bare", bare), ("wrapped", wrapper)):
        model.save_pretrained(tmp_path / name)
        save_tokenizer(tmp_path / name)
        pair = deltatree.load(str(tmp_path / name), drafter, device="cpu")
        options = dict(max_new_tokens=12, ignore_eos=True)
        ids = torch.tensor([[1, 2, 3]])
        given = dict(attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0)
        results.append(
            [
                *(pair.generate([1, 2, 3], method=m, **options).token_ids for m in ("ar", "dflash", "ddtree")),
                "".join(pair.stream([1, 2, 3], **options)),
                pair.generate([1, 2, 3], temperature=1.0, seed=4, **options).token_ids,
                model.generate(
                    ids, custom_generate=deltatree.custom_generate,
                    drafter=deltatree.load_drafter(drafter, model), **given,
                )[0, 3:].tolist(),
            ]
        )  # fmt: skip
    assert results[0] == results[1]
    assert results[0][0] == results[0][1] == results[0][2] == results[0][5]


@pytest.mark.parametrize("named_by", ["generation config", "tokenizer", "all three"])
def test_B26_every_end_token_that_any_source_names_ends_the_text(tmp_path, named_by):
    """Tokens that plain decoding writes on its way, declared to be end tokens in one place or another."""
    save_target(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    free = deltatree.load(str(tmp_path), device="cpu")
    text = free.generate([5, 6, 7], method="ar", max_new_tokens=40, ignore_eos=True).token_ids
    ends = [token for token in dict.fromkeys(text) if token not in (text[0], 130)][2:6]
    own = {130}
    if named_by == "generation config":
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends[:2]}))
        own |= set(ends[:2])
    elif named_by == "tokenizer":
        character = free.tokenizer.convert_ids_to_tokens(ends[2])
        settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": character}))
        own = {ends[2]}
    else:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends[:2]}))
        (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": ends[3]}))
        own |= {ends[0], ends[1], ends[3]}
    pair = deltatree.load(str(tmp_path), device="cpu")
    assert pair.stop_ids == own
    for token in own - {130}:
        pair.stop_ids = frozenset({token})  # each alone, so that each is reached
        done = pair.generate([5, 6, 7], method="ar", max_new_tokens=40)
        assert done.stop_reason == "stop" and done.token_ids == text[: text.index(token) + 1]
    pair.stop_ids = frozenset(own)
    done = pair.generate([5, 6, 7], method="ar", max_new_tokens=40, stop_token_ids=[text[1]])
    assert done.token_ids == text[:2]  # a user's own list adds to it


def refuse(match, error=CheckpointError, **options):
    with pytest.raises(error, match=match) as caught:
        deltatree.load(**options)
    assert "\n" not in str(caught.value)


def test_unusable_targets_are_refused_in_one_sentence(folder, tmp_path):
    refuse("neither an existing folder nor a hub id", target="./nowhere")
    refuse("could not be fetched from the hub", target="nobody/nothing")
    refuse("no config.json", target=str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    refuse("not valid JSON", target=str(tmp_path))
    (tmp_path / "config.json").write_text("[1]")
    refuse("JSON object", target=str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    refuse("'llama' has no tree rule here; supported are qwen3, qwen3_moe", ArchitectureError, target=str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    refuse("lacks hidden_size", target=str(tmp_path))
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_tokenizer(tmp_path)
    refuse("no weights", target=str(tmp_path), device="cpu")
    weights = (folder / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    refuse("corrupt|cannot be loaded", target=str(tmp_path), device="cpu")


def test_missing_weights_are_refused_not_invented(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    weights.pop(next(name for name in weights if "in_proj_qkv" in name))
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    refuse("lacks 1 weights", target=str(tmp_path), device="cpu")


def test_options_are_judged_before_anything_runs(folder):
    refuse(
        "no GPU|not known", OptionError, target=str(folder), device="cuda" if not torch.cuda.is_available() else "xyz"
    )
    refuse("not known", OptionError, target=str(folder), device="tpu7")
    refuse("float32, bfloat16", OptionError, target=str(folder), dtype="int3")
    pair = deltatree.load(str(folder), device="cpu")
    for options, message in [
        ({"budget": -1}, "at least 0"),
        ({"budget": "many"}, "at least 0, or 'auto'"),
        ({"method": "beam"}, "ar, dflash, ddtree"),
        ({"tree": "star"}, "chain, best-first"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"temperature": -1}, "temperature"),
        ({"best_of": 3}, "unknown option best_of"),
        ({"method": "ddtree"}, "needs a drafter"),
    ]:
        with pytest.raises(OptionError, match=message):
            pair.generate("hello", **options)


def test_prompts_that_cannot_be_used(folder):
    pair = deltatree.load(str(folder), device="cpu")
    for prompt, message in [
        ("", "empty"),
        ("  ", "empty"),
        ([], "empty"),
        ([1] * 4097, "4097 tokens"),
        ([999], "outside"),
    ]:
        with pytest.raises(PromptError, match=message):
            pair.generate(prompt, method="ar")
    with pytest.raises(PromptError, match="role"):
        pair.generate([{"text": "x"}], method="ar")


def test_weights_go_straight_to_a_gpu_where_accelerate_is_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    assert straight_to("cuda:1") == straight_to("cpu") == {}
    installed = types.ModuleType("accelerate")
    installed.__spec__ = importlib.machinery.ModuleSpec("accelerate", None)
    monkeypatch.setitem(sys.modules, "accelerate", installed)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert straight_to("cpu") == {}
    for device, index in (("cuda:1", 1), ("cuda", 3)):
        assert straight_to(device) == {"device_map": {"": torch.device("cuda", index)}}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gets_the_weights_of_the_checkpoint(folder):
    """With accelerate or without: the same weights, all on the device, and no hooks on the modules."""
    loaded = deltatree.load(str(folder), device="cuda", dtype="float32").target.model
    expected = tiny_model("qwen3_5_moe_text").state_dict()
    assert all(torch.equal(tensor.cpu(), expected[name]) for name, tensor in loaded.state_dict().items())
    assert all(tensor.is_cuda for tensor in (*loaded.parameters(), *loaded.buffers()))
    assert not any(hasattr(module, "_hf_hook") for module in loaded.modules())
