"""Shared by all tests: two cores are the rule here, and one thread per test process keeps timings and sums steady."""

import os
import tempfile

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="deltatree-tests-")  # what tests measure is no one else's

import pytest
import torch
from targets import fast_target, reference_target
from tiny import tiny_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def hybrid():
    """The tiny hybrid of the Qwen3.5 mixture-of-experts shape: 6 recurrent and 2 full-attention layers."""
    return tiny_model("qwen3_5_moe_text")


@pytest.fixture(scope="session")
def attention_moe():
    """The tiny attention-only mixture of experts of the Qwen3-MoE shape."""
    return tiny_model("qwen3_moe")


@pytest.fixture(params=[reference_target, fast_target], ids=["reference", "fast"])
def target_of(request):
    """Both targets share every test: makes one of a model and taps."""
    return request.param
