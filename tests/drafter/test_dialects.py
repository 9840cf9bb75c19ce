"""The three dialects say the same; what is missing or contradictory is refused by name."""

import pytest
import torch
from checkpoints import drafter_config, save_drafter, save_target

import deltatree
from deltatree.drafter import read_drafter_config
from deltatree.errors import ArchitectureError, CheckpointError, DeltatreeError, MismatchError


def read(tmp_path, config):
    import json

    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_drafter_config(str(tmp_path))


def meaning(config):
    skip = {"source", "folder", "dialect", "vocab_size"}
    return {name: getattr(config, name) for name in type(config).__dataclass_fields__ if name not in skip}


def test_three_dialects_one_meaning(tmp_path):
    read_configs = [read(tmp_path, drafter_config(d)) for d in ("z-lab", "speculators", "transformers")]
    assert [c.dialect for c in read_configs] == ["z-lab", "speculators", "transformers"]
    assert meaning(read_configs[0]) == meaning(read_configs[1]) == meaning(read_configs[2])
    assert (read_configs[0].taps, read_configs[0].depth, read_configs[0].mask_token_id) == ((1, 4, 7), 7, 120)


def test_B39_flat_and_nested_keys_load_alike(tmp_path):
    section = {"target_layer_ids": [0, 3, 6], "mask_token_id": 120, "block_size": 8}
    nested = drafter_config(
        block_size=None, rope_theta=None, rope_parameters={"rope_theta": 10000.0}, dflash_config=section
    )
    flat = drafter_config()
    ids_on_top = drafter_config(dflash_config={"mask_token_id": 120}, target_layer_ids=[0, 3, 6])
    assert meaning(read(tmp_path, nested)) == meaning(read(tmp_path, flat)) == meaning(read(tmp_path, ids_on_top))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": None}, "no `block_size`"),
        ({"block_size": "16"}, "whole number"),
        ({"dflash_config": {"target_layer_ids": [0], "mask_token_id": 120, "block_size": 9}}, "as 9 and as 8"),
        ({"dflash_config": {"target_layer_ids": [0, 3]}}, "no `mask_token_id`"),
        ({"dflash_config": {"mask_token_id": 120}}, "target_layer_ids"),
        (
            {"dflash_config": {"mask_token_id": 120, "target_layer_ids": [0, 3]}, "target_layer_ids": [0, 4]},
            "as .0, 3. and",
        ),
        ({"rope_theta": None}, "rope_theta"),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default"}}, "neither `rope_theta` nor"),
        ({"rope_parameters": {"rope_theta": 5.0}}, "rope_parameters.rope_theta"),
        ({"layer_types": ["full_attention"]}, "1 `layer_types` for 2 layers"),
        ({"layer_types": ["sliding_attention"] * 2}, "no `sliding_window`"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
    ],
)
def test_B39_B40_what_a_config_must_state(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, drafter_config(**changes))


def test_unknown_drafters_are_refused_by_name(tmp_path):
    with pytest.raises(ArchitectureError, match="DFlash2DraftModel"):
        read(tmp_path, drafter_config(architectures=["DFlash2DraftModel"]))
    with pytest.raises(ArchitectureError, match="EagleModel"):
        read(tmp_path, drafter_config(architectures=["EagleModel"], dflash_config=None))
    with pytest.raises(ArchitectureError, match="yarn"):
        read(tmp_path, drafter_config(rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0}))


def test_B43_rotary_fields_left_over_from_a_target_change_nothing(tmp_path):
    stray = drafter_config(
        partial_rotary_factor=0.25,
        rope_parameters={"rope_theta": 10000.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25},
    )
    assert meaning(read(tmp_path, stray)) == meaning(read(tmp_path, drafter_config()))


def test_B43_the_drafters_own_rotation_decides_and_is_shown(tmp_path, target):
    """The target rotates a quarter of each head, interleaved on three axes; its drafter whole heads, whatever it inherits."""
    from deltatree.inspect import inspect_pair

    rope = {"rope_theta": 10000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.25}
    proposals = []
    for stray in ({}, {"partial_rotary_factor": 0.25, "rope_theta": None, "rope_parameters": rope}):
        folder = tmp_path / str(len(proposals))
        save_drafter(folder, drafter_config(**stray))
        pair = deltatree.load(target, str(folder), device="cpu")
        features = torch.randn(9, 3 * 64, generator=torch.Generator().manual_seed(0))
        proposals.append(pair.drafter.start().propose(features, bonus=5))
        shown = inspect_pair(target, str(folder)).sections()[f"Drafter {folder}"]["rotary"]
        assert shown == "whole heads of 16, base 10000"
    assert torch.equal(*proposals)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(save_target(tmp_path_factory.mktemp("target")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "hidden size 32, target .* has 64"),
        ({"vocab_size": 132}, "vocabulary 132, target .* has 131"),
        ({"vocab_size": 130}, "vocabulary 130, target .* has 131"),
        ({"dflash_config": {"target_layer_ids": [0, 8], "mask_token_id": 120}}, r"hidden states \[1, 9\]"),
        ({"dflash_config": {"target_layer_ids": [0, 3], "mask_token_id": 131}}, "mask token 131"),  # B40
    ],
)
def test_B40_B46_a_drafter_of_another_target_is_refused_before_weights_load(tmp_path, target, changes, message):
    read(tmp_path, drafter_config(**changes))
    with pytest.raises(MismatchError, match=message):
        deltatree.load(target, str(tmp_path))  # there are no weights to load


def test_B46_weights_that_do_not_fit_their_config(tmp_path, target):
    save_drafter(tmp_path)
    read(tmp_path, drafter_config(dflash_config={"target_layer_ids": [0, 3, 5, 6], "mask_token_id": 120}))
    with pytest.raises(CheckpointError, match="`fc.weight` is"):
        deltatree.load(target, str(tmp_path), device="cpu")
    read(tmp_path, drafter_config(num_hidden_layers=3))
    with pytest.raises(CheckpointError, match="lacks weights layers.2"):
        deltatree.load(target, str(tmp_path), device="cpu")


def test_corrupt_or_absent_drafter_weights(tmp_path, target):
    read(tmp_path, drafter_config())
    with pytest.raises(CheckpointError, match="no weights"):
        deltatree.load(target, str(tmp_path), device="cpu")
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0 not a header")
    with pytest.raises(CheckpointError, match="corrupt"):
        deltatree.load(target, str(tmp_path), device="cpu")
    with pytest.raises(DeltatreeError, match="neither an existing folder"):
        deltatree.load(target, "./missing")
