"""Let the target continue the prompts by itself: the text its drafter learns from.

A recurrent state must not see padding, so a batch is fed token by token: where a prompt still runs its next token
goes in, where it has ended the target's own choice does. Prompts are sorted by length to make this cheap.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from target import NO_MASK, load_rows, load_target, log
from torch import Tensor
from transformers import DynamicCache


def choose(logits: Tensor, temperature: Tensor) -> Tensor:
    """[B] token ids: the best one where the temperature is 0, else a draw.

    logits: [B, vocab]    temperature: [B]
    """
    greedy = temperature == 0
    noise = -torch.empty_like(logits, dtype=torch.float32).exponential_().log()
    return torch.where(
        greedy[:, None], logits.float(), logits.float() / temperature.clamp_min(1e-3)[:, None] + noise
    ).argmax(-1)


@torch.inference_mode()
def continue_batch(
    target, prompts: list[np.ndarray], temperature: Tensor, *, new_tokens: int, stop_id: int | None
) -> tuple[Tensor, Tensor]:
    """Tokens [B, T] int64 and the valid length [B] of every row; a row ends with its stop token."""
    device = target.device
    sizes = torch.tensor([len(p) for p in prompts], device=device)
    longest, shortest = int(sizes.max()), int(sizes.min())
    tokens = torch.zeros(len(prompts), longest + new_tokens, dtype=torch.int64)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.from_numpy(prompt.astype(np.int64))
    tokens = tokens.to(device)
    ends = sizes + new_tokens
    cache = DynamicCache(config=target.config)
    fed = 0
    for width in range(shortest, tokens.shape[1]):
        logits = target(
            input_ids=tokens[:, fed:width],
            attention_mask=NO_MASK,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        fed = width
        own = choose(logits, temperature)
        tokens[:, width] = torch.where(sizes <= width, own, tokens[:, width])
        if stop_id is not None:
            stops = (sizes <= width) & (own == stop_id) & (ends > width)
            ends = torch.where(stops, width + 1, ends)
            if width % 16 == 0 and bool((ends <= width + 1).all()):
                break
    return tokens, ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="what prepare.py wrote")
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for selftext-PART.npz")
    parser.add_argument("--seconds", type=float, default=145)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--new-tokens", type=int, default=160)
    parser.add_argument(
        "--part", type=int, default=0, help="of --parts; one process waits for launches, several fill the GPU"
    )
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed + args.part)
    target = load_target(args.target, device, torch.bfloat16)
    stop_id = target.generation_config.eos_token_id
    prompts, columns = load_rows(args.data / "prompts.npz")
    args.out.mkdir(parents=True, exist_ok=True)

    mine = np.arange(args.part, len(prompts), args.parts)
    by_length = mine[np.argsort([len(prompts[i]) for i in mine], kind="stable")]
    groups = [by_length[i : i + args.batch] for i in range(0, len(mine), args.batch)]
    groups = [groups[i] for i in np.random.default_rng(args.seed).permutation(len(groups))]
    rows, first_new, slowest = [], [], 0.0
    for number, group in enumerate(groups):
        begun = time.monotonic()
        if begun + slowest > deadline:
            log(f"out of time after {number} of {len(groups)} batches")
            break
        chosen = [prompts[i] for i in group]
        temperature = torch.from_numpy(columns["temperature"][group]).to(device)
        tokens, ends = continue_batch(target, chosen, temperature, new_tokens=args.new_tokens, stop_id=stop_id)
        tokens, ends = tokens.cpu().numpy().astype(np.uint16), ends.tolist()
        rows += [row[:end] for row, end in zip(tokens, ends, strict=True)]
        first_new += [len(p) for p in chosen]
        slowest = max(slowest, time.monotonic() - begun)
        log(f"batch {number + 1}/{len(groups)}: {len(rows)} sequences, {time.monotonic() - begun:.1f} s")
    log(
        f"done: {len(rows)} sequences, {sum(map(len, rows)) / 1e6:.2f}M tokens, {(sum(map(len, rows)) - sum(first_new)) / 1e6:.2f}M written by the target"
    )

    order = np.random.default_rng(args.seed).permutation(len(rows))
    offsets = np.concatenate([[0], np.cumsum([len(rows[i]) for i in order])]).astype(np.int64)
    first_new = np.asarray([first_new[i] for i in order], np.int32)
    np.savez(
        args.out / f"selftext-{args.part}.npz",
        tokens=np.concatenate([rows[i] for i in order]),
        offsets=offsets,
        first_new=first_new,
    )


if __name__ == "__main__":
    main()
