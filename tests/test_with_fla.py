"""B61: with flash-linear-attention installed, a machine without a GPU decodes the same tokens as without it."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

DECODE = """
import sys
if {hide}:
    sys.modules["fla"] = None  # as if it were not installed
sys.path.insert(0, {tests!r})
import torch
from tiny import VOCAB, tiny_model
from deltatree.decode import Ending, Sampler, decode
from deltatree.drafter import RandomDrafter
from deltatree.models import ReferenceTarget
from deltatree.tree import best_first
target = ReferenceTarget(tiny_model("qwen3_5_moe_text"))
rounds = decode(target, RandomDrafter(VOCAB), [5, 6, 7], build_tree=best_first, budget=8, ending=Ending(8), sampler=Sampler())
print([token for r in rounds for token in r.token_ids])
"""


@pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="flash-linear-attention is not installed")
def test_B61_the_same_tokens_with_and_without():
    tests = str(Path(__file__).parent)
    outputs = []
    for hide in (False, True):
        code = DECODE.format(hide=hide, tests=tests)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1] and len(outputs[0]) > 8
