"""What the Triton kernels of the recurrence share: the commit of a path, the gates, exact products."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LONGEST_SHORT_PATH = 64  # nodes of a path that are committed in one product; longer paths go block by block
EXACT = tl.constexpr("ieee" if torch.version.hip else "tf32x3")  # a float32 product to float32 accuracy


@triton.jit
def _split3(x):
    """Three bfloat16 tiles that add up to a float32 one (24 bits)."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _committed(
    state, k, u, g, path, path_length, spath, skn, skk, sun, suv, sgn, ok, ov, mk, mv,
    PATH: tl.constexpr, BLOCK_PATH: tl.constexpr,
):  # fmt: skip
    """A state tile after the nodes of a path; k, u, g point at this head's stash. Gives the length of the path too.

    The whole path is fetched before its length is looked at: that is one wait for memory instead of three.
    """
    step = tl.arange(0, BLOCK_PATH)
    nodes = tl.load(path + step * spath, mask=step < PATH, other=0)
    length = PATH
    if path_length is not None:
        length = tl.minimum(tl.load(path_length), PATH).to(tl.int32)
    on = step < length
    nodes = tl.where(on, nodes, 0).to(tl.int64)
    # The keys come last: they pass through shared memory at once, and nothing is fetched while they are waited for.
    decay = tl.load(g + nodes * sgn, mask=on, other=0.0)
    wrote = tl.load(u + nodes[:, None] * sun + ov[None, :] * suv, mask=on[:, None] & mv[None, :], other=0.0)
    keys = tl.load(k + nodes[None, :] * skn + ok[:, None] * skk, mask=mk[:, None] & on[None, :], other=0.0)
    leaf = tl.sum(tl.where(step == length - 1, decay, 0.0), 0)
    remaining = tl.where(on, tl.exp(leaf - decay), 0.0)
    tile = tl.exp(leaf) * state
    tile = tl.dot(keys.to(tl.float32), remaining[:, None] * wrote.to(tl.float32), tile, input_precision=EXACT)
    return tile, length


@triton.jit
def _committed_long(
    state, k, u, g, path, path_length, spath, skn, skk, sun, suv, sgn, ok, ov, mk, mv,
    PATH: tl.constexpr, BLOCK_PATH: tl.constexpr,
):  # fmt: skip
    """The same for a path of any length, a block of it at a time."""
    length = PATH
    if path_length is not None:
        length = tl.minimum(tl.load(path_length), PATH).to(tl.int32)
    tile = state
    if length > 0:
        leaf = tl.load(g + tl.load(path + (length - 1) * spath).to(tl.int64) * sgn)
        tile = tl.exp(leaf) * tile
        for start in range(0, length, BLOCK_PATH):
            step = start + tl.arange(0, BLOCK_PATH)
            on = step < length
            nodes = tl.load(path + step * spath, mask=on, other=0).to(tl.int64)
            keys = tl.load(k + nodes[None, :] * skn + ok[:, None] * skk, mask=mk[:, None] & on[None, :], other=0.0)
            remaining = tl.where(on, tl.exp(leaf - tl.load(g + nodes * sgn, mask=on, other=0.0)), 0.0)
            wrote = tl.load(u + nodes[:, None] * sun + ov[None, :] * suv, mask=on[:, None] & mv[None, :], other=0.0)
            tile = tl.dot(keys.to(tl.float32), remaining[:, None] * wrote.to(tl.float32), tile, input_precision=EXACT)
    return tile, length


@triton.jit
def _gate(g, RAW: tl.constexpr, a_log, dt_bias):
    """log_decay from what was given: as it is, or from the raw projection."""
    if RAW:
        x = g + dt_bias
        g = -tl.exp(a_log) * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    return g


def path_block(path: Tensor | None) -> int:
    return 16 if path is None else min(LONGEST_SHORT_PATH, max(16, triton.next_power_of_2(path.numel())))
