"""The steps between a layer's products, in plain PyTorch, rounded where the models round.

Every function takes rows of N nodes and treats each row by itself, in float32 or wider.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centred: bool) -> Tensor:
    """Over the last dimension, in x's dtype. zero_centred: the weight is stored as its distance from 1."""
    wide = _wide(x)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if zero_centred:
        return (wide * (1.0 + _wide(weight))).to(x.dtype)
    return weight * wide.to(x.dtype)


def add_norm(
    residual: Tensor,
    update: Tensor | None,
    *,
    weight: Tensor,
    eps: float,
    zero_centred: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Add a layer's output to the residual stream, and the RMS norm of the sum.

    residual: [N, H], written in place    update: [N, H], or [N, P, H] whose P parts are added up in order, or None
    weight: [H]    zero_centred: the weight is stored as its distance from 1
    out: written and returned instead of a new tensor
    Returns [N, H] in the residual's dtype.
    """
    if update is not None:
        parts = update[:, None] if update.dim() == 2 else update
        total = _wide(residual)
        added = _wide(parts[:, 0])
        for part in range(1, parts.shape[1]):
            added = added + _wide(parts[:, part])
        residual.copy_(total + added.to(residual.dtype))
    normed = _rms_norm(residual, weight, eps, zero_centred)
    return normed if out is None else out.copy_(normed)


def gated_norm(x: Tensor, z: Tensor, *, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """A GatedDeltaNet layer's output norm: RMS norm of every head, times silu(z).

    x, z: [N, HV, V]    weight: [V]    out: written and returned instead of a new tensor
    Returns [N, HV * V] in z's dtype.
    """
    normed = _rms_norm(x.to(z.dtype), weight, eps, zero_centred=False)
    gated = (_wide(normed) * silu(_wide(z))).to(z.dtype).flatten(1)
    return gated if out is None else out.copy_(gated)


def norm_rotate(
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    depths: Tensor,
    length: Tensor | int,
    frequencies: Tensor,
    scaling: float = 1.0,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    zero_centred: bool = False,
    num_heads: int,
    gated: bool = False,
    count: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """From an attention layer's projection to its queries, keys and values: head norms, rotary positions, cache rows.

    x: [N, W], per node the queries ([num_heads, D], or with `gated` [num_heads, 2, D], queries then gates), then keys
        [HKV, D], then values [HKV, D]; num_heads may be 0 where only keys and values are wanted
    keys, values: [HKV, capacity, D], rows length + i are written for node i
    depths: [N] integers; node i stands at position length + depths[i]
    length: committed rows, an int or one integer on the device
    frequencies: [R / 2] float32; the first R of D dimensions are rotated, in halves    scaling: of cosine and sine
    q_weight, k_weight: [D], or None for no head norm
    count: one integer on the device, added to `length`; None for 0
    out: written and returned instead of a new tensor
    Returns queries [N, num_heads, D] in x's dtype.
    """
    key_heads, _, dim = keys.shape
    start = int(length) + (0 if count is None else int(count))
    queries = num_heads * dim * (2 if gated else 1)
    q, k, v = x.split([queries, key_heads * dim, key_heads * dim], dim=-1)
    q = q.unflatten(-1, (num_heads, -1))[..., :dim] if num_heads else q.new_empty(x.shape[0], 0, dim)
    k, v = k.unflatten(-1, (key_heads, dim)), v.unflatten(-1, (key_heads, dim))
    if q_weight is not None and num_heads:
        q = _rms_norm(q, q_weight, eps, zero_centred)
    if k_weight is not None:
        k = _rms_norm(k, k_weight, eps, zero_centred)
    angles = (start + depths.to(x.device)).float()[:, None] * frequencies  # [N, R/2]
    cos, sin = ((f(angles) * scaling)[:, None] for f in (torch.cos, torch.sin))
    half = frequencies.numel()

    def rotated(heads: Tensor) -> Tensor:
        first, second, rest = _wide(heads).split([half, half, dim - 2 * half], dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1).to(x.dtype)

    rows = slice(start, start + x.shape[0])
    keys[:, rows], values[:, rows] = rotated(k).transpose(0, 1), v.transpose(0, 1)
    q = rotated(q)
    return q if out is None else out.copy_(q)


def swiglu(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """silu(first half) * second half. x: [N, 2 * I], gate then up. Returns [N, I] in x's dtype."""
    gate, up = x.chunk(2, dim=-1)
    product = (silu(_wide(gate)) * _wide(up)).to(x.dtype)
    return product if out is None else out.copy_(product)
