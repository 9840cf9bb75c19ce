"""Train the target: a `qwen3_5_moe_text` hybrid of eight layers, about seven million parameters.

The weights are rounded to bfloat16 at the end, and only the rounded ones exist from then on.
"""

import argparse
import shutil
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from optimizer import TimedOptimizer, repeat_step
from torch import Tensor, nn
from transformers import AutoTokenizer, GenerationConfig, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import load_balancing_loss_func

# Causal as it is: spares the model looking for padding, which waits for the GPU.
NO_MASK = {"full_attention": None, "linear_attention": None}
MIXED = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]


def log(message: str) -> None:
    print(time.strftime("%H:%M:%S"), message, flush=True)


def dense_experts(self: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """All experts as one wide MLP whose unchosen parts weigh nothing: for few small experts faster than sorting tokens.

    hidden: [T, C]    top_k_index, top_k_weights: [T, k]
    """
    experts, doubled, width = self.gate_up_proj.shape
    weights = torch.zeros(len(hidden), experts, dtype=top_k_weights.dtype, device=hidden.device)
    weights = weights.scatter(1, top_k_index, top_k_weights)
    gate, up = F.linear(hidden, self.gate_up_proj.reshape(-1, width)).unflatten(-1, (experts, doubled)).chunk(2, dim=-1)
    inner = self.act_fn(gate) * up * weights[..., None]
    return F.linear(inner.flatten(1), self.down_proj.transpose(0, 1).reshape(width, -1))


ALL_EXPERTS_FUNCTIONS.register("dense", dense_experts)


def target_config(tokenizer_folder: Path) -> Qwen3_5MoeTextConfig:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    return Qwen3_5MoeTextConfig(
        vocab_size=len(tokenizer), hidden_size=256, num_hidden_layers=8, layer_types=MIXED * 2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=32, linear_value_head_dim=32, linear_conv_kernel_dim=4,
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=128, router_aux_loss_coef=0.01,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
                         "mrope_section": [4, 2, 2], "mrope_interleaved": True},
        max_position_embeddings=4096, tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip


def load_target(folder: Path, device: str, dtype: torch.dtype) -> Qwen3_5MoeForCausalLM:
    """The trained target, frozen."""
    target = Qwen3_5MoeForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval().requires_grad_(False)
    target.config._experts_implementation = "dense"
    return target


def load_rows(path: Path) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """A ragged file of token rows and its other columns."""
    with np.load(path) as data:
        tokens, offsets = data["tokens"], data["offsets"]
        columns = {key: data[key] for key in data.files if key not in ("tokens", "offsets")}
    return [tokens[a:b] for a, b in pairwise(offsets)], columns


def pack(pieces: list[np.ndarray], repeats: np.ndarray, length: int, rng: np.random.Generator) -> np.ndarray:
    """One epoch in a fresh order as [rows, length]; every row opens at the beginning of a piece."""
    order = rng.permutation(np.repeat(np.arange(len(pieces)), repeats))
    sizes = np.asarray([len(pieces[i]) for i in order])
    starts = np.concatenate([[0], np.cumsum(sizes)])
    stream = np.concatenate([pieces[i] for i in order])
    rows, position = [], 0
    while position + length <= len(stream):
        rows.append(stream[position : position + length])
        opening = int(starts[np.searchsorted(starts, position + length, side="right") - 1])
        position = opening if opening > position else position + length
    return np.stack(rows)


def batches(args: argparse.Namespace, device: str):
    pieces, columns = load_rows(args.data / "pieces.npz")
    rng = np.random.default_rng(args.seed)
    while True:
        rows = torch.from_numpy(pack(pieces, columns["repeats"], args.length, rng).astype(np.int16))
        log(f"an epoch of {len(rows)} rows")
        rows = rows[torch.randperm(len(rows))].to(device)
        for first in range(0, len(rows) - args.batch + 1, args.batch):
            yield rows[first : first + args.batch].long()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="what prepare.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=190)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=768)
    parser.add_argument("--matrix-lr", type=float, default=0.015)
    parser.add_argument("--other-lr", type=float, default=0.004)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")

    config = target_config(args.data / "tokenizer")
    target = Qwen3_5MoeForCausalLM(config).to(device)
    config._experts_implementation = "dense"
    log(f"target of {sum(p.numel() for p in target.parameters()) / 1e6:.2f}M parameters")
    stream = batches(args, device)

    def step(rows: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(device, torch.bfloat16):
            out = target.model(input_ids=rows, attention_mask=NO_MASK, use_cache=False, output_router_logits=True)
            logits = target.lm_head(out.last_hidden_state[:, :-1]).flatten(0, 1)
        loss = F.cross_entropy(logits.float(), rows[:, 1:].flatten())
        balance = load_balancing_loss_func(out.router_logits, config.num_experts, config.num_experts_per_tok)
        (loss + config.router_aux_loss_coef * balance).backward()
        return loss.detach(), balance.detach()

    # No CUDA graph here: the balance of the router counts tokens with `bincount`, which cannot be captured.
    run_step = repeat_step(step, target, next(stream), graph=False)
    optimizer = TimedOptimizer(target, seconds=args.seconds, matrix_lr=args.matrix_lr, other_lr=args.other_lr)
    recent = []
    while optimizer.progress < 1:
        loss, balance = run_step(next(stream))
        nn.utils.clip_grad_norm_(target.parameters(), 1.0)
        optimizer.step()
        recent.append(loss)
        if optimizer.steps % 50 == 0 or optimizer.steps == 10:
            # reading the loss also keeps the clock honest: launches run ahead of the GPU
            log(
                f"step {optimizer.steps} progress {optimizer.progress:.3f} loss {torch.stack(recent).mean():.4f} balance {balance:.3f}"
            )
            recent = []
    tokens = optimizer.steps * args.batch * args.length
    log(
        f"done: {optimizer.steps} steps, {tokens / 1e6:.1f}M tokens, last losses {torch.stack(recent).mean() if recent else 0:.4f}"
    )

    target.to(torch.bfloat16)
    config.dtype = torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(args.data / "tokenizer")
    target.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    target.save_pretrained(args.out)
    for file in (args.data / "tokenizer").iterdir():
        shutil.copy(file, args.out / file.name)


if __name__ == "__main__":
    main()
