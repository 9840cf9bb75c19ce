"""How much of a multiprocessor's memory serves as shared memory while a kernel runs."""

from __future__ import annotations

import ctypes

_PREFERRED_SHARED_MEMORY_CARVEOUT = 9  # of the driver's function attributes
_LARGEST, _DEFAULT = 100, -1
_asked: dict[int, bool] = {}  # functions of the driver and what was asked for them last


def room_for_several(launched: object, wanted: bool = True) -> None:
    """Ask the driver for the largest shared memory, so that more blocks of a kernel fit on a multiprocessor at once.

    launched: what the launch of a Triton kernel returned; the wish holds for its later launches. It is a hint: where
        there is no such kernel (in the interpreter) or no such driver, nothing happens
    wanted: False takes the wish back
    """
    function = getattr(launched, "function", None)
    if not isinstance(function, int) or _asked.get(function, False) == wanted:
        return
    _asked[function] = wanted
    try:
        ask = ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute
    except (OSError, AttributeError):  # no driver of this kind
        return
    ask(ctypes.c_void_p(function), _PREFERRED_SHARED_MEMORY_CARVEOUT, _LARGEST if wanted else _DEFAULT)
