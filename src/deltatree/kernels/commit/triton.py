"""Commit of one path in all layers, in Triton: one launch for each kind of state."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltatree.kernels.conv import triton as conv
from deltatree.kernels.gated_delta import triton as gated_delta
from deltatree.kernels.gated_delta.reference import DeltaStash


@triton.jit
def _commit_rows_kernel(
    keys, values, path, path_length, committed, committed_here,
    slk, sbk, shk, srk, sdk, slv, sbv, shv, srv, sdv, spath,
    B, H, D, PATH: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    d = (tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)
    h = (tl.program_id(1) % H).to(tl.int64)
    b = (tl.program_id(1) // H % B).to(tl.int64)
    layer = (tl.program_id(1) // H // B).to(tl.int64)
    length = PATH
    if path_length is not None:
        length = tl.minimum(tl.load(path_length), PATH).to(tl.int32)
    start = committed_here
    if committed is not None:
        start = tl.load(committed)
    start = tl.cast(start, tl.int64)
    keys += layer * slk + b * sbk + h * shk
    values += layer * slv + b * sbv + h * shv
    # A path's nodes ascend and stand at or behind their place in the path, so a block of rows that is read whole before
    # it is written never loses a row that a later block needs.
    for first in range(0, length, BLOCK_P):
        p = first + tl.arange(0, BLOCK_P)
        node = tl.load(path + p * spath, mask=p < length, other=0).to(tl.int64)
        inside = (p < length)[:, None] & (d < D)[None, :]
        source, place = start + node, start + p
        key = tl.load(keys + source[:, None] * srk + d[None, :] * sdk, mask=inside, other=0.0)
        value = tl.load(values + source[:, None] * srv + d[None, :] * sdv, mask=inside, other=0.0)
        tl.debug_barrier()
        tl.store(keys + place[:, None] * srk + d[None, :] * sdk, key, mask=inside)
        tl.store(values + place[:, None] * srv + d[None, :] * sdv, value, mask=inside)
        tl.debug_barrier()


def commit_states(states: Tensor, stash: DeltaStash, path: Tensor, *, length: Tensor | None = None) -> Tensor:
    """As the reference, in one launch."""
    gated_delta.launch_commit(states, states, stash, path, length)
    return states


def commit_windows(windows: Tensor, inputs: Tensor, path: Tensor, *, length: Tensor | None = None) -> Tensor:
    """As the reference, in one launch."""
    conv.launch_commit(windows, inputs, path, length, windows)
    return windows


def commit_rows(
    keys: Tensor, values: Tensor, path: Tensor, *, committed: Tensor | int, length: Tensor | None = None
) -> None:
    """As the reference, in one launch."""
    layers, batch, heads, _, dim = keys.shape
    path = path.to(keys.device)
    on_device = isinstance(committed, torch.Tensor)
    block_d = min(64, triton.next_power_of_2(dim))
    _commit_rows_kernel[(triton.cdiv(dim, block_d), layers * batch * heads)](
        keys, values, path, length, committed if on_device else None, 0 if on_device else committed,
        *keys.stride(), *values.stride(), path.stride(0), batch, heads, dim,
        PATH=path.numel(), BLOCK_P=min(32, triton.next_power_of_2(path.numel())), BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip
