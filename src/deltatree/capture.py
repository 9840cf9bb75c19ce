"""Capture of a step into a CUDA graph, and its replay. The step does not know that it is captured."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from deltatree.progress import telling


class Captured:
    """One step over static buffers: run as it is on a CPU, captured once and replayed on a GPU.

    step: reads and writes tensors whose addresses stay the same; nothing in it waits for the device
    pool: memory pool that graphs share which never run at the same time, from `torch.cuda.graph_pool_handle`
    before: run before each of the two passes that precede the capture (kernels are compiled in them), so that a step which
        leaves work for the next one does not find it
    what: what is captured, for people who wait for it
    """

    def __init__(
        self,
        step: Callable[[], object],
        device: torch.device,
        pool: object = None,
        before: Callable[[], object] = lambda: None,
        what: str = "a step",
    ) -> None:
        self.step, self.graph = step, None
        if device.type != "cuda":
            return
        with torch.cuda.device(device), telling(f"preparing {what} (first use compiles kernels; cached afterwards)"):
            stream = _side_stream(torch.cuda.current_device())
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    before()
                    step()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                step()
        self.graph, self.step = graph, None

    def __call__(self) -> None:
        if self.graph is None:
            self.step()
        else:
            self.graph.replay()


def shared_pool(device: torch.device) -> object:
    """A memory pool for graphs that never run at the same time, or None on a CPU."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


@cache
def _side_stream(index: int) -> torch.cuda.Stream:
    """The stream of every warm-up on a device: the libraries keep a workspace for each stream that they ever saw."""
    return torch.cuda.Stream(index)
