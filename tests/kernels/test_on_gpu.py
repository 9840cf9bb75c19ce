"""What only a GPU can show: captured graphs, 64-bit offsets, a cold first call, and a whole model's tokens."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from kernel_cases import ON_GPU, agrees, ancestors_of, delta_case, make_tree, path_to

from deltatree.kernels import gated_delta
from deltatree.kernels.attention import reference as attention_truth
from deltatree.kernels.attention import tree_attention
from deltatree.kernels.commit import commit_rows
from deltatree.kernels.conv import commit_window, conv_rows, tree_conv
from deltatree.kernels.conv import reference as conv_truth
from deltatree.kernels.gated_delta import DeltaStash, PendingCommit, commit_gated_delta
from deltatree.kernels.gated_delta import reference as delta_truth

tree_gated_delta = partial(gated_delta.tree_gated_delta, backend="triton")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")]


def everything_at_model_size(sizes=(1, 2, 16, 17, 32, 33, 64, 65, 128, 200, 256), launch=None, **options):
    """Every node bucket and every way to call it, against float64; a fused commit and gates included."""
    for nodes in sizes:
        for max_depth in (15, None):
            case = delta_case(make_tree("wide", nodes, nodes, max_depth=15), heads=(4, 12), dims=(128, 128), **options)
            _, stash = delta_truth.tree_gated_delta(case.state, **case.inputs)
            path = path_to(case.parents, nodes - 1).cuda()
            padded = torch.cat([path, path.new_zeros(16 - len(path))])
            for pending in (None, PendingCommit(stash, padded, torch.tensor([len(path)], device="cuda"))):
                state, true_state = case.state.clone(), case.state.double()
                if pending is not None:
                    wide = DeltaStash(stash.k.double(), stash.u.double(), stash.log_decay.double())
                    true_state = delta_truth.commit_gated_delta(true_state, wide, path)
                out, new = tree_gated_delta(state, **case.inputs, max_depth=max_depth, pending=pending, launch=launch)
                true_out, true_stash = delta_truth.tree_gated_delta(true_state, **case.double().inputs)
                assert agrees(state, true_state) and agrees(out, true_out) and agrees(new.u, true_stash.u), nodes


def test_bfloat16_inputs_at_model_size():
    everything_at_model_size(dtype=torch.bfloat16)


def test_float32_inputs_at_model_size():
    everything_at_model_size(gates="mixed")


@pytest.mark.parametrize("changed", [{}, {"READ_V": 16, "ROWS": 32, "READ_WARPS": 2}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_lean_launches_at_model_size(dtype, changed):
    everything_at_model_size((17, 33, 128, 256), launch={"KIND": "lean"} | changed, dtype=dtype)


def test_one_captured_graph_serves_every_round():
    """Verify and commit in one graph: trees, paths and lengths change in the buffers, never in the graph."""
    nodes, heads, rounds = 24, (2, 6), 30
    case = delta_case(make_tree("chain", nodes, 0), heads=heads, dims=(32, 32))
    seen = torch.ones(nodes, nodes, dtype=torch.uint8, device="cuda").tril()
    rows = conv_rows(torch.arange(-1, nodes - 1), 4).cuda()
    state, window = case.state.clone(), torch.randn(1, 64, 3, device="cuda")
    x, weight = torch.randn(1, nodes, 64, device="cuda"), torch.randn(64, 4, device="cuda")
    path, steps = torch.zeros(nodes, dtype=torch.int64, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    length = torch.tensor([5], dtype=torch.int64, device="cuda")
    keys, values = (torch.randn(1, 1, 2, 900, 32, device="cuda") for _ in range(2))
    q, out = torch.randn(1, 4, nodes, 32, device="cuda"), torch.empty(1, nodes, heads[1], 32, device="cuda")
    attended, convolved = torch.empty_like(q), torch.empty_like(x)

    def stash():
        shapes = (1, nodes, heads[0], 32), (1, nodes, heads[1], 32), (1, nodes, heads[1])
        return DeltaStash(*(torch.zeros(shape, device="cuda") for shape in shapes))

    old, new = stash(), stash()
    inputs = case.inputs | {"ancestors": seen}

    def step():
        pending = PendingCommit(old, path, steps)
        tree_gated_delta(state, **inputs, pending=pending, out=out, stash=new)
        tree_conv(window, x, weight=weight, bias=None, rows=rows, out=convolved)
        tree_attention(q, keys[0], values[0], ancestors=seen, length=length, out=attended)

    def commit():
        commit_window(window, x, path, length=steps, out=window)
        commit_rows(keys, values, path, committed=length, length=steps)

    saved = state.clone(), window.clone(), keys.clone(), values.clone()
    step(), commit()  # compile; a path of length 0 leaves everything as it is
    for tensor, before in zip((state, window, keys, values), saved, strict=True):
        assert torch.equal(tensor, before)
    graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    for graph, work in zip(graphs, (step, commit), strict=True):
        with torch.cuda.graph(graph):
            work()

    true_state = state.double()
    for turn in range(rounds):
        kind = ["bushy", "spine", "star", "wide"][turn % 4]
        parents = make_tree(kind, nodes, turn)
        fresh = delta_case(parents, seed=turn, heads=heads, dims=(32, 32))
        for name in ("q", "k", "v", "beta", "log_decay"):
            inputs[name].copy_(getattr(fresh, name))
        seen.copy_(fresh.ancestors), rows.copy_(conv_rows(torch.tensor(parents), 4)), x.normal_(), q.normal_()
        (
            keys[:, :, :, int(length) : int(length) + nodes].normal_(),
            values[:, :, :, int(length) : int(length) + nodes].normal_(),
        )
        graphs[0].replay()

        wide = fresh.double().inputs
        true_out, true_stash = delta_truth.tree_gated_delta(true_state, **wide)
        assert agrees(state, true_state) and agrees(out, true_out)
        expected = conv_truth.tree_conv(window.double(), x.double(), weight=weight.double(), bias=None, rows=rows)
        assert agrees(convolved, expected)
        args = (t.double() for t in (q, keys[0], values[0]))
        assert agrees(attended, attention_truth.tree_attention(*args, ancestors=fresh.ancestors, length=length))

        chosen = path_to(parents, (7 * turn) % nodes).cuda()
        path.zero_(), path[: len(chosen)].copy_(chosen), steps.fill_(len(chosen))
        true_window = conv_truth.commit_window(window, x, chosen)
        moved = keys[:, :, :, chosen + int(length)].clone()
        graphs[1].replay()
        assert torch.equal(window, true_window)
        assert torch.equal(keys[:, :, :, int(length) : int(length) + len(chosen)], moved)
        true_state = delta_truth.commit_gated_delta(true_state, true_stash, chosen)
        old.k.copy_(new.k), old.u.copy_(new.u), old.log_decay.copy_(new.log_decay)
        length += len(chosen)


def test_B37_offsets_beyond_32_bits():
    """State and cache pools whose strides pass 2^31 elements."""
    far = 2**31 + 64
    case = delta_case(make_tree("bushy", 9, 0), batch=2)
    pool = torch.zeros(far + case.state[0].numel(), device="cuda")
    state = pool.as_strided(case.state.shape, (far, *case.state.stride()[1:]))
    state.copy_(case.state)
    out, stash = tree_gated_delta(state, **case.inputs)
    true_out, true_stash = delta_truth.tree_gated_delta(case.double().state, **case.double().inputs)
    assert agrees(out, true_out)
    path = path_to(case.parents, 8)
    commit_gated_delta(state, stash, path, out=state)
    assert agrees(state, delta_truth.commit_gated_delta(case.state.double(), true_stash, path))
    del pool, state

    pool = torch.zeros(far + 4096, dtype=torch.float16, device="cuda")
    keys = pool.as_strided((1, 1, 2, 64, 32), (0, 0, far, 32, 1))
    keys.normal_()
    near = keys.contiguous()
    q = torch.randn(1, 4, 9, 32, device="cuda", dtype=torch.float16)
    seen = ancestors_of(case.parents).cuda()
    expected = attention_truth.tree_attention(q.double(), near[0].double(), near[0].double(), ancestors=seen, length=40)
    assert agrees(tree_attention(q, keys[0], keys[0], ancestors=seen, length=40), expected, 2e-3)
    commit_rows(keys, keys, path.cuda(), committed=40)
    assert torch.equal(keys[..., 40 : 40 + len(path), :], near[..., 40 + path, :])


COLD = """
import torch
from kernel_cases import agrees, delta_case, make_tree, path_to
from deltatree.kernels.gated_delta import PendingCommit, tree_gated_delta
from deltatree.kernels.gated_delta import reference as truth
for nodes in (2, 9, 17, 65):
    case = delta_case(make_tree("wide", nodes, 1))
    _, stash = truth.tree_gated_delta(case.state, **case.inputs)
    path = path_to(case.parents, nodes - 1).cuda()
    states = [case.state.clone() for _ in range(3)]
    results = [tree_gated_delta(s, **case.inputs, pending=PendingCommit(stash, path), backend="triton")[0] for s in states[:2]]
    expected, _ = truth.tree_gated_delta(states[2], **case.inputs, pending=PendingCommit(stash, path))
    assert torch.equal(states[0], states[1]) and torch.equal(*results), nodes
    assert agrees(states[0], states[2]) and agrees(results[0], expected), nodes
