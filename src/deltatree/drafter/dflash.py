"""The DFlash drafter: one bidirectional block of mask tokens over the target's own features.

Slot 0 of the block holds the bonus token's embedding, the others the mask token's; slot i proposes the token at its own
place, so a block of n drafts n - 1 tokens. Context keys and values come from the projected target features of *all*
committed tokens, appended to a cache once and never recomputed. Source: DFlash, Chen et al. 2026, arXiv:2602.06036.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from deltatree.drafter.dialects import DFlashConfig
from deltatree.errors import CheckpointError
from deltatree.models.protocol import Target


class RMSNorm(nn.RMSNorm):
    """RMS norm in float32, weight applied in the model's dtype, as the published drafters were trained."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary position embedding of whole heads (halves, not pairs). x: [B, H, n, D], positions: [n] int64."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions.to(x.device)[:, None].float() * frequencies  # [n, D/2]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class DFlashAttention(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        wide, narrow = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, wide, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, narrow, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, narrow, bias=config.attention_bias)
        self.o_proj = nn.Linear(wide, config.hidden_size, bias=config.attention_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """x: [B, n, hidden] -> rotated keys and values, [B, HKV, n, D] each."""
        k, v = (proj(x).unflatten(-1, (-1, self.config.head_dim)) for proj in (self.k_proj, self.v_proj))
        return rotate(self.k_norm(k).transpose(1, 2), positions, self.config.rope_theta), v.transpose(1, 2)

    def forward(self, x: Tensor, positions: Tensor, context: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """x: [B, n, hidden], the block. context: keys and values [B, HKV, T, D]. mask: [n, T + n] bool or None."""
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.config.head_dim))).transpose(1, 2)
        q = rotate(q, positions, self.config.rope_theta)
        k, v = (torch.cat(pair, dim=2) for pair in zip(context, self.keys_values(x, positions), strict=True))
        groups = self.config.num_heads // self.config.num_kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class DFlashMLP(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class DFlashLayer(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.self_attn = DFlashAttention(config)
        self.mlp = DFlashMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, positions: Tensor, context: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions, context, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlashModel(nn.Module):
    """The drafter's own weights; embedding and head are the target's. Parameter names are the published ones."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.num_layers))
        self.fc = nn.Linear(len(config.taps) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def project(self, features: Tensor) -> Tensor:
        """Target features to context: [..., F] -> [..., hidden]."""
        return self.hidden_norm(self.fc(features))

    def context_of(self, projected: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Every layer's context keys and values of projected features [B, n, hidden]."""
        return [layer.self_attn.keys_values(projected, positions) for layer in self.layers]

    def forward(
        self,
        block: Tensor,
        positions: Tensor,
        context: list[tuple[Tensor, Tensor]],
        masks: list[Tensor | None],
    ) -> Tensor:
        """block: [B, n, hidden] embeddings, positions: [n] int64; one context and one mask a layer -> [B, n, hidden]."""
        for layer, layer_context, mask in zip(self.layers, context, masks, strict=True):
            block = layer(block, positions, layer_context, mask)
        return self.norm(block)


class DFlashDrafter:
    """A DFlash model beside the target whose embedding and head it shares."""

    def __init__(self, model: DFlashModel, target: Target) -> None:
        self.model, self.target, self.config = model, target, model.config
        self.depth = model.config.depth
        self.context_length = model.config.context_length
        block = torch.full((model.config.block_size,), model.config.mask_token_id)
        self.mask_embedding = target.embed(block[:1])  # [1, hidden]
        self.experience = None  # what budget `auto` has learned with it; kept here by `custom_generate`

    def start(self) -> _DFlashSession:
        return _DFlashSession(self)


