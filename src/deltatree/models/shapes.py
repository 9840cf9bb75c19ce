"""Published shapes with random weights: for timings and plans, where no checkpoint is needed.

Random routing wakes more experts than real text does, and random weights write no text: only times mean something.
"""

from __future__ import annotations

import torch
from torch import nn

from deltatree.errors import OptionError
from deltatree.models.packed import norm_of
from deltatree.models.reference import ReferenceTarget

_HYBRID = {
    "vocab_size": 248_320,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "max_position_embeddings": 262_144,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
    "tie_word_embeddings": False,
}

SHAPES: dict[str, tuple[str, dict]] = {
    "qwen3.6-35b-a3b": (
        "qwen3_5_moe_text",
        _HYBRID
        | {
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "linear_num_value_heads": 32,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
    ),
    "qwen3.6-27b": (
        "qwen3_5_text",
        _HYBRID
        | {
            "hidden_size": 5120,
            "intermediate_size": 17_408,
            "num_hidden_layers": 64,
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "linear_num_value_heads": 48,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
        },
    ),
    "qwen3-coder-30b-a3b": (
        "qwen3_moe",
        {
            "vocab_size": 151_936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 262_144,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0},
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "tie_word_embeddings": False,
        },
    ),
    "tiny": (
        "qwen3_5_text",
        _HYBRID
        | {
            "vocab_size": 997,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "max_position_embeddings": 4096,
            "rope_parameters": _HYBRID["rope_parameters"] | {"rope_theta": 10_000.0, "mrope_section": [2, 1, 1]},
        },
    ),
}
"""Name -> (model_type, text settings) of published models, and `tiny`: a hybrid of a few small layers, to try things anywhere."""


def random_target(
    shape: str,
    *,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    taps: tuple[int, ...] = (),
    seed: int = 0,
    **changes,
) -> ReferenceTarget:
    """A target of a published shape with random weights, made on the device.

    shape: a key of SHAPES    changes: override single settings, e.g. num_hidden_layers
    Raises OptionError for an unknown shape, or if the device has less free memory than the weights need.
    """
    if shape not in SHAPES:
        raise OptionError(f"shape {shape!r} is not known; possible are {', '.join(SHAPES)}")
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, settings = SHAPES[shape]
    config = AutoConfig.for_model(model_type, **(settings | changes))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    needed = sum(p.numel() * p.element_size() for p in model.parameters())
    if torch.device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if needed > 0.97 * free:
            raise OptionError(
                f"shape {shape} needs {needed / 1e9:.0f} GB for its weights, {device} has {free / 1e9:.0f} GB free; "
                "choose a smaller shape or another device"
            )
    model.to_empty(device=device)
    fill(model, seed)
    # Buffers are not parameters: what the rotary module had computed was lost with the meta device.
    inner = getattr(model, "model", model)
    inner.rotary_emb = type(inner.rotary_emb)(config=config).to(device)
    if "num_experts" in settings:
        model.set_experts_implementation("grouped_mm" if torch.device(device).type == "cuda" else "eager")
    return ReferenceTarget(model.eval().requires_grad_(False), taps)


@torch.no_grad()
def fill(model: nn.Module, seed: int = 0) -> None:
    """Random weights of a size that keeps activations near one; norms near the identity."""
    torch.manual_seed(seed)
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        if "Norm" in type(module).__name__ and "weight" in own:
            own.pop("weight").fill_(0.0 if norm_of(module).zero_centred else 1.0)
        for name, weight in own.items():
            if name == "A_log":
                weight.uniform_(-3.0, 0.5)
            elif name == "dt_bias":
                weight.uniform_(-2.0, 1.0)
            elif isinstance(module, nn.Embedding):
                weight.normal_()
            elif isinstance(module, nn.Conv1d):
                weight.normal_(std=0.5)
            elif weight.dim() >= 2:
                weight.normal_(std=weight.shape[-1] ** -0.5)
            else:
                weight.zero_()
