"""From prompts to token ids and back: chat templates, end tokens, text that streams without broken characters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from deltatree.errors import CheckpointError, PromptError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | list[dict] | list[int]

HALF = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer writes for bytes that are no character, or not yet one."""


def load_tokenizer(folder) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint folder. Raises CheckpointError."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder} has no usable tokenizer ({str(error).splitlines()[0]})") from error
    if len(tokenizer) <= len(tokenizer.get_added_vocab()):  # the library makes an empty one where its file is missing
        raise CheckpointError(f"{folder} has no vocabulary; is its tokenizer.json there?")
    return tokenizer


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    *,
    raw: bool = False,
    thinking: bool | None = None,
    tools: list[dict] | None = None,
) -> list[int]:
    """Token ids of a prompt.

    prompt: a string (one user message, put through the chat template; as it is with `raw`), a list of chat messages,
        or token ids
    thinking: passed to the template as `enable_thinking` if given    tools: function descriptions for the template
    Raises PromptError if it is empty or cannot be rendered.
    """
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        raise PromptError("the prompt is empty; give a text, chat messages or token ids")
    if isinstance(prompt, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in prompt):
        return list(prompt)
    if isinstance(prompt, str):
        if raw:
            return tokenizer.encode(_valid(prompt))
        prompt = [{"role": "user", "content": prompt}]
    if not all(isinstance(m, dict) and "role" in m and "content" in m for m in prompt):
        raise PromptError("a chat prompt is a list of messages with `role` and `content`")
    if not tokenizer.chat_template:
        raise PromptError("this tokenizer has no chat template; pass the prompt raw (`raw=True`, `--raw`)")
    extra = {} if thinking is None else {"enable_thinking": thinking}
    if tools:
        if "tools" not in str(tokenizer.chat_template):
            raise PromptError("this model's chat template knows no tools; leave them out")
        extra["tools"] = tools
    try:
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, **extra)
    except Exception as error:  # templates raise what they like
        raise PromptError(f"the chat template refuses these messages: {error}") from error
    return tokenizer.encode(_valid(text), add_special_tokens=False)


def _valid(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(
            "the prompt is not valid Unicode: it has half of a surrogate pair; send whole characters"
        ) from error
    return text


def end_tokens(*sources) -> frozenset[int]:
    """The union of the end tokens that tokenizer, model config and generation config name, single ids or lists."""
    ids: set[int] = set()
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        ids |= {value} if isinstance(value, int) else set(value or ())
    return frozenset(ids)


def detokenize(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class TextStream:
    """Text of tokens as it becomes certain: whole characters only, nothing taken back, no tail lost.

    stops: the text ends before the first of these strings; what may become one of them is held back
    min_tokens: a stop string counts only if it is completed by this token (counted from 1) or a later one

    All pieces joined equal `detokenize` of all tokens, up to the stop string.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: tuple[str, ...] = (), min_tokens: int = 0) -> None:
        self.tokenizer, self.stops, self.min_tokens = tokenizer, stops, min_tokens
        self.num_tokens = 0
        self.stopped = False  # a stop string is complete
        self._window: list[int] = []  # the last tokens, decoded together
        self._decoded = 0  # characters of the window's text that are certain and in `_text`
        self._text = ""  # all that is certain, cut at the stop string
        self._taken = 0  # characters handed out
        self._ends: list[int] = []  # certain characters after each token; kept for stop strings alone
        self._floor = 0  # a stop string must end behind it

    def push(self, token_ids: Iterable[int]) -> bool:
        """Add tokens. True once a stop string is complete; tokens after it change nothing."""
        if not self.stops:
            self._add([*token_ids])
            return False
        for token in token_ids:
            if self.stopped:
                break
            self._add([token])
            self._ends.append(len(self._text))
            if self.num_tokens < self.min_tokens:
                self._floor = len(self._text)
            self._search()
        return self.stopped

    def take(self) -> str:
        """What has become certain since the last call."""
        return self._hand_out(len(self._text) - (0 if self.stopped else self._held_back()))

    def finish(self) -> str:
        """The rest, when no token follows: half characters as replacement marks, half stop strings as they are."""
        if not self.stopped:
            self._text += self._window_text()[self._decoded :]
            self._decoded = len(self._window_text())
            self._search()
        return self._hand_out(len(self._text))

    @property
    def all(self) -> str:
        """Everything that is certain, up to the stop string."""
        return self._text

    def num_shown_tokens(self) -> int:
        """How many tokens the text needs: those that only the stop string has are not among them."""
        if not self.stopped:
            return self.num_tokens
        if not self._text:
            return 0
        return next((i for i, end in enumerate(self._ends, start=1) if end >= len(self._text)), self.num_tokens)

    def _window_text(self) -> str:
        return detokenize(self.tokenizer, self._window)

    def _add(self, token_ids: list[int]) -> None:
        self._window += token_ids
        self.num_tokens += len(token_ids)
        text = self._window_text()
        certain = text.rstrip(HALF)  # perhaps half a character: wait for the rest
        if len(certain) > self._decoded:
            self._text += certain[self._decoded :]
            self._decoded = len(certain)
        if len(certain) == len(text) and len(self._window) > 32:  # keep the work per token bounded
            self._window = self._window[-4:]  # some tokenizers treat the first token of a text differently
            self._decoded = len(self._window_text())

    def _search(self) -> None:
        """Cut the text at the first stop string, if there is one."""
        longest = max((len(stop) for stop in self.stops), default=0)
        since = max(self._taken, 0) if len(self._ends) < 2 else max(self._ends[-2] - longest + 1, 0)
        starts = []
        for stop in self.stops:
            at = self._text.find(stop, max(since, self._floor - len(stop) + 1))
            if at >= 0:
                starts.append(at)
        if starts:
            self._text, self.stopped = self._text[: min(starts)], True

    def _held_back(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        return max(
            (
                n
                for stop in self.stops
                for n in range(min(len(stop) - 1, len(self._text)), 0, -1)
                if self._text.endswith(stop[:n])
            ),
            default=0,
        )

    def _hand_out(self, end: int) -> str:
        piece = self._text[self._taken : end]
        self._taken = max(self._taken, end)
        return piece


def stream_text(tokenizer: PreTrainedTokenizerBase, batches: Iterable[list[int]]) -> Iterator[str]:
    """Text of token batches as it becomes certain. Joined, the pieces equal `detokenize` of all tokens."""
    stream = TextStream(tokenizer)
    for batch in batches:
        stream.push(batch)
        if piece := stream.take():
            yield piece
    if tail := stream.finish():
        yield tail
