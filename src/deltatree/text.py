"""From prompts to token ids and back: chat templates, end tokens, text that streams without broken characters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from deltatree.errors import CheckpointError, PromptError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | list[dict] | list[int]


def load_tokenizer(folder) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint folder. Raises CheckpointError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder} has no usable tokenizer ({str(error).splitlines()[0]})") from error


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, *, raw: bool = False, thinking: bool | None = None
) -> list[int]:
    """Token ids of a prompt.

    prompt: a string (one user message, put through the chat template; as it is with `raw`), a list of chat messages,
        or token ids
    thinking: passed to the template as `enable_thinking` if given
    Raises PromptError if it is empty or cannot be rendered.
    """
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        raise PromptError("the prompt is empty; give a text, chat messages or token ids")
    if isinstance(prompt, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in prompt):
        return list(prompt)
    if isinstance(prompt, str):
        if raw:
            return tokenizer.encode(prompt)
        prompt = [{"role": "user", "content": prompt}]
    if not all(isinstance(m, dict) and "role" in m and "content" in m for m in prompt):
        raise PromptError("a chat prompt is a list of messages with `role` and `content`")
    if not tokenizer.chat_template:
        raise PromptError("this tokenizer has no chat template; pass the prompt raw (`raw=True`, `--raw`)")
    extra = {} if thinking is None else {"enable_thinking": thinking}
    try:
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, **extra)
    except Exception as error:  # templates raise what they like
        raise PromptError(f"the chat template refuses these messages: {error}") from error
    return tokenizer.encode(text, add_special_tokens=False)


def end_tokens(*sources) -> frozenset[int]:
    """The union of the end tokens that tokenizer, model config and generation config name, single ids or lists."""
    ids: set[int] = set()
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        ids |= {value} if isinstance(value, int) else set(value or ())
    return frozenset(ids)


def detokenize(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def stream_text(tokenizer: PreTrainedTokenizerBase, batches: Iterable[list[int]]) -> Iterator[str]:
    """Text of token batches as it becomes certain: whole characters only, nothing taken back, no tail lost.

    Joined, the pieces equal `detokenize` of all tokens.
    """
    token_ids: list[int] = []
    start = sent = 0  # tokens before `start` are fully sent; `sent` characters of the rest are
    for batch in batches:
        token_ids += batch
        text = detokenize(tokenizer, token_ids[start:])
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            text = text.rstrip("\N{REPLACEMENT CHARACTER}")  # perhaps half a character: wait for the rest
            whole = False
        else:
            whole = True
        if len(text) > sent:
            yield text[sent:]
            sent = len(text)
        if whole and len(token_ids) - start > 32:  # keep the work per batch bounded
            start, sent = len(token_ids), 0
    tail = detokenize(tokenizer, token_ids[start:])
    if len(tail) > sent:
        yield tail[sent:]
