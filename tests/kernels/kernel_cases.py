"""Random trees and inputs for the kernel tests, and what counts as agreement."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if ON_GPU else "cpu"
TOLERANCE = 1e-5  # relative, float32 inputs, against float64

needs_kernels = [
    pytest.mark.skipif(
        not (ON_GPU or INTERPRETED),
        reason="Triton kernels need a GPU, or TRITON_INTERPRET=1 from the start; test_interpreter.py runs this file so",
    ),
    *([pytest.mark.gpu] if ON_GPU else []),
]
some_examples = settings(max_examples=60 if ON_GPU else 5, deadline=None, derandomize=True, database=None)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| in float64; NaN anywhere gives NaN, which no comparison passes."""
    actual, expected = actual.double().cpu(), expected.double().cpu()
    return ((actual - expected).norm() / expected.norm().clamp(min=1e-300)).item()


def agrees(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> bool:
    """The one check that right kernels pass and mutants must not."""
    return actual.shape == expected.shape and relative_error(actual, expected) <= tolerance


def ancestors_of(parents: list[int]) -> Tensor:
    """[N, N] bool, self included."""
    seen = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents[1:], start=1):
        seen[node] |= seen[parent]
    return seen


def depths_of(parents: list[int]) -> Tensor:
    return ancestors_of(parents).sum(1) - 1


def path_to(parents: list[int], node: int) -> Tensor:
    """[P] int64, node indices from the root to `node`."""
    return ancestors_of(parents)[node].nonzero()[:, 0]


def make_tree(kind: str, nodes: int, seed: int, max_depth: int = 32) -> list[int]:
    """Parents of a tree; kind: chain, star, bushy (uniform parents), spine (a chain with branches), wide (best-first-like)."""
    generator = torch.Generator().manual_seed(seed)
    parents, depths = [-1], [0]
    for node in range(1, nodes):
        while True:
            draw = torch.rand(2, generator=generator).tolist()
            recent = max(0, node - 1 - int(4 * draw[1]))
            parent = {
                "chain": node - 1,
                "star": 0,
                "bushy": int(draw[0] * node),
                "spine": node - 1 if draw[0] < 0.8 else int(draw[1] * node),
                "wide": recent if draw[0] < 0.5 else int(draw[1] * node / 2),
            }[kind]
            if depths[parent] < max_depth:
                break
            kind = "bushy"  # the chain is as deep as it may be
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return parents


@st.composite
def trees(draw, max_nodes: int):
    kind = draw(st.sampled_from(["chain", "star", "bushy", "spine", "wide"]))
    return make_tree(kind, draw(st.integers(1, max_nodes)), draw(st.integers(0, 2**20)))


@dataclass(frozen=True, slots=True)
class DeltaCase:
    """Inputs of one call of the tree recurrence."""

    parents: list[int]
    state: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    log_decay: Tensor

    @property
    def ancestors(self) -> Tensor:
        return ancestors_of(self.parents).to(self.state.device)

    @property
    def inputs(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in ("q", "k", "v", "beta", "log_decay", "ancestors")}

    def double(self) -> DeltaCase:
        wide = {name: getattr(self, name).double() for name in ("state", "q", "k", "v", "beta", "log_decay")}
        return replace(self, **wide)


def delta_case(
    parents: list[int],
    *,
    seed: int = 0,
    batch: int = 1,
    heads: tuple[int, int] = (2, 6),
    dims: tuple[int, int] = (16, 16),
    gates: str = "any",
    beta: str = "any",
    repeated: bool = False,
    dtype: torch.dtype = torch.float32,
) -> DeltaCase:
    """gates: any, near-0, near-1, mixed    beta: any, near-1    repeated: only two different keys in the tree"""
    generator = torch.Generator().manual_seed(seed)
    nodes, (key_heads, value_heads), (key_dim, value_dim) = len(parents), heads, dims

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(batch, nodes, value_heads, generator=generator)

    k = normal(batch, nodes, key_heads, key_dim)
    if repeated:
        k = k[:, torch.randint(0, min(2, nodes), (nodes,), generator=generator)]
    near_0, near_1 = -uniform(4.0, 9.0), -uniform(0.0, 1e-3)
    log_decay = {
        "any": -uniform(0.0, 2.0),
        "near-0": near_0,
        "near-1": near_1,
        "mixed": torch.where(uniform(0.0, 1.0) < 0.3, near_0, near_1),
    }[gates]
    return DeltaCase(
        parents,
        state=normal(batch, value_heads, key_dim, value_dim).to(DEVICE),
        q=normal(batch, nodes, key_heads, key_dim).to(DEVICE, dtype),
        k=k.to(DEVICE, dtype),
        v=normal(batch, nodes, value_heads, value_dim).to(DEVICE, dtype),
        beta=(1 - uniform(0.0, 1e-3) if beta == "near-1" else uniform(0.0, 1.0)).to(DEVICE, dtype),
        log_decay=log_decay.to(DEVICE),
    )


# A tree in which two siblings (1, 2) have children, grandchildren and cousins.
FAMILY = [-1, 0, 0, 1, 2, 3, 4, 5, 6, 3, 4]


def swapped_parents(seen: Tensor) -> Tensor:
    """Mutant: nodes 3 and 4, children of the siblings 1 and 2, trade parents (their descendants follow)."""
    parents = list(FAMILY)
    parents[3], parents[4] = parents[4], parents[3]
    return ancestors_of(parents).to(seen.device)


def dropped_ancestor(seen: Tensor) -> Tensor:
    """Mutant: node 7 no longer sees its grandparent 3."""
    seen = seen.clone()
    seen[7, 3] = False
    return seen


def added_cousin(seen: Tensor) -> Tensor:
    """Mutant: node 7 also sees 4, the child of its ancestor's sibling."""
    seen = seen.clone()
    seen[7, 4] = True
    return seen


def draft_case(seed: int, max_budget: int = 256) -> tuple[Tensor, int]:
    """Log-probabilities [D, vocab] of a block of 4 to 16 and a budget; two of three have many equal values."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(4, generator=generator).tolist()
    depths, vocab = 3 + int(13 * uniform[0]), 2 + int(300 * uniform[1])
    budget = max_budget if seed % 50 == 0 else round(max_budget ** uniform[2])
    log_probs = (torch.randn(depths, vocab, generator=generator) * (0.3 + 4 * uniform[3])).log_softmax(-1)
    if seed % 3 == 1:
        log_probs = (4 * log_probs).round() / 4
    if seed % 3 == 2:
        log_probs = log_probs.round().clamp(min=-4)
    return log_probs, budget


def is_tree(built, tree) -> bool:
    """Whether `TreeBuffers` hold this `DraftTree`, every relation of it, and harmless padding."""
    from deltatree.kernels.conv import conv_rows
    from deltatree.tree import ancestors

    count, parents = len(tree), built.parents.cpu()
    seen = torch.eye(len(parents), dtype=torch.uint8)
    seen[:count, :count] = ancestors(tree).to(torch.uint8)
    return (
        int(built.num_nodes) == count
        and all(
            torch.equal(x[:count].cpu(), y) and not bool(x[count:].any())
            for x, y in (
                (built.token_ids, tree.token_ids), (built.parents, tree.parents), (built.depths, tree.depths),
            )
        )
        and bool((built.scores[count:] == -torch.inf).all())
        and torch.equal(built.ancestors.cpu(), seen)
        and torch.equal(built.rows.cpu(), conv_rows(parents, built.rows.shape[1]))
    )  # fmt: skip
