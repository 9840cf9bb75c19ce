"""What a user may ask of a generation. Free of torch, so that a mistake is reported before anything loads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from deltatree.errors import OptionError

METHODS = ("ar", "dflash", "ddtree")
"""Plain decoding, DFlash (a chain), DDTree (a tree): three policies of one loop."""

TREES = ("chain", "best-first", "calibrated", "transitions", "transitions-chain")
TRANSITION_TREES = {"transitions": "best-first", "transitions-chain": "chain"}
"""Trees that score by the target's own transitions -> what they are without them."""
AUTO = "auto"
DEFAULT_BUDGET = AUTO


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """Options of one generation, checked when made. Raises OptionError."""

    max_new_tokens: int = 512
    method: str = "ddtree"
    budget: int | str = DEFAULT_BUDGET  # drafted nodes a round, root not counted, or "auto"; for ddtree
    tree: str = "best-first"  # policy of ddtree
    transitions: str = "auto"  # for trees of that name: auto (cached, else written now), none, or a table's file
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0  # 1 keeps all
    min_p: float = 0.0  # 0 keeps all
    repetition_penalty: float = 1.0  # divides the scores of tokens seen in prompt and answer; 1 changes nothing
    presence_penalty: float = 0.0  # taken once from every token that the answer already has
    frequency_penalty: float = 0.0  # taken from a token for each time that the answer already has it
    logit_bias: Mapping[int, float] | None = None  # token id -> added to its score
    bad_words: tuple[str | tuple[int, ...], ...] = ()  # never emitted: texts, or sequences of token ids
    seed: int | None = None  # None draws a fresh one
    min_new_tokens: int = 0  # nothing ends the text before so many tokens
    stop: tuple[str, ...] = ()  # the text ends before the first of these strings
    stop_token_ids: tuple[int, ...] = ()  # further end tokens, beside the checkpoint's own
    ignore_eos: bool = False  # the checkpoint's own end tokens do not end the text
    json_schema: Mapping | None = None  # the text is JSON of this schema; {} is any JSON. Extra `structured`
    grammar: str | None = None  # the text is of this Lark grammar. Extra `structured`

    def __post_init__(self) -> None:
        _whole("max_new_tokens", self.max_new_tokens, 1)
        if self.budget != AUTO:
            _whole("budget", self.budget, 0, or_else=", or 'auto'")
        _whole("top_k", self.top_k, 0)
        _whole("min_new_tokens", self.min_new_tokens, 0)
        _one_of("method", self.method, METHODS)
        _one_of("tree", self.tree, TREES)
        if not isinstance(self.transitions, str) or not self.transitions:
            raise OptionError(f"transitions={self.transitions!r} is not possible; give auto, none, or a table's file")
        _within("temperature", self.temperature, 0, 100)
        _within("min_p", self.min_p, 0, 1)
        _within("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise OptionError("top_p=0 keeps no token; use a value above 0 (temperature=0 is greedy)")
        _within("repetition_penalty", self.repetition_penalty, 0.01, 100)
        _within("presence_penalty", self.presence_penalty, -100, 100)
        _within("frequency_penalty", self.frequency_penalty, -100, 100)
        if self.seed is not None:
            _whole("seed", self.seed, 0, (1 << 63) - 1)
        if self.min_new_tokens > self.max_new_tokens:
            raise OptionError(
                f"min_new_tokens={self.min_new_tokens} is above max_new_tokens={self.max_new_tokens}; lower it"
            )
        self._check_lists()
        self._check_structure()

    def _check_lists(self) -> None:
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise OptionError("logit_bias is a mapping of token ids to numbers, e.g. {17: -100}")
            for token, bias in self.logit_bias.items():
                _whole("a token id in logit_bias", token, 0)
                _within("a bias in logit_bias", bias, -1e6, 1e6)
        stop = (self.stop,) if isinstance(self.stop, str) else _sequence("stop", self.stop)
        if not all(isinstance(text, str) and text for text in stop):
            raise OptionError("stop holds texts of at least one character")
        stop_token_ids = _sequence("stop_token_ids", self.stop_token_ids)
        for token in stop_token_ids:
            _whole("a token id in stop_token_ids", token, 0)
        bad_words = []
        for word in (self.bad_words,) if isinstance(self.bad_words, str) else _sequence("bad_words", self.bad_words):
            bad_words.append(word if isinstance(word, str) else _sequence("a word in bad_words", word))
            if not word:
                raise OptionError("bad_words holds texts or sequences of token ids, none of them empty")
            for token in () if isinstance(word, str) else word:
                _whole("a token id in bad_words", token, 0)
        # Whatever sequences were given are kept as tuples; the dataclass is frozen to everyone else.
        for name, value in (("stop", stop), ("stop_token_ids", stop_token_ids), ("bad_words", tuple(bad_words))):
            object.__setattr__(self, name, value)

    def _check_structure(self) -> None:
        if self.json_schema is not None and not isinstance(self.json_schema, Mapping):
            raise OptionError("json_schema is a JSON schema as a mapping; {} allows any JSON")
        if self.grammar is not None and not (isinstance(self.grammar, str) and self.grammar.strip()):
            raise OptionError("grammar is the text of a Lark grammar")
        if self.json_schema is not None and self.grammar is not None:
            raise OptionError("json_schema and grammar exclude each other; give one")
        if self.is_structured and (self.min_new_tokens or self.ignore_eos):
            raise OptionError("a structured text ends where its grammar ends; drop min_new_tokens and ignore_eos")

    @property
    def is_greedy(self) -> bool:
        """One threshold for all: below 1e-4 the division would leave only the best token anyway."""
        return self.temperature < 1e-4 or self.top_k == 1

    @property
    def uses_transitions(self) -> bool:
        return (
            self.method == "ddtree"
            and self.budget != 0
            and self.tree in TRANSITION_TREES
            and self.transitions != "none"
        )

    @property
    def is_structured(self) -> bool:
        return self.json_schema is not None or self.grammar is not None


def _whole(name: str, value, least: int, most: int | None = None, or_else: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise OptionError(f"{name}={value!r} is not possible; give a whole number {limits}{or_else}")


def _within(name: str, value, low: float, high: float) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not low <= value <= high:
        raise OptionError(f"{name}={value!r} is not possible; give a number from {low} to {high}")


def _one_of(name: str, value, possible: tuple[str, ...]) -> None:
    if value not in possible:
        raise OptionError(f"{name} {value!r} is not known; possible are {', '.join(possible)}")


def _sequence(name: str, value) -> tuple:
    if not isinstance(value, (list, tuple)):
        raise OptionError(f"{name} is a list, not {type(value).__name__}")
    return tuple(value)
