"""Targets and drafters to project with: a checkpoint's, or random weights of a published shape."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from deltatree.errors import OptionError

if TYPE_CHECKING:
    from deltatree.drafter.dflash import DFlashDrafter
    from deltatree.drafter.protocol import Drafter
    from deltatree.models.protocol import Target


def target_and_drafter(
    shape: str, block_size: int, *, device: str | None = None, dtype: str | None = None, backend: str | None = None
) -> tuple[Target, Drafter]:
    """Random weights of a shape that write a plain text, and of a DFlash drafter beside it, as `deltatree.load` would place them.

    shape: a key of `deltatree.models.shapes.SHAPES`    Raises OptionError.
    """
    from deltatree.models.shapes import SHAPES, random_target
    from deltatree.pair_api import check_backend, choose_backend, place

    check_backend(backend, None)
    placed, torch_dtype = place(device, dtype)
    if shape not in SHAPES:
        raise OptionError(f"shape {shape!r} is not known; possible are {', '.join(SHAPES)}")
    num_layers = SHAPES[shape][1]["num_hidden_layers"]
    target = random_target(shape, device=placed, dtype=torch_dtype, taps=_taps(num_layers))
    count_upwards(target.model)
    return choose_backend(target, random_drafter(target, block_size), backend, None)


LOUDNESS = 32.0
"""Of the embedding over what a layer adds, so that the last hidden state still tells the token."""


def count_upwards(model) -> None:
    """Make token t + 1 follow token t, whatever the layers do, which goes on costing what it costs.

    Random weights stand at a near tie at every other token (of logits, and of experts), so that rounding would decide what
    their text is, and a drafter that knows it would soon be wrong. Changes embedding and head; a tied head is left as it is.
    """
    import torch

    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if embedding.data_ptr() == head.data_ptr():
        return
    with torch.no_grad():
        head[1:] = embedding[:-1]
        head[0] = embedding[-1]
        head *= head.shape[1] ** -0.5
        embedding *= LOUDNESS


def _taps(num_layers: int) -> tuple[int, ...]:
    """Five hidden states, spread over the layers."""
    return tuple(sorted({max(1, round(num_layers * (1 + 4 * step) / 20)) for step in range(5)}))


def random_drafter(target: Target, block_size: int, **changes) -> DFlashDrafter:
    """A DFlash drafter with random weights beside a target, reading its taps.

    By default of the usual size: five layers as wide as the target. changes: override single fields of its DFlashConfig
    """
    import torch

    from deltatree.drafter.dflash import DFlashDrafter, DFlashModel
    from deltatree.drafter.dialects import DFlashConfig

    hidden = target.config.hidden_size
    head_dim = min(128, hidden // 2)
    heads = max(2, hidden // head_dim // 8 * 8 if hidden >= 1024 else hidden // head_dim)
    settings = {
        "intermediate_size": 3 * hidden,
        "num_layers": 5,
        "num_heads": heads,
        "num_kv_heads": max(1, heads // 4),
        "head_dim": head_dim,
        "rope_theta": 1e6,
        "context_length": target.context_length,
    } | changes
    config = DFlashConfig(
        source="random",
        folder=Path(),
        dialect="z-lab",
        hidden_size=hidden,
        rms_norm_eps=1e-6,
        attention_bias=False,
        block_size=block_size,
        mask_token_id=0,
        taps=target.taps,
        vocab_size=target.vocab_size,
        windows=(None,) * settings["num_layers"],
        causal=(False,) * settings["num_layers"],
        **settings,
    )
    torch.manual_seed(1)
    with torch.device(target.device):
        model = DFlashModel(config).to(target.dtype)
    return DFlashDrafter(model.eval().requires_grad_(False), target)
