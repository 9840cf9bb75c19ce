"""Structured output: masks of a JSON schema or a grammar along every path. Needs the extra `structured` (llguidance)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from deltatree.decode.options import GenerateOptions
from deltatree.errors import OptionError
from deltatree.tree import DraftTree

WHITE_SPACE = r"[ \n\r\t]{0,24}"
"""Between the marks of JSON: enough to indent, too little for a target that would go on with spaces for ever."""

_TOKENIZERS: WeakKeyDictionary = WeakKeyDictionary()  # wrapping a tokenizer takes a second


class Grammar:
    """A constraint on the new tokens of one generation.

    One matcher follows wherever it is asked: it takes back what two paths do not share and reads on from there, so that
    every node of a tree has the mask of its own path.
    """

    def __init__(self, matcher, prompt_length: int, stop_ids: Iterable[int]) -> None:
        self.matcher, self.prompt_length = matcher, prompt_length
        self.stop_ids = sorted(stop_ids)
        self._read: list[int] = []  # new tokens that the matcher has consumed

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [1, vocab] with every token at minus infinity that may not follow input_ids [1, T]."""
        if not self.follow(input_ids[0, self.prompt_length :].tolist()):
            return torch.full_like(scores, -torch.inf)
        allowed = self.allowed(scores.shape[-1]).to(scores.device)
        return scores.masked_fill(~allowed, -torch.inf)

    def follow(self, new_ids: list[int]) -> bool:
        """Bring the matcher to this text; false if the grammar forbids it."""
        shared = 0
        for read, wanted in zip(self._read, new_ids, strict=False):
            if read != wanted:
                break
            shared += 1
        if len(self._read) > shared:
            self.matcher.rollback(len(self._read) - shared)
            del self._read[shared:]
        for token in new_ids[shared:]:
            if self.matcher.is_stopped() or not self._consume(token):
                return False
            self._read.append(token)
        return True

    def allowed(self, vocab_size: int) -> Tensor:
        """[vocab] bool: what may follow the text that was followed last."""
        allowed = torch.zeros(vocab_size, dtype=torch.bool)
        if self.matcher.is_stopped():
            allowed[self.stop_ids] = True
            return allowed
        if self.matcher.is_error():
            raise OptionError(f"the grammar cannot be followed: {self.matcher.get_error().strip().splitlines()[0]}")
        packed = torch.frombuffer(bytearray(self.matcher.compute_bitmask()), dtype=torch.uint8)
        bits = (packed[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
        bits = bits.flatten()[:vocab_size].bool()
        allowed[: bits.numel()] = bits
        return allowed

    def prune(self, tree: DraftTree, history: list[int]) -> DraftTree:
        """The tree without forbidden nodes and what hangs below them."""
        base = history[self.prompt_length :]
        tokens, parents = tree.token_ids.tolist(), tree.parents.tolist()
        paths: dict[int, list[int]] = {0: []}  # node -> tokens from below the root
        for node in range(1, len(tokens)):
            above = paths.get(parents[node])
            if above is not None and self.follow(base + above) and self._may_follow(tokens[node]):
                paths[node] = [*above, tokens[node]]
        if len(paths) == len(tokens):
            return tree
        kept = {old: new for new, old in enumerate(paths)}
        return DraftTree.from_parents([tokens[old] for old in kept], [kept.get(parents[old], -1) for old in kept])

    def _may_follow(self, token: int) -> bool:
        # An end token gains nothing as a node: as the bonus token it ends the text just as well, and nothing follows it.
        return (
            token not in self.stop_ids and not self.matcher.is_stopped() and self.matcher.validate_tokens([token]) == 1
        )

    def _consume(self, token: int) -> bool:
        # Ask first: a refused token would put the matcher into its error state for good.
        return self.matcher.validate_tokens([token]) == 1 and self.matcher.consume_token(token)


def grammar_for(
    options: GenerateOptions, tokenizer, *, vocab_size: int, prompt_length: int, stop_ids: Iterable[int]
) -> Grammar:
    """The grammar that the options ask for. Raises OptionError if it cannot be read, or llguidance is not installed."""
    try:
        from llguidance import LLMatcher
        from llguidance.hf import from_tokenizer
    except ImportError as error:
        raise OptionError(
            "structured output needs llguidance, which is not installed; pip install 'deltatree[structured]'"
        ) from error
    stop_ids = sorted(stop_ids)
    if not stop_ids:
        raise OptionError("structured output needs an end token, and this checkpoint names none; give stop_token_ids")
    key = (vocab_size, tuple(stop_ids))
    wrapped = _TOKENIZERS.setdefault(tokenizer, {})
    if key not in wrapped:
        wrapped[key] = from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=stop_ids)
    try:
        if options.grammar is not None:
            grammar = LLMatcher.grammar_from_lark(options.grammar)
        else:
            grammar = LLMatcher.grammar_from_json_schema(
                json.dumps(dict(options.json_schema)), defaults={"whitespace_pattern": WHITE_SPACE}
            )
        wrong = LLMatcher.validate_grammar(grammar, wrapped[key])
    except (ValueError, TypeError, RuntimeError) as error:
        wrong = str(error)
    if wrong:
        kind = "grammar" if options.grammar is not None else "json_schema"
        raise OptionError(f"{kind} cannot be used: {wrong.strip().splitlines()[0]}")
    return Grammar(LLMatcher(wrapped[key], grammar, log_level=0), prompt_length, stop_ids)
