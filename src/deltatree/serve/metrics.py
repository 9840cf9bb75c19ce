"""What Prometheus reads at /metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from deltatree.pair_api import Running
from deltatree.serve.engine import Engine

LENGTHS = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 12, 16)
SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """One registry a server, so that two servers in one process do not mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests by path and HTTP status.", "path", "status")
        self.generations = self._counter("generations", "Answers by how they ended.", "ended")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens.")
        self.reused_tokens = self._counter("prompt_tokens_reused", "Prompt tokens continued from an earlier turn.")
        self.completion_tokens = self._counter("completion_tokens", "Tokens of answers.")
        self.rounds = self._counter("rounds", "Rounds after prefill.")
        self.drafted = self._counter("drafted_nodes", "Drafted nodes, roots not counted.")
        self.acceptance = Histogram(
            "deltatree_acceptance_length",
            "Mean acceptance length of an answer: accepted drafted nodes + 1.",
            buckets=LENGTHS,
            registry=self.registry,
        )
        self.prefill = self._seconds("prefill_seconds", "Prefill of an answer.")
        self.decoding = self._seconds("decode_seconds", "All rounds of an answer.")

    def watch(self, engine: Engine) -> None:
        """Show the queue of an engine."""
        for name, what, value in (
            ("queue_waiting", "Requests that wait.", lambda: engine.num_waiting),
            ("queue_running", "Requests that are decoded now: 0 or 1.", lambda: int(engine.running is not None)),
        ):
            Gauge(f"deltatree_{name}", what, registry=self.registry).set_function(value)

    def observe(self, running: Running, how: str) -> None:
        """A generation has ended: "finished", "cancelled" or "failed"."""
        self.generations.labels(how).inc()
        self.prompt_tokens.inc(running.prompt_length)
        self.reused_tokens.inc(running.reused_length)
        self.completion_tokens.inc(running.num_tokens)
        self.rounds.inc(len(running.acceptance_lengths))
        self.drafted.inc(sum(running.budgets))
        self.prefill.observe(running.prefill_seconds)
        self.decoding.observe(running.decode_seconds)
        if running.acceptance_lengths:
            self.acceptance.observe(sum(running.acceptance_lengths) / len(running.acceptance_lengths))

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"deltatree_{name}", what, labels, registry=self.registry)

    def _seconds(self, name: str, what: str) -> Histogram:
        return Histogram(f"deltatree_{name}", what, buckets=SECONDS, registry=self.registry)
