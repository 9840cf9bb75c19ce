"""The Triton candidates, tree, record and walk are the reference ones, and the tree is that of `best_first`."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import DEVICE, ON_GPU, draft_case, is_tree, needs_kernels, some_examples

from deltatree.kernels.candidates import reference as candidates_truth
from deltatree.kernels.candidates import top_candidates
from deltatree.kernels.candidates.triton import scratch_for
from deltatree.kernels.draft_record import draft_record
from deltatree.kernels.draft_record import reference as record_truth
from deltatree.kernels.tree_build import TreeBuffers, build_tree
from deltatree.kernels.tree_build import reference as build_truth
from deltatree.kernels.walk import Walked, walk
from deltatree.kernels.walk import reference as walk_truth
from deltatree.tree import best_first
from deltatree.tree import top_candidates as candidates_on_host

pytestmark = needs_kernels
LARGEST = 248_320 if ON_GPU else 5_000  # of the vocabularies


def run_candidates(logits, k, id_dtype=torch.int64):
    """With every buffer filled with rubbish first."""
    count = min(k, logits.shape[1])
    out = (
        torch.full((logits.shape[0], count), torch.nan, device=DEVICE),
        torch.full((logits.shape[0], count), -1, dtype=id_dtype, device=DEVICE),
    )
    scratch = scratch_for(logits, k).fill_(torch.nan)
    values, ids = top_candidates(logits, k, out=out, scratch=scratch, backend="triton")
    assert values is out[0] and ids is out[1]
    return values, ids.long()


def normal(depths, vocab, seed):
    return torch.randn(depths, vocab, generator=torch.Generator().manual_seed(seed)).to(DEVICE) * 4


@some_examples
@given(
    vocab=st.integers(1, LARGEST), depths=st.integers(1, 4), k=st.integers(1, 256), seed=st.integers(0, 2**20),
    steps=st.sampled_from([1, 64]), id_dtype=st.sampled_from([torch.int32, torch.int64]),
)  # fmt: skip
def test_candidates_with_equal_logits_are_a_full_stable_sort(vocab, depths, k, seed, steps, id_dtype):
    logits = (normal(depths, vocab, seed) * steps).round() / steps  # far enough apart for any rounding of the sum
    values, ids = run_candidates(logits, k, id_dtype)
    expected_values, expected_ids = candidates_truth.top_candidates(logits, k)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(values, expected_values, atol=4e-6, rtol=0)


@some_examples
@given(vocab=st.integers(1, LARGEST), k=st.integers(1, 256), seed=st.integers(0, 2**20), half=st.booleans())
def test_candidates_are_the_best_of_their_own_log_probabilities(vocab, k, seed, half):
    """Only the log of the sum may be rounded otherwise; given that, values, ids and the order of equals are exact."""
    logits = normal(2, vocab, seed).to(torch.bfloat16 if half else torch.float32)
    values, ids = run_candidates(logits, k)
    wide = logits.float()
    below = wide - wide.amax(-1, keepdim=True)
    weight = below.double().exp().sum(-1).log()[:, None]
    torch.testing.assert_close(values, (below.gather(1, ids).double() - weight).float(), atol=2e-6, rtol=0)
    own = -values[:, :1]  # the best token stands 0 below the maximum
    expected_values, expected_ids = candidates_on_host(below - own, k)
    assert torch.equal(ids.cpu(), expected_ids) and torch.equal(values.cpu(), expected_values)


def test_candidates_of_one_group_of_tokens_or_of_none_but_equal_ones():
    logits = torch.zeros(2, 3000, device=DEVICE)
    logits[1, 2000:2200] = 5.0
    _, ids = run_candidates(logits, 200)
    assert torch.equal(ids[0].cpu(), torch.arange(200)) and torch.equal(ids[1].cpu(), torch.arange(2000, 2200))


def test_candidates_of_removed_tokens_and_strided_rows():
    logits = torch.full((3, 2000), -torch.inf, device=DEVICE)[:, ::2]
    logits[:, 700], logits[:, 3] = 1.0, 0.5
    values, ids = run_candidates(logits, 5)
    assert ids[2].tolist() == [700, 3, 0, 1, 2] and bool((values[:, 2:] == -torch.inf).all())


def test_candidates_of_what_is_no_number_are_still_tokens():
    _, ids = run_candidates(torch.full((1, 100), torch.nan, device=DEVICE), 40)
    assert sorted(ids[0].tolist()) == sorted(set(ids[0].tolist())) and 0 <= int(ids.min()) <= int(ids.max()) < 100


def rubbish(nodes, kernel=4):
    out = TreeBuffers.empty(nodes, kernel, DEVICE)
    for field in fields(out):
        getattr(out, field.name).fill_(77)
    return out


def check_tree(seed, max_budget, kernel=4, root_on_device=False):
    log_probs, budget = draft_case(seed, max_budget)
    values, ids = (x.to(DEVICE) for x in candidates_on_host(log_probs, max_budget))
    root = torch.tensor([9], device=DEVICE) if root_on_device else 9
    out = rubbish(budget + 1, kernel)
    assert build_tree(values, ids, root, budget=budget, out=out, backend="triton") is out
    assert is_tree(out, best_first(log_probs, root=9, budget=budget)), seed


@pytest.mark.parametrize("seed", range(300 if ON_GPU else 24))
def test_the_tree_is_that_of_the_heap(seed):
    check_tree(seed, 256 if ON_GPU else 24, kernel=seed % 4 + 1, root_on_device=seed % 2 == 0)


def test_a_tree_of_more_than_a_warp_of_nodes():
    check_tree(50, 70)
    check_tree(100, 256 if ON_GPU else 40)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_ten_thousand_trees():
    for seed in range(10_000):
        log_probs, budget = draft_case(seed)
        values, ids = (x.to(DEVICE) for x in candidates_on_host(log_probs, budget))
        built = build_tree(values, ids, 9, budget=budget, backend="triton")
        assert is_tree(built, best_first(log_probs, root=9, budget=budget)), seed


def test_a_prefix_is_the_tree_of_a_smaller_budget():
    log_probs, _ = draft_case(1)
    values, ids = (x.to(DEVICE) for x in candidates_on_host(log_probs, 20))
    whole = build_tree(values, ids, 9, budget=20, backend="triton")
    for budget in (0, 1, 7):
        part = build_tree(values, ids, 9, budget=budget, backend="triton")
        n = budget + 1
        for name in ("token_ids", "parents", "depths", "scores", "rows"):
            assert torch.equal(getattr(whole, name)[:n], getattr(part, name)), name
        assert torch.equal(whole.ancestors[:n, :n], part.ancestors)


def test_fewer_prefixes_than_the_budget_and_none_at_all():
    log_probs = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    values, ids = (x.to(DEVICE) for x in candidates_on_host(log_probs, 9))
    out = build_tree(values, ids, 4, budget=9, out=rubbish(10), backend="triton")
    assert int(out.num_nodes) == 7 and is_tree(out, best_first(log_probs, root=4, budget=9))
    out = build_tree(values[:0], ids[:0], 4, budget=9, out=rubbish(10), backend="triton")
    assert int(out.num_nodes) == 1 and is_tree(out, best_first(log_probs[:0], root=4, budget=9))


def test_minus_infinity_is_a_score_like_any_other():
    log_probs = torch.full((3, 5), -torch.inf)
    log_probs[:, 2] = 0.0
    values, ids = (x.to(DEVICE) for x in candidates_on_host(log_probs, 12))
    out = build_tree(values, ids.int(), 0, budget=12, out=rubbish(13), backend="triton")
    tree = best_first(log_probs, root=0, budget=12)
    assert int(out.num_nodes) == len(tree) and torch.equal(out.token_ids[: len(tree)].cpu(), tree.token_ids)
    assert torch.equal(out.parents[: len(tree)].cpu(), tree.parents)


@pytest.mark.parametrize("seed", range(100 if ON_GPU else 12))
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_walk_is_the_reference_one(seed, dtype):
    log_probs, budget = draft_case(seed, 60)
    tree = best_first(log_probs[:, :3], root=1, budget=budget)
    nodes = torch.zeros(80, dtype=dtype, device=DEVICE), torch.zeros(80, dtype=dtype, device=DEVICE)  # padded
    for padded, own in zip(nodes, (tree.token_ids, tree.parents), strict=True):
        padded[: len(tree)] = own
    target_ids = torch.randint(3, (80,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    count = torch.tensor([len(tree)], dtype=torch.int32, device=DEVICE)
    out = Walked.of(torch.full((34,), 77, dtype=torch.int32, device=DEVICE))
    options = {"num_nodes": count, "max_depth": 15}
    assert walk(*nodes, target_ids, **options, out=out, backend="triton") is out
    assert torch.equal(out.record, walk_truth.walk(*nodes, target_ids, **options).record)


@pytest.mark.parametrize("seed", range(100 if ON_GPU else 12))
def test_the_record_is_the_reference_one(seed):
    """With padding behind the tree, as it stands in the buffers."""
    log_probs, budget = draft_case(seed, 120)
    values, ids = (x.to(DEVICE) for x in candidates_on_host(log_probs, budget))
    built = build_tree(values, ids, 9, budget=budget, out=rubbish(budget + 1), backend="reference")
    options = {"num_nodes": built.num_nodes, "max_depth": len(log_probs), "limit": 9.0, "scale": 4.0}
    fields = built.scores, built.parents, built.depths
    out = torch.full((5, budget + 1), torch.nan, dtype=torch.float64, device=DEVICE)
    assert draft_record(*fields, **options, out=out, backend="triton") is out
    expected, kept = record_truth.draft_record(*fields, **options), int(built.num_nodes)
    torch.testing.assert_close(out[:2, :kept], expected[:2, :kept], atol=1e-9, rtol=0)
    assert torch.equal(out[2:, :kept], expected[2:, :kept])


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_one_graph_takes_every_round_from_logits_to_the_record():
    depths, vocab, budget = 15, 248_320, 64
    logits = torch.zeros(depths, vocab, device=DEVICE)
    out = torch.empty(depths, budget, device=DEVICE), torch.empty(depths, budget, dtype=torch.int64, device=DEVICE)
    scratch, built, walked = scratch_for(logits, budget), rubbish(budget + 1), Walked.empty(depths, DEVICE)
    root, targets = torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.zeros(budget + 1, dtype=torch.int64).cuda()

    def work():
        top_candidates(logits, budget, out=out, scratch=scratch, backend="triton")
        build_tree(*out, root, budget=budget, out=built, backend="triton")
        walk(
            built.token_ids, built.parents, targets, num_nodes=built.num_nodes, max_depth=depths, out=walked,
            backend="triton",
        )  # fmt: skip

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for seed in range(10):
        logits.copy_((normal(depths, vocab, seed) * 8).round() / 8)
        root.fill_(seed)
        targets.copy_(torch.randint(40, (budget + 1,)))
        graph.replay()
        assert torch.equal(out[1], candidates_truth.top_candidates(logits, budget)[1])
        assert int(built.num_nodes) == budget + 1 and int(built.token_ids[0]) == seed
        truth = walk_truth.walk(built.token_ids, built.parents, targets, num_nodes=built.num_nodes, max_depth=depths)
        assert torch.equal(walked.record, truth.record)
        again = build_truth.build_tree(*out, root, budget=budget)
        assert all(torch.equal(getattr(built, f.name), getattr(again, f.name)) for f in fields(built))
