"""Acceptance profiles: how often the first tokens of a draft are all right. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass

from deltatree.errors import OptionError


@dataclass(frozen=True, slots=True)
class Profile:
    """A drafter's acceptance by depth. Raises OptionError."""

    name: str
    all_right: tuple[float, ...]  # probability that the first d drafted tokens are all right, d = 1, 2, ...
    is_published: bool = False

    def __post_init__(self) -> None:
        falling = all(b <= a for a, b in zip((1.0, *self.all_right), self.all_right, strict=False))
        if not self.all_right or not falling or self.all_right[-1] < 0:
            raise OptionError(
                f"profile {self.name!r} must name probabilities that never rise, from 1 at most to 0 at least: "
                "entry d is how often the first d drafted tokens are all right"
            )

    @property
    def depth(self) -> int:
        return len(self.all_right)

    @property
    def given_right(self) -> list[float]:
        """Probability that token d is right if all before it are."""
        before = (1.0, *self.all_right)
        return [b / a if a else 0.0 for a, b in zip(before, self.all_right, strict=False)]

    @property
    def chain_length(self) -> float:
        """Acceptance length of a chain of this depth."""
        return 1 + sum(self.all_right)


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("own-domain", (0.854, 0.770, 0.713, 0.673, 0.642, 0.614, 0.593, 0.574), is_published=True),
        Profile("chat", (0.712, 0.483, 0.340, 0.254, 0.197, 0.154, 0.122, 0.096), is_published=True),
        Profile("very-weak", (0.300, 0.075, 0.016, 0.003, 0.001, 0.0, 0.0, 0.0)),
        Profile("very-strong", (0.970, 0.946, 0.925, 0.906, 0.888, 0.870, 0.853, 0.836)),
    )
}
"""Profiles by name. own-domain and chat were published for Qwen3.6-35B-A3B with blocks of 8; the others are made up."""

SECOND, AMONG_THREE = 0.37, 0.58
"""At the first miss, how often the right token is the second candidate, and one of the first three. Published likewise."""

AFTER_SIBLING = 0.22
"""How often the next first choice is right below a branch. Published likewise."""


def parse_profile(text: str) -> Profile:
    """A name, or numbers by comma. Raises OptionError."""
    if text in PROFILES:
        return PROFILES[text]
    try:
        return Profile("given", tuple(float(item) for item in text.split(",")))
    except ValueError as error:
        if isinstance(error, OptionError):
            raise
        raise OptionError(
            f"profile {text!r} is not known; possible are {', '.join(PROFILES)}, or probabilities by comma, e.g. 0.8,0.6,0.4"
        ) from None
