"""Which twin of an operation runs: the plain PyTorch reference, or the Triton kernel beside it.

The tensor's device decides: the reference on a CPU, Triton on a GPU (CUDA or ROCm) unless the state is float64. Triton is
imported only when one of its kernels is called, so a machine without it loses nothing. `backend="reference"` or
`backend="triton"` asks for one by name; tests and benchmarks do.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

BACKENDS = ("reference", "triton")

_uncompilable: set[torch.device] = set()
"""Devices whose code generator refused a kernel; everything on them runs the reference from then on."""


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed. It is not imported for the answer."""
    return importlib.util.find_spec("triton") is not None


def backend_for(tensor: Tensor, backend: str | None = None) -> str:
    """`backend` if it is named, else what suits the tensor. Raises ValueError for a name that is not in BACKENDS."""
    if backend is not None:
        if backend not in BACKENDS:
            raise ValueError(
                f"backend={backend!r} is not one of {', '.join(BACKENDS)}; leave it out to go by the device"
            )
        return backend
    on_gpu = tensor.device.type == "cuda"  # PyTorch's name for ROCm devices too
    able = tensor.dtype != torch.float64 and has_triton() and tensor.device not in _uncompilable
    return "triton" if on_gpu and able else "reference"


def dispatched(reference: Callable, twin: str) -> Callable:
    """The public function of an operation: `reference`, or its namesake in module `twin`, by its first tensor's device."""
    first = next(iter(inspect.signature(reference).parameters))

    @functools.wraps(reference)
    def operation(*args, backend: str | None = None, **kwargs):
        tensor = args[0] if args else kwargs[first]
        if backend_for(tensor, backend) == "reference":
            return reference(*args, **kwargs)
        fast = getattr(importlib.import_module(twin), reference.__name__)
        try:
            return fast(*args, **kwargs)
        except Exception as error:
            # Nothing has run yet when the code generator refuses a kernel, so the reference starts from unharmed inputs.
            if backend is not None or type(error).__name__ != "PTXASError":
                raise
            _uncompilable.add(tensor.device)
            warnings.warn(
                f"Triton's ptxas cannot build {reference.__name__} for {tensor.device}, so plain PyTorch runs there; "
                "point TRITON_PTXAS_PATH (TRITON_PTXAS_BLACKWELL_PATH for compute capability 10 and later) at the "
                "ptxas of a CUDA toolkit that knows this chip",
                RuntimeWarning,
                stacklevel=2,
            )
            return reference(*args, **kwargs)

    return operation
