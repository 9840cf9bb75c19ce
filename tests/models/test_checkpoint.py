"""Loading: the published layouts, and one clear sentence for everything that cannot be loaded."""

import json

import pytest
import torch
from checkpoints import save_drafter, save_target, save_tokenizer, wrapped_model
from tiny import ARCHITECTURES, plain_greedy, tiny_model

import deltatree
from deltatree.errors import ArchitectureError, CheckpointError, OptionError, PromptError
from deltatree.models import ReferenceTarget
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


def test_B26_end_tokens_are_the_union_of_what_every_source_names(tmp_path):
    save_target(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [17, 18]}))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": 19}))
    assert deltatree.load(str(tmp_path), device="cpu").stop_ids == {17, 18, 19, 130}


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
