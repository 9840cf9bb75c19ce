"""The steps between a layer's products, in Triton: one program a row, or some heads of a row or of a few."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deltatree.kernels.chaining import chaining


@triton.jit
def _add_norm_kernel(
    residual, update, weight, out, eps, srn, srh, sun, sup, suh, son, soh,
    H: tl.constexpr, PARTS: tl.constexpr, ZERO_CENTRED: tl.constexpr, BLOCK_H: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    on = h < H
    x = tl.load(residual + row * srn + h * srh, mask=on, other=0.0)
    dtype = x.dtype
    if PARTS > 0:
        added = tl.load(update + row * sun + h * suh, mask=on, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            added += tl.load(update + row * sun + part * sup + h * suh, mask=on, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) + added.to(dtype).to(tl.float32)).to(dtype)
        tl.store(residual + row * srn + h * srh, x, mask=on)
    wide = x.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / H + eps)
    factor = tl.load(weight + h, mask=on, other=0.0)
    if ZERO_CENTRED:
        normed = wide * (1.0 + factor.to(tl.float32))
    else:
        normed = factor.to(tl.float32) * wide.to(dtype).to(tl.float32)
    tl.store(out + row * son + h * soh, normed.to(dtype), mask=on)


def add_norm(
    residual: Tensor,
    update: Tensor | None,
    *,
    weight: Tensor,
    eps: float,
    zero_centred: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """As the reference."""
    nodes, size = residual.shape
    out = torch.empty_like(residual) if out is None else out
    parts = None if update is None else (update[:, None] if update.dim() == 2 else update)
    _add_norm_kernel[(nodes,)](
        residual, parts, weight, out, eps, *residual.stride(), *((0, 0, 0) if parts is None else parts.stride()),
        *out.stride(), H=size, PARTS=0 if parts is None else parts.shape[1], ZERO_CENTRED=zero_centred,
        BLOCK_H=triton.next_power_of_2(size), num_warps=8 if size > 1024 else 4, **chaining(residual.device),
    )  # fmt: skip
    return out


@triton.jit
def _gated_norm_kernel(
    x, z, weight, out, eps, N, HV, sxn, sxh, sxv, szn, szh, szv, son,
    V: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """BLOCK_R rows; a row is one head of one node."""
    if CHAINED:
        gdc_launch_dependents()  # at once: the product behind may take in its weight meanwhile
        gdc_wait()
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    node, head = (r // HV).to(tl.int64)[:, None], (r % HV).to(tl.int64)[:, None]
    v = tl.arange(0, BLOCK_V)[None, :]
    on_v = v < V
    on = (r < N * HV)[:, None] & on_v
    gate = tl.load(z + node * szn + head * szh + v * szv, mask=on, other=0.0)
    wide = tl.load(x + node * sxn + head * sxh + v * sxv, mask=on, other=0.0).to(gate.dtype).to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 1) / V + eps)[:, None]
    factor = tl.load(weight + v, mask=on_v, other=0.0).to(tl.float32)
    normed = (factor * wide.to(gate.dtype).to(tl.float32)).to(gate.dtype).to(tl.float32)
    gate = gate.to(tl.float32)
    tl.store(out + node * son + head * V + v, normed * gate * tl.sigmoid(gate), mask=on)


def head_rows(dim: int, warps: int, rows: int = 1) -> int:
    """Rows of `dim` values of a block in which every warp works on `rows` runs of 8 values a thread.

    Blocks of that many rows or more all add up a row in the same order: 8 values a thread (16 bytes of a half type),
    then across the threads of one warp. With fewer rows the threads would hold fewer values each, in another order.
    Values that are not `in_words` would lie in several warps of a block that has them, so they get blocks of one warp.
    """
    return triton.next_power_of_2(rows * warps * max(1, 256 // triton.next_power_of_2(dim)))


def in_words(*tensors: Tensor) -> bool:
    """Whether a thread reads 8 values at once: a half type, all but the last dimension at multiples of 16 values."""
    return all(
        x.element_size() == 2 and x.stride(-1) == 1 and not any(x.data_ptr() % 16 or n % 16 for n in x.stride()[:-1])
        for x in tensors
    )


def gated_norm_sizes(rows: int, dim: int, words: bool) -> dict[str, int]:
    """The launch of the gated norm: a fixed table by rows (nodes x heads). No choice changes a bit of what a row gets.

    words: whether both inputs are `in_words`
    """
    warps = 8 if words and rows > 512 else 1
    return {"BLOCK_R": head_rows(dim, warps), "num_warps": warps}


def gated_norm(
    x: Tensor,
    z: Tensor,
    *,
    weight: Tensor,
    eps: float,
    out: Tensor | None = None,
    launch: dict[str, int] | None = None,
) -> Tensor:
    """As the reference. launch: instead of `gated_norm_sizes`, to measure."""
    nodes, heads, dim = x.shape
    out = torch.empty(nodes, heads * dim, dtype=z.dtype, device=z.device) if out is None else out
    sizes = gated_norm_sizes(nodes * heads, dim, in_words(x, z)) if launch is None else launch
    _gated_norm_kernel[(triton.cdiv(nodes * heads, sizes["BLOCK_R"]),)](
        x, z, weight, out, eps, nodes, heads, *x.stride(), *z.stride(), out.stride(0),
        V=dim, BLOCK_V=triton.next_power_of_2(dim), **sizes, **chaining(x.device),
    )  # fmt: skip
    return out


@triton.jit
def _normed(x, norm, factor, NORMS: tl.constexpr, ZERO_CENTRED: tl.constexpr):
    """x: [rows, columns]    norm: [rows], reciprocal roots of mean squares    factor: float32. In x's dtype."""
    if NORMS:
        wide = x.to(tl.float32) * norm[:, None]
        if ZERO_CENTRED:
            normed = (wide * (1.0 + factor)).to(x.dtype)
        else:
            normed = (factor * wide.to(x.dtype).to(tl.float32)).to(x.dtype)
    else:
        normed = x
    return normed


