"""A linear layer, in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

PROGRAMS = 264  # wanted of a launch: two for each multiprocessor of the largest chips
SHORTEST_SHARE = 512  # columns


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


def shares_of(rows: int, columns: int) -> int:
    """Into how many shares the sums over `columns` are split. The number of tokens must not matter."""
    return max(1, min(PROGRAMS // -(-rows // 64), columns // SHORTEST_SHARE))


def share_size(rows: int, columns: int) -> int:
    """Columns of a share; the last one may have fewer."""
    return -(-columns // (128 * shares_of(rows, columns))) * 128


def linear_parts(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """x weight^T, one part for every share of the columns, for a reader who adds them up (`kernels.fused.add_norm`).

    x: [N, K]    weight: [M, K]    out: [N, P, M], written and returned instead of a new tensor
    Returns [N, P, M] in float32 or wider, P = shares_of(M, K).
    """
    rows, columns = weight.shape
    wide, size = torch.promote_types(x.dtype, torch.float32), share_size(rows, columns)
    shares = [slice(i * size, (i + 1) * size) for i in range(shares_of(rows, columns))]
    parts = torch.stack([functional.linear(x[:, at].to(wide), weight[:, at].to(wide)) for at in shares], dim=1)
    return parts if out is None else out.copy_(parts)