class _DFlashSession:
    """One generation's context: keys and values of every committed token, [1, HKV, capacity, D] a layer."""

    def __init__(self, drafter: DFlashDrafter) -> None:
        self.drafter = drafter
        self.length = 0
        self.cache: list[list[Tensor]] = []

    @torch.inference_mode()
    def propose(self, features: Tensor, *, bonus: int) -> Tensor:
        drafter, config = self.drafter, self.drafter.config
        self._append(features)
        positions = torch.arange(self.length, self.length + config.block_size, device=features.device)
        root = drafter.target.embed(torch.tensor([bonus]))
        block = torch.cat([root, drafter.mask_embedding.expand(config.depth, -1)])[None]
        context = [(keys[:, :, : self.length], values[:, :, : self.length]) for keys, values in self.cache]
        masks = [self._mask(window, causal) for window, causal in zip(config.windows, config.causal, strict=True)]
        hidden = drafter.model(block, positions, context, masks)
        return drafter.target.head(hidden[0, 1:]).float().log_softmax(-1)

    def _append(self, features: Tensor) -> None:
        """Add the context of newly committed tokens; what is there already is never touched."""
        count = features.shape[0]
        end = self.length + count
        if count:
            positions = torch.arange(self.length, end, device=features.device)
            new = self.drafter.model.context_of(self.drafter.model.project(features[None]), positions)
            if not self.cache:
                self.cache = [[x[:, :, :0] for x in pair] for pair in new]
            for held, pair in zip(self.cache, new, strict=True):
                for side, x in enumerate(pair):
                    if end > held[side].shape[2]:
                        grown = x.new_empty(*x.shape[:2], max(end, 2 * held[side].shape[2], 256), x.shape[3])
                        grown[:, :, : self.length] = held[side][:, :, : self.length]
                        held[side] = grown
                    held[side][:, :, self.length : end] = x
        self.length = end

    def _mask(self, window: int | None, causal: bool) -> Tensor | None:
        """[n, T + n] bool for a layer with a sliding window or a causal block; None where all is visible."""
        if window is None and not causal:
            return None
        block, device = self.drafter.config.block_size, self.drafter.target.device
        queries = torch.arange(self.length, self.length + block, device=device)[:, None]
        distance = queries - torch.arange(self.length + block, device=device)
        mask = torch.ones_like(distance, dtype=torch.bool)
        if window is not None:
            mask &= distance.abs() < window
        if causal:
            mask &= distance >= 0
        return mask


_ALIASES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm.", "context_norm.": "hidden_norm."}
"""Names of the other dialects -> the published ones."""


def load_drafter(config: DFlashConfig, target: Target, *, dtype: torch.dtype | None = None) -> DFlashDrafter:
    """Load a drafter's weights beside its target. Raises CheckpointError if they are absent, corrupt or do not fit."""
    with torch.device("meta"):
        model = DFlashModel(config)
    expected = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    weights = {}
    for name, tensor in _read_weights(config).items():
        name = name.removeprefix("model.")
        name = next((new + name.removeprefix(old) for old, new in _ALIASES.items() if name.startswith(old)), name)
        if name in expected:
            weights[name] = tensor.to(device=target.device, dtype=dtype or target.dtype)
    missing = sorted(expected.keys() - weights.keys())
    if missing:
        raise CheckpointError(
            f"drafter {config.source} lacks weights {', '.join(missing[:3])}{', ...' * (len(missing) > 3)}"
        )
    for name, tensor in weights.items():
        if tuple(tensor.shape) != expected[name]:
            raise CheckpointError(
                f"drafter {config.source}: `{name}` is {tuple(tensor.shape)}, its config says {expected[name]}"
            )
    model.load_state_dict(weights, assign=True)
    return DFlashDrafter(model.eval().requires_grad_(False), target)


def _read_weights(config: DFlashConfig) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(config.folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{config.folder} holds a config but no weights; expected model.safetensors beside it")
    weights = {}
    for file in files:
        try:
            weights |= load_file(file)
        except SafetensorError as error:
            raise CheckpointError(f"{file} is corrupt ({error}); download it again") from error
    return weights
