"""How much of a multiprocessor's memory serves as shared memory while a kernel runs."""

from __future__ import annotations

import ctypes
import functools

_PREFERRED_SHARED_MEMORY_CARVEOUT = 9  # of the driver's function attributes


@functools.cache
def _ask_for_all(function: int) -> None:
    ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(ctypes.c_void_p(function), _PREFERRED_SHARED_MEMORY_CARVEOUT, 100)


def room_for_several(launched: object) -> None:
    """Ask the driver for the largest shared memory, so that more blocks of a kernel fit on a multiprocessor at once.

    launched: what the launch of a Triton kernel returned; the wish holds for its later launches. It is a hint: where
    there is no such kernel (in the interpreter) or no such driver, nothing happens.
    """
    function = getattr(launched, "function", None)
    if isinstance(function, int):
        try:
            _ask_for_all(function)
        except (OSError, AttributeError):  # no driver of this kind
            return
