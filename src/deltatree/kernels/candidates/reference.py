"""The best tokens of every depth with their log-probabilities, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor


def top_candidates(
    logits: Tensor, k: int, *, out: tuple[Tensor, Tensor] | None = None, scratch: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The k best tokens of every row by log-probability, best first, equal ones by the lower token id.

    logits: [D, vocab] float32 or bfloat16    k: at least 1; no more than vocab are returned
    out: values [D, k] float32 and ids [D, k] int32 or int64, written and returned instead of new tensors
    scratch: only the fast twin needs it
    Returns values [D, min(k, vocab)] float32 (logit - maximum - log of the sum of exponentials) and ids, int64. Tokens whose
    log-probabilities are the same float32 number are equal, whatever their logits were. Raises ValueError if k < 1.
    """
    check_k(k)
    log_probs, ids = logits.float().log_softmax(-1).sort(dim=-1, descending=True, stable=True)
    best = log_probs[:, :k], ids[:, :k]
    return best if out is None else (out[0].copy_(best[0]), out[1].copy_(best[1]))


def check_k(k: int) -> None:
    if k < 1:
        raise ValueError(f"k={k} asks for no candidate; ask for at least 1")
