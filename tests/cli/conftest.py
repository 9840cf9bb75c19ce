"""How tests call a command: as a process of its own, or here, where everything is imported already."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.fixture
def run_here(capsys, monkeypatch):
    """Calls `deltatree` in this process: a CompletedProcess of its arguments."""
    from deltatree.cli import main

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["deltatree", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return subprocess.CompletedProcess(arguments, ended.value.code, *capsys.readouterr())

    return run
