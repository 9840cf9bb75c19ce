"""A linear layer, in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Partials:
    """Scratch of the fast twin where it splits the sums: a launch leaves the counters as it found them, all zero."""

    sums: Tensor  # float32
    counters: Tensor  # int32, zeros


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None, scratch: Partials | None = None
) -> Tensor:
    """x weight^T + bias.

    x: [N, K]    weight: [M, K], as torch.nn.Linear holds it    bias: [M] or None
    out: [N, M], written and returned instead of a new tensor in x's dtype; it may be wider
    scratch: only the fast twin needs it
    Summed in float32 or wider.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    product = functional.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))
    return product.to(x.dtype) if out is None else out.copy_(product)
