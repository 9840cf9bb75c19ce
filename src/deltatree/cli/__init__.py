"""The command line: parses, calls the library, and turns its errors into one sentence and exit code 2."""

from __future__ import annotations

import sys

import typer

from deltatree.cli.bench import bench, chart
from deltatree.cli.demo import demo
from deltatree.cli.generate import generate
from deltatree.cli.inspect import inspect
from deltatree.cli.plan import plan
from deltatree.cli.serve import serve
from deltatree.cli.transitions import transitions
from deltatree.errors import DeltatreeError

app = typer.Typer(
    help="Lossless draft-tree decoding: DDTree on DFlash drafters, for targets with a recurrent state.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo)
app.command()(generate)
app.command()(inspect)
app.command()(bench)
app.command()(chart)
app.command()(plan)
app.command()(serve)
app.command()(transitions)


def main() -> None:
    """Entry point of `deltatree` and `python -m deltatree`."""
    try:
        app()
    except DeltatreeError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        raise SystemExit(130) from None
