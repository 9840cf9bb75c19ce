"""`deltatree transitions`: let a target write the table of its own transitions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deltatree.cli.common import DeviceOption, DtypeOption, load_pair
from deltatree.errors import OptionError


def transitions(
    target: Annotated[str, typer.Argument(help="Target: a folder, a hub id, or 'shipped'.")],
    out: Annotated[
        Path | None, typer.Option(help="The table's file. [default: the cache, by the weights' hash]")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens that the target writes. [default: 262144 on a CPU, else 600000]")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Sequences side by side, at most. [default: 256 on a CPU, else 512]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the text.")] = 0,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Write the table of n-grams that the tree policies `transitions` and `transitions-chain` read."""
    for name, value in (("tokens", tokens), ("batch", batch)):
        if value is not None and value < 1:
            raise OptionError(f"{name}={value} is not possible; give a whole number of at least 1")
    if out is not None and out.is_dir():
        raise OptionError(f"--out {out} is a folder; name a file")
    pair = load_pair(target, None, device, dtype)

    from deltatree.transitions.store import default_tokens, showing_progress, table_file, write_table

    file = out or table_file(target)
    tokens = tokens or default_tokens(pair.target)
    with showing_progress(tokens) as on_tokens:
        table = write_table(
            pair.target, pair.tokenizer, file, num_tokens=tokens, batch=batch, seed=seed, on_tokens=on_tokens
        )
    print(
        f"{file}: {table.num_entries} n-grams of at least {tokens} tokens, {file.stat().st_size / 1e6:.1f} MB on disk, "
        f"{table.num_bytes / 1e6:.1f} MB in memory"
    )
