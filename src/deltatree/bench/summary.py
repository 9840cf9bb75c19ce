"""What the records say: speeds, speedups, acceptance, verdicts. A pure function of records, without torch.

Two means of everything: *token-weighted* pools all tokens and all seconds (what a busy machine sees), *per request* averages
each request's own figure (what a user sees). Speeds are decoding alone: tokens after the first over the seconds of all
rounds, prefill apart; a request that prefill already ended has no speed and is left out of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from statistics import fmean, median, quantiles

from deltatree.bench.plan import Arm
from deltatree.bench.records import VERDICTS, Record

ALL = "all"
"""The data set name of the rows over all data sets."""


def summarise(info: dict, records: list[Record]) -> dict:
    """The content of summary.json. info: as in run.json."""
    drafted = [record for record in records if record.method != "ar"]
    return {
        "baseline": "plain decoding of the same target in the same runtime",
        "target": info["target"]["id"],
        "drafter": (info["drafter"] or {}).get("id"),
        "device": info["device"],
        "dtype": info["dtype"],
        "temperature": info["plan"]["temperature"],
        "max_new_tokens": info["plan"]["max_new_tokens"],
        "thinking": info["plan"]["thinking"],
        "num_samples": len({(record.dataset, record.sample) for record in records}),
        "noise": info["noise"],
        "verdicts": verdict_counts(drafted),
        "divergences": [_divergence(record) for record in drafted if record.divergence is not None],
        "groups": [_group(name, arm, rows) for name, rows in _by_dataset(records) for arm in arms_of(rows)],
    }


def arms_of(records: Iterable[Record]) -> list[Arm]:
    """Plain, DFlash, then DDTree by budget."""
    rank = {"ar": 0, "dflash": 1, "ddtree": 2}
    arms = {record.arm for record in records}
    return sorted(arms, key=lambda arm: (rank[arm.method], isinstance(arm.budget, str), arm.budget))


def verdict_counts(records: Iterable[Record]) -> dict[str, int]:
    counts = Counter(record.verdict for record in records)
    return {verdict: counts[verdict] for verdict in VERDICTS}


def _by_dataset(records: list[Record]) -> Iterator[tuple[str, list[Record]]]:
    names = list(dict.fromkeys(record.dataset for record in records))
    for name in names:
        yield name, [record for record in records if record.dataset == name]
    if len(names) > 1:
        yield ALL, records


def _divergence(record: Record) -> dict:
    where = record.divergence
    return {
        "verdict": record.verdict,
        "dataset": record.dataset,
        "sample": record.sample,
        "turn": record.turn,
        "method": record.method,
        "budget": record.budget,
        "position": where.position,
        "token": where.token,
        "plain_token": where.plain_token,
        "gap": where.gap,
    }


def _group(name: str, arm: Arm, rows: list[Record]) -> dict:
    """All figures of one arm on one data set."""
    own = [record for record in rows if record.arm == arm]
    rounds = [length for record in own for length in record.acceptance_lengths]
    decode_seconds = sum(record.decode_seconds for record in own if record.rounds)
    staged = [record for record in own if record.stage_seconds is not None]
    return {
        "dataset": name,
        "method": arm.method,
        "budget": arm.budget,
        "label": arm.label,
        "num_requests": len(own),
        "num_tokens": sum(len(record.token_ids) for record in own),
        "num_rounds": len(rounds),
        "num_drafted": sum(record.num_drafted for record in own),
        "budget_histogram": {str(budget): count for budget, count in sorted(_budgets(own).items())},
        "tokens_per_second": _speed(own),
        "speedup": _speedup(own, [record for record in rows if record.method == "ar"]),
        "speedup_over_dflash": _speedup(own, [record for record in rows if record.method == "dflash"]),
        "acceptance_length": {
            "token_weighted": sum(rounds) / len(rounds) if rounds else None,
            **_spread([record.acceptance_length for record in own if record.rounds]),
        },
        "acceptance_by_depth": _by_depth(own, len(rounds)),
        "acceptance_histogram": {str(length): count for length, count in sorted(Counter(rounds).items())},
        "milliseconds_per_round": 1e3 * decode_seconds / len(rounds) if rounds else None,
        "prefill_seconds": _spread([record.prefill_seconds for record in own]),
        "stage_milliseconds_per_round": _stages(staged),
        "num_staged": len(staged),
        "peak_bytes": max((record.peak_bytes for record in own if record.peak_bytes is not None), default=None),
        "verdicts": verdict_counts(own) if arm.method != "ar" else None,
    }


def _budgets(records: list[Record]) -> Counter[int]:
    """How many rounds drafted how many nodes."""
    return Counter(budget for record in records for budget in record.budgets or ())


def _spread(values: list[float]) -> dict:
    """Mean, median and quartiles over requests."""
    if not values:
        return {"per_request": None, "median": None, "quartiles": None}
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"per_request": fmean(values), "median": median(values), "quartiles": [low, high]}


def _pooled(records: list[Record]) -> float | None:
    seconds = sum(record.decode_seconds for record in records)
    return sum(record.decoded_tokens for record in records) / seconds if seconds else None


def _speed(records: list[Record]) -> dict:
    timed = [record for record in records if record.rounds]
    return {"token_weighted": _pooled(timed), **_spread([record.tokens_per_second for record in timed])}


def _speedup(own: list[Record], base: list[Record]) -> dict | None:
    """Speed over that of `base` on the same requests; below 1 it is slower, and said so."""
    timed = {_request(record): record for record in base if record.rounds}
    both = [(record, timed[_request(record)]) for record in own if record.rounds and _request(record) in timed]
    if not both:
        return None
    ratios = [mine.tokens_per_second / theirs.tokens_per_second for mine, theirs in both]
    return {"token_weighted": _pooled([m for m, _ in both]) / _pooled([t for _, t in both]), **_spread(ratios)}


def _request(record: Record) -> tuple:
    return record.dataset, record.sample, record.turn


def _by_depth(records: list[Record], num_rounds: int) -> list[float]:
    """Share of rounds whose accepted path reached depth 1, 2, ..."""
    counts: Counter[int] = Counter()
    for record in records:
        counts.update(dict(enumerate(record.accepted_by_depth)))
    return [counts[depth] / num_rounds for depth in sorted(counts)]


def _stages(staged: list[Record]) -> dict[str, float] | None:
    num_rounds = sum(record.rounds for record in staged)
    if not num_rounds:
        return None
    return {
        stage: 1e3 * sum(record.stage_seconds[stage] for record in staged) / num_rounds
        for stage in staged[0].stage_seconds
    }


def summary_tables(summary: dict) -> Iterator:
    """One rich table a data set."""
    from rich import box
    from rich.table import Table

    columns = [
        "",
        "tokens/s",
        "speedup",
        "per request",
        "quartiles",
        "vs DFlash",
        "accepted",
        "per request",
        "nodes",
        "ms/round",
    ]
    names = dict.fromkeys(group["dataset"] for group in summary["groups"])
    for name in names:
        groups = [group for group in summary["groups"] if group["dataset"] == name]
        table = Table(title=f"{name}, {groups[0]['num_requests']} requests", title_justify="left", box=box.SIMPLE_HEAD)
        for column in columns:
            table.add_column(column, justify="right" if column else "left")
        table.add_column("verdicts")
        for group in groups:
            table.add_row(*_cells(group))
        yield table


def _cells(group: dict) -> Iterator[str]:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    speedup, over = group["speedup"] or {}, group["speedup_over_dflash"] or {}
    quartiles = speedup.get("quartiles")
    yield group["label"]
    yield number(group["tokens_per_second"]["token_weighted"], ".1f")
    yield number(speedup.get("token_weighted"), ".2f")
    yield number(speedup.get("per_request"), ".2f")
    yield "-".join(format(q, ".2f") for q in quartiles) if quartiles else "-"
    yield number(over.get("token_weighted"), ".2f")
    yield number(group["acceptance_length"]["token_weighted"], ".2f")
    yield number(group["acceptance_length"]["per_request"], ".2f")
    yield number(group["num_drafted"] / group["num_rounds"] if group["num_rounds"] else None, ".1f")
    yield number(group["milliseconds_per_round"], ".1f")
    verdicts = group["verdicts"]
    yield ", ".join(f"{count} {name}" for name, count in verdicts.items() if count) if verdicts else "baseline"


def verdict_lines(summary: dict) -> Iterator[str]:
    """Losslessness in a few lines: the counts, and every divergence."""
    counts = ", ".join(f"{count} {name}" for name, count in summary["verdicts"].items() if count)
    yield f"against plain decoding: {counts or 'nothing drafted'}"
    noise = summary["noise"]
    if noise["measured"] is not None:
        yield (
            f"noise between one-token and tree forwards, {noise['positions']} positions: {noise['measured']:.2g} in logits"
        )
        if noise["measured"] > noise["bound"]:
            yield f"that is more than rounding explains: only gaps up to {noise['bound']:.2g} count as near-ties"
    for entry in summary["divergences"]:
        gap = "one text ends there" if entry["gap"] is None else f"gap {entry['gap']:.3g}"
        yield (
            f"{entry['verdict']}: {entry['dataset']} {entry['sample']} turn {entry['turn'] + 1}, {entry['method']} "
            f"{entry['budget']}, position {entry['position']}: {entry['token']} instead of {entry['plain_token']}, {gap}"
        )
