"""Prefill on a GPU: both rules agree, a long prompt stays within memory, and drafting starts from what plain decoding does."""

import importlib.util
import logging

import pytest
import torch
from tiny import VOCAB, tiny_model

from deltatree.decode import Ending, Sampler, decode
from deltatree.drafter import RandomDrafter
from deltatree.models import FastTarget, ReferenceTarget, reference
from deltatree.models.shapes import random_target
from deltatree.tree import best_first, no_draft
from deltatree.verify.chain import fla_chain, own_chain

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
HAS_FLA = importlib.util.find_spec("fla") is not None
needs_fla = pytest.mark.skipif(not HAS_FLA, reason="flash-linear-attention is not installed")
LIBRARY_TOLERANCE = (
    5e-3 if HAS_FLA else 1e-3
)  # its forward takes that package by itself, whose float32 products are TF32
CONTEXT = 24_576


def relative(actual, expected):
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def chain_inputs(length, dtype, heads=8, seed=0):
    """The published head sizes, on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape, dtype=dtype):
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32).to(dtype)

    qk, v = (1, length, heads // 2, 128), (1, length, heads, 128)
    inputs = dict(q=normal(*qk), k=normal(*qk), v=normal(*v), beta=normal(*v[:3]).sigmoid())
    inputs["log_decay"] = -0.1 * normal(*v[:3], dtype=torch.float32).exp()
    return normal(1, heads, 128, 128, dtype=torch.float32), inputs


def in_float64(state, inputs):
    return own_chain(state.double(), **{name: x.double() for name, x in inputs.items()})


@pytest.mark.parametrize("length", [1, 63, 64, 1000, 4096])
def test_the_own_rule_keeps_float32_accuracy(length):
    state, inputs = chain_inputs(length, torch.float32)
    for actual, expected in zip(own_chain(state, **inputs), in_float64(state, inputs), strict=True):
        assert relative(actual, expected) < 1e-5


@needs_fla
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 1000, 4096])
def test_flash_linear_attention_agrees_with_the_own_rule(length, dtype, tolerance):
    """Its products of float32 numbers are TF32; state in, state out, outputs."""
    state, inputs = chain_inputs(length, dtype)
    before = state.clone()
    out, after = fla_chain(state, **inputs)
    expected = in_float64(state, inputs)
    assert torch.equal(state, before)
    assert after.dtype == torch.float32 and after.shape == state.shape and out.dtype == dtype
    assert relative(out, expected[0]) < tolerance and relative(after, expected[1]) < tolerance


@needs_fla
def test_flash_linear_attention_goes_on_from_a_state():
    state, inputs = chain_inputs(1000, torch.bfloat16)
    _, whole = fla_chain(state, **inputs)
    for part in (slice(0, 300), slice(300, 1000)):
        _, state = fla_chain(state, **{name: x[:, part] for name, x in inputs.items()})
    assert relative(state, whole) < 1e-2


@pytest.mark.parametrize("architecture", ["qwen3_5_moe_text", "qwen3_next", "qwen3_moe"])
def test_later_chunks_attend_to_what_they_may_without_a_mask(architecture, monkeypatch):
    """float32: chunks of 64 with the named pattern, against one chunk, against the library's forward over all."""
    model = tiny_model(architecture).cuda()
    prompt = [(7 * i + 3) % VOCAB for i in range(150)]
    target = ReferenceTarget(model)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt], device="cuda"), use_cache=False).logits[0, -1:].float()
    assert relative(target.prefill(prompt, target.new_state()).logits, expected) < LIBRARY_TOLERANCE
    monkeypatch.setattr(reference, "PREFILL_CHUNK", 64)
    assert type(target._chain_mask("full_attention", 64, 64)).__name__ == "CausalBias"
    assert relative(target.prefill(prompt, target.new_state()).logits, expected) < LIBRARY_TOLERANCE


@pytest.mark.parametrize("prefill", ["own", pytest.param("fla", marks=needs_fla)])
def test_a_long_prompt_takes_no_more_than_one_chunks_memory(prefill):
    """20,000 tokens in bfloat16: beside state and features, no more than 5,000 tokens take."""
    model = random_target("tiny", dtype=torch.bfloat16, max_position_embeddings=CONTEXT).model
    target = FastTarget(ReferenceTarget(model, (1, 4), prefill=prefill), context_length=CONTEXT, buckets=(1, 9))
    peaks = {}
    for length in (5_000, 5_000, 20_000):  # the first one compiles
        state = target.new_state()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        verified = target.prefill([(7 * i) % 997 for i in range(length)], state)
        torch.cuda.synchronize()
        features = verified.features.numel() * verified.features.element_size()
        peaks[length] = torch.cuda.max_memory_allocated() - before - features
        assert torch.isfinite(verified.logits).all() and state.length == length
        del state, verified
    attended = 4 * CONTEXT * 4 * 32 * 2  # keys and values once for each query head, while a layer attends
    assert peaks[20_000] < peaks[5_000] + attended


@needs_fla
def test_plain_and_drafted_decoding_start_from_the_same_bits():
    model = random_target("tiny", dtype=torch.bfloat16).model
    prompt = [(7 * i + 3) % 997 for i in range(300)]
    target = FastTarget(ReferenceTarget(model, prefill="fla"), context_length=1024, buckets=(1, 9, 17))
    assert target.reference.chain_rule is fla_chain
    results = [target.prefill(prompt, target.new_state()).logits for _ in range(2)]
    assert torch.equal(*results)
    firsts = []
    for policy, budget in ((no_draft, 0), (best_first, 8)):
        rounds = decode(
            target, RandomDrafter(997), prompt, build_tree=policy, budget=budget, ending=Ending(1), sampler=Sampler()
        )
        firsts.append([token for r in rounds for token in r.token_ids])
    assert firsts[0] == firsts[1]


def test_a_capture_tells_what_it_prepares(caplog):
    target = FastTarget(ReferenceTarget(tiny_model("qwen3_5_text").cuda()), context_length=256, buckets=(1, 9))
    state = target.new_state()
    with caplog.at_level(logging.INFO, "deltatree.progress"), torch.inference_mode():
        target.captured_verify(state.buffers, 9)
        target.captured_verify(state.buffers, 9)
    told = [record.getMessage() for record in caplog.records]
    assert told == ["preparing 9 nodes (first use compiles kernels; cached afterwards)"]
