"""The fast target: static buffers, fused kernels, one captured graph per node bucket.

The same weights, verbs and rules as the reference target, which it stands on: prefill is the reference's own, layer by layer,
into the static buffers, so that both start a generation from the same numbers. Verify and commit are captured once and
replayed. On a CPU the same steps run uncaptured with the kernels' references, which is what the tests use.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear

from deltatree.capture import Captured, shared_pool
from deltatree.errors import TreeError
from deltatree.kernels.attention import tree_attention
from deltatree.kernels.conv import tree_conv
from deltatree.kernels.experts import expert_mlp, route_tokens
from deltatree.kernels.fused import add_norm, gated_norm, norm_rotate, swiglu
from deltatree.kernels.gated_delta import DeltaStash, tree_gated_delta
from deltatree.kernels.linear import product, summed_later
from deltatree.models.packed import Norm, PackedAttention, PackedExperts, PackedMLP, PackedRecurrent, norm_of, pack
from deltatree.models.protocol import Verified
from deltatree.models.reference import ReferenceTarget
from deltatree.state import Nodes, StateShapes, StaticBuffers, StaticState
from deltatree.state.static import MAX_DEPTH
from deltatree.tree import DraftTree

if TYPE_CHECKING:
    from deltatree.models.lock_step import LockStep

BUCKETS = (1, 2, 4, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128, 129, 192, 256, 257)
"""Node counts that are captured, root included. Beside the round ones those of the usual budgets, which lack the root."""

USUAL_DEPTH = 15  # of a drafter with blocks of 16; deeper trees have graphs of their own
DEFAULT_CONTEXT = 32_768  # tokens, if neither the user nor the model says less


class FastTarget:
    """A target for one sequence at a time per state, near the speed of memory.

    reference: the loaded model; its projections are packed in place and it goes on working
    context_length: tokens that the buffers hold, prompt and answer    buckets: node counts to capture
    device_rounds: whether greedy rounds may stay on the device from draft to walk (`deltatree.device`)
    Raises ArchitectureError if the model has layers that cannot be packed (quantised ones).
    """

    def __init__(
        self,
        reference: ReferenceTarget,
        *,
        context_length: int | None = None,
        buckets: tuple[int, ...] = BUCKETS,
        device_rounds: bool = False,
    ) -> None:
        self.device_rounds = device_rounds
        self.num_captured = 0  # graphs; a round that made one took a time that says nothing
        self.reference = reference
        self.model, self.config, self.taps = reference.model, reference.config, reference.taps
        self.layer_kinds, self.vocab_size = reference.layer_kinds, reference.vocab_size
        self.feature_size = reference.feature_size
        self.context_length = min(context_length or DEFAULT_CONTEXT, reference.context_length)
        self.node_buckets = buckets
        text, window = reference.text, getattr(self.config, "sliding_window", None)
        self.layers = [pack(layer, kind, window) for layer, kind in zip(text.layers, self.layer_kinds, strict=False)]
        self.norm = norm_of(text.norm)
        self.frequencies = text.rotary_emb.inv_freq.float().to(self.device)
        self.rotary_scaling = float(getattr(text.rotary_emb, "attention_scaling", 1.0))
        self.shapes = self._shapes()
        self._free: list[StaticBuffers] = []
        self._pool = shared_pool(self.device)

    @property
    def device(self) -> torch.device:
        return self.reference.device

    @property
    def dtype(self) -> torch.dtype:
        return self.reference.dtype

    def new_state(self) -> StaticState:
        """Buffers of a generation that has ended, or new ones; graphs stay with the buffers."""
        if self._free:
            buffers = max(self._free, key=lambda free: len(free.graphs))  # so that little is captured again
            self._free.remove(buffers)
        else:
            with torch.inference_mode():
                buffers = StaticBuffers(
                    self.shapes, self.context_length, max(self.node_buckets), self.device, self.dtype
                )
        with torch.inference_mode():
            return StaticState(buffers, self._free)

    def prefill(self, token_ids: list[int], state: StaticState) -> Verified:
        return self.reference.prefill(token_ids, state)

    @torch.inference_mode()
    def verify(self, tree: DraftTree, state: StaticState) -> Verified:
        buffers, num_nodes = state.buffers, len(tree)
        count, depth = self.bucket(num_nodes), self._depth(tree.max_depth)
        state.begin(tree)
        buffers.place(tree, count)
        self.captured_verify(buffers, count, depth)()
        state.finish(tree)
        return Verified(buffers.logits[:num_nodes].to(torch.float32, copy=True), buffers.features[:num_nodes].clone())

    @torch.inference_mode()
    def commit(self, path: list[int], state: StaticState) -> None:
        state.commit(path)
        buffers = state.buffers
        buffers.path[: len(path)].copy_(torch.tensor(path))
        buffers.steps.fill_(len(path))
        self.captured_commit(buffers, len(path))()

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.reference.embed(token_ids)

    def head(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """out: [n, vocab], written and returned instead of a new tensor, where hidden is [n, hidden]"""
        head = self.model.get_output_embeddings()
        return product(hidden, head.weight, head.bias, out) if hidden.dim() == 2 else head(hidden)

    def lock_step(self, batch: int, length: int) -> LockStep | None:
        """Up to `batch` sequences of up to `length` tokens side by side, fewer where memory is short; None if not one fits."""
        from deltatree.models.lock_step import LockStep

        return LockStep.fitting(self, batch, length)

    def bucket(self, num_nodes: int) -> int:
        """The smallest captured node count that holds a tree. Raises TreeError beyond the largest."""
        if num_nodes > max(self.node_buckets):
            raise TreeError(
                f"a tree of {num_nodes} nodes needs more than the {max(self.node_buckets)} captured; "
                f"use a budget of at most {max(self.node_buckets) - 1}"
            )
        return min(count for count in self.node_buckets if count >= num_nodes)

    def _depth(self, max_depth: int) -> int:
        if max_depth > MAX_DEPTH:
            raise TreeError(
                f"a tree of depth {max_depth} is deeper than the {MAX_DEPTH} captured; draft at most that many"
            )
        return USUAL_DEPTH if max_depth <= USUAL_DEPTH else MAX_DEPTH

    def captured_verify(self, buffers: StaticBuffers, count: int, depth: int = USUAL_DEPTH) -> Captured:
        """The verify of `buffers.nodes(count)` as captured work. depth: no node is deeper."""
        key = ("verify", count, 0 if count == 1 else depth)
        if key not in buffers.graphs:
            self.num_captured += 1
            step = partial(self.step, buffers, buffers.nodes(count), key[2])
            buffers.graphs[key] = Captured(step, self.device, self._pool, what=f"{count} nodes")
        return buffers.graphs[key]

    def captured_commit(self, buffers: StaticBuffers, path_length: int) -> Captured:
        """The commit of `buffers.path[:buffers.steps]` as captured work, for paths of up to `path_length` nodes."""
        size = next(size for size in (1, 4, USUAL_DEPTH + 1, MAX_DEPTH + 1) if size >= path_length)
        if ("commit", size) not in buffers.graphs:
            self.num_captured += 1
            steps = buffers.steps.clone()
            buffers.steps.zero_()  # warm-up runs the commit too, of nothing
            commit, what = partial(buffers.commit, size), f"commits of {size}"
            buffers.graphs["commit", size] = Captured(commit, self.device, self._pool, what=what)
            buffers.steps.copy_(steps)
        return buffers.graphs["commit", size]

    @torch.inference_mode()
    def capture_host_steps(self, path_length: int) -> None:
        """Capture what the host takes where rounds on the device end: commits of paths of all lengths up to `path_length`
        nodes, for how long one is, nobody knows before, and the verify of one node, by which a text is looked at again."""
        state = self.new_state()
        self.captured_verify(state.buffers, 1)
        for length in range(1, path_length + 1):
            self.captured_commit(state.buffers, length)

    def step(self, buffers: StaticBuffers, nodes: Nodes, depth: int) -> None:
        """One forward over the nodes: reads the state, writes scratch, logits and features. depth: no node is deeper."""
        count = len(nodes.token_ids)
        hidden = self.walk(
            nodes.token_ids,
            recur=partial(_recur, nodes=nodes, buffers=buffers, depth=depth),
            attend=partial(self._attend, nodes=nodes, buffers=buffers),
            tap=partial(self._tap, buffers.features[:count]),
        )
        self.head(hidden, out=buffers.logits[:count])

    def walk(
        self,
        token_ids: Tensor,
        *,
        recur: Callable[[PackedRecurrent, Tensor, int], Tensor],
        attend: Callable[[PackedAttention, Tensor, int], Tensor],
        tap: Callable[[int, Tensor], None] = lambda index, hidden: None,
    ) -> Tensor:
        """Through all layers. token_ids: [n] -> [n, hidden], what the output head reads.

        recur, attend: a layer's mixer, its input [n, hidden] and its place among its kind -> what it adds, as the norms take it
        tap: gets every layer's number and input, and at last their number and the result
        """
        residual = self.reference.text.embed_tokens.weight.index_select(0, token_ids)
        update, recurrent, attention = None, 0, 0
        for index, layer in enumerate(self.layers):
            hidden = _normed(residual, update, layer.input_norm)
            tap(index, residual)
            if isinstance(layer.mixer, PackedRecurrent):
                mixed = recur(layer.mixer, hidden, recurrent)
                recurrent += 1
            else:
                mixed = attend(layer.mixer, hidden, attention)
                attention += 1
            update = _feed_forward(layer.mlp, _normed(residual, mixed, layer.post_norm))
        hidden = _normed(residual, update, self.norm)
        tap(len(self.layers), hidden)
        return hidden

    def _tap(self, features: Tensor, index: int, hidden: Tensor) -> None:
        """Keep a hidden state that the drafter reads. features: [n, taps * hidden]"""
        size = hidden.shape[1]
        for place, tap in enumerate(self.taps):
            if tap == index:
                features[:, place * size : (place + 1) * size] = hidden

    def queries(
        self, w: PackedAttention, x: Tensor, keys: Tensor, values: Tensor, *, depths: Tensor, length: Tensor | int
    ) -> tuple[Tensor, Tensor | None]:
        """Queries of an attention layer, [n, HQ, D], and what gates its output, the same or None. x: [n, hidden]

        Keys and values, [HKV, rows, D], get rows from `length` on; see `norm_rotate`, which has depths and length from here.
        """
        projected = product(x, w.projection, w.bias)
        q = norm_rotate(
            projected, keys, values, depths=depths, length=length, frequencies=self.frequencies,
            scaling=self.rotary_scaling, q_weight=w.q_norm.weight, k_weight=w.k_norm.weight, eps=w.q_norm.eps,
            zero_centred=w.q_norm.zero_centred, num_heads=w.heads, gated=w.gated,
        )  # fmt: skip
        if not w.gated:
            return q, None
        return q, projected[:, : 2 * w.heads * w.head_dim].unflatten(-1, (w.heads, 2, w.head_dim))[:, :, 1]

    def _attend(self, w: PackedAttention, x: Tensor, index: int, *, nodes: Nodes, buffers: StaticBuffers) -> Tensor:
        """Attention of all nodes. x: [n, hidden]; their keys and values go behind the committed rows."""
        keys, values = buffers.keys[index], buffers.values[index]
        q, gate = self.queries(w, x, keys[0], values[0], depths=nodes.depths, length=buffers.length)
        window = {"depths": nodes.depths, "window": w.window} if w.window else {}
        attended = tree_attention(
            q.transpose(0, 1)[None], keys, values, ancestors=nodes.ancestors, length=buffers.length,
            gate=None if gate is None else gate.transpose(0, 1)[None], **window,
        )[0].transpose(0, 1)  # fmt: skip
        return summed_later(attended.flatten(1), w.output, w.output_bias)

    def _shapes(self) -> StateShapes:
        recurrent = next((w.mixer for w in self.layers if isinstance(w.mixer, PackedRecurrent)), None)
        attention = next((w.mixer for w in self.layers if isinstance(w.mixer, PackedAttention)), None)
        return StateShapes(
            self.layer_kinds,
            attention.key_heads if attention else 1,
            attention.head_dim if attention else 1,
            (recurrent.key_heads, recurrent.value_heads, recurrent.key_dim, recurrent.value_dim) if recurrent else None,
            recurrent.channels if recurrent else 1,
            recurrent.projection.shape[0] if recurrent else 1,
            recurrent.conv_weight.shape[1] if recurrent else 1,
            self.vocab_size,
            self.feature_size,
        )


def _normed(residual: Tensor, update: Tensor | None, norm: Norm) -> Tensor:
    return add_norm(residual, update, weight=norm.weight, eps=norm.eps, zero_centred=norm.zero_centred)


def _recur(w: PackedRecurrent, x: Tensor, index: int, *, nodes: Nodes, buffers: StaticBuffers, depth: int) -> Tensor:
    """A GatedDeltaNet layer over all nodes. x: [n, hidden]; leaves its projection and its stash in the buffers."""
    count = x.shape[0]
    projected = buffers.projected[index, 0, :count]
    if w.order is None:
        product(x, w.projection, out=projected)
    else:
        torch.index_select(product(x, w.projection), 1, w.order, out=projected)
    wide = w.value_heads * w.value_dim
    qkv, z, b, a = projected.split([w.channels, wide, w.value_heads, w.value_heads], dim=-1)
    mixed = tree_conv(buffers.windows[index], qkv[None], weight=w.conv_weight, bias=w.conv_bias, rows=nodes.rows)
    q, k, v = mixed.split([w.key_heads * w.key_dim, w.key_heads * w.key_dim, wide], dim=-1)
    stash = buffers.stash
    out, _ = tree_gated_delta(
        buffers.matrices[index],
        q=q.unflatten(-1, (w.key_heads, -1)),
        k=k.unflatten(-1, (w.key_heads, -1)),
        v=v.unflatten(-1, (w.value_heads, -1)),
        beta=b[None],
        log_decay=a[None],
        gates=w.gates,
        ancestors=nodes.ancestors,
        max_depth=depth,
        out=x.new_empty(1, count, w.value_heads, w.value_dim),
        stash=DeltaStash(stash.k[index, :, :count], stash.u[index, :, :count], stash.log_decay[index, :, :count]),
    )
    normed = gated_norm(out[0], z.unflatten(-1, (w.value_heads, -1)), weight=w.norm.weight, eps=w.norm.eps)
    return summed_later(normed, w.output)


def _feed_forward(w: PackedMLP | PackedExperts, x: Tensor) -> Tensor:
    """[n, hidden] -> [n, hidden], or [n, P, hidden] whose parts the next norm adds up."""
    if isinstance(w, PackedMLP):
        return summed_later(swiglu(linear(x, w.gate_up)), w.down)
    return _experts(w, x)


def _experts(w: PackedExperts, x: Tensor) -> Tensor:
    """Every token's weighted parts, [n, P, hidden]."""
    routing = route_tokens(x, w.router, w.num_experts, w.top_k, w.normalise, shared=w.shared is not None)
    shared = () if w.shared is None else (w.shared.gate_up, w.shared.down)
    return expert_mlp(x, routing, w.gate_up, w.down, *shared)
