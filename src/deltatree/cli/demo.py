"""`deltatree demo`: the shipped pair on a few real prompts, three methods side by side."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deltatree.cli.common import DeviceOption, DtypeOption, load_pair, parse_budget
from deltatree.files import SHIPPED

if TYPE_CHECKING:
    from rich.table import Table

    from deltatree.bench import Record

METHOD_NAMES = {"ar": "plain decoding", "dflash": "DFlash (chain)", "ddtree": "DDTree (tree)"}


def demo(
    chart: Annotated[Path, typer.Option(help="Where the chart goes; its twin (.svg or .png) beside it.")] = Path(
        "deltatree-demo.png"
    ),
    max_new_tokens: Annotated[int, typer.Option(help="For each prompt and method.")] = 96,
    budget: Annotated[str, typer.Option(help="Drafted nodes a round, for ddtree.")] = "16",
    device: DeviceOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Decode eight prompts of four data sets with three methods, compare texts and speed, draw a chart.

    No network. Exit code 0 only if all three methods wrote the same tokens.
    """
    import tempfile

    from deltatree.bench.plan import BenchPlan
    from deltatree.bench.samples import DEMO, load_samples

    plan = BenchPlan(budgets=(parse_budget(budget),), max_new_tokens=max_new_tokens, stage_samples=2)
    samples = load_samples(DEMO, 100)
    _check_writable(chart)
    pair = load_pair(SHIPPED, SHIPPED, device, dtype)

    from deltatree.bench import run_bench
    from deltatree.chart import draw_chart
    from deltatree.cli.bench import record_progress

    with tempfile.TemporaryDirectory() as folder, record_progress(shown=True) as on_record:
        run = run_bench(pair, samples, plan, Path(folder) / "demo", command="deltatree demo", on_record=on_record)
        files = draw_chart([Path(folder) / "demo"], chart)
    _show(run.records, files)
    different = [record for record in run.records if record.method != "ar" and not _same(record, run.records)]
    for record in different:
        print(f"different: {record.dataset} {record.sample}, {METHOD_NAMES[record.method]}", file=sys.stderr)
    if different:
        raise SystemExit(1)


def _check_writable(chart: Path) -> None:
    """Before a minute of work, not after."""
    import os

    from deltatree.errors import OptionError

    folder = chart.absolute().parent
    if chart.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise OptionError(f"chart {str(chart)!r} is no picture; name a file ending in .png, .svg or .pdf")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise OptionError(
            f"chart folder {str(folder)!r} does not exist or cannot be written; choose another with --chart"
        )


def _same(record: Record, records: list[Record]) -> bool:
    """Whether plain decoding wrote the same tokens for this request."""
    request = (record.dataset, record.sample, record.turn)
    plain = next(r for r in records if r.method == "ar" and (r.dataset, r.sample, r.turn) == request)
    return plain.token_ids == record.token_ids


def _show(records: list[Record], files: list[Path]) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 110)
    names = list(dict.fromkeys(record.dataset for record in records))
    for name in names:
        console.print(_table(name, [r for r in records if r.dataset == name], records))
    console.print(_table(f"all {len(names)} data sets", records, records))
    same = all(_same(record, records) for record in records)
    verdict = "all three methods wrote the same tokens" if same else "THE METHODS WROTE DIFFERENT TOKENS"
    console.print(f"{verdict}; chart: {', '.join(map(str, files))}", soft_wrap=True, highlight=False, markup=False)


def _table(title: str, rows: list[Record], records: list[Record]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("")
    for column in ("tokens", "tokens/s", "rounds", "acceptance length", "speedup", "identical"):
        table.add_column(column, justify="right")
    speeds: dict[str, float] = {}
    for method, name in METHOD_NAMES.items():
        own = [record for record in rows if record.method == method]
        rounds = sum(record.rounds for record in own)
        decoded = sum(record.decoded_tokens for record in own)
        speeds[method] = decoded / sum(record.decode_seconds for record in own)
        table.add_row(
            name,
            str(sum(len(record.token_ids) for record in own)),
            f"{speeds[method]:.1f}",
            str(rounds),
            f"{sum(sum(record.acceptance_lengths) for record in own) / rounds:.2f}",
            f"{speeds[method] / speeds['ar']:.2f}x",
            "-" if method == "ar" else "yes" if all(_same(record, records) for record in own) else "NO",
        )
    return table
