"""The fast target on a GPU: captured graphs and kernels give the tokens of plain decoding, captured or not."""

import pytest
import torch
from tiny import ARCHITECTURES, VOCAB, tiny_model

from deltatree.capture import Captured
from deltatree.decode import Ending, Sampler, decode
from deltatree.drafter import RandomDrafter, RightDrafter, WrongDrafter
from deltatree.models import FastTarget, ReferenceTarget
from deltatree.tree import DraftTree, best_first, chain, no_draft

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BUCKETS = (1, 2, 9, 17, 33)


def run(target, drafter, prompt, count, policy, budget):
    rounds = decode(target, drafter, prompt, build_tree=policy, budget=budget, ending=Ending(count), sampler=Sampler())
    return [token for r in rounds for token in r.token_ids]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_any_drafter_and_budget_gives_the_tokens_of_the_reference_target(architecture):
    model = tiny_model(architecture).cuda()
    reference = ReferenceTarget(model)
    prompt = [(7 * i + 3) % VOCAB for i in range(50)]
    truth = run(reference, RandomDrafter(VOCAB, depth=7), prompt, 40, no_draft, 0)
    target = FastTarget(ReferenceTarget(model), context_length=256, buckets=BUCKETS)
    assert run(target, RandomDrafter(VOCAB, depth=7), prompt, 40, no_draft, 0) == truth
    for drafter in (RightDrafter(prompt + truth, VOCAB), WrongDrafter(prompt + truth, VOCAB), RandomDrafter(VOCAB)):
        assert run(target, drafter, prompt, 40, chain, 7) == truth
        for budget in (1, 8, 32):
            assert run(target, drafter, prompt, 40, best_first, budget) == truth


def test_B56_captured_and_uncaptured_rounds_leave_the_same_states():
    """200 rounds with widths that change, two requests of different length: the same logits and states, bit for bit."""
    model = tiny_model("qwen3_5_moe_text").cuda()
    captured = FastTarget(ReferenceTarget(model), context_length=2048, buckets=BUCKETS)
    plain = FastTarget(ReferenceTarget(model), context_length=2048, buckets=BUCKETS)
    plain.captured_verify = lambda buffers, count, depth=15: lambda: plain.step(buffers, buffers.nodes(count), depth)
    plain.captured_commit = lambda buffers, size: lambda: buffers.commit(16)
    generator = torch.Generator().manual_seed(0)

    def number(most):
        return int(torch.randint(1, most + 1, (), generator=generator))

    for prompt_length in (61, 7):
        prompt = torch.randint(VOCAB, (prompt_length,), generator=generator).tolist()
        states = [target.new_state() for target in (captured, plain)]
        for target, state in zip((captured, plain), states, strict=True):
            target.prefill(prompt, state)
        for _ in range(100):
            spine, branches = number(8), number(9) - 1
            tokens = torch.randint(VOCAB, (spine + branches,), generator=generator).tolist()
            parents = [-1, *range(spine - 1), *(number(spine) - 1 for _ in range(branches))]
            tree, path = DraftTree.from_parents(tokens, parents), list(range(number(spine)))
            logits = []
            for target, state in zip((captured, plain), states, strict=True):
                logits.append(target.verify(tree, state).logits)
                target.commit(path, state)
            assert torch.equal(*logits)
        one, two = (state.buffers for state in states)
        for name in ("matrices", "windows", "length"):
            assert torch.equal(getattr(one, name), getattr(two, name)), name
        del states, one, two, state


def test_prefill_and_verify_agree_on_a_long_chain():
    model = tiny_model("qwen3_next").cuda()
    target = FastTarget(ReferenceTarget(model), context_length=512, buckets=(17,))
    tokens = [(5 * i) % VOCAB for i in range(216)]
    state, fresh = target.new_state(), target.new_state()
    target.prefill(tokens[:12], state)
    for start in range(12, 216, 17):
        target.verify(DraftTree.from_parents(tokens[start : start + 17], list(range(-1, 16))), state)
        target.commit(list(range(17)), state)
    target.prefill(tokens, fresh)
    error = (state.buffers.matrices - fresh.buffers.matrices).norm() / fresh.buffers.matrices.norm()
    assert state.length == fresh.length == 216 and error < 1e-4


def test_captures_keep_one_workspace_however_many_there_are():
    """The libraries' products keep a workspace for every stream that they were ever called on."""
    x = torch.randn(64, 64, device="cuda")
    out = torch.empty_like(x)
    graphs = [Captured(lambda: torch.mm(x, x, out=out), x.device) for _ in range(2)]
    before = torch.cuda.memory_allocated()
    graphs += [Captured(lambda: torch.mm(x, x, out=out), x.device) for _ in range(40)]
    assert torch.cuda.memory_allocated() - before < 8 << 20
