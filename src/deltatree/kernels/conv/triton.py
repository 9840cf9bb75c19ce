"""The depthwise convolution over a tree with its SiLU, and the commit of its window, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deltatree.kernels.chaining import chaining


@triton.jit
def _tree_conv_kernel(
    window, x, weight, bias, rows, out,
    N, C, swb, swc, swt, sxb, sxn, sxc, sfc, sft, sbc, srn, srt, sob, son, soc,
    KERNEL: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, TILES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """TILES: blocks of nodes of one program, which reads its weights and its window once for them all."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    c = (tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    mc = c < C
    factors, columns = (), ()
    for tap in tl.static_range(KERNEL):
        factors += (tl.load(weight + c * sfc + tap * sft, mask=mc, other=0.0).to(tl.float32),)
    for column in tl.static_range(KERNEL - 1):
        old = tl.load(window + b * swb + c * swc + column * swt, mask=mc, other=0.0).to(x.dtype.element_ty)
        columns += (old,)
    for tile in tl.range(TILES):
        n = ((tl.program_id(1) * TILES + tile) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
        mn = n < N
        total = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
        if bias is not None:
            total += tl.load(bias + c * sbc, mask=mc, other=0.0).to(tl.float32)[None, :]
        for tap in tl.static_range(KERNEL):
            row = tl.load(rows + n * srn + tap * srt, mask=mn, other=0).to(tl.int64)
            committed = row < KERNEL - 1
            node = row - (KERNEL - 1)
            seen = tl.load(
                x + b * sxb + node[:, None] * sxn + c[None, :] * sxc,
                mask=(mn & ~committed)[:, None] & mc[None, :],
                other=0.0,
            )
            for column in tl.static_range(KERNEL - 1):
                seen = tl.where((row == column)[:, None], columns[column][None, :], seen)
            total += seen.to(tl.float32) * factors[tap][None, :]
        total = total * tl.sigmoid(total)
        tl.store(out + b * sob + n[:, None] * son + c[None, :] * soc, total, mask=mn[:, None] & mc[None, :])


@triton.jit
def _commit_window_kernel(
    window, x, path, path_length, out, C, B,
    slw, swb, swc, swt, slx, sxb, sxn, sxc, slo, sob, soc, sot, spath,
    WIDTH: tl.constexpr, PATH: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    c = (tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
    layer = (tl.program_id(1) // B).to(tl.int64)
    b = (tl.program_id(1) % B).to(tl.int64)
    t = tl.arange(0, BLOCK_W)
    mc, mt = c < C, t < WIDTH
    length = PATH
    if path_length is not None:
        length = tl.minimum(tl.load(path_length), PATH).to(tl.int32)
    source = t + length  # column of concat(window, path)
    old = tl.load(
        window + layer * slw + b * swb + c[:, None] * swc + source[None, :] * swt,
        mask=mc[:, None] & (mt & (source < WIDTH))[None, :], other=0.0,
    )  # fmt: skip
    walked = mt & (source >= WIDTH)
    node = tl.load(path + (source - WIDTH) * spath, mask=walked, other=0).to(tl.int64)
    new = tl.load(
        x + layer * slx + b * sxb + node[None, :] * sxn + c[:, None] * sxc,
        mask=mc[:, None] & walked[None, :],
        other=0.0,
    )
    moved = tl.where(walked[None, :], new.to(window.dtype.element_ty), old)
    tl.debug_barrier()  # out may be the window: every column is read before one is written
    tl.store(out + layer * slo + b * sob + c[:, None] * soc + t[None, :] * sot, moved, mask=mc[:, None] & mt[None, :])


def conv_sizes(nodes: int) -> dict[str, int]:
    """The launch of the convolution: a fixed table by nodes.

    Weights and window lie across the channels that a thread holds, so that reading them takes more instructions than
    the nodes' inputs do: a program reads them once for all of its nodes. No choice changes a bit of what a node gets.
    """
    if nodes <= 3:
        return {"BLOCK_N": 1, "BLOCK_C": 128, "TILES": 1, "num_warps": 2}
    if nodes <= 16:
        return {"BLOCK_N": 4, "BLOCK_C": 256, "TILES": 1, "num_warps": 4}
    return {"BLOCK_N": 8, "BLOCK_C": 256, "TILES": 2 if nodes <= 128 else 4, "num_warps": 8}


def tree_conv(
    window: Tensor,
    x: Tensor,
    *,
    weight: Tensor,
    bias: Tensor | None,
    rows: Tensor,
    out: Tensor | None = None,
    launch: dict[str, int] | None = None,
) -> Tensor:
    """As the reference, summed in float32. launch: instead of `conv_sizes`, to measure."""
    batch, nodes, channels = x.shape
    out = torch.empty_like(x) if out is None else out
    rows = rows.to(x.device)
    sizes = conv_sizes(nodes) if launch is None else launch
    grid = (triton.cdiv(channels, sizes["BLOCK_C"]), triton.cdiv(nodes, sizes["BLOCK_N"] * sizes["TILES"]), batch)
    _tree_conv_kernel[grid](
        window, x, weight, bias, rows, out, nodes, channels,
        *window.stride(), *x.stride(), *weight.stride(), 1 if bias is None else bias.stride(0), *rows.stride(),
        *out.stride(), KERNEL=weight.shape[1], **sizes, **chaining(x.device),
    )  # fmt: skip
    return out


def launch_commit(windows: Tensor, inputs: Tensor, path: Tensor, length: Tensor | None, outs: Tensor) -> None:
    """One launch over windows [L, B, C, kernel-1] and inputs [L, B, N, C]."""
    layers, batch, channels, width = windows.shape
    path = path.to(windows.device)
    block_c = 256
    _commit_window_kernel[(triton.cdiv(channels, block_c), layers * batch)](
        windows, inputs, path, length, outs, channels, batch,
        *windows.stride(), *inputs.stride(), *outs.stride(), path.stride(0),
        WIDTH=width, PATH=path.numel(), BLOCK_W=triton.next_power_of_2(width), BLOCK_C=block_c, num_warps=4,
    )  # fmt: skip


def commit_window(
    window: Tensor, x: Tensor, path: Tensor, *, length: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """As the reference."""
    out = torch.empty_like(window) if out is None else out
    launch_commit(window[None], x[None], path, length, out[None])
    return out
