"""The Triton calibration is the reference's, and trees over two kinds of scores are."""

from __future__ import annotations

import random
from dataclasses import fields

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from kernel_cases import DEVICE, needs_kernels
from test_calibration import candidates_of, draft_of, some_walk

from deltatree.kernels.calibration import Seen, corrected, learn_calibration, reference
from deltatree.kernels.tree_build import TreeBuffers, build_tree
from deltatree.kernels.tree_build import reference as tree_reference
from deltatree.kernels.walk import Walked
from deltatree.tree import Calibrated

pytestmark = needs_kernels


def on_device(seen: Seen) -> Seen:
    return Seen(seen.hits.to(DEVICE), seen.expected.to(DEVICE))


def seen_of(draw, depth, device="cpu", *, is_much=True):
    """What a long text, or none, has shown."""
    hits = torch.tensor([[draw.random() * 40 * is_much for _ in range(depth)] for _ in range(2)], device=device)
    return Seen(hits, hits * 0.5 + 10 * is_much)


@pytest.mark.parametrize("depth, width", [(1, 1), (5, 12), (15, 200)])
@pytest.mark.parametrize("is_much", [True, False])
def test_scores_against_float64(depth, width, is_much):
    draw = random.Random(depth)
    values = torch.randn(depth, width, generator=torch.Generator().manual_seed(1)).sort(-1, descending=True).values
    values = (values - values.logsumexp(-1, keepdim=True)).clamp(max=0)
    seen = seen_of(draw, depth, is_much=is_much)
    expected = reference.corrected(values.double(), Seen(seen.hits.double(), seen.expected.double()))
    out = torch.full((2, depth, width), torch.nan, device=DEVICE)
    assert corrected(values.to(DEVICE), on_device(seen), out=out, backend="triton") is out
    torch.testing.assert_close(out.double().cpu(), expected, atol=2e-5, rtol=1e-5)
    assert (out.diff(dim=-1) <= 0).all() and (out <= 0).all()


@pytest.mark.parametrize("depth", [1, 4, 15])
def test_learning(depth):
    draw, policy = random.Random(depth), Calibrated()
    expected, seen = seen_of(draw, depth), None
    seen = on_device(Seen(expected.hits.clone(), expected.expected.clone()))
    for _ in range(12):
        log_probs = draft_of(draw, depth)
        tree = policy(log_probs, root=5, budget=9)
        values, ids = candidates_of(log_probs, 3)
        _, walked = some_walk(draw, tree, depth)
        reference.learn_calibration(values, ids, walked, expected)
        there = values.to(DEVICE), ids.to(DEVICE), Walked.of(walked.record.to(DEVICE)), seen
        learn_calibration(*there, backend="triton")
    torch.testing.assert_close(seen.hits.cpu(), expected.hits)
    torch.testing.assert_close(seen.expected.cpu(), expected.expected)


@pytest.mark.parametrize("depth, budget", [(1, 4), (4, 9), (8, 31), (15, 64)])
def test_trees_over_two_kinds_of_scores(depth, budget):
    """Ties included: scores are multiples of a quarter."""
    draw = random.Random(budget)
    for turn in range(6):
        values, ids = candidates_of(draft_of(draw, depth), min(budget, 20))
        rows = reference.corrected(values, seen_of(draw, depth))
        rows = (rows * 4).floor() / 4 if turn % 2 else rows
        expected = tree_reference.build_tree(rows, ids, 9, budget=budget)
        out = TreeBuffers.empty(budget + 1, 4, DEVICE)
        for field in fields(out):
            getattr(out, field.name).fill_(77)
        root = torch.tensor([9], device=DEVICE)
        build_tree(rows.to(DEVICE), ids.to(DEVICE), root, budget=budget, out=out, backend="triton")
        for field in fields(out):
            found, wanted = getattr(out, field.name).cpu(), getattr(expected, field.name)
            assert torch.equal(found, wanted.to(found.dtype)), field.name
