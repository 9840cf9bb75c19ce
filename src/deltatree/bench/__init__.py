"""Benchmarks: what to run, the harness, records on disk, verdicts on losslessness, and what the records say.

Knows the library only from outside: a loaded `Pair` comes in, records come out.
"""

from deltatree.lazy import lazy_names

_HOMES = {
    "Arm": "deltatree.bench.plan",
    "BenchPlan": "deltatree.bench.plan",
    "BenchRun": "deltatree.bench.harness",
    "Ranks": "deltatree.bench.ranks",
    "Record": "deltatree.bench.records",
    "Sample": "deltatree.bench.samples",
    "load_samples": "deltatree.bench.samples",
    "read_records": "deltatree.bench.records",
    "read_run": "deltatree.bench.records",
    "run_bench": "deltatree.bench.harness",
    "summarise": "deltatree.bench.summary",
    "summary_tables": "deltatree.bench.summary",
    "verdict_lines": "deltatree.bench.summary",
}

__all__ = sorted(_HOMES)

__getattr__ = lazy_names(__name__, _HOMES)
