"""The DFlash drafter over static buffers: context cache, block and head in one captured graph.

The rules are those of `dflash`; the context of a round (at most a path's tokens) is appended inside the graph, a prompt's before it,
chunk by chunk. Layers' context keys and values come from one product for all layers.
"""

from __future__ import annotations

import weakref
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from deltatree.capture import Captured, shared_pool
from deltatree.drafter.dflash import DFlashDrafter, DFlashLayer
from deltatree.kernels.attention import tree_attention
from deltatree.kernels.fused import add_norm, norm_rotate, swiglu
from deltatree.kernels.linear import product, summed_later
from deltatree.models.packed import fuse

PROMPT_CHUNK = 2048  # rows of features that are appended at once


class _Buffers:
    """One generation's context, [L, 1, HKV, capacity, D], and the inputs of a draft. Lent out again and again."""

    def __init__(self, drafter: FastDFlashDrafter, number: int) -> None:
        self.number = number  # in the order in which they were made
        config, device, dtype = drafter.config, drafter.target.device, drafter.target.dtype
        rows = drafter.context_length + drafter.most_new + config.block_size

        def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        shape = (config.num_layers, 1, config.num_kv_heads, rows, config.head_dim)
        self.keys, self.values = zeros(*shape), zeros(*shape)
        self.length, self.count, self.bonus = (zeros(1, dtype=torch.int64) for _ in range(3))
        self.features = zeros(drafter.most_new, len(config.taps) * config.hidden_size)
        self.logits = zeros(config.depth, drafter.target.vocab_size)
        self.graph: Captured | None = None

    def clear(self) -> None:
        for tensor in (self.length, self.count, self.bonus):
            tensor.zero_()


class FastDFlashDrafter:
    """A DFlash model beside the fast target whose embedding and head it shares.

    drafter: the loaded model    context_length: tokens that the buffers hold    most_new: rows of features that one
    round may bring
    """

    def __init__(self, drafter: DFlashDrafter, *, context_length: int, most_new: int = 17) -> None:
        self.drafter, self.model, self.target, self.config = drafter, drafter.model, drafter.target, drafter.config
        self.depth = drafter.depth
        self.context_length = min(context_length, drafter.context_length)
        self.most_new = most_new
        self.num_captured = 0  # graphs
        device, config = self.target.device, self.config
        half = config.head_dim // 2
        self.frequencies = config.rope_theta ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
        self.block_places = torch.arange(config.block_size, device=device)
        self.new_places = torch.arange(max(PROMPT_CHUNK, most_new), device=device)
        ones = torch.ones(config.block_size, config.block_size, dtype=torch.bool, device=device)
        self.visible = {False: ones, True: ones.tril()}  # by whether a layer's block is causal
        attentions, mlps = zip(*((layer.self_attn, layer.mlp) for layer in self.model.layers), strict=True)
        self.projections = [fuse(one.q_proj, one.k_proj, one.v_proj) for one in attentions]
        self.gate_ups = [fuse(one.gate_proj, one.up_proj) for one in mlps]
        heads = config.num_heads * config.head_dim
        self.context_projection = torch.cat([projection[heads:] for projection in self.projections])
        self._free: list[_Buffers] = []
        self._num_made = 0
        self._pool = shared_pool(device)

    @staticmethod
    def covers(drafter: DFlashDrafter) -> bool:
        """Whether these steps compute what this drafter computes. Biased projections, and windows that end inside the
        block, are left to the plain drafter."""
        config = drafter.config
        narrow = any(window is not None and window < config.block_size for window in config.windows)
        return not config.attention_bias and not narrow

    def start(self) -> FastSession:
        return FastSession(self, self.take_buffers())

    def take_buffers(self) -> _Buffers:
        """Buffers of a session that has ended, or new ones. Of several the oldest, so that the same ones of the target come
        together with them again: whole rounds are captured for both."""
        with torch.inference_mode():
            buffers = min(self._free, key=lambda free: free.number, default=None)
            if buffers is None:
                buffers, self._num_made = _Buffers(self, self._num_made), self._num_made + 1
            else:
                self._free.remove(buffers)
            buffers.clear()
        return buffers

    def append(self, buffers: _Buffers, features: Tensor, count: Tensor | None) -> None:
        """Keys and values of newly committed tokens, behind `buffers.length`. features: [n, F]

        count: rows that are real, on the device; the others are overwritten by the block, or by the next append
        """
        config = self.config
        context = self.model.project(features)
        projected = linear(context, self.context_projection).chunk(config.num_layers, dim=-1)
        for index, layer in enumerate(self.model.layers):
            norm_rotate(
                projected[index], buffers.keys[index, 0], buffers.values[index, 0],
                depths=self.new_places[: len(features)], length=buffers.length, frequencies=self.frequencies,
                k_weight=layer.self_attn.k_norm.weight, eps=config.rms_norm_eps, num_heads=0,
            )  # fmt: skip
        if count is not None:
            buffers.length += count

    def draft(self, buffers: _Buffers) -> None:
        """One round: append the features of the round before, run the block, leave its logits in the buffers."""
        config = self.config
        self.append(buffers, buffers.features, buffers.count)
        root = self.target.embed(buffers.bonus)
        residual = torch.cat([root, self.drafter.mask_embedding.expand(config.depth, -1)])
        update = None
        for index, layer in enumerate(self.model.layers):
            hidden = self._normed(residual, update, layer.input_layernorm)
            mixed = self._attend(buffers, index, layer, hidden)
            hidden = self._normed(residual, mixed, layer.post_attention_layernorm)
            update = summed_later(swiglu(product(hidden, self.gate_ups[index])), layer.mlp.down_proj.weight)
        hidden = self._normed(residual, update, self.model.norm)
        buffers.logits.copy_(self.target.head(hidden[1:]))

    def _attend(self, buffers: _Buffers, index: int, layer: DFlashLayer, hidden: Tensor) -> Tensor:
        config, attention = self.config, layer.self_attn
        q = norm_rotate(
            linear(hidden, self.projections[index]), buffers.keys[index, 0], buffers.values[index, 0],
            depths=self.block_places, length=buffers.length, frequencies=self.frequencies,
            q_weight=attention.q_norm.weight, k_weight=attention.k_norm.weight, eps=config.rms_norm_eps,
            num_heads=config.num_heads,
        )  # fmt: skip
        window = config.windows[index]
        attended = tree_attention(
            q.transpose(0, 1)[None], buffers.keys[index], buffers.values[index],
            ancestors=self.visible[bool(config.causal[index])], length=buffers.length,
            depths=self.block_places if window else None, window=window,
        )  # fmt: skip
        return summed_later(attended[0].transpose(0, 1).flatten(1), attention.o_proj.weight)

    def _normed(self, residual: Tensor, update: Tensor | None, norm) -> Tensor:
        return add_norm(residual, update, weight=norm.weight, eps=norm.eps)

    def captured(self, buffers: _Buffers) -> Captured:
        """`draft` as captured work; the warm-up appends rows that count for nothing."""
        if buffers.graph is None:
            self.num_captured += 1
            count = buffers.count.clone()
            buffers.count.zero_()
            buffers.graph = Captured(partial(self.draft, buffers), self.target.device, self._pool, what="drafts")
            buffers.count.copy_(count)
        return buffers.graph


