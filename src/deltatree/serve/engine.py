"""One thread that decodes, and the queue before it: first come, first served, one request at a time."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deltatree.decode import Conversation, GenerateOptions
from deltatree.errors import DeltatreeError
from deltatree.serve.refusals import Refusal

if TYPE_CHECKING:
    from deltatree.pair_api import Generation, Pair

log = logging.getLogger("deltatree.serve")


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of one answer of a request."""

    choice: int
    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of one answer."""

    choice: int
    generation: Generation


@dataclass(eq=False)
class Job:
    """One request: prompts and options of its answers, and where its events go."""

    answers: list[tuple[list[int], GenerateOptions]]
    deadline: float  # on the clock of time.monotonic
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    events: asyncio.Queue = field(default_factory=asyncio.Queue)
    cancelled: threading.Event = field(default_factory=threading.Event)

    def post(self, event: Piece | Finished | DeltatreeError) -> None:
        """Called by the decoding thread."""
        try:
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)
        except RuntimeError:  # the loop has been closed: nobody listens
            self.cancelled.set()

    async def next(self) -> Piece | Finished:
        """The next event. Raises what ended the request."""
        try:
            async with asyncio.timeout(max(self.deadline - time.monotonic(), 0)):
                event = await self.events.get()
        except TimeoutError:
            raise Refusal(504, "the request took too long and was ended; ask for fewer tokens or try later") from None
        if isinstance(event, DeltatreeError):
            raise event
        return event


class Engine:
    """The decoder of one device.

    observe: told of every generation and how it ended ("finished", "cancelled" or "failed"), for metrics
    """

    def __init__(
        self, pair: Pair, *, max_queue: int, keep_conversations: int, observe=lambda running, how: None
    ) -> None:
        self.pair, self.max_queue, self.observe = pair, max_queue, observe
        self.conversations = deque(Conversation() for _ in range(keep_conversations))  # the last used one first
        self.running: Job | None = None
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._mean_seconds = 1.0  # of the last requests
        self._thread = threading.Thread(target=self._work, name="deltatree-decoder", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._closed

    def submit(self, job: Job) -> None:
        """Put a request at the end of the queue. Raises Refusal if it is full or the server stops."""
        with self._changed:
            if self._closed:
                raise Refusal(503, "the server is shutting down; try again later", retry_after=5)
            if len(self._waiting) >= self.max_queue:
                seconds = math.ceil(min(max(self._mean_seconds * len(self._waiting), 1), 60))
                raise Refusal(
                    429, f"{len(self._waiting)} requests wait already; try again in {seconds} s", retry_after=seconds
                )
            self._waiting.append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Forget a request: out of the queue at once, or after the round that runs."""
        job.cancelled.set()
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)

    def close(self, grace_seconds: float = 0.0) -> None:
        """Take no more requests, let those here finish for a while, then end them."""
        until = time.monotonic() + grace_seconds
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(max(until - time.monotonic(), 0))
        with self._changed:
            for job in (*self._waiting, *([self.running] if self.running else ())):
                job.cancelled.set()
                job.post(Refusal(503, "the server is shutting down; try again later"))
            self._waiting.clear()
        self._thread.join(10)
        self.conversations.clear()

    def _work(self) -> None:
        while True:
            with self._changed:
                self.running = None
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if not self._waiting:
                    return
                job = self.running = self._waiting.popleft()
            started = time.monotonic()
            try:
                for choice, (prompt_ids, options) in enumerate(job.answers):
                    self._answer(job, choice, prompt_ids, options)
            except DeltatreeError as error:
                job.post(error)
            except Exception:  # the thread must outlive any request
                log.exception("a request failed")
                job.post(Refusal(500, "the server failed on this request; its log says more"))
            self._mean_seconds += 0.2 * (time.monotonic() - started - self._mean_seconds)
            del job

    def _answer(self, job: Job, choice: int, prompt_ids: list[int], options: GenerateOptions) -> None:
        if job.cancelled.is_set():
            return
        running, how = self.pair.start(prompt_ids, options, self._conversation(prompt_ids)), "failed"
        try:
            with closing(running):
                for text in running:
                    if job.cancelled.is_set():
                        how = "cancelled"
                        return
                    if text:
                        job.post(Piece(choice, text))
                how, finished = "finished", Finished(choice, running.generation())
        finally:
            self.observe(running, how)
        job.post(finished)  # last, so that who has the answer finds it counted and its conversation ready

    def _conversation(self, prompt_ids: list[int]) -> Conversation | None:
        """The one that this prompt continues furthest, else the least recently used."""
        if not self.conversations:
            return None
        best = max(self.conversations, key=lambda held: held.continues(prompt_ids))
        if not best.continues(prompt_ids):
            best = self.conversations[-1]
        self.conversations.remove(best)
        self.conversations.appendleft(best)
        return best
