"""Tiny checkpoints on disk, in the exact layout of the published ones."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny import HYBRID, VOCAB, enliven, tiny_model

from deltatree.drafter import DFlashModel, read_drafter_config


def save_tokenizer(folder: Path, *, chat_template: str | None = "{{ messages[-1]['content'] }}") -> None:
    """A byte-level tokenizer whose 131 ids are single characters and three specials."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [chr(i) for i in range(33, 127)] + ["Ġ", "Ċ"]
    vocabulary = {c: i for i, c in enumerate(characters)}
    for filler in range(len(vocabulary), VOCAB):
        vocabulary[f"<{filler}>"] = filler
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<130>")
    fast.chat_template = chat_template
    fast.save_pretrained(folder)


def save_target(folder: Path, architecture: str = "qwen3_5_moe_text", **changes) -> Path:
    """A tiny target with tokenizer, as `save_pretrained` writes it."""
    tiny_model(architecture, **changes).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def wrapped_model(moe: bool = False):
    """The tiny hybrid inside its multimodal `...ForConditionalGeneration`."""
    from tiny import EXPERTS
    from transformers import AutoConfig, AutoModelForImageTextToText

    kind = "qwen3_5_moe" if moe else "qwen3_5"
    vision = dict(
        depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64, patch_size=4,
        spatial_merge_size=2, temporal_patch_size=2, num_position_embeddings=16, in_channels=3,
    )  # fmt: skip
    text = {**HYBRID, **(EXPERTS if moe else {})}
    config = AutoConfig.for_model(
        kind, text_config=text, vision_config=vision, tie_word_embeddings=False,
        image_token_id=120, video_token_id=121, vision_start_token_id=122, vision_end_token_id=123,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    enliven(model.model.language_model)
    with torch.no_grad():
        model.lm_head.weight.normal_(std=0.1)
    return model.eval().requires_grad_(False)


def drafter_config(dialect: str = "z-lab", **changes) -> dict:
    """A drafter config for the tiny hybrid (hidden 64), in one of the three dialects."""
    body = dict(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, rms_norm_eps=1e-6, vocab_size=VOCAB, max_position_embeddings=4096,
    )  # fmt: skip
    if dialect == "z-lab":
        config = body | dict(
            architectures=["DFlashDraftModel"], model_type="qwen3", rope_theta=10000.0, block_size=8,
            dflash_config={"target_layer_ids": [0, 3, 6], "mask_token_id": 120},
        )  # fmt: skip
    elif dialect == "speculators":
        config = dict(
            architectures=["DFlashSpeculator"], speculators_model_type="dflash", block_size=8, mask_token_id=120,
            aux_hidden_state_layer_ids=[1, 4, 7],
            transformer_layer_config=body | {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
        )  # fmt: skip
    else:
        config = body | dict(
            architectures=["MuseGlimmerAssistantModel"], model_type="muse_glimmer_assistant", block_size=8,
            mask_token_id=120, target_layer_ids=[1, 4, 7],
            rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
        )  # fmt: skip
    return {key: value for key, value in (config | changes).items() if value is not None}


def save_drafter(folder: Path, config: dict | None = None, *, seed: int = 1, rename=lambda name: name) -> Path:
    """A random drafter of that config, with weight names passed through `rename`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or drafter_config()))
    torch.manual_seed(seed)
    model = DFlashModel(read_drafter_config(str(folder)))
    save_file(
        {rename(name): tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / "model.safetensors"
    )
    return folder
