"""Programmatic dependent launches: a kernel is set up while the one before it ends.

A chained kernel begins with `gdc_wait`, before it reads anything that a kernel writes, and then allows the next one to be
set up, at once or as its programs end. Since every chained kernel waits for the one before it, an order of launches means
what it means without chaining. A kernel ahead of a product allows it before it waits itself, so that the product can
take in its weight meanwhile; one that is set up so early may read nothing but weights before its own wait.
"""

from __future__ import annotations

import functools

import torch
import triton


@functools.cache
def chaining(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel that has a CHAINED parameter: on from compute capability 9.0, off elsewhere."""
    able = device.type == "cuda" and torch.version.hip is None and not triton.knobs.runtime.interpret
    if able and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"CHAINED": True, "launch_pdl": True}
    return {"CHAINED": False}
