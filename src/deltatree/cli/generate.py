"""`deltatree generate`: one prompt, one answer."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deltatree.cli.common import (
    BackendOption,
    BudgetOption,
    ContextOption,
    DeviceOption,
    DrafterOption,
    DtypeOption,
    LateSpinner,
    PrefillOption,
    TargetOption,
    followed,
    load_pair,
    parse_budget,
    read_prompt,
)
from deltatree.decode.options import DEFAULT_BUDGET, METHODS, TREES, GenerateOptions
from deltatree.errors import OptionError
from deltatree.files import SHIPPED

if TYPE_CHECKING:
    from deltatree.decode.trace import Trace
    from deltatree.pair_api import Pair


def generate(
    prompt: Annotated[str | None, typer.Option(help="One user message, put through the chat template.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from a UTF-8 file instead.")] = None,
    target: TargetOption = SHIPPED,
    drafter: DrafterOption = None,
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")] = "ddtree",
    budget: BudgetOption = DEFAULT_BUDGET,
    tree: Annotated[str, typer.Option(help=f"Tree policy of ddtree: {', '.join(TREES)}.")] = "best-first",
    transitions: Annotated[
        str, typer.Option(help="Table of the trees `transitions...`: auto (cached, or written now), none, or a file.")
    ] = "auto",
    max_new_tokens: Annotated[int, typer.Option(help="Never a token more.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Keep the most probable tokens up to this mass; 1 keeps all.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep this many tokens; 0 keeps all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the best one; 0 keeps all.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the draws. [default: a fresh one]")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end token.")] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Give the prompt to the target as it is, without template.")
    ] = False,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    backend: BackendOption = None,
    context_length: ContextOption = None,
    prefill: PrefillOption = "own",
    trace: Annotated[
        Path | None, typer.Option(help="Write every round's tree, accepted path and times there, as JSON lines.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")] = False,
) -> None:
    """Answer one prompt; the text streams to stdout, a line of figures follows on stderr."""
    options = GenerateOptions(
        max_new_tokens=max_new_tokens,
        method=method,
        budget=parse_budget(budget),
        tree=tree,
        transitions=transitions,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        ignore_eos=ignore_eos,
    )
    text = read_prompt(prompt, prompt_file)
    with _writing(trace) as write:
        pair = load_pair(target, drafter, device, dtype, backend, context_length, prefill)
        prompt_ids = pair.encode(text, raw=raw)
        notes = trace_of(pair, prompt_ids, options, write) if write is not None else None
        printer = None if json else Printer()
        with _waiting(printer):
            done = pair.collect(prompt_ids, options, on_text=printer, trace=notes)
    if json:
        print(jsonlib.dumps(done.as_dict(), ensure_ascii=False))
        return
    printer.finish()
    print(
        f"{len(done.token_ids)} tokens, {done.rounds} rounds, acceptance length {done.acceptance_length:.2f}, "
        f"{sum(done.budgets) / max(done.rounds, 1):.1f} nodes drafted a round, "
        f"{done.tokens_per_second:.1f} tokens/s after {done.prefill_seconds * 1e3:.0f} ms of prefill, "
        f"ended by {done.stop_reason}",
        file=sys.stderr,
    )


class Printer:
    """The text on stdout as it comes; its first piece, which prefill emits, with the second, so that what the first round
    waits for can be shown on a line of its own."""

    def __init__(self) -> None:
        self.first: str | None = None
        self.num_pieces = 0

    def __call__(self, piece: str) -> None:
        self.num_pieces += 1
        if self.num_pieces == 1:
            self.first = piece
            return
        print((self.first or "") + piece, end="", flush=True)
        self.first = None

    def finish(self) -> None:
        print(self.first or "")

    @property
    def is_fresh(self) -> bool:
        """Nothing stands on the line yet."""
        return self.num_pieces < 2


@contextmanager
def _waiting(printer: Printer | None) -> Iterator[None]:
    from rich.console import Console

    shares_line = printer is not None and sys.stdout.isatty()
    spinner = LateSpinner(Console(stderr=True), lambda: not shares_line or printer.is_fresh)
    with followed(spinner):
        yield


def trace_of(pair: Pair, prompt_ids: list[int], options: GenerateOptions, write: Callable[[dict], object]) -> Trace:
    """A trace whose rows name their tokens' texts; a row about the generation comes first."""
    from deltatree.decode.trace import Trace

    target, drafter = pair.names
    write(
        {
            "target": target,
            "drafter": drafter,
            "method": options.method,
            "budget": options.budget,
            "tree": options.tree,
            "temperature": options.temperature,
            "prompt_length": len(prompt_ids),
        }
    )

    def add(row: dict) -> None:
        texts = pair.tokenizer.batch_decode([[token] for token in [*row["tokens"], row["bonus"]]])
        write(row | {"texts": texts[:-1], "bonus_text": texts[-1]})

    return Trace(add)


@contextmanager
def _writing(file: Path | None) -> Iterator[Callable[[dict], object] | None]:
    """Writes rows to a file of JSON lines. Raises OptionError if it cannot be opened."""
    if file is None:
        yield None
        return
    try:
        handle = file.open("w", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"trace {str(file)!r} cannot be written ({error.strerror}); name another file") from error
    with handle:
        yield lambda row: print(jsonlib.dumps(row, ensure_ascii=False), file=handle, flush=True)
