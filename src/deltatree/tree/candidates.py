"""The tokens that a tree may be made of: the best ones of every depth."""

from __future__ import annotations

from torch import Tensor


def top_candidates(log_probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best tokens of every row, best first, equal values by the lower token id, on every device alike.

    log_probs: [D, vocab]. Returns values [D, k] and token ids [D, k], on the CPU.
    """
    k = min(k, log_probs.shape[-1])
    values, ids = log_probs.topk(k, dim=-1)
    # topk breaks ties as it likes. Where the k-th value is shared by tokens left outside, sort the row in full.
    crowded = ((log_probs >= values[:, -1:]).sum(-1) > k).tolist()
    values, ids = values.cpu(), ids.cpu()
    for row in (r for r, tied in enumerate(crowded) if tied):
        full, order = log_probs[row].cpu().sort(descending=True, stable=True)
        values[row], ids[row] = full[:k], order[:k]
    ids, by_id = ids.sort(dim=-1)
    values, by_value = values.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, by_value)
