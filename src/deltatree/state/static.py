"""State and scratch of one generation in buffers that never move, so that captured work can read and write them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from deltatree.kernels.commit import commit_rows, commit_states, commit_windows
from deltatree.kernels.conv import conv_rows
from deltatree.kernels.gated_delta import DeltaStash
from deltatree.state.layers import AttentionState, RecurrentState
from deltatree.state.tree_state import TreeState
from deltatree.tree.draft_tree import DraftTree, ancestors

MAX_DEPTH = 32  # deepest node of a tree that can be committed


class StateShapes(NamedTuple):
    """What a model's layers need, for one sequence."""

    layer_kinds: tuple[str, ...]
    key_heads: int  # of attention layers
    head_dim: int
    recurrent: tuple[int, int, int, int] | None  # HK, HV, K, V
    channels: int  # C, that the convolution sees
    projected: int  # width of a recurrent layer's projection; its first C columns go through the convolution
    kernel: int  # of the convolution
    vocab_size: int
    feature_size: int


class Nodes(NamedTuple):
    """The nodes of one tree on the device, padded to a bucket."""

    token_ids: Tensor  # [n] int64
    depths: Tensor  # [n] int64
    rows: Tensor  # [n, kernel] int64, from `conv_rows`
    ancestors: Tensor  # [n, n] bool, self included; a padding node sees itself alone


@dataclass(eq=False)
class StaticBuffers:
    """Allocated once; lent to one generation after another. Scratch holds trees of up to `max_nodes`."""

    shapes: StateShapes
    context_length: int
    max_nodes: int
    device: torch.device
    dtype: torch.dtype
    graphs: dict = field(default_factory=dict, repr=False)  # captured work over these buffers
    scratch: dict = field(default_factory=dict, repr=False)  # further tensors that captured work needs to find again

    def __post_init__(self) -> None:
        s, nodes = self.shapes, self.max_nodes
        wide = torch.promote_types(self.dtype, torch.float32)
        num_recurrent = sum(kind == "linear_attention" for kind in s.layer_kinds)
        num_attention = len(s.layer_kinds) - num_recurrent

        def zeros(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        rows = self.context_length + nodes  # the last committed row may be followed by a whole tree
        self.keys, self.values = (zeros(num_attention, 1, s.key_heads, rows, s.head_dim) for _ in range(2))
        key_heads, heads, key_dim, value_dim = s.recurrent or (1, 1, 1, 1)
        self.matrices = zeros(num_recurrent, 1, heads, key_dim, value_dim, dtype=wide)
        self.windows = zeros(num_recurrent, 1, s.channels, s.kernel - 1)
        self.projected = zeros(num_recurrent, 1, nodes, s.projected)
        self.stash = DeltaStash(
            zeros(num_recurrent, 1, nodes, key_heads, key_dim, dtype=wide),
            zeros(num_recurrent, 1, nodes, heads, value_dim, dtype=wide),
            zeros(num_recurrent, 1, nodes, heads, dtype=wide),
        )
        self.length = zeros(1, dtype=torch.int64)
        self.logits, self.features = zeros(nodes, s.vocab_size), zeros(nodes, s.feature_size)
        self.path, self.steps = zeros(MAX_DEPTH + 1, dtype=torch.int64), zeros(1, dtype=torch.int64)
        self._numbers = zeros((2 + s.kernel) * nodes, dtype=torch.int64)
        self._ancestors = zeros(nodes * nodes, dtype=torch.bool)
        self.layers = self._layers()

    def _layers(self) -> list[AttentionState | RecurrentState]:
        """Views of every layer's part, for the prefill that goes layer by layer."""
        layers, recurrent, attention = [], 0, 0
        for kind in self.shapes.layer_kinds:
            if kind == "linear_attention":
                layer = RecurrentState()
                layer.matrix, layer.window = self.matrices[recurrent], self.windows[recurrent]
                recurrent += 1
            else:
                layer = AttentionState()
                layer.keys, layer.values = self.keys[attention], self.values[attention]
                attention += 1
            layers.append(layer)
        return layers

    def clear(self) -> None:
        """An empty state. Rows of keys and values behind the length are never read, so they may stay."""
        for tensor in (self.matrices, self.windows, self.length, self.steps):
            tensor.zero_()

    def nodes(self, count: int) -> Nodes:
        """The buffers of a bucket of `count` nodes; every bucket lies in the same memory."""
        kernel = self.shapes.kernel
        numbers = self._numbers[: (2 + kernel) * count].view(2 + kernel, count)
        return Nodes(numbers[0], numbers[1], numbers[2:].T, self._ancestors[: count * count].view(count, count))

    def place(self, tree: DraftTree, count: int) -> None:
        """Write a tree into the bucket of `count` nodes, padded with nodes that nobody sees."""
        kernel, num_nodes = self.shapes.kernel, len(tree)
        numbers = torch.zeros(2 + kernel, count, dtype=torch.int64)
        numbers[0, :num_nodes], numbers[1, :num_nodes] = tree.token_ids, tree.depths
        numbers[2:, :num_nodes] = conv_rows(tree.parents, kernel).T
        seen = torch.eye(count, dtype=torch.bool)
        seen[:num_nodes, :num_nodes] = ancestors(tree)
        self._numbers[: numbers.numel()].copy_(numbers.view(-1))
        self._ancestors[: seen.numel()].copy_(seen.view(-1))

    def commit(self, path_size: int) -> None:
        """Make `path[:steps]` part of the state: one launch for each kind of state. path_size: entries of `path` read."""
        path, channels = self.path[:path_size], self.shapes.channels
        if len(self.matrices):
            commit_states(self.matrices, self.stash, path, length=self.steps)
            commit_windows(self.windows, self.projected[..., :channels], path, length=self.steps)
        if len(self.keys):
            commit_rows(self.keys, self.values, path, committed=self.length, length=self.steps)
        self.length += self.steps
        self.steps.fill_(0)  # a kernel; zero_ would be a node of another kind in a captured graph

    @property
    def num_bytes(self) -> int:
        tensors = (
            self.keys, self.values, self.matrices, self.windows, self.projected, self.stash.k, self.stash.u,
            self.stash.log_decay, self.logits, self.features, self._numbers, self._ancestors,
        )  # fmt: skip
        return sum(t.numel() * t.element_size() for t in tensors)


class StaticState(TreeState):
    """The state of one generation in borrowed buffers, which go back to `pool` when the generation is forgotten."""

    def __init__(self, buffers: StaticBuffers, pool: list[StaticBuffers]) -> None:
        self.buffers, self.layers = buffers, buffers.layers
        self.length = 0
        self._pending: DraftTree | None = None
        buffers.clear()
        weakref.finalize(self, pool.append, buffers).atexit = False

    def begin(self, tree: DraftTree) -> None:
        self._pending = None

    def advance(self, num_tokens: int) -> None:
        self.length += num_tokens
        self.buffers.length.fill_(self.length)

    def commit(self, path: list[int]) -> None:
        """Only checks the path and counts it; the target runs the captured commit."""
        self.take(path)
        self.length += len(path)
