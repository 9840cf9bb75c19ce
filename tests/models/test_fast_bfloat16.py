"""In bfloat16 the fast target rounds elsewhere than the reference target, and not more: both are held against float32."""

import pytest
import torch

import deltatree
from deltatree.tree import DraftTree

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]
TREE = [-1, 0, 1, 2, 3, 4, 0, 1, 6, 2, 0, 3, 7, 5, 4, 1]  # parents


def logits_of(backend, dtype, device):
    """Logits of four trees of the shipped target after committed paths, [rounds * nodes, vocab]."""
    pair = deltatree.load("shipped", backend=backend, device=device, dtype=dtype, context_length=512)
    target, state = pair.target, pair.target.new_state()
    target.prefill(pair.encode("Tom has 3 boxes of 12 eggs. He sells 9 eggs. How many are left?"), state)
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(4):
        tokens = torch.randint(target.vocab_size, (len(TREE),), generator=generator).tolist()
        found.append(target.verify(DraftTree.from_parents(tokens, TREE), state).logits.cpu().double())
        target.commit([0, 1, 2], state)
    return torch.cat(found)


@pytest.mark.parametrize("device", DEVICES)
def test_logits_are_as_close_to_float32_as_the_references(device):
    exact = logits_of("reference", "float32", device)
    exact_fast = logits_of("fast", "float32", device)
    assert (exact_fast - exact).norm() / exact.norm() < 1e-4
    reference, fast = (logits_of(backend, "bfloat16", device) - exact for backend in ("reference", "fast"))
    assert 0 < fast.norm() <= 1.5 * reference.norm()
    assert fast.norm(dim=1).median() <= 1.5 * reference.norm(dim=1).median()
    assert fast.abs().max() <= 2 * reference.abs().max()
