"""Tiny random models of every supported family, built in memory."""

from __future__ import annotations

import torch

VOCAB = 131

HYBRID = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
    max_position_embeddings=4096,
    rope_parameters={
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
    eos_token_id=None,
    bos_token_id=None,
    pad_token_id=None,
    tie_word_embeddings=False,
)
EXPERTS = dict(
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
    decoder_sparse_step=1,
    norm_topk_prob=True,
    mlp_only_layers=[],
)
ATTENTION = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=4096,
    eos_token_id=None,
    bos_token_id=None,
    pad_token_id=None,
    tie_word_embeddings=False,
)

ARCHITECTURES = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen3_moe", "qwen3")


def tiny_config(architecture: str, **changes):
    """The config of a tiny model; `changes` override single settings."""
    from transformers import AutoConfig

    settings = {
        "qwen3_5_moe_text": HYBRID | EXPERTS,
        "qwen3_5_text": HYBRID,
        "qwen3_next": HYBRID | EXPERTS,
        "qwen3_moe": ATTENTION | {k: v for k, v in EXPERTS.items() if not k.startswith("shared")},
        "qwen3": ATTENTION,
    }[architecture]
    return AutoConfig.for_model(architecture, **(settings | changes))


def tiny_model(architecture: str, *, seed: int = 0, **changes):
    """A tiny random `...ForCausalLM` in float32 on the CPU, with weights large enough that its text does not settle."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = tiny_config(architecture, **changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    enliven(model)
    return model.eval().requires_grad_(False)


def enliven(model) -> None:
    """Scale random weights up: with the library's 0.02 every layer is nearly the identity and hides mistakes."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2 and "conv1d" not in name:
                weight.normal_(std=0.8 * weight.shape[-1] ** -0.5 if "embed" not in name else 1.0)
            elif "conv1d" in name:
                weight.normal_(std=0.5)
            elif name.endswith("A_log"):
                weight.uniform_(-3.0, 0.5)
            elif name.endswith("dt_bias"):
                weight.uniform_(-2.0, 1.0)


@torch.inference_mode()
def plain_greedy(model, prompt: list[int], count: int) -> list[int]:
    """Transformers' own greedy decoding: the truth that every method must repeat."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


@torch.inference_mode()
def full_logits(model, token_ids: list[int]) -> torch.Tensor:
    """[T, vocab]: the whole sequence re-run without any cache."""
    return model(torch.tensor([token_ids]), use_cache=False).logits[0].float()


@torch.inference_mode()
def one_by_one(model, token_ids: list[int]) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """The library's own model and cache, one token a forward: what every state must equal.

    Returns logits [T, vocab] and, for each layer, (matrix, window) or (keys, values), the window without the oldest of the
    library's kernel-wide one.
    """
    cache, logits = None, []
    for token in token_ids:
        out = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits.append(out.logits[0, -1].float())
    layers = [
        (layer.keys, layer.values)
        if hasattr(layer, "keys")
        else (layer.recurrent_states[0], layer.conv_states[0][..., 1:])
        for layer in cache.layers
    ]
    return torch.stack(logits), layers


def committed(state) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A `TreeState` in the form of `one_by_one`: what it holds below its committed length."""
    return [
        (layer.matrix, layer.window)
        if hasattr(layer, "matrix")
        else (layer.keys[:, :, : state.length], layer.values[:, :, : state.length])
        for layer in state.layers
    ]


def assert_same_state(state, layers, tolerance: float = 1e-4) -> None:
    """Every committed number of a `TreeState` against the layers of `one_by_one` or `committed`."""
    for ours, theirs in zip(committed(state), layers, strict=True):
        for mine, truth in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, truth, atol=tolerance, rtol=tolerance)