"""


def test_B36_the_first_call_of_a_cold_cache_is_like_the_second(tmp_path):
    here = Path(__file__).parent
    paths = [str(here), str(here.parent.parent / "src"), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([sys.executable, "-c", COLD], env=env, check=True, timeout=300)


@pytest.mark.parametrize("architecture", ["qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"])
def test_a_model_on_the_gpu_gives_plain_greedy_tokens(architecture, monkeypatch):
    """The reference target with the kernels in place of the references: float32 tokens stay those of plain decoding."""
    from tiny import VOCAB, tiny_model

    from deltatree.decode import Ending, Sampler, decode
    from deltatree.drafter import RandomDrafter, RightDrafter
    from deltatree.models import ReferenceTarget
    from deltatree.tree import best_first

    monkeypatch.setattr("deltatree.verify.gated_delta_net.tree_gated_delta", tree_gated_delta)
    model = tiny_model(architecture).cuda()
    prompt, count = list(range(3, 90)), 60
    ids = torch.tensor([prompt], device="cuda")
    plain = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    plain = plain[0, len(prompt) :].tolist()
    target = ReferenceTarget(model)
    for drafter in (RandomDrafter(VOCAB, depth=7), RightDrafter(prompt + plain, VOCAB)):
        rounds = decode(
            target, drafter, prompt, build_tree=best_first, budget=24, ending=Ending(count), sampler=Sampler()
        )
        assert [token for r in rounds for token in r.token_ids] == plain
