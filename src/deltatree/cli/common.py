"""What the commands share: their common options, progress, and quiet libraries."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock, Timer
from typing import TYPE_CHECKING, Annotated

import typer

from deltatree.decode.options import AUTO
from deltatree.errors import OptionError, PromptError
from deltatree.files import SHIPPED

if TYPE_CHECKING:
    from rich.console import Console

    from deltatree.pair_api import Pair

TargetOption = Annotated[str, typer.Option("--target", help="Target: a folder, a hub id, or 'shipped'.")]
DrafterOption = Annotated[
    str | None, typer.Option("--drafter", help="DFlash drafter: a folder, a hub id, or 'shipped'. [default: none]")
]
BudgetOption = Annotated[
    str, typer.Option("--budget", help="Drafted nodes a round, for ddtree; auto decides it every round.")
]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ... [default: a GPU if there is one]")]
DtypeOption = Annotated[
    str | None, typer.Option(help="float32, bfloat16 or float16. [default: bfloat16 on a GPU, float32 on a CPU]")
]

BackendOption = Annotated[
    str | None, typer.Option(help="fast, fast-host or reference. [default: fast on a GPU where it covers the model]")
]
ContextOption = Annotated[
    int | None, typer.Option("--context-length", help="Tokens the fast backend keeps room for. [default: 32768]")
]
PrefillOption = Annotated[
    str,
    typer.Option(help="What takes recurrent layers through a prompt: own, or fla (flash-linear-attention, on a GPU)."),
]


def load_pair(
    target: str,
    drafter: str | None,
    device: str | None,
    dtype: str | None,
    backend: str | None = None,
    context_length: int | None = None,
    prefill: str = "own",
) -> Pair:
    """Load with progress on stderr; the libraries' own chatter is silenced, because the command line owns the screen."""
    with progress(f"loading {target if target != SHIPPED else 'the shipped pair'}"):
        import transformers

        from deltatree import load

        if target == SHIPPED:
            import torch

            torch.set_num_threads(1)  # its operations are too small to share; two threads mostly wait for each other
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        return load(
            target,
            drafter,
            device=device,
            dtype=dtype,
            backend=backend,
            context_length=context_length,
            prefill=prefill,
        )


@contextmanager
def progress(what: str) -> Iterator[None]:
    """A spinner on stderr while something takes its time; a plain line where stderr is no terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        print(f"{what} ...", file=sys.stderr, flush=True)
        yield
        return
    with console.status(what) as status, followed(lambda text: status.update(text or what)):
        yield


@contextmanager
def followed(show: Callable[[str | None], object]) -> Iterator[None]:
    """Give `show` what the library says takes its time (see `deltatree.progress`), and None when that is over."""
    from deltatree.progress import LOGGER

    handler = logging.Handler()
    handler.emit = lambda record: show(record.shown)
    kept = LOGGER.level, LOGGER.propagate
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.DEBUG)
    LOGGER.propagate = False  # one display at a time
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(kept[0])
        LOGGER.propagate = kept[1]


class LateSpinner:
    """Shows what lasts longer than DELAY seconds, where and while the screen is free for it.

    is_free: whether the cursor stands at the start of a line, so that the spinner's line covers nothing
    """

    DELAY = 0.5

    def __init__(self, console: Console, is_free: Callable[[], bool] = lambda: True) -> None:
        self.console, self.is_free = console, is_free
        self._lock, self._text, self._timer, self._status = Lock(), "", None, None

    def __call__(self, text: str | None) -> None:
        with self._lock:
            if text is None:
                self._end()
            elif self._status is not None:
                self._status.update(text)
            elif self.console.is_terminal and self.is_free():
                self._text = text
                if self._timer is None:
                    self._timer = Timer(self.DELAY, self._begin)
                    self._timer.daemon = True
                    self._timer.start()

    def _begin(self) -> None:
        with self._lock:
            if self._timer is not None:  # else it ended meanwhile
                self._status = self.console.status(self._text)
                self._status.start()

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._status is not None:
            self._status.stop()
        self._timer = self._status = None


def parse_budget(text: str) -> int | str:
    """A whole number of drafted nodes, or `auto`. Raises OptionError."""
    try:
        return text if text == AUTO else int(text)
    except ValueError:
        raise OptionError(f"budget {text!r} is not a whole number of drafted nodes; try 32, or auto") from None


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt's text from one of the two options. Raises OptionError, PromptError."""
    if (prompt is None) == (prompt_file is None):
        raise OptionError("give exactly one of --prompt and --prompt-file")
    if prompt_file is None:
        return prompt
    try:
        return prompt_file.read_text(encoding="utf-8")
    except OSError as error:
        raise PromptError(f"{prompt_file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PromptError(f"{prompt_file} is not UTF-8 (byte {error.start}); convert it first") from error
