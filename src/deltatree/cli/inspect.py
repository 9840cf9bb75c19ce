"""`deltatree inspect`: what a target (and a drafter) is and needs, from the configs alone."""

from __future__ import annotations

import json as jsonlib
from typing import Annotated

import typer

from deltatree.cli.common import BackendOption, DeviceOption, DrafterOption, DtypeOption, load_pair


def inspect(
    target: Annotated[str, typer.Argument(help="Target: a folder, a hub id, or 'shipped'.")],
    drafter: DrafterOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    numerics: Annotated[
        bool, typer.Option("--numerics", help="Load the target and measure how trees round differently from one token.")
    ] = False,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    backend: BackendOption = None,
) -> None:
    """Layers, bytes of state and stash, what fits, and why something is refused. Reads no weights without --numerics."""
    from deltatree.inspect import inspect_pair

    report = inspect_pair(target, drafter)
    noise = {}
    if numerics and not report.refusal:
        from deltatree.bench.numerics import noise_by_nodes

        noise = noise_by_nodes(load_pair(target, None, device, dtype, backend))
    if json:
        print(jsonlib.dumps(report.as_dict() | ({"noise": noise} if noise else {})))
    else:
        _print(report, noise)
    if report.refusal:
        raise SystemExit(2)


def _print(report, noise: dict[int, float]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for title, rows in report.sections().items():
        table = Table(title=title, title_justify="left", show_header=False)
        for name, value in rows.items():
            table.add_row(name, value)
        console.print(table)
    if noise:
        title = "noise of a tree's logits"
        table = Table("nodes", "noise", title=title, title_justify="left")
        for nodes, size in noise.items():
            table.add_row(str(nodes), f"{size:.2g}")
        console.print(table)
    if report.refusal:
        console.print(f"refused: {report.refusal}", markup=False, style="bold")
