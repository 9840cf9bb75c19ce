"""The tokens that a tree may be made of: the best ones of every depth."""

from __future__ import annotations

from torch import Tensor


def top_candidates(log_probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best tokens of every row, best first, equal values by the lower token id, on every device alike.

    log_probs: [D, vocab]. Returns values [D, k] and token ids [D, k], on the CPU.
    """
    k = min(k, log_probs.shape[-1])
    values, ids = log_probs.topk(min(k + 1, log_probs.shape[-1]), dim=-1)
    tied = values[:, 1:] == values[:, :-1]
    crowded = tied[:, k - 1 :].any(-1).tolist() if tied.any() else None
    values, ids = values[:, :k].cpu(), ids[:, :k].cpu()
    if crowded is None:
        return values, ids
    # topk breaks ties as it likes. Where the k-th value is shared by a token left outside, sort the row in full.
    for row in (r for r, is_crowded in enumerate(crowded) if is_crowded):
        full, order = log_probs[row].cpu().sort(descending=True, stable=True)
        values[row], ids[row] = full[:k], order[:k]
    ids, by_id = ids.sort(dim=-1)
    values, by_value = values.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, by_value)
