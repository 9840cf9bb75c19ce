"""Prefill: the chunk rule against the recurrence token by token, what goes to flash-linear-attention, and memory that is bounded."""

import importlib.machinery
import subprocess
import sys
import types
import warnings
from functools import partial

import pytest
import torch
from tiny import VOCAB, assert_same_state, committed, tiny_model
from torch.nn.attention.bias import causal_lower_right

import deltatree
from deltatree.errors import OptionError
from deltatree.models import ReferenceTarget, reference
from deltatree.verify.chain import chain_rule, fla_chain, own_chain

PROMPT = [(7 * i + 3) % VOCAB for i in range(150)]
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def chain_inputs(length, dtype=torch.float32, *, decay=1.0, batch=1, key_heads=2, heads=6, seed=0):
    """A state and a chain; decay: how strongly tokens forget."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    qk, v = (batch, length, key_heads, 16), (batch, length, heads, 8)
    inputs = dict(q=normal(*qk), k=normal(*qk), v=normal(*v), beta=normal(*v[:3]).sigmoid())
    inputs["log_decay"] = -decay * normal(*v[:3]).exp()
    state = normal(batch, heads, 16, 8).to(torch.promote_types(dtype, torch.float32))
    return state, {name: x.to(dtype) for name, x in inputs.items()}


def token_by_token(state, *, q, k, v, beta, log_decay):
    """The rule as it is written down, in float64."""
    state, outs = state.double(), []
    q, k, v, beta, log_decay = (x.double() for x in (q, k, v, beta, log_decay))
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    for t in range(v.shape[1]):
        state = log_decay[:, t].exp()[..., None, None] * state
        wrote = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], wrote)
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t] * q.shape[-1] ** -0.5, state))
    return torch.stack(outs, dim=1), state


def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, **others
):
    """What flash-linear-attention's function of this name takes and gives, computed token by token."""
    assert not others and output_final_state and use_qk_l2norm_in_kernel and scale == q.shape[-1] ** -0.5
    assert q.shape == k.shape and q.shape[:3] == v.shape[:3] == g.shape == beta.shape
    assert g.dtype == initial_state.dtype == torch.float32 and q.dtype == k.dtype == v.dtype
    assert all(x.is_contiguous() for x in (q, k, v, g, beta, initial_state))
    out, state = token_by_token(initial_state, q=q, k=k, v=v, beta=beta, log_decay=g)
    return out.to(q.dtype), state.float()


def relative(actual, expected):
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("decay", [1e-3, 1.0, 20.0])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 200])
def test_the_chunk_rule_is_the_recurrence(length, decay):
    state, inputs = chain_inputs(length, decay=decay, batch=2)
    before = state.clone()
    out, after = own_chain(state, **inputs)
    expected = token_by_token(state, **inputs)
    assert torch.equal(state, before) and out.dtype == after.dtype == torch.float32
    assert relative(out, expected[0]) < 1e-5 and relative(after, expected[1]) < 1e-5


def test_a_sudden_decay_costs_the_tokens_behind_it_no_digits():
    """One token that forgets all, in the middle of ones that forget next to nothing."""
    state, inputs = chain_inputs(64, decay=1e-4)
    inputs["log_decay"][:, 10] = -3000.0
    out, after = own_chain(state, **inputs)
    expected = token_by_token(state, **inputs)
    assert relative(out[:, 10:], expected[0][:, 10:]) < 1e-5 and relative(after, expected[1]) < 1e-5


def test_the_chunk_rule_computes_in_the_states_dtype():
    state, inputs = chain_inputs(130, torch.float64)
    for actual, expected in zip(own_chain(state, **inputs), token_by_token(state, **inputs), strict=True):
        assert actual.dtype == torch.float64 and relative(actual, expected) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flash_linear_attention_gets_its_own_layout(dtype):
    state, inputs = chain_inputs(70, dtype)
    views = {name: x.transpose(0, 1).contiguous().transpose(0, 1) for name, x in inputs.items()}  # not contiguous
    out, after = fla_chain(state, **views, kernel=chunk_gated_delta_rule)
    expected = own_chain(state, **inputs)
    assert out.dtype == dtype and relative(out, expected[0]) < (1e-5 if dtype == torch.float32 else 5e-3)
    assert after.shape == state.shape and relative(after, expected[1]) < 1e-5


