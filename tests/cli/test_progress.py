"""What takes its time is told to who listens, and shown where a person waits: on a terminal, once it lasts."""

import logging
import threading

import pytest

from deltatree.cli.common import LateSpinner, followed
from deltatree.cli.generate import Printer
from deltatree.models import ReferenceTarget, reference
from deltatree.progress import LOGGER, telling


class Screen:
    """A console that notes what its spinner does."""

    def __init__(self, is_terminal=True):
        self.is_terminal, self.seen, self.appeared = is_terminal, [], threading.Event()

    def status(self, text):
        self.text = text
        return self

    def start(self):
        self.seen.append(self.text)
        self.appeared.set()

    def update(self, text):
        self.seen.append(text)

    def stop(self):
        self.seen.append("gone")


def test_a_long_prompt_tells_how_far_it_is(hybrid, monkeypatch):
    monkeypatch.setattr(reference, "PREFILL_CHUNK", 32)
    target, shown = ReferenceTarget(hybrid), []
    with followed(shown.append):
        target.prefill(list(range(32)), target.new_state())
        assert shown == []  # one chunk is no story
        target.prefill(list(range(80)), target.new_state())
    what = "prefill of 80 tokens"
    assert shown == [what, f"{what}: 32 done", f"{what}: 64 done", f"{what}: 80 done", None]


def test_nobody_sees_it_unasked(hybrid, monkeypatch, capsys, caplog):
    monkeypatch.setattr(reference, "PREFILL_CHUNK", 32)
    target = ReferenceTarget(hybrid)
    target.prefill(list(range(80)), target.new_state())
    assert capsys.readouterr() == ("", "") and not caplog.records
    with caplog.at_level(logging.INFO, LOGGER.name):  # what a server's log keeps
        target.prefill(list(range(80)), target.new_state())
    assert [record.getMessage() for record in caplog.records] == ["prefill of 80 tokens"]


def test_listening_ends_and_so_does_what_failed():
    before, shown = (list(LOGGER.handlers), LOGGER.level, LOGGER.propagate), []
    with pytest.raises(MemoryError), followed(shown.append), telling("preparing 64 nodes"):
        raise MemoryError
    assert shown == ["preparing 64 nodes", None]
    assert (LOGGER.handlers, LOGGER.level, LOGGER.propagate) == before


def test_a_spinner_comes_late_and_goes(monkeypatch):
    monkeypatch.setattr(LateSpinner, "DELAY", 0.01)
    screen = Screen()
    with followed(LateSpinner(screen)), telling("preparing 64 nodes") as tell:
        assert screen.appeared.wait(5)
        tell("half")
    assert screen.seen == ["preparing 64 nodes", "preparing 64 nodes: half", "gone"]


def test_what_is_quick_is_not_shown(monkeypatch):
    monkeypatch.setattr(LateSpinner, "DELAY", 30)
    screen, spinner = Screen(), None
    spinner = LateSpinner(screen)
    with followed(spinner), telling("preparing 2 nodes"):
        timer = spinner._timer
    timer.join(5)  # cancelled
    assert screen.seen == [] and not timer.is_alive()


@pytest.mark.parametrize(("is_terminal", "is_free"), [(False, True), (True, False)])
def test_no_spinner_in_a_pipe_or_behind_text(is_terminal, is_free, monkeypatch):
    monkeypatch.setattr(LateSpinner, "DELAY", 0)
    spinner = LateSpinner(Screen(is_terminal), lambda: is_free)
    spinner("preparing 64 nodes")
    assert spinner._timer is None
    spinner(None)


def test_the_text_begins_after_the_first_round(capsys):
    """So that the spinner of what that round waits for has a line of its own."""
    printer = Printer()
    printer("The")
    assert printer.is_fresh and capsys.readouterr().out == ""
    printer(" end")
    assert not printer.is_fresh and capsys.readouterr().out == "The end"
    printer(".")
    printer.finish()
    assert capsys.readouterr().out == ".\n"
    short = Printer()
    short("Yes")
    short.finish()
    assert capsys.readouterr().out == "Yes\n"
