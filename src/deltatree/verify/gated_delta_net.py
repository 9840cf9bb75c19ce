"""A GatedDeltaNet layer that also takes a tree.

The loaded layer keeps its weights and its stock forward; its instance gets a subclass whose forward hands over to a
*pass* when one is given: a `TreePass` reads the state and leaves scratch, a `ChainPass` (prefill) writes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from deltatree.kernels.conv import commit_window, conv_rows, tree_conv
from deltatree.kernels.gated_delta import tree_gated_delta
from deltatree.state import RecurrentState, TreeState
from deltatree.verify.chain import ChainRule, own_chain


class Projections(NamedTuple):
    """A GatedDeltaNet layer's input projections."""

    qkv: Tensor  # [B, N, C], C = 2*HK*K + HV*V: queries, keys and values before the convolution
    z: Tensor  # [B, N, HV, V], output gate
    b: Tensor  # [B, N, HV], beta before the sigmoid
    a: Tensor  # [B, N, HV], decay before the softplus


@dataclass(frozen=True, slots=True)
class TreePass:
    """Verify: all nodes from the committed state, which is only read."""

    state: TreeState
    ancestors: Tensor  # [N, N] bool, on the layers' device
    rows: Tensor  # [N, kernel] from conv_rows, on the layers' device

    def convolve(self, layer: RecurrentState, qkv: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return tree_conv(layer.window, qkv, weight=weight, bias=bias, rows=self.rows)

    def recur(self, layer: RecurrentState, inputs: Tensor, **qkv) -> Tensor:
        out, stash = tree_gated_delta(layer.matrix, ancestors=self.ancestors, **qkv)
        layer.leave(stash, inputs)
        return out


@dataclass(frozen=True, slots=True)
class ChainPass:
    """Prefill: a chain of tokens, each part of the state at once."""

    state: TreeState
    rows: Tensor  # [T, kernel] from conv_rows, on the layers' device
    rule: ChainRule = own_chain

    def convolve(self, layer: RecurrentState, qkv: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return tree_conv(layer.window, qkv, weight=weight, bias=bias, rows=self.rows)

    def recur(self, layer: RecurrentState, inputs: Tensor, **qkv) -> Tensor:
        out, after = self.rule(layer.matrix, **qkv)
        layer.matrix.copy_(after)
        last = inputs[:, -layer.window.shape[-1] :]  # a path of few lengths: a kernel is compiled for each
        layer.window.copy_(commit_window(layer.window, last, torch.arange(last.shape[1])))
        return out


def chain_rows(length: int, kernel: int) -> Tensor:
    """`conv_rows` of a chain of `length` tokens."""
    return conv_rows(torch.arange(-1, length - 1), kernel)


def _forward(
    module: nn.Module, project: Callable[..., Projections], hidden: Tensor, tree: TreePass | ChainPass
) -> Tensor:
    """The layer's own computation, with convolution and recurrence taken from the pass. hidden: [B, N, hidden]."""
    layer = tree.state.layers[module.layer_idx]
    key_heads, value_heads = module.num_k_heads, module.num_v_heads
    qkv, z, b, a = project(module, hidden)
    layer.start(
        (hidden.shape[0], value_heads, module.head_k_dim, module.head_v_dim),
        (hidden.shape[0], qkv.shape[-1], module.conv_kernel_size - 1),
        like=hidden,
    )
    mixed = tree.convolve(layer, qkv, module.conv1d.weight.squeeze(1), module.conv1d.bias)
    q, k, v = mixed.split([module.key_dim, module.key_dim, module.value_dim], dim=-1)
    out = tree.recur(
        layer,
        qkv,
        q=q.unflatten(-1, (key_heads, -1)),
        k=k.unflatten(-1, (key_heads, -1)),
        v=v.unflatten(-1, (value_heads, -1)),
        beta=b.sigmoid(),
        log_decay=-module.A_log.float().exp() * softplus(a.float() + module.dt_bias),
    ).to(hidden.dtype)
    out = module.norm(out.flatten(0, 2), z.flatten(0, 2))
    return module.out_proj(out.view(*hidden.shape[:2], -1))


@cache
def _tree_class(stock: type[nn.Module], project: Callable[..., Projections]) -> type[nn.Module]:
    """A subclass of one library layer class whose forward takes `tree=`; without it, the stock forward runs."""

    def forward(self, hidden_states, *args, tree=None, **kwargs):
        if tree is None:
            return stock.forward(self, hidden_states, *args, **kwargs)
        return _forward(self, project, hidden_states, tree)

    return type(f"Tree{stock.__name__}", (stock,), {"forward": forward, "takes_tree": True})


def open_to_trees(module: nn.Module, project: Callable[..., Projections]) -> None:
    """Give this one layer instance the subclass; its class, its module and other instances stay as they are."""
    if not getattr(module, "takes_tree", False):
        module.__class__ = _tree_class(type(module), project)
