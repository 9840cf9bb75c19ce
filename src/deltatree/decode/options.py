"""What a user may ask of a generation. Free of torch, so that a mistake is reported before anything loads."""

from __future__ import annotations

from dataclasses import dataclass

from deltatree.errors import OptionError

METHODS = ("ar", "dflash", "ddtree")
"""Plain decoding, DFlash (a chain), DDTree (a tree): three policies of one loop."""

TREES = ("chain", "best-first")
DEFAULT_BUDGET = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """Options of one generation, checked when made. Raises OptionError."""

    max_new_tokens: int = 512
    method: str = "ddtree"
    budget: int = DEFAULT_BUDGET  # drafted nodes a round, root not counted; for ddtree
    tree: str = "best-first"  # policy of ddtree
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0  # 1 keeps all
    min_p: float = 0.0  # 0 keeps all
    seed: int | None = None  # None draws a fresh one
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.budget == "auto":
            raise OptionError("budget 'auto' does not exist yet; give a whole number of drafted nodes, e.g. 32")
        _whole("max_new_tokens", self.max_new_tokens, 1)
        _whole("budget", self.budget, 0)
        _whole("top_k", self.top_k, 0)
        _one_of("method", self.method, METHODS)
        _one_of("tree", self.tree, TREES)
        _within("temperature", self.temperature, 0, 100)
        _within("min_p", self.min_p, 0, 1)
        _within("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise OptionError("top_p=0 keeps no token; use a value above 0 (temperature=0 is greedy)")
        if self.seed is not None:
            _whole("seed", self.seed, 0)

    @property
    def is_greedy(self) -> bool:
        """One threshold for all: below 1e-4 the division would leave only the best token anyway."""
        return self.temperature < 1e-4 or self.top_k == 1


def _whole(name: str, value, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(f"{name}={value!r} is not possible; give a whole number of at least {least}")


def _within(name: str, value, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise OptionError(f"{name}={value!r} is not possible; give a number from {low} to {high}")


def _one_of(name: str, value, possible: tuple[str, ...]) -> None:
    if value not in possible:
        raise OptionError(f"{name} {value!r} is not known; possible are {', '.join(possible)}")
