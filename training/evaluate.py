"""Acceptance on held-out prompts: the target decodes greedily, the drafter is asked at every round of that text."""

import argparse
import heapq
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from drafter import load_drafter, read_target
from selftext import continue_batch
from target import load_rows, load_target, log
from transformers import AutoTokenizer


def chain_acceptance(ranks: np.ndarray) -> int:
    """Leading depths whose best candidate is the true token, and the bonus token. ranks: [D], -1 if not a candidate."""
    wrong = np.flatnonzero(ranks != 0)
    return (int(wrong[0]) if len(wrong) else len(ranks)) + 1


def best_first_acceptance(ranks: np.ndarray, log_probs: np.ndarray, budget: int) -> int:
    """The same for the `budget` most probable prefixes under the product of marginals. log_probs: [D, k], sorted."""
    deepest, depths = 0, len(ranks)
    heap = [
        (-log_probs[0, 0], 0, 0, 0.0, True)
    ]  # cost, depth, rank, cost of the parent, does the parent lie on the text
    for _ in range(budget):
        cost, depth, rank, parent, on_text = heapq.heappop(heap)
        true = on_text and rank == ranks[depth]
        deepest = max(deepest, depth + 1) if true else deepest
        if rank + 1 < log_probs.shape[1]:
            heapq.heappush(heap, (parent - log_probs[depth, rank + 1], depth, rank + 1, parent, on_text))
        if depth + 1 < depths:
            heapq.heappush(heap, (cost - log_probs[depth + 1, 0], depth + 1, 0, cost, true))
    return deepest + 1


@torch.inference_mode()
def evaluate(
    target, drafter, prompts: list[np.ndarray], *, new_tokens: int, budgets: list[int], stop_id: int
) -> tuple[dict, list[np.ndarray]]:
    """Tokens a round, all rounds pooled and as a mean over prompts, for the chain and every budget; and the texts."""
    config, device = drafter.config, target.device
    block, embed = config["block_size"], target.get_input_embeddings().weight.float()
    tokens, ends = continue_batch(
        target, prompts, torch.zeros(len(prompts), device=device), new_tokens=new_tokens, stop_id=stop_id
    )
    lengths: dict[str, list[list[int]]] = {name: [] for name in ["chain", *(f"best-first {b}" for b in budgets)]}
    texts = []
    for row, (prompt, end) in enumerate(zip(prompts, ends.tolist(), strict=True)):
        ids = tokens[row : row + 1, :end]
        features, _ = read_target(target, ids, config["dflash_config"]["target_layer_ids"])
        anchors = torch.arange(len(prompt), end - 1, device=device)[None]
        out = drafter(
            features.float(), embed[ids.gather(1, anchors)], embed[config["dflash_config"]["mask_token_id"]], anchors
        )
        best, candidates = F.linear(out[0, :, 1:], embed).log_softmax(-1).topk(64)
        best, candidates, true = best.cpu().numpy(), candidates.cpu().numpy(), ids[0].cpu().numpy()
        for name, rounds in lengths.items():
            rounds.append([])
            at = len(prompt)
            while at < end - 1:
                depths = min(block - 1, end - 1 - at)
                mine, number = best[at - len(prompt)], at - len(prompt)
                hits = candidates[number, :depths] == true[at + 1 : at + 1 + depths, None]
                ranks = np.full(block - 1, -1)
                ranks[:depths] = np.where(hits.any(1), hits.argmax(1), -1)
                accepted = (
                    chain_acceptance(ranks)
                    if name == "chain"
                    else best_first_acceptance(ranks, mine, int(name.split()[1]))
                )
                rounds[-1].append(min(accepted, end - 1 - at))
                at += accepted
        texts.append(true[len(prompt) :])
    means = {
        name: {
            "pooled": float(np.mean([n for r in rounds for n in r])),
            "per_prompt": float(np.mean([np.mean(r) for r in rounds if r])),
        }
        for name, rounds in lengths.items()
    }
    return means, texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="eval.npz of prepare.py")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--budgets", type=int, nargs="+", default=[16, 64])
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # bfloat16 on a GPU, as the pair is used there
    target = load_target(args.target, device, torch.bfloat16 if device == "cuda" else torch.float32)
    drafter = load_drafter(args.drafter, device)
    prompts, _ = load_rows(args.prompts)
    means, texts = evaluate(
        target,
        drafter,
        prompts,
        new_tokens=args.new_tokens,
        budgets=args.budgets,
        stop_id=target.generation_config.eos_token_id,
    )
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    for text in texts[:3]:
        log(repr(tokenizer.decode(text.tolist())))
    log(f"{sum(map(len, texts))} tokens; acceptance length: {json.dumps(means)}")


if __name__ == "__main__":
    main()
