"""`deltatree plan`: what drafting would bring on this machine, projected from its costs and a drafter's acceptance."""

from __future__ import annotations

import json as jsonlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from deltatree.cli.common import (
    BackendOption,
    DeviceOption,
    DrafterOption,
    DtypeOption,
    followed,
    load_pair,
    progress,
)
from deltatree.errors import OptionError


def plan(
    shape: Annotated[
        str | None,
        typer.Option(help="Random weights: tiny, qwen3.6-35b-a3b, qwen3.6-27b, qwen3-coder-30b-a3b."),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="A loadable target instead: a folder, a hub id, or 'shipped'.")
    ] = None,
    drafter: DrafterOption = None,
    acceptance: Annotated[
        str,
        typer.Option(
            help="own-domain, chat, very-weak, very-strong, or by comma how often the first 1, 2, ... tokens are all right."
        ),
    ] = "chat",
    budgets: Annotated[
        str, typer.Option(help="Drafted nodes a round, one row each; auto decides it.")
    ] = "8,16,32,64,auto",
    tree: Annotated[
        str, typer.Option(help="Tree policies of ddtree by comma, every budget once with each: best-first, calibrated.")
    ] = "best-first",
    context: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 256,
    max_new_tokens: Annotated[int, typer.Option(help="For each prompt and method.")] = 128,
    repeats: Annotated[int, typer.Option(help="Prompts; figures are medians over them.")] = 3,
    seed: Annotated[int, typer.Option(help="Of prompts and luck.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the rows there as JSON lines, too.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON lines instead of a table.")] = False,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    backend: BackendOption = None,
) -> None:
    """Project plain decoding, DFlash and DDTree on this machine without a trained drafter: times are real, acceptance is given.

    A drafter that is named, or comes with a shape, only lends its time to each draft.
    """
    from deltatree.bench.plan import parse_budgets
    from deltatree.projection.profiles import parse_profile

    if (shape is None) == (target is None):
        raise OptionError("give exactly one of --shape and --target")
    profile = parse_profile(acceptance)
    chosen = parse_budgets(budgets)
    if out is not None and not out.absolute().parent.is_dir():
        raise OptionError(f"folder {str(out.absolute().parent)!r} does not exist; choose another file with --out")

    from deltatree.projection.run import NOTE, ProjectionPlan, project
    from deltatree.projection.shapes import target_and_drafter

    projected = ProjectionPlan(
        budgets=chosen,
        trees=tuple(name.strip() for name in tree.split(",")),
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        context_length=context,
        seed=seed,
    )
    if target is not None:
        pair = load_pair(target, drafter, device, dtype, backend)
        loaded, timed, names = pair.target, pair.drafter, pair.names
    else:
        with progress(f"making random weights of shape {shape}"):
            loaded, timed = target_and_drafter(shape, profile.depth + 1, device=device, dtype=dtype, backend=backend)
        names = (f"random {shape}", "random")
    rows = _run(project, loaded, profile, projected, timed, names)
    lines = [jsonlib.dumps(row) for row in rows]
    if out is not None:
        out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if json:
        print("\n".join(lines))
    else:
        _show(rows, profile, NOTE, timed is not None)


def _run(project, target, profile, plan, timed, names) -> list[dict]:
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(description := "warming up", total=None)

        def on_pass(done: int, total: int, arm) -> None:
            nonlocal description
            description = arm.label
            bar.update(task, total=total, completed=done, description=description)

        with followed(lambda text: bar.update(task, description=text or description)):
            return project(target, profile, plan, timed=timed, names=names, on_pass=on_pass)


def _show(rows: list[dict], profile, note: str, is_timed: bool) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 120)
    first = rows[0]
    title = f"PROJECTION for {first['target']} on {first['device']}, acceptance profile {profile.name}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("")
    for column in (
        "tokens/s",
        "speedup",
        "vs DFlash",
        "accepted",
        "nodes",
        "ms/round",
        "departures",
        "exp. acc.",
        "exp. tok/s",
        "of best",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["label"],
            f"{row['tokens_per_second']:.1f}",
            f"{row['speedup']:.2f}",
            f"{row['speedup_over_dflash']:.2f}",
            f"{row['acceptance_length']:.2f}",
            f"{row['nodes_per_round']:.1f}",
            f"{row['milliseconds_per_round']:.2f}",
            str(row["departures"]),
            f"{row['expected_acceptance_length']:.2f}",
            f"{row['expected_tokens_per_second']:.1f}",
            f"{row['expected_share_of_best_fixed']:.3f}",
        )
    console.print(table)
    claim = "published" if profile.is_published else "made up" if profile.name != "given" else "as given"
    lines = [
        note,
        f"profile ({claim}): the first 1, 2, ... drafted tokens are all right with {', '.join(f'{p:g}' for p in profile.all_right)}; "
        f"a whole chain then accepts {profile.chain_length:.2f} tokens a round",
        "departures: near ties that fell otherwise than in plain decoding; the drafter was then told how the text goes on",
        "expected: the last three columns are the same methods at the measured ms/round over "
        f"{min(row['expected_rounds'] for row in rows)} rounds or more of drafts by the profile, without a model; the columns before them hold these few prompts' luck",
    ]
    if not is_timed:
        lines.append("no drafter was named, so that drafts cost nothing here; with --drafter their time is in")
    for line in lines:
        console.print(line, markup=False, highlight=False)
