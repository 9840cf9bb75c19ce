"""What takes its time, told to whoever listens: records of the logger `deltatree.progress`.

At level INFO what begins, at DEBUG how far it is and its end; logging shows neither unless it is asked to. A display finds in
`record.shown` what to show from now on, None for nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOGGER = logging.getLogger("deltatree.progress")


@contextmanager
def telling(what: str, *, when: bool = True) -> Iterator[Callable[[str], object]]:
    """Tell that `what` begins and that it is over. Yields what tells how far it is. when: False tells nothing."""
    if not when:
        yield lambda how_far: None
        return
    LOGGER.info(what, extra={"shown": what})
    try:
        yield lambda how_far: LOGGER.debug("%s: %s", what, how_far, extra={"shown": f"{what}: {how_far}"})
    finally:
        LOGGER.debug("%s: over", what, extra={"shown": None})
