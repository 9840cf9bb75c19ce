"""`deltatree bench` and `deltatree chart`: measure, and show what was measured."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deltatree.cli.common import (
    BackendOption,
    ContextOption,
    DeviceOption,
    DrafterOption,
    DtypeOption,
    PrefillOption,
    TargetOption,
    followed,
    load_pair,
)
from deltatree.decode.options import METHODS, TREES
from deltatree.files import SHIPPED

if TYPE_CHECKING:
    from deltatree.bench import BenchRun, Ranks, Record


def bench(
    dataset: Annotated[
        str,
        typer.Option(help="A name, FILE.jsonl as it is, or NAME=FILE.jsonl with NAME's template; several by comma."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for records, summary and chart; an interrupted run goes on there.")],
    target: TargetOption = SHIPPED,
    drafter: DrafterOption = None,
    samples: Annotated[int, typer.Option(help="Samples of each data set.")] = 20,
    max_new_tokens: Annotated[int, typer.Option(help="Never a token more, in every turn.")] = 512,
    budgets: Annotated[
        str, typer.Option(help="Drafted nodes a round, one ddtree arm each; auto decides it every round.")
    ] = "16,64,auto",
    methods: Annotated[str, typer.Option(help="What to compare; ar always runs as the baseline.")] = ",".join(METHODS),
    tree: Annotated[str, typer.Option(help=f"Tree policy of ddtree: {', '.join(TREES)}.")] = "best-first",
    transitions: Annotated[
        str, typer.Option(help="Table of the trees `transitions...`: auto (cached, or written now), none, or a file.")
    ] = "auto",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Keep the most probable tokens up to this mass; 1 keeps all.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep this many tokens; 0 keeps all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the best one; 0 keeps all.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the first request.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end token.")] = False,
    thinking: Annotated[bool, typer.Option("--thinking/--no-thinking", help="Given to the chat template.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Prompts without the chat template.")] = False,
    stage_samples: Annotated[int, typer.Option(help="Decode this many samples again with stage timing.")] = 0,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    backend: BackendOption = None,
    context_length: ContextOption = None,
    prefill: PrefillOption = "own",
) -> None:
    """Compare plain decoding, DFlash and DDTree: speed, acceptance length, losslessness. Exit code 1 if a text diverged.

    Under torchrun every process decodes its share of the prompts.
    """
    from deltatree.bench.plan import BenchPlan, parse_budgets, parse_methods
    from deltatree.bench.provenance import describe_samples
    from deltatree.bench.ranks import Ranks
    from deltatree.bench.records import make_folder, refuse_other_run
    from deltatree.bench.samples import load_samples

    ranks = Ranks.of(os.environ)
    plan = BenchPlan(
        methods=parse_methods(methods),
        budgets=parse_budgets(budgets),
        tree=tree,
        transitions=transitions,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        ignore_eos=ignore_eos,
        thinking=thinking,
        raw=raw,
        stage_samples=stage_samples,
    )
    chosen = load_samples(dataset, samples)
    refuse_other_run(out, {"plan": plan.as_dict(), "samples": describe_samples(chosen)})
    make_folder(out)
    pair = load_pair(target, drafter, _own_device(device, ranks), dtype, backend, context_length, prefill)

    from deltatree.bench.harness import run_bench

    with record_progress(ranks.is_first) as on_record:
        command = shlex.join(["deltatree", *sys.argv[1:]])
        run = run_bench(pair, chosen, plan, out, command=command, ranks=ranks, on_record=on_record)
    if not ranks.is_first:
        return
    report(run, out)
    if run.num_diverged:
        raise SystemExit(1)


def chart(
    runs: Annotated[list[Path] | None, typer.Argument(help="Folders of bench runs, shown side by side.")] = None,
    out: Annotated[Path, typer.Option(help="The picture: .png, .svg or .pdf.")] = Path("chart.png"),
    trace: Annotated[
        Path | None, typer.Option(help="Draw a generation instead: the FILE of deltatree generate --trace.")
    ] = None,
    round_number: Annotated[
        int | None, typer.Option("--round", help="Whose tree to show. [default: the one that accepted most]")
    ] = None,
) -> None:
    """Draw bench runs (speedup, acceptance length, stage shares), or one generation's trace (a tree, budgets)."""
    from deltatree.chart import draw_chart, draw_trace
    from deltatree.errors import OptionError

    if trace is None and round_number is not None:
        raise OptionError("--round chooses a round of a trace; name its file with --trace")
    if trace is not None and runs:
        raise OptionError("draw either bench runs or a trace; leave one of them out")
    for file in draw_chart(runs or [], out) if trace is None else draw_trace(trace, out, round_number):
        print(file)


def _own_device(device: str | None, ranks: Ranks) -> str | None:
    """Under torchrun each process has the GPU of its own number, unless a device was named."""
    if device is not None or ranks.size == 1:
        return device
    import torch

    return f"cuda:{ranks.local_rank}" if torch.cuda.is_available() else None


@contextmanager
def record_progress(shown: bool) -> Iterator:
    """A bar on stderr while records come in; one line a record where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import Progress

    def line(done: int, total: int, record: Record) -> None:
        if shown:
            print(f"{done}/{total} {_line(record)}", file=sys.stderr, flush=True)

    console = Console(stderr=True)
    if not shown or not console.is_terminal:
        yield line
        return
    with Progress(console=console) as progress:
        task = progress.add_task(description := "warming up", total=None)

        def advance(done: int, total: int, record: Record) -> None:
            nonlocal description
            description = _line(record)
            progress.update(task, total=total, completed=done, description=description)

        with followed(lambda text: progress.update(task, description=text or description)):
            yield advance


def _line(record: Record) -> str:
    speed = f"{record.tokens_per_second:.1f} tokens/s" if record.rounds else "ended by prefill"
    return f"{record.dataset} {record.sample} {record.arm.label}: {len(record.token_ids)} tokens, {speed}, {record.verdict}"


def report(run: BenchRun, out: Path) -> None:
    """Write summary.json and the chart into a run's folder, and its tables to stdout."""
    from rich.console import Console

    from deltatree.bench.records import write_json
    from deltatree.bench.summary import summarise, summary_tables, verdict_lines
    from deltatree.chart import draw_chart

    summary = summarise(run.info, run.records)
    write_json(out / "summary.json", summary)
    files = [out / "summary.json", *draw_chart([out], out / "chart.png")]
    console = Console(width=None if sys.stdout.isatty() else 130)
    for table in summary_tables(summary):
        console.print(table)
    for line in verdict_lines(summary):
        console.print(line, markup=False, highlight=False)
    console.print("wrote", ", ".join(str(file) for file in files), markup=False, highlight=False, soft_wrap=True)
