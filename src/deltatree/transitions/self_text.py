"""Text that the target writes by itself: what its transitions are counted on. No data, no training."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn

SEQUENCE_LENGTH = 256
"""Tokens a sequence: short enough for many starts, long enough to leave the start behind."""
TEMPERATURE = 0.8


@torch.inference_mode()
def write_self_text(
    model: nn.Module,
    *,
    num_tokens: int,
    batch: int,
    opening: list[int] | None = None,
    seed: int = 0,
    on_tokens: Callable[[int], object] | None = None,
) -> Tensor:
    """[R, SEQUENCE_LENGTH] int64: what the target writes after a start of its own, one sequence a row.

    Half of the rows start from one random token each, the other half from the opening of a chat, so that the target writes the
    user's question and then its answer. End tokens end nothing: it goes on with whatever it takes to come next.

    model: a loaded Transformers model of any supported family. The rows of a batch start together with equally many tokens, so
        no padding ever enters a recurrent state.
    num_tokens: in all, at least    batch: sequences side by side    opening: token ids; None starts all rows from random tokens
    on_tokens: told how many were written since
    The same seed and batch on the same machine give the same text, and a longer one begins with a shorter one.
    """
    from transformers import DynamicCache

    device, vocab_size = model.device, model.config.get_text_config().vocab_size
    cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    rows: list[Tensor] = []
    while len(rows) * batch * SEQUENCE_LENGTH < num_tokens:
        generator = torch.Generator(device).manual_seed(
            seed + len(rows)
        )  # each batch its own: any number of them agree
        if opening is None or len(rows) % 2:
            current = torch.randint(vocab_size, (batch, 1), generator=generator, device=device)
        else:
            current = torch.tensor(opening, device=device).expand(batch, -1)
        tokens, cache = current, DynamicCache(config=model.config)
        while tokens.shape[1] < SEQUENCE_LENGTH:
            outputs = model(input_ids=current, **{cache_name: cache}, use_cache=True, logits_to_keep=1)
            probs = (outputs.logits[:, -1].float() / TEMPERATURE).softmax(-1)
            current = torch.multinomial(probs, 1, generator=generator)
            tokens = torch.cat([tokens, current], dim=1)
            if on_tokens is not None:
                on_tokens(batch)
        rows.append(tokens)
    return torch.cat(rows)


def chat_opening(tokenizer) -> list[int] | None:
    """The tokens of the tokenizer's chat template that come before a user's words; None if it has no template."""
    mark = "deltatree"
    if not getattr(tokenizer, "chat_template", None):
        return None
    text = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    return tokenizer.encode(text[: text.index(mark)], add_special_tokens=False) or None
