"""`deltatree inspect`: what a target (and a drafter) is and needs, from the configs alone."""

from __future__ import annotations

import json as jsonlib
from typing import Annotated

import typer

from deltatree.cli.common import DrafterOption


def inspect(
    target: Annotated[str, typer.Argument(help="Target: a folder, a hub id, or 'shipped'.")],
    drafter: DrafterOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Layers, bytes of state and stash, what fits, and why something is refused. Reads no weights."""
    from deltatree.inspect import inspect_pair

    report = inspect_pair(target, drafter)
    if json:
        print(jsonlib.dumps(report.as_dict()))
    else:
        _print(report)
    if report.refusal:
        raise SystemExit(2)


def _print(report) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for title, rows in report.sections().items():
        table = Table(title=title, title_justify="left", show_header=False)
        for name, value in rows.items():
            table.add_row(name, value)
        console.print(table)
    if report.refusal:
        console.print(f"refused: {report.refusal}", markup=False, style="bold")