def test_tensors_on_a_cpu_never_reach_flash_linear_attention(monkeypatch):
    install_fla(monkeypatch)  # without the function: taking it would raise
    state, inputs = chain_inputs(70)
    assert torch.equal(fla_chain(state, **inputs)[0], own_chain(state, **inputs)[0])


@pytest.mark.parametrize("splits", [[150], [70, 80], [149, 1]])
def test_a_prompt_through_either_rule_leaves_the_same_state(hybrid, splits):
    logits, states = [], []
    for rule in (own_chain, partial(fla_chain, kernel=chunk_gated_delta_rule)):
        target, done = ReferenceTarget(hybrid), 0
        target.chain_rule, state = rule, target.new_state()
        for size in splits:
            verified = target.prefill(PROMPT[done : done + size], state)
            done += size
        logits.append(verified.logits)
        states.append(state)
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
    assert_same_state(states[0], committed(states[1]))


def install_fla(monkeypatch):
    """A package of that name whose import works and whose kernels do not."""
    for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)


def test_which_rule_prefill_takes(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    assert chain_rule("own", GPU) is own_chain
    with pytest.raises(OptionError, match="pip install"):
        chain_rule("fla", GPU)
    with pytest.raises(OptionError, match="own, fla"):
        chain_rule("fast", GPU)
    install_fla(monkeypatch)
    for name, device, rule in [("own", GPU, own_chain), ("own", CPU, own_chain), ("fla", GPU, fla_chain)]:
        assert chain_rule(name, device) is rule, (name, device)
    with pytest.raises(OptionError, match="needs a GPU, and the device is cpu"):
        chain_rule("fla", CPU)


def test_a_broken_installation_is_told(monkeypatch):
    install_fla(monkeypatch)
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", None)
    with pytest.raises(OptionError, match="cannot be imported"):
        chain_rule("fla", GPU)


def test_an_import_of_the_package_imports_no_flash_linear_attention():
    code = "import sys, deltatree.models, deltatree.verify; assert 'fla' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_load_passes_the_rule_on(monkeypatch):
    install_fla(monkeypatch)
    assert deltatree.load(device="cpu", prefill="own").target.chain_rule is own_chain
    with pytest.raises(OptionError, match="own, fla"):
        deltatree.load(device="cpu", prefill="chunked")


@pytest.mark.parametrize("architecture", ["qwen3_5_moe_text", "qwen3_moe"])
def test_attention_takes_the_pattern_instead_of_a_mask(architecture, monkeypatch):
    """What a GPU's later chunks get: the library hands it to PyTorch as it is."""
    target = ReferenceTarget(tiny_model(architecture))
    expected, state = target.prefill(PROMPT, target.new_state()).logits, target.new_state()
    monkeypatch.setattr(reference, "PREFILL_CHUNK", 64)
    own_mask, given = target._chain_mask, []

    def pattern(kind, count, length):
        if kind == "linear_attention" or length == 0:
            return own_mask(kind, count, length)
        given.append((count, length + count))
        assert torch.equal(causal_lower_right(*given[-1])._materialize(), own_mask(kind, count, length)[0, 0])
        return causal_lower_right(*given[-1])

    target._chain_mask = pattern
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a CPU has no kernel for it and makes the mask after all
        actual = target.prefill(PROMPT, state).logits
    assert given == [(64, 128), (22, 150)]
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_a_long_prompts_chunks_go_through_all_layers_one_after_another(hybrid, monkeypatch):
    """What is held besides the state and the features is one chunk's; logits are made of the last token alone."""
    monkeypatch.setattr(reference, "PREFILL_CHUNK", 32)
    target, seen, heads = ReferenceTarget(hybrid, (1, 8)), [], []
    forward, head = target._forward, target.head

    def watched(tree, masks, state, chain_pass):
        seen.append(len(tree))
        return forward(tree, masks, state, chain_pass)

    target._forward = watched
    target.head = lambda hidden: heads.append(len(hidden)) or head(hidden)
    verified = target.prefill(PROMPT, target.new_state())
    assert seen == [32, 32, 32, 32, 22] and heads == [1]
    assert verified.features.shape == (150, 128) and verified.logits.shape == (1, VOCAB)
