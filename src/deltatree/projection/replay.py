"""A drafter that knows the target's own text and is right as often as a profile says.

Its claims are calibrated: at every depth of a round it draws a confidence around the profile's value, claims it for its first
choice, and is right with just that probability as long as it was right before. Where it misses first, the right token stands second
or third as often as published. Deeper down it does not know that it has missed, as a block drafter does not: it claims as before, and
its first choice is right as seldom as published. All draws depend on the place alone, so that every method meets the same luck.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deltatree.drafter import FastDFlashDrafter
from deltatree.drafter.protocol import Drafter, DraftSession
from deltatree.projection.profiles import AFTER_SIBLING, AMONG_THREE, SECOND, Profile

SPREAD = 2.0
"""Weight of the Beta distribution that confidences are drawn from; the smaller, the nearer to 0 and 1 they fall."""


@dataclass
class ReplayDrafter:
    """Drafts the known text by a profile.

    text: all tokens, prompt and continuation; `emitted` tells it what was really emitted
    timed: a drafter whose work is done and thrown away, so that a draft takes its time; None drafts for nothing
    """

    profile: Profile
    vocab_size: int
    device: torch.device
    timed: Drafter | None = None
    seed: int = 0
    text: list[int] = field(default_factory=list)

    @property
    def depth(self) -> int:
        return self.profile.depth

    @property
    def context_length(self) -> int:
        return self.timed.context_length if self.timed is not None else 1 << 62

    def at(self, length: int) -> tuple[list[list[int]], list[list[float]]]:
        """Candidates and claims (see `planted`) of a draft behind so many committed tokens."""
        following = self.text[length + 1 : length + 1 + self.depth]
        return planted(self.profile, following, self.vocab_size, f"{self.seed} {length}")

    def start(self) -> _ReplaySession:
        return _ReplaySession(self, self.timed.start() if self.timed is not None else None)


@dataclass
class _ReplaySession:
    drafter: ReplayDrafter
    timed: DraftSession | None
    committed: int = 0

    def propose(self, features: Tensor, *, bonus: int) -> Tensor:
        me = self.drafter
        if self.timed is not None:
            self.timed.propose(features, bonus=bonus)
        self.committed += features.shape[0]
        tokens, chances = me.at(self.committed)
        rest = max(1e-6, 1e-3 / me.vocab_size)
        probs = torch.full((me.depth, me.vocab_size), rest, device=me.device)
        probs.scatter_(
            1, torch.tensor(tokens, device=me.device), torch.tensor(chances, device=me.device).clamp_(min=rest)
        )
        return probs.log_()


class FastReplayDrafter(FastDFlashDrafter):
    """The same where rounds stay on the device: the timed drafter's work is done there, and its logits are overwritten.

    What is planted at every length lies on the device (`plant`), and a draft finds its own by the length of its context: it
    may be launched before the host knows how far the text has come, and costs the host nothing.

    replay: what is drafted; its `timed` is a FastDFlashDrafter, whose weights are taken over
    """

    LOWEST = -16.0  # logit of every token that was not planted

    def __init__(self, replay: ReplayDrafter) -> None:
        timed = replay.timed
        super().__init__(timed.drafter, context_length=timed.context_length, most_new=timed.most_new)
        self.replay = replay
        self.depth = min(self.depth, replay.depth)
        lengths = self.context_length + self.most_new + self.config.block_size  # as many as buffers have rows
        shape, device = (lengths, self.config.depth, 3), self.target.device
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self.logits = torch.full(shape, self.LOWEST, dtype=self.target.dtype, device=device)
        self._planted: tuple | None = None

    @torch.inference_mode()
    def plant(self, lengths: range) -> None:
        """Put on the device what `replay` drafts at these lengths of its text, from now on and in place of what was there.

        It takes the host about 0.1 ms a length, and nothing where the same was planted last. Other lengths keep what they have.
        """
        replay, lengths = self.replay, lengths[: len(self.tokens) - lengths.start]
        new = replay.profile, replay.seed, tuple(replay.text), lengths
        if new == self._planted:
            return
        self._planted, depth = new, min(replay.depth, self.config.depth)
        tokens, chances = zip(*map(replay.at, lengths), strict=True)
        rows = slice(lengths.start, lengths.stop)
        self.tokens[rows, :depth] = torch.tensor(tokens)[:, :depth].to(self.tokens.device)
        self.logits[rows, :depth] = torch.tensor(chances)[:, :depth].clamp_(min=1e-6).log_().to(self.logits)
        self.logits[rows, depth:] = self.LOWEST

    def draft(self, buffers) -> None:
        super().draft(buffers)
        tokens, logits = (table.index_select(0, buffers.length)[0] for table in (self.tokens, self.logits))
        buffers.logits.fill_(self.LOWEST)
        buffers.logits.scatter_(1, tokens, logits)


def planted(
    profile: Profile, following: list[int], vocab_size: int, seed: str
) -> tuple[list[list[int]], list[list[float]]]:
    """Three candidates a depth, best first, with the probabilities that are claimed for them.

    following: the tokens that the target will emit after the root; unknown ones are taken at random
    """
    draw = random.Random(seed)
    tokens, chances, is_right = [], [], True
    for depth, mean in enumerate(profile.given_right):
        truth = following[depth] if depth < len(following) else draw.randrange(vocab_size)
        confidence = draw.betavariate(SPREAD * mean, SPREAD * (1 - mean)) if 0 < mean < 1 else mean
        luck, place = draw.random(), draw.random()
        others = [(truth + 1 + step) % vocab_size for step in draw.sample(range(vocab_size - 1), 3)]
        if luck < (confidence if is_right else AFTER_SIBLING):
            tokens.append([truth, *others[:2]])
        elif place < SECOND:
            tokens.append([others[0], truth, others[1]])
        else:
            tokens.append([*others[:2], truth if place < AMONG_THREE else others[2]])
        is_right = is_right and tokens[-1][0] == truth
        missing = 1 - confidence  # claimed in order, whatever was drawn: no candidate above the one before it
        second = min(missing * SECOND, 0.95 * confidence)
        chances.append([confidence, second, min(missing * (AMONG_THREE - SECOND), 0.95 * second)])
    return tokens, chances
