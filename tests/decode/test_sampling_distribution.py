"""Sampling through a draft tree is sampling from the target: two-token continuations against the exact distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from markov import VOCAB, MarkovTarget, drafter, exact_pairs

from deltatree.decode import Ending, GenerateOptions, Sampler, decode, sampler_for
from deltatree.decode.methods import plan
from deltatree.drafter import ScriptedDrafter

PROMPT = [3, 7]
DRAWS = 200_000
SETTINGS = {
    "temperature 0.5": dict(temperature=0.5),
    "temperature 1.0": dict(temperature=1.0),
    "temperature 1.5": dict(temperature=1.5),
    "top-p 0.8": dict(temperature=1.0, top_p=0.8),
    "top-k 3": dict(temperature=1.0, top_k=3),
    "repetition penalty 1.3": dict(temperature=1.0, repetition_penalty=1.3),
}
DRAFTERS = ("right", "wrong", "over-confident")


class Fork(Exception):
    """A draw that the script does not foresee."""


class CrowdSampler(Sampler):
    """The sampler itself, for many generations at once: repeats the draws of a script, and stops at the first new one."""

    script: tuple[int, ...] = ()
    length = 2

    def _choose(self, scores, input_ids):
        if self.turn < len(self.script):
            choice = self.script[self.turn]
        elif self.turn < self.length:
            raise Fork(self._cumulative(scores, input_ids))
        else:  # behind the tokens that count
            choice = super()._choose(scores, input_ids)
        self.turn += 1
        return choice


class BiasedSampler(CrowdSampler):
    """The planted mistake: "near enough" to a confident draft counts as that draft."""

    def bind(self, tree, logits, history):
        choose = super().bind(tree, logits, history)

        def biased(node: int, path: list[int]) -> int:
            choice = choose(node, path)
            drafted = int(tree.token_ids[1]) if len(tree) > 1 and node == 0 else -1
            return drafted if drafted >= 0 and abs(drafted - choice) == 1 else choice

        return biased


def count_pairs(options: GenerateOptions, kind: str, draws: int, make=CrowdSampler) -> np.ndarray:
    """[vocab, vocab] counts of the two-token continuations that the loop emits.

    Every draw is made. Generations that have drawn the same so far share one run of the loop, so that 200,000 take
    about as many runs as there are continuations.
    """
    target = MarkovTarget()
    drafting, build_tree, budget = plan(options, drafter(kind, target), VOCAB)
    plain = sampler_for(options, prompt_length=len(PROMPT))
    counts = np.zeros((VOCAB, VOCAB), dtype=np.int64)

    def run(script: tuple[int, ...], crowd: int) -> None:
        sampler = make(plain.processor, plain.generator, plain.draft_processor, plain.draft_filter)
        sampler.script, sampler.turn = script, 0
        emitted: list[int] = []
        loop = decode(target, drafting, PROMPT, build_tree=build_tree, budget=budget, ending=Ending(2), sampler=sampler)
        try:
            for done in loop:
                emitted += done.token_ids
        except Fork as fork:
            drawn, sizes = sampler._draw(fork.args[0], crowd).unique(return_counts=True)
            for token, size in zip(drawn.tolist(), sizes.tolist(), strict=True):
                run((*script, token), size)
        else:
            counts[emitted[0], emitted[1]] += crowd

    run((), draws)
    return counts


def chi_square_p(counts: np.ndarray, probs: np.ndarray) -> float:
    """P-value of the counts under the probabilities; cells expecting fewer than 5 are pooled."""
    expected = probs.flatten() * counts.sum()
    observed = counts.flatten()
    if observed[expected == 0].any():  # what cannot happen has happened
        return 0.0
    small = expected < 5
    expected = np.append(expected[~small], expected[small].sum())
    observed = np.append(observed[~small], observed[small].sum())
    keep = expected > 0
    statistic = float(((observed - expected)[keep] ** 2 / expected[keep]).sum())
    freedom = int(keep.sum()) - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2.0).double(), torch.tensor(statistic / 2).double()))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", ("dflash", "ddtree"))
@pytest.mark.parametrize("kind", DRAFTERS)
def test_drafting_does_not_change_the_distribution(kind, method, setting):
    options = GenerateOptions(method=method, budget=8, seed=11, **SETTINGS[setting])
    counts = count_pairs(options, kind, DRAWS)
    assert counts.sum() == DRAWS
    assert chi_square_p(counts, exact_pairs(MarkovTarget(), PROMPT, options)) > 1e-4


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", ("dflash", "ddtree"))
def test_a_planted_bias_is_caught(method, setting):
    options = GenerateOptions(method=method, budget=8, seed=11, **SETTINGS[setting])
    counts = count_pairs(options, "over-confident", DRAWS, BiasedSampler)
    assert chi_square_p(counts, exact_pairs(MarkovTarget(), PROMPT, options)) < 1e-12


def test_without_shared_runs_the_frequencies_are_the_same():
    """600 generations one by one, each with its own run of the loop."""
    options = GenerateOptions(method="ddtree", budget=8, seed=5, temperature=1.0, top_p=0.8, repetition_penalty=1.3)
    target, sampler = MarkovTarget(), sampler_for(options, prompt_length=len(PROMPT))
    drafting, build_tree, budget = plan(options, drafter("right", target), VOCAB)
    counts = np.zeros((VOCAB, VOCAB), dtype=np.int64)
    for _ in range(600):
        loop = decode(target, drafting, PROMPT, build_tree=build_tree, budget=budget, ending=Ending(2), sampler=sampler)
        first, second = [token for done in loop for token in done.token_ids]
        counts[first, second] += 1
    assert chi_square_p(counts, exact_pairs(target, PROMPT, options)) > 1e-4


class CoinTarget(MarkovTarget):
    """Five tokens, after every one of which tokens 1 and 3 have 0.55 and 0.45."""

    vocab_size = 5

    def __init__(self) -> None:
        self.table = torch.tensor([1e-9, 0.55, 1e-9, 0.45, 1e-9]).log().expand(5, 5, 5)


def test_B28_every_token_of_a_round_is_drawn():
    """20,000 continuations of three tokens, of a drafter that always drafts the likeliest one."""
    target, draws = CoinTarget(), 20_000
    certain = ScriptedDrafter(
        lambda committed, bonus: torch.tensor([-9.0, 9.0, -9.0, -9.0, -9.0]).expand(2, -1), depth=2
    )
    options = GenerateOptions(method="ddtree", budget=2, seed=1, temperature=1.0)
    drafting, build_tree, budget = plan(options, certain, 5)
    plain = sampler_for(options, prompt_length=2)
    counts = np.zeros((5, 5, 5), dtype=np.int64)

    def run(script: tuple[int, ...], crowd: int) -> None:
        sampler = CrowdSampler(plain.processor, plain.generator)
        sampler.script, sampler.turn, sampler.length = script, 0, 3
        try:
            loop = decode(
                target, drafting, [0, 1], build_tree=build_tree, budget=budget, ending=Ending(3), sampler=sampler
            )
            emitted = [token for done in loop for token in done.token_ids]
        except Fork as fork:
            drawn, sizes = sampler._draw(fork.args[0], crowd).unique(return_counts=True)
            for token, size in zip(drawn.tolist(), sizes.tolist(), strict=True):
                run((*script, token), size)
        else:
            counts[tuple(emitted)] += crowd

    run((), draws)
    coin = np.array([1e-9, 0.55, 1e-9, 0.45, 1e-9])
    exact = coin[:, None, None] * coin[:, None] * coin
    assert counts.sum() == draws and chi_square_p(counts, exact / exact.sum()) > 1e-3
    for axis in range(3):
        share = counts.sum(axis=tuple({0, 1, 2} - {axis}))[1] / draws
        assert abs(share - 0.55) < 0.015
