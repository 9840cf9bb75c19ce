"""The model families with a tree rule, by the `model_type` in their config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deltatree.errors import ArchitectureError
from deltatree.verify import Projections


@dataclass(frozen=True, slots=True)
class Architecture:
    """What differs between families."""

    name: str
    project: Callable[..., Projections] | None = None  # a GatedDeltaNet layer's input projections
    position_axes: int = 1  # rotary position axes; text uses the same position on all of them


def separate_projections(module: nn.Module, hidden: Tensor) -> Projections:
    """Qwen3.5 and later: one linear layer each for qkv, z, b and a."""
    return Projections(
        module.in_proj_qkv(hidden),
        module.in_proj_z(hidden).unflatten(-1, (module.num_v_heads, -1)),
        module.in_proj_b(hidden),
        module.in_proj_a(hidden),
    )


def fused_projections(module: nn.Module, hidden: Tensor) -> Projections:
    """Qwen3-Next: qkvz in one linear layer and ba in another, grouped by key head."""
    groups, per_group = module.num_k_heads, module.num_v_heads // module.num_k_heads
    wide = per_group * module.head_v_dim
    grouped = module.in_proj_qkvz(hidden).unflatten(-1, (groups, -1))
    q, k, v, z = grouped.split([module.head_k_dim, module.head_k_dim, wide, wide], dim=-1)
    b, a = module.in_proj_ba(hidden).unflatten(-1, (groups, -1)).split([per_group, per_group], dim=-1)
    return Projections(
        torch.cat([x.flatten(2) for x in (q, k, v)], dim=-1),
        z.flatten(2).unflatten(-1, (module.num_v_heads, -1)),
        b.flatten(2),
        a.flatten(2),
    )


QWEN3 = Architecture("qwen3")
QWEN3_MOE = Architecture("qwen3_moe")
QWEN3_NEXT = Architecture("qwen3_next", fused_projections)
QWEN3_5 = Architecture("qwen3_5", separate_projections, position_axes=3)
QWEN3_5_MOE = Architecture("qwen3_5_moe", separate_projections, position_axes=3)

ARCHITECTURES: dict[str, Architecture] = {
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5": QWEN3_5,
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe": QWEN3_5_MOE,
    "qwen3_5_moe_text": QWEN3_5_MOE,
}
"""`model_type` -> architecture. The multimodal wrappers (`qwen3_5`, `qwen3_5_moe`) are opened to their text model."""


def architecture_of(model_type: str) -> Architecture:
    """Raises ArchitectureError, naming the supported families, for any other."""
    if model_type not in ARCHITECTURES:
        raise ArchitectureError(
            f"architecture {model_type!r} has no tree rule here; supported are {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[model_type]