class FastSession:
    """One generation's context in borrowed buffers, which go back when the session is forgotten."""

    def __init__(self, drafter: FastDFlashDrafter, buffers: _Buffers) -> None:
        self.drafter, self.buffers = drafter, buffers
        self.length = 0  # tokens in the context
        self.waiting = 0  # rows of features in the buffers that the next draft appends
        weakref.finalize(self, drafter._free.append, buffers).atexit = False

    @torch.inference_mode()
    def propose(self, features: Tensor, *, bonus: int) -> Tensor:
        self.place(features)
        self.buffers.bonus.fill_(bonus)
        self.drafter.captured(self.buffers)()
        self.count(0)
        return self.buffers.logits.float().log_softmax(-1)

    @torch.inference_mode()
    def place(self, features: Tensor) -> None:
        """Take over the features of committed tokens, [n, F]: long ones go into the context by chunks, the last
        `most_new` rows wait in the buffers for the next draft, which appends them itself. What a draft that came to nothing
        has appended is forgotten."""
        drafter, buffers = self.drafter, self.buffers
        buffers.length.fill_(self.length)
        before = max(0, len(features) - drafter.most_new)
        for start in range(0, before, PROMPT_CHUNK):
            part = features[start : min(start + PROMPT_CHUNK, before)]
            drafter.append(buffers, part, None)
            buffers.length += len(part)
            self.length += len(part)
        self.waiting = len(features) - before
        buffers.features[: self.waiting] = features[before:]
        buffers.count.fill_(self.waiting)

    def count(self, waiting: int) -> None:
        """The captured work has appended what waited; `waiting` rows are in the buffers now."""
        self.length += self.waiting
        self.waiting = waiting
