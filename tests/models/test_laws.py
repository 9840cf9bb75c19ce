"""The laws, on whatever is drawn: any tree, any drafter, any accepted path, any prompt in any chunks; same tokens, same states."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import VOCAB, assert_same_state, committed, one_by_one, plain_greedy, tiny_model

from deltatree.decode import Ending, Sampler, decode
from deltatree.drafter import ScriptedDrafter
from deltatree.models import reference
from deltatree.tree import DraftTree, best_first, chain, path_to

MODELS = ("qwen3_5_moe_text", "qwen3_moe")
COUNT = 20

law = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
tokens = st.integers(0, VOCAB - 1)


@cache
def model_of(architecture: str):
    return tiny_model(architecture)


@cache
def truth_of(architecture: str, prompt: tuple[int, ...]) -> list[int]:
    return plain_greedy(model_of(architecture), list(prompt), COUNT)


@st.composite
def trees(draw, most: int = 24) -> DraftTree:
    """Any parent-first tree: deep, wide, with equal siblings."""
    nodes = draw(st.integers(1, most))
    reach = draw(st.sampled_from([1, 2, most]))  # 1 is a chain
    parents = [-1, *(draw(st.integers(max(0, node - reach), node - 1)) for node in range(1, nodes))]
    return DraftTree.from_parents(draw(st.lists(tokens, min_size=nodes, max_size=nodes)), parents)


@pytest.fixture(params=MODELS)
def architecture(request):
    return request.param


@law
@given(data=st.data())
def test_any_path_of_any_tree_after_any_prompt_in_any_chunks(target_of, architecture, data, monkeypatch):
    prompt = data.draw(st.lists(tokens, min_size=1, max_size=20), label="prompt")
    trees_drawn = data.draw(st.lists(trees(), min_size=1, max_size=2), label="trees")
    monkeypatch.setattr(reference, "PREFILL_CHUNK", data.draw(st.integers(1, 21), label="chunk"))
    split = data.draw(st.integers(0, len(prompt) - 1), label="split")
    target = target_of(model_of(architecture), taps=(0, 2, 4))
    state, text, features = target.new_state(), list(prompt), []
    for part in (prompt[:split], prompt[split:]):
        if part:
            verified = target.prefill(part, state)
            features.append(verified.features)
    seen = {len(text) - 1: verified.logits[0]}
    for tree in trees_drawn:
        path = path_to(tree, data.draw(st.integers(0, len(tree) - 1), label="accepted"))
        untouched = [(a.clone(), b.clone()) for a, b in committed(state)]
        verified = target.verify(tree, state)
        assert_same_state(state, untouched, tolerance=0)
        seen |= {len(text) + depth: verified.logits[node] for depth, node in enumerate(path)}
        features.append(verified.features[path])
        target.commit(path, state)
        text += tree.token_ids[path].tolist()
    logits, layers = one_by_one(model_of(architecture), text)
    assert state.length == len(text)
    assert_same_state(state, layers, tolerance=2e-4)
    for place, row in seen.items():
        torch.testing.assert_close(row, logits[place], atol=2e-4, rtol=2e-4)
    whole = target.prefill(text, target.new_state()).features
    torch.testing.assert_close(torch.cat(features), whole, atol=2e-4, rtol=2e-4)


@law
@given(
    prompt=st.sampled_from([(5,), (40, 2), (9, 8, 7, 6, 5), tuple(range(17))]),
    seed=st.integers(0, 1000),
    rightness=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    depth=st.integers(0, 9),
    budget=st.integers(0, 40),
    policy=st.sampled_from(["chain", "best-first", "anything"]),
    cap=st.integers(1, COUNT),
    chunk=st.integers(1, 18),
)
def test_any_drafter_under_any_policy_gives_the_same_tokens_and_the_same_state(
    target_of, architecture, prompt, seed, rightness, depth, budget, policy, cap, chunk, monkeypatch
):
    """The drafter knows each place of the text with some probability, and draws noise elsewhere."""
    monkeypatch.setattr(reference, "PREFILL_CHUNK", chunk)
    truth = truth_of(architecture, prompt)
    text = [*prompt, *truth]
    generator = torch.Generator().manual_seed(seed)
    knows = torch.rand(len(text) + 10, generator=generator) < rightness

    def script(done: int, bonus: int) -> torch.Tensor:
        rows = torch.randn(depth, VOCAB, generator=generator)
        for place in range(done + 1, min(done + 1 + depth, len(text))):
            if knows[place]:
                rows[place - done - 1, text[place]] += 6
        return rows

    def anything(log_probs, *, root, budget):
        """Trees that no drafter would think of: random parents, likely and unlikely tokens."""
        parents, ids, depths = [-1], [root], [0]
        for _ in range(budget):
            parent = int(torch.randint(len(parents), (), generator=generator))
            if depths[parent] < len(log_probs):
                ids.append(int(torch.multinomial(log_probs[depths[parent]].exp(), 1, generator=generator)))
                parents.append(parent)
                depths.append(depths[parent] + 1)
        return DraftTree.from_parents(ids, parents)

    target, states = target_of(model_of(architecture)), []
    new_state = target.new_state
    target.new_state = lambda: states.append(new_state()) or states[-1]
    build_tree = {"chain": chain, "best-first": best_first, "anything": anything}[policy]
    rounds = list(
        decode(
            target, ScriptedDrafter(script, depth), list(prompt), build_tree=build_tree, budget=budget,
            ending=Ending(cap), sampler=Sampler(),
        )
    )  # fmt: skip
    assert [token for done in rounds for token in done.token_ids] == truth[:cap]
    assert states[0].length == len(prompt) + cap - 1
    plain = new_state()
    target.prefill(text[: states[0].length], plain)
    assert_same_state(states[0], committed(plain), tolerance=2e-4)
