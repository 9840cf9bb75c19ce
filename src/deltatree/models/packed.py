"""A loaded model's weights as the fast target wants them, without a second copy.

Projections that read the same input become one matrix; the library's modules keep views of its rows, so the reference
target goes on working on the same memory. Expert weights stay as the library holds them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deltatree.errors import ArchitectureError
from deltatree.kernels.gated_delta import Gates


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm's weight; zero_centred: stored as its distance from 1."""

    weight: Tensor
    eps: float
    zero_centred: bool


@dataclass(frozen=True, slots=True)
class PackedRecurrent:
    """A GatedDeltaNet layer."""

    projection: Tensor  # [2*HK*K + 2*HV*V + 2*HV, hidden]: rows of q, k, v, z, b, a in that order after `order`
    order: Tensor | None  # [W] int64: column i of the ordered projection is column order[i]; None: as it is
    output: Tensor  # [hidden, HV*V]
    conv_weight: Tensor  # [C, kernel]
    conv_bias: Tensor | None
    gates: Gates
    norm: Norm
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def channels(self) -> int:
        """C: of queries, keys and values, which the convolution sees."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class PackedAttention:
    """A full-attention or sliding-window layer."""

    projection: Tensor  # [W, hidden]: queries (each head's gate behind it, if gated), keys, values
    bias: Tensor | None
    output: Tensor  # [hidden, HQ*D]
    output_bias: Tensor | None
    q_norm: Norm
    k_norm: Norm
    heads: int
    key_heads: int
    head_dim: int
    gated: bool
    window: int | None


@dataclass(frozen=True, slots=True)
class PackedMLP:
    """A dense feed-forward layer, or a shared expert."""

    gate_up: Tensor  # [2*I, hidden]
    down: Tensor  # [hidden, I]


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """A mixture-of-experts layer."""

    router: Tensor  # [E, hidden]; with a shared expert its gate is row E, and rows of zeros follow
    gate_up: Tensor  # [E, 2*I, hidden]
    down: Tensor  # [E, hidden, I]
    shared: PackedMLP | None
    top_k: int
    normalise: bool

    @property
    def num_experts(self) -> int:
        return self.gate_up.shape[0]


@dataclass(frozen=True, slots=True)
class PackedLayer:
    input_norm: Norm
    mixer: PackedRecurrent | PackedAttention
    post_norm: Norm
    mlp: PackedMLP | PackedExperts


def fuse(*linears: nn.Linear) -> Tensor:
    """One matrix of several linear layers' rows; the layers keep views of it. Raises ArchitectureError if one is quantised."""
    for linear in linears:
        if not isinstance(linear, nn.Linear) or not linear.weight.is_floating_point() or linear.weight.dim() != 2:
            raise ArchitectureError(
                f"{type(linear).__name__} is not a plain linear layer; the reference target takes it"
            )
    if len(linears) == 1:
        return linears[0].weight.data
    fused = torch.cat([linear.weight.data for linear in linears])
    start = 0
    for linear in linears:
        linear.weight.data = fused[start : start + linear.out_features]
        start += linear.out_features
    return fused


def fuse_bias(*linears: nn.Linear) -> Tensor | None:
    """Their biases in one row, or None if they have none."""
    if all(linear.bias is None for linear in linears):
        return None
    return torch.cat([torch.zeros_like(x.weight[:, 0]) if x.bias is None else x.bias.data for x in linears])


def norm_of(module: nn.Module) -> Norm:
    eps = getattr(module, "variance_epsilon", None)
    zero_centred = type(module).__name__ in ("Qwen3NextRMSNorm", "Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm")
    return Norm(module.weight.data, module.eps if eps is None else eps, zero_centred)


def pack_recurrent(module: nn.Module) -> PackedRecurrent:
    order = None
    if hasattr(module, "in_proj_qkvz"):
        projection = fuse(module.in_proj_qkvz, module.in_proj_ba)
        order = _ungrouped(module).to(projection.device)
    else:
        projection = fuse(module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a)
    return PackedRecurrent(
        projection,
        order,
        fuse(module.out_proj),
        module.conv1d.weight.data.squeeze(1),
        None if module.conv1d.bias is None else module.conv1d.bias.data,
        Gates(module.A_log.data.float(), module.dt_bias.data.float()),
        norm_of(module.norm),
        module.num_k_heads,
        module.num_v_heads,
        module.head_k_dim,
        module.head_v_dim,
    )


def _ungrouped(module: nn.Module) -> Tensor:
    """Qwen3-Next groups its projections by key head: where each column of q, k, v, z, b, a stands."""
    groups, per_group = module.num_k_heads, module.num_v_heads // module.num_k_heads
    wide = per_group * module.head_v_dim
    sizes = [module.head_k_dim, module.head_k_dim, wide, wide]
    qkvz = torch.arange(groups * sum(sizes)).view(groups, -1).split(sizes, dim=-1)
    ba = (groups * sum(sizes) + torch.arange(2 * module.num_v_heads)).view(groups, -1).split(per_group, dim=-1)
    return torch.cat([columns.reshape(-1) for columns in (*qkvz, *ba)])


def pack_attention(module: nn.Module, window: int | None) -> PackedAttention:
    dim = module.head_dim
    key_heads = module.k_proj.out_features // dim
    heads = key_heads * module.num_key_value_groups
    parts = (module.q_proj, module.k_proj, module.v_proj)
    return PackedAttention(
        fuse(*parts),
        fuse_bias(*parts),
        fuse(module.o_proj),
        fuse_bias(module.o_proj),
        norm_of(module.q_norm),
        norm_of(module.k_norm),
        heads,
        key_heads,
        dim,
        module.q_proj.out_features == 2 * heads * dim,
        window,
    )


def pack_mlp(module: nn.Module) -> PackedMLP | PackedExperts:
    if not hasattr(module, "experts"):
        return PackedMLP(fuse(module.gate_proj, module.up_proj), fuse(module.down_proj))
    router, shared = module.gate.weight.data, None
    if hasattr(module, "shared_expert"):
        gate = module.shared_expert_gate
        # Rows of zeros behind them: with 257 rows the library's product is several times slower than with 320.
        experts, padding = len(router), -(len(router) + 1) % 64 if len(router) >= 64 else 0
        router = torch.cat([router, gate.weight.data, router.new_zeros(padding, router.shape[1])])
        module.gate.weight.data, gate.weight.data = router[:experts], router[experts : experts + 1]
        shared = pack_mlp(module.shared_expert)
    experts = module.experts
    return PackedExperts(
        router,
        experts.gate_up_proj.data,
        experts.down_proj.data,
        shared,
        module.gate.top_k,
        getattr(module.gate, "norm_topk_prob", True),  # Qwen3.5 always divides by the sum
    )


def pack(layer: nn.Module, kind: str, window: int | None) -> PackedLayer:
    """One decoder layer. kind: from the config's layer_types; window: of a sliding-window layer."""
    if kind == "linear_attention":
        mixer = pack_recurrent(layer.linear_attn)
    else:
        mixer = pack_attention(layer.self_attn, window if kind == "sliding_attention" else None)
    return PackedLayer(
        norm_of(layer.input_layernorm), mixer, norm_of(layer.post_attention_layernorm), pack_mlp(layer.mlp)
    )
