"""The state of one layer: keys and values, or a recurrent matrix and a convolution window."""

from __future__ import annotations

import torch
from torch import Tensor

from deltatree.kernels.conv import commit_window
from deltatree.kernels.gated_delta import DeltaStash, commit_gated_delta


class AttentionState:
    """Keys and values of a full-attention (or sliding-window) layer.

    keys, values: [B, HKV, capacity, D]. Rows below the committed length are the state; rows behind it are scratch
    where `write_nodes` puts the nodes of a tree. Grows by doubling.
    """

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def write_nodes(self, keys: Tensor, values: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Put [B, HKV, N, D] behind `length` committed rows; returns views [B, HKV, length + N, D]."""
        end = length + keys.shape[2]
        self._reserve(keys, values, length, end)
        self.keys[:, :, length:end] = keys
        self.values[:, :, length:end] = values
        return self.keys[:, :, :end], self.values[:, :, :end]

    def commit(self, path: Tensor, length: int) -> None:
        """Move the rows of `path` (node indices, [P] int64) to `length .. length + P`."""
        if torch.equal(path, torch.arange(path.numel())):
            return  # a chain's rows already stand where they belong
        rows = path.to(self.keys.device) + length
        for cache in (self.keys, self.values):
            # index_select copies first, so no row is overwritten before it is read
            cache[:, :, length : length + path.numel()] = cache.index_select(2, rows)

    @property
    def num_bytes(self) -> int:
        return 0 if self.keys is None else sum(t.numel() * t.element_size() for t in (self.keys, self.values))

    def _reserve(self, keys: Tensor, values: Tensor, length: int, end: int) -> None:
        capacity = 0 if self.keys is None else self.keys.shape[2]
        if end <= capacity:
            return
        capacity = max(end, 2 * capacity, 256)

        def grown(old: Tensor | None, like: Tensor) -> Tensor:
            new = like.new_empty(*like.shape[:2], capacity, like.shape[3])
            if old is not None:
                new[:, :, :length] = old[:, :, :length]
            return new

        self.keys, self.values = grown(self.keys, keys), grown(self.values, values)


class RecurrentState:
    """The state of a GatedDeltaNet layer.

    matrix: [B, HV, K, V] float32    window: [B, C, kernel-1], the last convolution inputs, oldest first, zeros where
    there is no history. Scratch after a verify: the stash of the recurrence and the nodes' convolution inputs.
    """

    def __init__(self) -> None:
        self.matrix: Tensor | None = None
        self.window: Tensor | None = None
        self.stash: DeltaStash | None = None
        self.inputs: Tensor | None = None  # [B, N, C]

    def start(self, matrix_shape: tuple[int, ...], window_shape: tuple[int, ...], like: Tensor) -> None:
        """Zeros on first use; `like` gives the window's dtype and the device of both."""
        if self.matrix is None:
            self.matrix = like.new_zeros(matrix_shape, dtype=torch.promote_types(like.dtype, torch.float32))
            self.window = like.new_zeros(window_shape)

    def leave(self, stash: DeltaStash, inputs: Tensor) -> None:
        """Keep what the nodes of a verify leave behind; replaces the last tree's scratch."""
        self.stash, self.inputs = stash, inputs

    def commit(self, path: Tensor) -> None:
        """Make the nodes of `path` ([P] int64) part of the state; the scratch is used up."""
        self.matrix.copy_(commit_gated_delta(self.matrix, self.stash, path))
        self.window.copy_(commit_window(self.window, self.inputs, path))
        self.stash = self.inputs = None

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.matrix, self.window) if t is not None)
