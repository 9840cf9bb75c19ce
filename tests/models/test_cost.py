"""What a tree costs: bytes, and the experts that it wakes."""

import pytest
import torch
from tiny import VOCAB, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from deltatree.models import ReferenceTarget
from deltatree.models.reference import PREFILL_CHUNK
from deltatree.tree import DraftTree

STATE_BYTES = 6 * 16 * 16 * 4  # of one layer


def tree_of(nodes: int) -> DraftTree:
    return DraftTree.from_parents([i % VOCAB for i in range(nodes)], [-1, *[i // 2 for i in range(nodes - 1)]])


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned, in bytes."""

    num_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.num_bytes = max(self.num_bytes, tensor.numel() * tensor.element_size())
        return out


def test_B19_scratch_grows_by_the_stash_not_by_a_state_per_node(hybrid):
    target = ReferenceTarget(hybrid)
    state = target.new_state()
    target.prefill([1, 2, 3], state)
    target.verify(tree_of(65), state)
    recurrent = state.layers[0]
    assert recurrent.stash.bytes_per_node == 4 * (2 * 16 + 6 * 16 + 6)
    assert recurrent.stash.bytes_per_node * 10 < STATE_BYTES


@pytest.mark.parametrize("budget", [8, 64, 256])
def test_B19_no_tensor_of_a_verify_holds_a_state_per_node(hybrid, budget):
    target = ReferenceTarget(hybrid)
    state = target.new_state()
    target.prefill(list(range(100)), state)
    with Largest() as largest:
        target.verify(tree_of(budget + 1), state)
    nodes = budget + 1
    pairs = 6 * nodes * nodes * 4  # one number for each head and pair of nodes
    logits = nodes * VOCAB * 4
    weights = max(p.numel() * p.element_size() for p in hybrid.parameters())
    # masks and attention scores: 4 heads, nodes x (prefix + nodes), and the KV buffers' own growth
    scores = 4 * nodes * (100 + nodes) * 4
    buffers = 2 * 512 * 32 * 4
    assert largest.num_bytes <= max(pairs, logits, weights, scores, buffers)
    if budget == 64:  # the heads are tiny: with more nodes their pairs weigh more than states would
        assert nodes * STATE_BYTES > 1.2 * largest.num_bytes


@pytest.mark.parametrize("length", [1000, 8000])
def test_B19_a_prompt_leaves_one_row_of_logits_and_the_tapped_layers_alone(length):
    model = tiny_model("qwen3_5_text", num_hidden_layers=4, layer_types=["linear_attention"] * 3 + ["full_attention"],
                       max_position_embeddings=32768)  # fmt: skip
    target = ReferenceTarget(model, (1, 4))
    state = target.new_state()
    heads, rows = [], []
    head = target.head
    target.head = lambda hidden: rows.append(len(hidden)) or head(hidden)
    hook = model.model.layers[0].register_forward_pre_hook(lambda module, args: heads.append(args[0].shape[1]))
    verified = target.prefill([(7 * i) % VOCAB for i in range(length)], state)
    hook.remove()
    assert verified.logits.shape == (1, VOCAB) and rows == [1]
    assert verified.features.shape == (length, 2 * 64)
    assert max(heads) <= PREFILL_CHUNK < 8000  # no forward over the whole prompt
    assert all(not hasattr(layer, "stash") or layer.stash is None for layer in state.layers)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("length", [1000, 8000, 32000])
def test_B19_measured_peak_on_a_gpu(length):
    model = tiny_model("qwen3_5_text", max_position_embeddings=40000).cuda()
    target, peaks = ReferenceTarget(model), {}
    state = target.new_state()
    target.prefill([(7 * i) % VOCAB for i in range(length)], state)
    for budget in (8, 64, 256):
        target.verify(tree_of(budget + 1), state)  # grows the buffers
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        target.verify(tree_of(budget + 1), state)
        peaks[budget] = torch.cuda.max_memory_allocated() - before
    # The masks and scores of the attention layers, not states: a few times nodes x (prefix + nodes). The library's
    # attention also repeats one layer's keys and values for every query head, once for a tree: 33 MB at 32,000 tokens.
    config = model.config
    for budget, peak in peaks.items():
        nodes = budget + 1
        rows = length + nodes
        repeated = 2 * config.num_attention_heads * config.head_dim * 4 * rows
        assert peak < 64 * nodes * rows + 4096 * nodes + repeated + (16 << 20), peaks


def test_B57_every_further_node_may_wake_further_experts(attention_moe):
    """A union of experts: it grows with the tree, up to all of them."""
    target, woken = ReferenceTarget(attention_moe), []
    gate = target.text.layers[1].mlp.gate

    def count(module, args, out=None):
        hidden = args[0].reshape(-1, args[0].shape[-1])
        experts = torch.nn.functional.linear(hidden, gate.weight).topk(2, dim=-1).indices
        woken.append(experts.unique().numel())

    state = target.new_state()
    target.prefill([1, 2, 3], state)
    hook = gate.register_forward_pre_hook(count)
    for nodes in (1, 8, 32, 128):
        target.verify(tree_of(nodes), state)
    hook.remove()
    assert woken == sorted(woken) and woken[0] == 2 and 2 < woken[1] <= woken[-1] <= 8
