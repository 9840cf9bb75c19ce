"""Stage timing from outside: a target and a drafter that note when their verbs begin and end.

The time between two verbs belongs to the stage that runs there: build between draft and verify, accept between verify and
commit. The device is synchronised at these borders, which slows decoding a little: hence a pass of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deltatree.drafter.protocol import Drafter
    from deltatree.models.protocol import Target

STAGES = ("draft", "build", "verify", "accept", "commit", "other")
"""`other` is the loop itself between a commit and the next verb."""

_BETWEEN = {("draft", "verify"): "build", ("verify", "commit"): "accept"}


class StageClock:
    """Adds up seconds by stage. synchronize: waits for the device."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self.synchronize = synchronize
        self.restart()

    def restart(self) -> None:
        """Forget what was measured, and start now."""
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._last = "commit"
        self._mark = self._now()

    def run(self, stage: str, verb: Callable, *args, **kwargs):
        begun = self._now()
        self.seconds[_BETWEEN.get((self._last, stage), "other")] += begun - self._mark
        result = verb(*args, **kwargs)
        self._mark, self._last = self._now(), stage
        self.seconds[stage] += self._mark - begun
        return result

    def _now(self) -> float:
        self.synchronize()
        return time.perf_counter()


class _Delegate:
    """Everything but the timed verbs is the inner object's."""

    def __init__(self, inner, clock: StageClock) -> None:
        self._inner, self._clock = inner, clock

    def __getattr__(self, name: str):
        return getattr(self._inner, name)


class TimedTarget(_Delegate):
    _inner: Target

    def verify(self, tree, state):
        return self._clock.run("verify", self._inner.verify, tree, state)

    def commit(self, path, state):
        return self._clock.run("commit", self._inner.commit, path, state)


class TimedDrafter(_Delegate):
    _inner: Drafter

    def start(self):
        return _TimedSession(self._inner.start(), self._clock)


class _TimedSession(_Delegate):
    def propose(self, features, *, bonus):
        return self._clock.run("draft", self._inner.propose, features, bonus=bonus)
