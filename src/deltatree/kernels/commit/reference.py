"""Commit of one path in all layers, in plain PyTorch: the one-layer rules over stacked tensors, in place."""

from __future__ import annotations

from torch import Tensor

from deltatree.kernels.conv.reference import commit_window
from deltatree.kernels.gated_delta.reference import DeltaStash, commit_gated_delta


def commit_states(states: Tensor, stash: DeltaStash, path: Tensor, *, length: Tensor | None = None) -> Tensor:
    """Recurrent matrices: the rule of `commit_gated_delta` in every layer.

    states: [L, B, HV, K, V], written    stash: its tensors with a leading L    path: [P] int64, from the root on
    length: one integer on the device, entries of `path` in use; None for all of them
    Returns `states`.
    """
    for layer, (k, u, log_decay) in zip(states, zip(stash.k, stash.u, stash.log_decay, strict=True), strict=True):
        commit_gated_delta(layer, DeltaStash(k, u, log_decay), path, length=length, out=layer)
    return states


def commit_windows(windows: Tensor, inputs: Tensor, path: Tensor, *, length: Tensor | None = None) -> Tensor:
    """Convolution windows: the rule of `commit_window` in every layer.

    windows: [L, B, C, kernel-1], written    inputs: [L, B, N, C]    path, length: as above. Returns `windows`.
    """
    for window, x in zip(windows, inputs, strict=True):
        commit_window(window, x, path, length=length, out=window)
    return windows


def commit_rows(
    keys: Tensor, values: Tensor, path: Tensor, *, committed: Tensor | int, length: Tensor | None = None
) -> None:
    """Keys and values: move the rows of `path` to the end of the committed ones.

    keys, values: [L, B, HKV, capacity, D]; node i stands in row committed + i; rows committed .. committed+P-1 are written
    committed: rows before this commit, an int or one integer on the device    path, length: as above
    """
    path = path.to(keys.device)
    if length is not None:
        path = path[: int(length)]
    start = int(committed)
    for cache in (keys, values):
        # index_select copies first, so no row is overwritten before it is read
        cache[:, :, :, start : start + path.numel()] = cache.index_select(3, path + start)
