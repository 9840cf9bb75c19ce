"""Targets and drafters to project with: a checkpoint's, or random weights of a published shape."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from deltatree.errors import OptionError

if TYPE_CHECKING:
    import torch

    from deltatree.drafter.dflash import DFlashDrafter
    from deltatree.drafter.protocol import Drafter
    from deltatree.models.protocol import Target

TINY = "tiny"
"""A hybrid of a few small layers, to see a projection run anywhere."""

_DRAFTER_LAYERS = 5


def target_and_drafter(
    shape: str, block_size: int, *, device: str | None = None, dtype: str | None = None, backend: str | None = None
) -> tuple[Target, Drafter]:
    """Random weights of a shape, and of a DFlash drafter beside it, as `deltatree.load` would place them.

    shape: `tiny`, or a key of `deltatree.models.shapes.SHAPES`    Raises OptionError.
    """
    from deltatree.pair_api import check_backend, choose_backend, place

    check_backend(backend, None)
    placed, torch_dtype = place(device, dtype)
    if shape == TINY:
        target = _tiny(placed, torch_dtype)
    else:
        from deltatree.models.shapes import SHAPES, random_target

        if shape not in SHAPES:
            raise OptionError(f"shape {shape!r} is not known; possible are {', '.join((*SHAPES, TINY))}")
        num_layers = SHAPES[shape][1]["num_hidden_layers"]
        target = random_target(shape, device=placed, dtype=torch_dtype, taps=_taps(num_layers))
    return choose_backend(target, _drafter(target, block_size, torch_dtype), backend, None)


def _taps(num_layers: int) -> tuple[int, ...]:
    """Five hidden states, spread over the layers."""
    return tuple(sorted({max(1, round(num_layers * (1 + 4 * step) / 20)) for step in range(5)}))


def _drafter(target, block_size: int, dtype: torch.dtype) -> DFlashDrafter:
    """A DFlash drafter of the usual size with random weights: a few layers as wide as the target, reading its taps."""
    import torch

    from deltatree.drafter.dflash import DFlashDrafter, DFlashModel
    from deltatree.drafter.dialects import DFlashConfig

    hidden = target.config.hidden_size
    head_dim = min(128, hidden // 2)
    heads = max(2, hidden // head_dim // 8 * 8 if hidden >= 1024 else hidden // head_dim)
    config = DFlashConfig(
        source="random",
        folder=Path(),
        dialect="z-lab",
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_layers=_DRAFTER_LAYERS,
        num_heads=heads,
        num_kv_heads=max(1, heads // 4),
        head_dim=head_dim,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        attention_bias=False,
        block_size=block_size,
        mask_token_id=0,
        taps=target.taps,
        vocab_size=target.vocab_size,
        context_length=target.context_length,
        windows=(None,) * _DRAFTER_LAYERS,
        causal=(False,) * _DRAFTER_LAYERS,
    )
    torch.manual_seed(1)
    with torch.device(target.device):
        model = DFlashModel(config).to(dtype)
    return DFlashDrafter(model.eval().requires_grad_(False), target)


def _tiny(device: str, dtype: torch.dtype):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from deltatree.models.reference import ReferenceTarget

    config = AutoConfig.for_model(
        "qwen3_5_text",
        vocab_size=997,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype).to(device)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(std=1.0 if "embed" in name else weight.shape[-1] ** -0.5)
    return ReferenceTarget(model.eval().requires_grad_(False), _taps(config.num_hidden_layers))
