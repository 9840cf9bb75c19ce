"""What the host launches and waits for: halves of rounds, their times on the device, and records on their way."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Half(NamedTuple):
    """The first half of a round: all before verify. It leaves the target's state alone."""

    kind: str  # "draft"; "offer", a draft with a record to choose from; "rest", no draft
    count: int  # nodes that it places, root included
    is_chain: bool = False

    def serves(self, wanted: Half) -> bool:
        """Whether a round that wants another half can go on from this one. Trees stand best first, and every one has its root;
        a chain is laid from any draft."""
        if wanted.kind == "rest" or self == wanted:
            return True
        may_be_chosen_from = self.kind == "offer" and wanted.kind in ("draft", "offer")
        return may_be_chosen_from and (wanted.is_chain or self.count >= wanted.count)


REST = Half("rest", 1)


class Span:
    """Between two places of the device's stream, both of them passed when it is asked. On a CPU it knows nothing.

    Events are made once and recorded again and again, for making one takes the host longer than a launch.
    """

    def __init__(self, is_gpu: bool) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * is_gpu)]

    def __enter__(self) -> Span:
        if self._events:
            self._events[0].record()
        return self

    def __exit__(self, *_) -> None:
        if self._events:
            self._events[1].record()

    @property
    def seconds(self) -> float | None:
        return self._events[0].elapsed_time(self._events[1]) / 1e3 if self._events else None


class Arrival:
    """Where a record of the device comes to on the host."""

    def __init__(self, record: Tensor) -> None:
        # Written outside of inference mode, which takes the host longer to enter than to copy.
        with torch.inference_mode(False):
            self._held = torch.empty(record.shape, dtype=record.dtype, pin_memory=record.is_cuda)
        self._array = self._held.numpy()
        self._event = torch.cuda.Event() if record.is_cuda else None

    def send(self, record: Tensor) -> Arrival:
        """Copy the record as it is when all that was launched is done."""
        self._held.copy_(record, non_blocking=True)
        if self._event is not None:
            self._event.record()
        return self

    def wait(self) -> np.ndarray:
        """The record, until another one is sent here."""
        if self._event is not None:
            self._event.synchronize()
        return self._array


class Flight(NamedTuple):
    """A round whose verify is launched."""

    count: int  # nodes that it verifies, root included
    arrival: Arrival
    spans: tuple[Span, Span]  # of its halves
