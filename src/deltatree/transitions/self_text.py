"""Text that the target writes by itself: what its transitions are counted on. No data, no training."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

SEQUENCE_LENGTH = 256
"""Tokens a sequence: short enough for many starts, long enough to leave the start behind."""
TEMPERATURE = 0.8


class Sequences(Protocol):
    """A batch of sequences that are continued together, equally many tokens each."""

    batch: int

    def restart(self) -> None:
        """Empty all of them."""

    def logits(self, token_ids: Tensor) -> Tensor:
        """Logits [B, vocab] after the last of these tokens, [B, T] int64, which follow those of earlier calls."""


class LibrarySequences:
    """By the loaded Transformers model, for any target and device."""

    def __init__(self, model: nn.Module, batch: int) -> None:
        self.model, self.batch = model, batch
        self.cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self.restart()

    def restart(self) -> None:
        from transformers import DynamicCache

        self.cache = DynamicCache(config=self.model.config)

    def logits(self, token_ids: Tensor) -> Tensor:
        known = {self.cache_name: self.cache}
        return self.model(input_ids=token_ids, **known, use_cache=True, logits_to_keep=1).logits[:, -1]


def sequences_of(target, batch: int) -> Sequences:
    """The fast target's on a GPU, up to `batch` of them by the memory that is free, else the library's."""
    if target.device.type == "cuda" and hasattr(target, "lock_step"):
        side_by_side = target.lock_step(batch, SEQUENCE_LENGTH)
        if side_by_side is not None:
            return side_by_side
    return LibrarySequences(target.model, batch)


@torch.inference_mode()
def write_self_text(
    target,
    *,
    num_tokens: int,
    batch: int,
    opening: list[int] | None = None,
    seed: int = 0,
    on_tokens: Callable[[int], object] | None = None,
    sequences: Sequences | None = None,
) -> Tensor:
    """[R, SEQUENCE_LENGTH] int64: what the target writes after a start of its own, one sequence a row.

    Half of the rows start from one random token each, the other half from the opening of a chat, so that the target writes the
    user's question and then its answer. End tokens end nothing: it goes on with whatever it takes to come next.

    target: the reference or the fast one. The rows of a batch start together with equally many tokens, so no padding ever
        enters a recurrent state.
    num_tokens: in all, at least    batch: sequences side by side, at most    opening: token ids; None starts all rows from
        random tokens    on_tokens: told how many were written since    sequences: None for those that suit the target
    The same seed and batch on the same machine give the same text, and a longer one begins with a shorter one.
    """
    sequences = sequences or sequences_of(target, batch)
    batch, device = sequences.batch, target.device
    rows: list[Tensor] = []
    while len(rows) * batch * SEQUENCE_LENGTH < num_tokens:
        # Each batch its own generator: any number of them agree.
        generator = torch.Generator(device).manual_seed(seed + len(rows))
        if opening is None or len(rows) % 2:
            current = torch.randint(target.vocab_size, (batch, 1), generator=generator, device=device)
        else:
            current = torch.tensor(opening, device=device).expand(batch, -1)
        tokens = [current]
        sequences.restart()
        for _ in range(SEQUENCE_LENGTH - current.shape[1]):
            probs = (sequences.logits(current).float() / TEMPERATURE).softmax(-1)
            current = torch.multinomial(probs, 1, generator=generator)
            tokens.append(current)
            if on_tokens is not None:
                on_tokens(batch)
        rows.append(torch.cat(tokens, dim=1))
    del sequences
    if device.type == "cuda":
        torch.cuda.empty_cache()  # gigabytes, which a graph that is captured later could not take from the reserve
    return torch.cat(rows)


def chat_opening(tokenizer) -> list[int] | None:
    """The tokens of the tokenizer's chat template that come before a user's words; None if it has no template."""
    mark = "deltatree"
    if not getattr(tokenizer, "chat_template", None):
        return None
    text = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    return tokenizer.encode(text[: text.index(mark)], add_special_tokens=False) or None
