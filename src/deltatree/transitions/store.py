"""Where tables lie: one file per set of weights in a cache folder, written by the target when it is first asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from deltatree.errors import CheckpointError, MismatchError, OptionError
from deltatree.files import resolve_checkpoint, weight_hashes
from deltatree.transitions.self_text import TEMPERATURE, chat_opening, write_self_text
from deltatree.transitions.table import TransitionTable

PACKAGED = Path(__file__).parent / "tables"
"""Tables that ship: the one of the shipped target, written by `deltatree transitions shipped --out FILE` on a CPU."""
CPU_TOKENS, DEVICE_TOKENS = 262_144, 600_000
"""Self-text tokens of a table, unless told otherwise: on a CPU some minutes' worth."""
CPU_BATCH, DEVICE_BATCH = 256, 512


def table_file(source: str) -> Path:
    """The table of a target, named by the hash of its weights: in this package if it is there, else beside the hub's cache.

    source: a folder, `shipped` or a hub id. Raises CheckpointError if it has no weights.
    """
    name = f"{_digest(source)}.safetensors"
    return PACKAGED / name if (PACKAGED / name).is_file() else cache_folder() / name


def cache_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "deltatree" / "transitions"


def _digest(source: str) -> str:
    hashes = weight_hashes(resolve_checkpoint(source, "target"))
    if not hashes:
        raise CheckpointError(f"target {source!r} has no *.safetensors to name its transitions by; pass a table's path")
    return hashlib.sha256(repr(sorted(hashes.items())).encode()).hexdigest()[:32]


def default_tokens(target) -> int:
    """Self-text tokens of a table of this target, as it is placed now."""
    return CPU_TOKENS if target.device.type == "cpu" else DEVICE_TOKENS


def write_table(
    target,
    tokenizer,
    file: Path,
    *,
    num_tokens: int | None = None,
    batch: int | None = None,
    seed: int = 0,
    on_tokens: Callable[[int], object] | None = None,
) -> TransitionTable:
    """Let the target write its text, count it, and save the table. Raises OptionError if the file cannot be written.

    target: the reference or the fast one    num_tokens: of self-text, at least
    batch: sequences side by side, at most    on_tokens: told how many were written since
    """
    num_tokens = num_tokens or default_tokens(target)
    batch = batch or (CPU_BATCH if target.device.type == "cpu" else DEVICE_BATCH)
    part = file.with_name(f"{file.name}.part")
    try:  # before minutes of work, not after
        file.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
    except OSError as error:
        raise OptionError(
            f"transitions file {file} cannot be written ({error.strerror}); choose another path"
        ) from error
    try:
        text = write_self_text(
            target, num_tokens=num_tokens, batch=batch, opening=chat_opening(tokenizer), seed=seed, on_tokens=on_tokens
        )
        table = TransitionTable.count(text.cpu(), target.vocab_size)
        table.save(part, {"num_tokens": str(text.numel()), "temperature": str(TEMPERATURE), "seed": str(seed)})
        part.replace(file)  # at once: another process never sees half a table
    finally:
        part.unlink(missing_ok=True)
    return table


def table_for(choice: str, source: str, target, tokenizer) -> TransitionTable:
    """The table that an option names: `auto` is the cached one, written now if there is none; else a file.

    source: the target as the user named it    target: the reference or the fast one. Raises CheckpointError, MismatchError, OptionError.
    """
    file = table_file(source) if choice == "auto" else Path(choice)
    if choice == "auto" and not file.is_file():
        with showing_progress(default_tokens(target)) as on_tokens:
            table = write_table(target, tokenizer, file, on_tokens=on_tokens)
    else:
        table = TransitionTable.load(file)
    if table.vocab_size != target.vocab_size:
        raise MismatchError(
            f"transitions {file} are of a vocabulary of {table.vocab_size}, the target has {target.vocab_size}; "
            "write its own with `deltatree transitions TARGET`"
        )
    return table


@contextmanager
def showing_progress(num_tokens: int) -> Iterator[Callable[[int], object]]:
    """A bar on stderr while the target writes; a plain line where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    what = "the target writes the text of its transitions (once)"
    if not console.is_terminal:
        console.print(f"{what}: {num_tokens} tokens ...", highlight=False, soft_wrap=True)
        yield lambda count: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(what, total=num_tokens)
        yield lambda count: progress.advance(task, count)
