"""Many short sequences side by side on the fast target's weights: all equally long, each one token further a step.

The tokens of a step are the rows of one forward, so that every weight is read once for all sequences. Nothing is ever taken
back here, so a sequence's state is written at once and there is no scratch. On a GPU a step is captured and replayed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from deltatree.capture import Captured
from deltatree.kernels.conv import commit_window, tree_conv
from deltatree.kernels.delta_step import gated_delta_step
from deltatree.kernels.fused import gated_norm
from deltatree.kernels.linear import product
from deltatree.models.fast import FastTarget
from deltatree.models.packed import PackedAttention, PackedRecurrent
from deltatree.state import StateShapes

MOST_OF_MEMORY = 0.85
"""Share of the free memory that the sequences may take; the rest is for what a step allocates."""


def bytes_per_sequence(shapes: StateShapes, length: int, itemsize: int) -> int:
    """What one sequence of up to `length` tokens takes, a choice among its logits included. itemsize: of the model's dtype"""
    num_recurrent = sum(kind == "linear_attention" for kind in shapes.layer_kinds)
    num_attention = len(shapes.layer_kinds) - num_recurrent
    _, heads, key_dim, value_dim = shapes.recurrent or (1, 1, 1, 1)
    recurrent = 4 * heads * key_dim * value_dim + itemsize * shapes.channels * (shapes.kernel - 1)
    attention = 2 * itemsize * shapes.key_heads * shapes.head_dim * length
    choosing = shapes.vocab_size * (itemsize + 4 * 4)  # logits, and some copies of them in float32
    return num_recurrent * recurrent + num_attention * attention + choosing


def most_sequences(wanted: int, bytes_each: int, free_bytes: int) -> int:
    """`wanted`, halved until that many fit; 0 if not one does."""
    while wanted and wanted * bytes_each > MOST_OF_MEMORY * free_bytes:
        wanted //= 2
    return wanted


def free_bytes(device: torch.device) -> int:
    """Memory that this process can still have on a GPU, what PyTorch keeps in reserve included."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


class LockStep:
    """A batch of sequences. `restart` empties them, `logits` feeds one or more tokens to each.

    target: whose packed weights are read    batch: sequences    length: tokens that each of them may have
    """

    @classmethod
    def fitting(cls, target: FastTarget, batch: int, length: int) -> LockStep | None:
        """`batch` sequences, or on a GPU half as many again and again until they fit; None if not one does."""
        if target.device.type == "cuda":
            each = bytes_per_sequence(target.shapes, length, target.dtype.itemsize)
            batch = most_sequences(batch, each, free_bytes(target.device))
        return cls(target, batch, length) if batch else None

    def __init__(self, target: FastTarget, batch: int, length: int) -> None:
        self.target, self.batch, self.length = target, batch, length
        shapes, device = target.shapes, target.device

        def zeros(*shape: int, dtype: torch.dtype = target.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        with torch.inference_mode():
            num_recurrent = sum(kind == "linear_attention" for kind in shapes.layer_kinds)
            num_attention = len(shapes.layer_kinds) - num_recurrent
            _, heads, key_dim, value_dim = shapes.recurrent or (1, 1, 1, 1)
            wide = torch.promote_types(target.dtype, torch.float32)
            self.matrices = zeros(num_recurrent, batch, heads, key_dim, value_dim, dtype=wide)
            self.windows = zeros(num_recurrent, batch, shapes.channels, shapes.kernel - 1)
            cache = num_attention, batch, shapes.key_heads, length, shapes.head_dim
            self.keys, self.values = zeros(*cache), zeros(*cache)
            self.new_keys, self.new_values = (zeros(shapes.key_heads, batch, shapes.head_dim) for _ in range(2))
            self.token_ids, self.positions = (zeros(batch, dtype=torch.int64) for _ in range(2))
            self.out = zeros(batch, target.vocab_size)
            self.conv_rows = torch.arange(shapes.kernel, device=device)[None]  # of a node without a parent
            self.root = zeros(1, dtype=torch.int64)  # the path of one node
            self.rows = torch.arange(length, device=device)
            self._captured = Captured(self.step, device, before=self.restart)
            self.restart()

    @torch.inference_mode()
    def restart(self) -> None:
        """All sequences are empty. Rows of keys and values that were not written since are never seen."""
        for tensor in (self.matrices, self.windows, self.positions):
            tensor.zero_()

    @torch.inference_mode()
    def logits(self, token_ids: Tensor) -> Tensor:
        """Logits [B, vocab] after the last of these tokens, in buffers that the next call overwrites.

        token_ids: [B, T] int64, which follow those of earlier calls. Never more than `length` in all.
        """
        for column in token_ids.unbind(1):
            self.token_ids.copy_(column)
            self._captured()
        return self.out

    def step(self) -> None:
        """One forward over one token of each sequence: reads `token_ids`, writes the states and `out`."""
        self.target.head(self.target.walk(self.token_ids, recur=self._recur, attend=self._attend), out=self.out)
        self.positions += 1

    def _recur(self, w: PackedRecurrent, x: Tensor, index: int) -> Tensor:
        """A GatedDeltaNet layer. x: [B, hidden]"""
        projected = product(x, w.projection)
        if w.order is not None:
            projected = projected.index_select(1, w.order)
        wide = w.value_heads * w.value_dim
        qkv, z, b, a = projected.split([w.channels, wide, w.value_heads, w.value_heads], dim=-1)
        window, inputs = self.windows[index], qkv[:, None]
        mixed = tree_conv(window, inputs, weight=w.conv_weight, bias=w.conv_bias, rows=self.conv_rows)[:, 0]
        commit_window(window, inputs, self.root, out=window)
        q, k, v = mixed.split([w.key_heads * w.key_dim, w.key_heads * w.key_dim, wide], dim=-1)
        out = gated_delta_step(
            self.matrices[index],
            q=q.unflatten(-1, (w.key_heads, -1)),
            k=k.unflatten(-1, (w.key_heads, -1)),
            v=v.unflatten(-1, (w.value_heads, -1)),
            beta=b,
            log_decay=a,
            gates=w.gates,
            out=x.new_empty(self.batch, w.value_heads, w.value_dim),
        )
        return linear(
            gated_norm(out, z.unflatten(-1, (w.value_heads, -1)), weight=w.norm.weight, eps=w.norm.eps), w.output
        )

    def _attend(self, w: PackedAttention, x: Tensor, index: int) -> Tensor:
        """A layer with keys and values. x: [B, hidden]"""
        q, gate = self.target.queries(w, x, self.new_keys, self.new_values, depths=self.positions, length=0)
        place = self.positions[:1]
        keys, values = self.keys[index], self.values[index]
        keys.index_copy_(2, place, self.new_keys.transpose(0, 1)[:, :, None])
        values.index_copy_(2, place, self.new_values.transpose(0, 1)[:, :, None])
        seen = self.rows <= place
        if w.window:
            seen = seen & (place - self.rows < w.window)
        # The query heads of one key head see the same rows: they stand where otherwise the tokens do.
        grouped = q.unflatten(1, (w.key_heads, -1))
        attended = scaled_dot_product_attention(grouped, keys, values, attn_mask=seen[None, None, None]).flatten(1, 2)
        if gate is not None:
            attended = attended * gate.sigmoid()
        return linear(attended.flatten(1), w.output, w.output_bias)
