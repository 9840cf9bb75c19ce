"""`model.generate(..., custom_generate=deltatree.custom_generate)`: Transformers' own options, the same tokens."""

import pytest
import torch
from checkpoints import drafter_config, save_drafter, wrapped_model
from tiny import ARCHITECTURES, tiny_model

import deltatree
from deltatree.errors import MismatchError, OptionError, PromptError

PROMPT = torch.tensor([[5, 6, 7, 8, 9]])
COMMON = dict(attention_mask=torch.ones_like(PROMPT), max_new_tokens=20, do_sample=False, pad_token_id=0)


def drafter_for(model, folder):
    taps = {"target_layer_ids": [0, 1, 2], "mask_token_id": 120}
    return deltatree.load_drafter(str(save_drafter(folder, drafter_config(dflash_config=taps))), model)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("method", ["ar", "dflash", "ddtree"])
def test_the_same_tokens_as_generate(architecture, method, tmp_path):
    model = tiny_model(architecture)
    drafter = drafter_for(model, tmp_path)
    expected = model.generate(PROMPT, **COMMON)
    got = model.generate(
        PROMPT, custom_generate=deltatree.custom_generate, drafter=drafter, method=method, budget=16, **COMMON
    )
    assert torch.equal(got, expected)


def test_processors_and_stopping_criteria_are_honoured(hybrid, tmp_path):
    drafter = drafter_for(hybrid, tmp_path)
    free = hybrid.generate(PROMPT, **COMMON)[0, 5:].tolist()
    for options in (
        {"repetition_penalty": 1.5},
        {"bad_words_ids": [[free[0]], [free[3]]]},
        {"eos_token_id": free[6]},
        {"eos_token_id": free[2], "min_new_tokens": 9},
        {"no_repeat_ngram_size": 2},
    ):
        expected = hybrid.generate(PROMPT, **COMMON | options)
        got = hybrid.generate(PROMPT, custom_generate=deltatree.custom_generate, drafter=drafter, **COMMON | options)
        assert torch.equal(got, expected), options


def test_a_multimodal_wrapper_works_too(tmp_path):
    model = wrapped_model()
    got = model.generate(
        PROMPT, custom_generate=deltatree.custom_generate, drafter=drafter_for(model, tmp_path), **COMMON
    )
    assert torch.equal(got, model.generate(PROMPT, **COMMON))


def test_sampling_follows_manual_seed(hybrid, tmp_path):
    drafter = drafter_for(hybrid, tmp_path)

    def sample(seed):
        torch.manual_seed(seed)
        options = COMMON | {"do_sample": True, "temperature": 1.2, "top_k": 20}
        return hybrid.generate(PROMPT, custom_generate=deltatree.custom_generate, drafter=drafter, **options).tolist()

    assert sample(1) == sample(1) != sample(2)


def test_tokens_arrive_round_by_round_and_a_dict_can_be_asked_for(hybrid, tmp_path):
    pieces = []
    out = hybrid.generate(
        PROMPT, custom_generate=deltatree.custom_generate, drafter=drafter_for(hybrid, tmp_path),
        on_tokens=pieces.append, return_dict_in_generate=True, **COMMON,
    )  # fmt: skip
    assert out.sequences[0].tolist() == [*PROMPT[0].tolist(), *(token for piece in pieces for token in piece)]


def test_requests_that_cannot_be_served_are_refused(hybrid, attention_moe, tmp_path):
    drafter = drafter_for(hybrid, tmp_path)

    def ask(model=hybrid, ids=PROMPT, drafter=drafter, **options):
        given = COMMON | {"attention_mask": torch.ones_like(ids)} | options
        return model.generate(ids, custom_generate=deltatree.custom_generate, drafter=drafter, **given)

    with pytest.raises(PromptError, match="padded"):
        ask(attention_mask=torch.tensor([[0, 1, 1, 1, 1]]))
    with pytest.raises(OptionError, match="one at a time"):
        ask(ids=PROMPT.expand(2, -1))
    with pytest.raises(OptionError, match="num_beams"):
        ask(num_beams=2)
    with pytest.raises(OptionError, match="another model object"):
        ask(model=attention_moe)
    with pytest.raises(OptionError, match="needs a drafter"):
        ask(drafter=None)
    with pytest.raises(MismatchError, match="hidden states"):
        ask(model=attention_moe, drafter=str(save_drafter(tmp_path / "deep")))
