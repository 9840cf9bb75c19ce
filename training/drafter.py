"""Train a DFlash drafter in the z-lab dialect on text its target wrote, and save it as z-lab publishes them.

A block of 16 slots starts with an anchor token; the others hold the mask token, and slot i learns the token i places after
the anchor. What the block knows of the text are the target's features strictly before the anchor.
"""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from optimizer import TimedOptimizer, repeat_step
from safetensors.torch import load_file, save_file
from target import NO_MASK, load_rows, load_target, log
from torch import Tensor, nn
from transformers import AutoTokenizer


def drafter_config(target_config, *, mask_token_id: int, layers: int, intermediate: int, taps: list[int]) -> dict:
    return {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3",
        "hidden_size": target_config.hidden_size, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_act": "silu",
        "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": target_config.max_position_embeddings, "vocab_size": target_config.vocab_size,
        "layer_types": ["full_attention"] * layers, "sliding_window": None, "use_sliding_window": False,
        "block_size": 16, "num_target_layers": target_config.num_hidden_layers,
        "dflash_config": {"target_layer_ids": taps, "mask_token_id": mask_token_id},
        "tie_word_embeddings": True, "dtype": "bfloat16",
    }  # fmt: skip


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Block rows ask; context features and block rows answer."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        size, head = config["hidden_size"], config["head_dim"]
        self.head_dim, self.groups = head, config["num_attention_heads"] // config["num_key_value_heads"]
        self.q_proj = nn.Linear(size, config["num_attention_heads"] * head, bias=False)
        self.k_proj = nn.Linear(size, config["num_key_value_heads"] * head, bias=False)
        self.v_proj = nn.Linear(size, config["num_key_value_heads"] * head, bias=False)
        self.o_proj = nn.Linear(config["num_attention_heads"] * head, size, bias=False)
        self.q_norm, self.k_norm = RMSNorm(head, config["rms_norm_eps"]), RMSNorm(head, config["rms_norm_eps"])

    def forward(self, rows: Tensor, context: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        def heads(x: Tensor) -> Tensor:
            return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        keys_from = torch.cat((context, rows), dim=1)
        own = slice(-rows.shape[1], None)
        q = rotate(self.q_norm(heads(self.q_proj(rows))), cos[:, :, own], sin[:, :, own])
        k = rotate(self.k_norm(heads(self.k_proj(keys_from))), cos, sin)
        v = heads(self.v_proj(keys_from))
        k, v = (x.repeat_interleave(self.groups, dim=1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype), attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        size, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config), MLP(config)
        self.input_layernorm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.post_attention_layernorm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])

    def forward(self, rows: Tensor, context: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        rows = rows + self.self_attn(self.input_layernorm(rows), context, cos, sin, mask)
        return rows + self.mlp(self.post_attention_layernorm(rows))


class DFlash(nn.Module):
    """Many blocks of one sequence at a time; parameter names are those of the published checkpoints."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        self.config = config
        size, eps = config["hidden_size"], config["rms_norm_eps"]
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm, self.hidden_norm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.fc = nn.Linear(len(config["dflash_config"]["target_layer_ids"]) * size, size, bias=False)

    def forward(self, features: Tensor, anchor_rows: Tensor, mask_row: Tensor, anchors: Tensor) -> Tensor:
        """Hidden rows [B, A, block, C] for the target's head.

        features: [B, T, taps * C]    anchor_rows: [B, A, C], embedded    mask_row: [C]    anchors: [B, A] positions
        """
        block = self.config["block_size"]
        (num_rows, length), num_anchors = features.shape[:2], anchors.shape[1]
        context = self.hidden_norm(self.fc(features))
        rows = torch.cat(
            (anchor_rows[:, :, None], mask_row.expand(num_rows, num_anchors, block - 1, -1)), dim=2
        ).flatten(1, 2)
        steps = torch.arange(block, device=anchors.device)
        past = torch.arange(length, device=anchors.device)
        positions = torch.cat((past.expand(num_rows, -1), (anchors[..., None] + steps).flatten(1)), dim=1)
        half = self.config["head_dim"] // 2
        frequencies = self.config["rope_theta"] ** (-torch.arange(half, device=anchors.device) / half)
        angles = (positions[..., None] * frequencies).repeat(1, 1, 2)[:, None]
        cos, sin = angles.cos().to(rows.dtype), angles.sin().to(rows.dtype)
        owner = torch.arange(num_anchors, device=anchors.device).repeat_interleave(block)
        sees_past = past < anchors.repeat_interleave(block, dim=1)[..., None]
        sees_block = (owner[:, None] == owner[None]).expand(num_rows, -1, -1)
        mask = torch.cat((sees_past, sees_block), dim=2)[:, None]
        for layer in self.layers:
            rows = layer(rows, context, cos, sin, mask)
        return self.norm(rows).unflatten(1, (num_anchors, block))


def save_drafter(drafter: DFlash, weights: dict[str, Tensor], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(drafter.config, indent=2) + "\n")
    save_file(
        {k: v.to(torch.bfloat16).contiguous().cpu() for k, v in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def load_drafter(folder: Path, device: str) -> DFlash:
    drafter = DFlash(json.loads((folder / "config.json").read_text()))
    drafter.load_state_dict(load_file(folder / "model.safetensors"))
    return drafter.to(device).eval()


@torch.no_grad()
def read_target(target, tokens: Tensor, taps: list[int]) -> tuple[Tensor, Tensor]:
    """The features [B, T, taps * C] of the tapped layers and the rows [B, T, C] that the head would read."""
    kept: list[Tensor] = []
    hooks = [target.model.layers[i].register_forward_hook(lambda _m, _a, out: kept.append(out)) for i in taps]
    try:
        last = target.model(input_ids=tokens, attention_mask=NO_MASK, use_cache=False).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat(kept, dim=-1), last


@dataclass
class Text:
    """Self-written sequences with everything the drafter needs of the target, read once and kept on the device."""

    tokens: Tensor  # [N, T] int64
    ends: Tensor  # [N]
    first_new: Tensor  # [N]
    features: Tensor  # [N, T, taps * C] bfloat16
    last: Tensor  # [N, T, C] bfloat16


def read_text(folder: Path, target, taps: list[int], *, limit: int, length: int, seconds: float) -> Text:
    deadline = time.monotonic() + seconds
    rows, first_new = [], []
    for path in sorted(folder.glob("selftext-*.npz")):
        part, columns = load_rows(path)
        rows += part
        first_new += columns["first_new"].tolist()
    usable = [i for i in range(len(rows)) if len(rows[i]) >= first_new[i] + 4 and first_new[i] < length - 8]
    usable = [usable[i] for i in np.random.default_rng(0).permutation(len(usable))[:limit]]
    tokens = torch.zeros(len(usable), length, dtype=torch.int64)
    for row, index in zip(tokens, usable, strict=True):
        ids = rows[index][:length].astype(np.int64)
        row[: len(ids)] = torch.from_numpy(ids)
    tokens = tokens.to(target.device)
    size = target.config.hidden_size
    features = torch.empty(len(usable), length, len(taps) * size, dtype=torch.bfloat16, device=target.device)
    last = torch.empty(len(usable), length, size, dtype=torch.bfloat16, device=target.device)
    done = 0
    while done < len(usable) and time.monotonic() < deadline:
        part = slice(done, done + 512)
        features[part], last[part] = read_target(target, tokens[part], taps)
        done = min(done + 512, len(usable))
    ends = torch.tensor([min(len(rows[i]), length) for i in usable[:done]], device=target.device)
    return Text(
        tokens[:done],
        ends,
        torch.tensor([first_new[i] for i in usable[:done]], device=target.device),
        features[:done],
        last[:done],
    )


def block_loss(
    drafter: DFlash, target, text: Text, chosen: Tensor, *, num_anchors: int, gamma: float, soft: float
) -> tuple[Tensor, Tensor]:
    """Loss over random anchors of the chosen sequences, and how often each depth [block - 1] was right."""
    block, mask_token = drafter.config["block_size"], drafter.config["dflash_config"]["mask_token_id"]
    tokens, ends, first = text.tokens[chosen], text.ends[chosen], text.first_new[chosen]
    # Anchors are tokens the target wrote, as in decoding: the first is the prefill's bonus token.
    spread = torch.rand(len(chosen), num_anchors, device=tokens.device)
    anchors = (first[:, None] + spread * (ends - 1 - first)[:, None]).long()
    steps = torch.arange(1, block, device=tokens.device)
    slots = anchors[..., None] + steps
    inside = slots < ends[:, None, None]
    slots = slots.clamp_max(tokens.shape[1] - 1)
    wanted = tokens.gather(1, slots.flatten(1)).view_as(slots)
    embed = target.get_input_embeddings().weight
    with torch.autocast(tokens.device.type, torch.bfloat16):
        out = drafter(text.features[chosen], embed[tokens.gather(1, anchors)], embed[mask_token], anchors)
        logits = F.linear(out[:, :, 1:], embed)
        before = (slots - 1).flatten(1)
        last = text.last[chosen].gather(1, before[..., None].expand(-1, -1, embed.shape[1])).view(*slots.shape, -1)
        own = F.linear(last, embed)
    log_probs = logits.float().log_softmax(-1)
    hard = -log_probs.gather(-1, wanted[..., None])[..., 0]
    taught = -(own.float().softmax(-1) * log_probs).sum(-1)
    weights = torch.exp(-(steps - 1) / gamma) * inside
    loss = (weights * ((1 - soft) * hard + soft * taught)).sum() / weights.sum()
    right = (log_probs.argmax(-1) == wanted) & inside
    return loss, right.sum((0, 1)) / inside.sum((0, 1)).clamp_min(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True, help="folder of selftext-N.npz")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=205, help="for training, reading the text not counted")
    parser.add_argument("--read-seconds", type=float, default=60)
    parser.add_argument("--sequences", type=int, default=85_000, help="at most; 85,000 fill about 60 GB")
    parser.add_argument("--length", type=int, default=288)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--anchors", type=int, default=24)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--intermediate", type=int, default=1024)
    parser.add_argument("--taps", type=int, nargs="+", default=[1, 3, 5, 6])
    parser.add_argument("--gamma", type=float, default=6.0, help="depths' weights fall by e every so many")
    parser.add_argument("--soft", type=float, default=0.3, help="share of the target's own distribution in the labels")
    parser.add_argument("--matrix-lr", type=float, default=0.015)
    parser.add_argument("--other-lr", type=float, default=0.003)
    parser.add_argument("--ema", type=float, default=0.998)
    parser.add_argument("--eager", action="store_true", help="without a CUDA graph")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")

    target = load_target(args.target, device, torch.bfloat16)
    mask_token_id = AutoTokenizer.from_pretrained(args.target).mask_token_id
    config = drafter_config(
        target.config, mask_token_id=mask_token_id, layers=args.layers, intermediate=args.intermediate, taps=args.taps
    )
    text = read_text(args.text, target, args.taps, limit=args.sequences, length=args.length, seconds=args.read_seconds)
    log(
        f"read {len(text.ends)} sequences, {int((text.ends - text.first_new).sum()) / 1e6:.2f}M tokens the target wrote"
    )

    drafter = DFlash(config)
    for param in drafter.parameters():
        if param.ndim == 2:
            nn.init.normal_(param, std=0.02)
    drafter.to(device)
    log(f"drafter of {sum(p.numel() for p in drafter.parameters()) / 1e6:.2f}M parameters")
    average = {name: p.detach().clone() for name, p in drafter.named_parameters()}

    def step(chosen: Tensor) -> tuple[Tensor, Tensor]:
        loss, accuracy = block_loss(
            drafter, target, text, chosen, num_anchors=args.anchors, gamma=args.gamma, soft=args.soft
        )
        loss.backward()
        return loss.detach(), accuracy

    def batches():
        while True:
            yield from torch.randperm(len(text.ends), device=device).split(args.batch)

    stream = (chosen for chosen in batches() if len(chosen) == args.batch)
    run_step = repeat_step(step, drafter, next(stream), graph=device == "cuda" and not args.eager)
    log("ready")
    optimizer = TimedOptimizer(drafter, seconds=args.seconds, matrix_lr=args.matrix_lr, other_lr=args.other_lr)
    losses, accuracies = [], []
    while optimizer.progress < 1:
        loss, accuracy = run_step(next(stream))
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        torch._foreach_lerp_(list(average.values()), [p.detach() for p in drafter.parameters()], 1 - args.ema)
        losses.append(loss)
        accuracies.append(accuracy)
        if optimizer.steps % 100 == 0 or optimizer.steps == 10:
            mean = torch.stack(accuracies).mean(0).tolist()
            shown = " ".join(f"{mean[depth - 1]:.3f}" for depth in (1, 2, 3, 5, 8, 15))
            log(
                f"step {optimizer.steps} progress {optimizer.progress:.3f} loss {torch.stack(losses).mean():.4f} right at 1 2 3 5 8 15: {shown}"
            )
            losses, accuracies = [], []
    log(f"done: {optimizer.steps} steps, {optimizer.steps * args.batch * args.anchors / 1e6:.2f}M blocks")
    save_drafter(drafter, average, args.out)


if __name__ == "__main__":
    main()
