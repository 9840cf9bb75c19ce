"""Without a GPU the twins' tests run through Triton's interpreter, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_cases import INTERPRETED, ON_GPU

from deltatree.kernels.dispatch import has_triton

HERE = Path(__file__).parent
LAWS = sorted(path.stem.removeprefix("test_twin_") for path in HERE.glob("test_twin_*.py"))


@pytest.mark.skipif(not has_triton(), reason="triton is not installed; the test extra brings it where it exists")
@pytest.mark.skipif(INTERPRETED or ON_GPU, reason="the twins' tests already run here")
@pytest.mark.parametrize("law", LAWS)
def test_twins_in_the_interpreter(law):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            "not gpu",
            str(HERE / f"test_twin_{law}.py"),
        ],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert "skipped" not in done.stdout.splitlines()[-1], done.stdout[-500:]