@triton.jit
def _factor(q_weight, k_weight, is_query, at, on):
    """The weights of the head norm of every row, at some dimensions, in float32."""
    factor = tl.load(k_weight + at, mask=on, other=0.0)
    if q_weight is not None:
        factor = tl.where(is_query[:, None], tl.load(q_weight + at, mask=on, other=0.0), factor)
    return factor.to(tl.float32)


@triton.jit
def _norm_rotate_kernel(
    x, keys, values, depths, length, length_here, count, frequencies, scaling, q_weight, k_weight, eps, out,
    sxn, skh, skr, skd, svh, svr, svd, son, soh,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    GATED: tl.constexpr, ZERO_CENTRED: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_HALF: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """BLOCK_H heads of one node: their angles are computed once, and only for the dimensions that turn."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    node = tl.program_id(0).to(tl.int64)
    start = length_here
    if length is not None:
        start = tl.load(length)
    start = tl.cast(start, tl.int64)
    if count is not None:
        start += tl.load(count).to(tl.int64)
    row = start + node
    width: tl.constexpr = HEADS * D * (2 if GATED else 1)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_query, is_value = head < HEADS, (head >= HEADS + KEY_HEADS) & (head < HEADS + 2 * KEY_HEADS)
    is_key = (head >= HEADS) & (head < HEADS + KEY_HEADS)
    key_head = tl.where(is_value, head - HEADS - KEY_HEADS, head - HEADS).to(tl.int64)
    base = tl.where(is_query, head * (2 * D if GATED else D), width + (head - HEADS) * D)
    here = x + node * sxn + base[:, None]
    query_rows = out + node * son + head[:, None] * soh
    key_rows = keys + key_head[:, None] * skh + row * skr

    d = tl.arange(0, BLOCK_D)[None, :]
    on_d = d < D
    on = (is_query | is_key | is_value)[:, None] & on_d
    mine = tl.load(here + d, mask=on, other=0.0)
    tl.store(values + key_head[:, None] * svh + row * svr + d * svd, mine, mask=on & is_value[:, None])
    wide = mine.to(tl.float32)
    norm = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)
    NORMS: tl.constexpr = k_weight is not None
    factor = 1.0
    if D > 2 * HALF:
        if NORMS:
            factor = _factor(q_weight, k_weight, is_query, d, on_d)
        still = _normed(mine, norm, factor, NORMS, ZERO_CENTRED)
        on = (d >= 2 * HALF) & on_d
        tl.store(query_rows + d, still, mask=on & is_query[:, None])
        tl.store(key_rows + d * skd, still, mask=on & is_key[:, None])

    h = tl.arange(0, BLOCK_HALF)[None, :]
    on_h = h < HALF
    on = (is_query | is_key)[:, None] & on_h
    first, second = tl.load(here + h, mask=on, other=0.0), tl.load(here + HALF + h, mask=on, other=0.0)
    other_factor = 1.0
    if NORMS:
        factor = _factor(q_weight, k_weight, is_query, h, on_h)
        other_factor = _factor(q_weight, k_weight, is_query, HALF + h, on_h)
    first = _normed(first, norm, factor, NORMS, ZERO_CENTRED).to(tl.float32)
    second = _normed(second, norm, other_factor, NORMS, ZERO_CENTRED).to(tl.float32)
    position = (start + tl.load(depths + node).to(tl.int64)).to(tl.float32)
    angle = position * tl.load(frequencies + h, mask=on_h, other=0.0)
    cos, sin = tl.cos(angle) * scaling, tl.sin(angle) * scaling
    one, two = first * cos - second * sin, second * cos + first * sin
    tl.store(query_rows + h, one, mask=on & is_query[:, None])
    tl.store(query_rows + HALF + h, two, mask=on & is_query[:, None])
    tl.store(key_rows + h * skd, one, mask=on & is_key[:, None])
    tl.store(key_rows + (HALF + h) * skd, two, mask=on & is_key[:, None])


def norm_rotate_sizes(nodes: int, dim: int, words: bool) -> dict[str, int]:
    """The launch of `norm_rotate`: a fixed table by nodes. No choice changes a bit of what a node gets.

    words: whether the projection is `in_words`
    """
    if nodes <= 16 or not words:
        return {"BLOCK_H": head_rows(dim, 1), "num_warps": 1}
    if nodes <= 64:
        return {"BLOCK_H": head_rows(dim, 4), "num_warps": 4}
    return {"BLOCK_H": head_rows(dim, 4, 2), "num_warps": 4}


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
    launch: dict[str, int] | None = None,
) -> Tensor:
    """As the reference, angles in float32. launch: instead of `norm_rotate_sizes`, to measure."""
    nodes = x.shape[0]
    key_heads, _, dim = keys.shape
    heads, half = num_heads + 2 * key_heads, frequencies.numel()
    out = x.new_empty(nodes, num_heads, dim) if out is None else out
    on_device = isinstance(length, torch.Tensor)
    sizes = norm_rotate_sizes(nodes, dim, in_words(x)) if launch is None else launch
    _norm_rotate_kernel[(nodes, triton.cdiv(heads, sizes["BLOCK_H"]))](
        x, keys, values, depths, length if on_device else None, 0 if on_device else length, count, frequencies, scaling,
        q_weight, k_weight, eps, out, x.stride(0), *keys.stride(), *values.stride(), out.stride(0), out.stride(1),
        HEADS=num_heads, KEY_HEADS=key_heads, D=dim, HALF=half, GATED=gated, ZERO_CENTRED=zero_centred,
        BLOCK_D=triton.next_power_of_2(dim), BLOCK_HALF=triton.next_power_of_2(half), **sizes, **chaining(x.device),
    )  # fmt: skip
    return out


@triton.jit
def _swiglu_kernel(x, out, size, sxn, son, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    if CHAINED:
        gdc_launch_dependents()  # at once: the product behind may take in its weight meanwhile
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    on = at < size
    gate = tl.load(x + row * sxn + at, mask=on, other=0.0).to(tl.float32)
    up = tl.load(x + row * sxn + size + at, mask=on, other=0.0).to(tl.float32)
    tl.store(out + row * son + at, gate * tl.sigmoid(gate) * up, mask=on)


def swiglu(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """As the reference."""
    nodes, size = x.shape[0], x.shape[1] // 2
    out = x.new_empty(nodes, size) if out is None else out
    _swiglu_kernel[(nodes, triton.cdiv(size, 1024))](
        x, out, size, x.stride(0), out.stride(0), BLOCK=1024, num_warps=4, **chaining(x.device)
    )
    return out
