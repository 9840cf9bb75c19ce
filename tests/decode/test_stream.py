"""The loop: where a text ends, what it costs, and that generations do not touch each other."""

import pytest
import torch
from tiny import VOCAB, plain_greedy, tiny_model

from deltatree.decode import Ending, GenerateOptions, Sampler, decode, sampler_for
from deltatree.drafter import NoDrafter, RandomDrafter, RightDrafter, ScriptedDrafter
from deltatree.drafter.scripted import one_hot_log_probs
from deltatree.errors import PromptError
from deltatree.models import ReferenceTarget
from deltatree.state import RecurrentState
from deltatree.tree import accept, best_first, chain, path_to

PROMPT = [5, 6, 7, 8, 9, 10, 3]


@pytest.fixture(scope="module")
def truth(hybrid):
    return plain_greedy(hybrid, PROMPT, 40)


@pytest.fixture(scope="module")
def target(hybrid):
    return ReferenceTarget(hybrid)


def rounds_of(target, drafter, ending, prompt=PROMPT, policy=best_first, budget=8, sampler=None):
    return decode(
        target, drafter, prompt, build_tree=policy, budget=budget, ending=ending, sampler=sampler or Sampler()
    )


def tokens_of(rounds):
    return [token for r in rounds for token in r.token_ids]


@pytest.mark.parametrize("cap", [*range(1, 12), 16, 17, 25])
def test_B22_B23_exactly_the_tokens_asked_for(target, truth, cap):
    rounds = list(rounds_of(target, RightDrafter(PROMPT + truth, VOCAB), Ending(cap)))
    assert tokens_of(rounds) == truth[:cap]
    assert [r.ended for r in rounds] == [None] * (len(rounds) - 1) + ["length"]


@pytest.mark.parametrize("place", range(12))
def test_B20_nothing_after_an_end_token_wherever_it_falls(target, truth, place):
    """The end token as first token, at every depth of an accepted path, and as the bonus token."""
    stop = truth[place]
    ending = Ending(40, frozenset({stop}))
    rounds = list(rounds_of(target, RightDrafter(PROMPT + truth, VOCAB), ending))
    assert tokens_of(rounds) == truth[: truth.index(stop) + 1]
    assert rounds[-1].ended == "stop"


def test_what_is_committed_is_what_was_shown_but_for_the_last_token(hybrid, truth):
    target, states = ReferenceTarget(hybrid), []
    new_state = target.new_state
    target.new_state = lambda: states.append(new_state()) or states[-1]
    list(rounds_of(target, RightDrafter(PROMPT + truth, VOCAB), Ending(13)))
    assert states[0].length == len(PROMPT) + 12
    plain = new_state()
    target.prefill(PROMPT + truth[:12], plain)
    for ours, theirs in zip(states[0].layers, plain.layers, strict=True):
        if isinstance(ours, RecurrentState):
            torch.testing.assert_close(ours.matrix, theirs.matrix, atol=1e-4, rtol=1e-4)


def test_B41_a_block_of_n_emits_at_most_n_tokens_a_round(target, truth):
    rounds = list(rounds_of(target, RightDrafter(PROMPT + truth, VOCAB, depth=7), Ending(33), budget=64))
    assert max(r.acceptance_length for r in rounds) == 8
    assert max(r.depth for r in rounds) == 7


def chains_and_trees(target, script, budget, count=40):
    """Both methods' rounds with one drafter."""
    return [
        list(rounds_of(target, ScriptedDrafter(script), Ending(count), policy=policy, budget=budget))
        for policy in (chain, best_first)
    ]


def test_B08_a_tree_that_is_the_chain_accepts_like_the_chain(hybrid):
    """200 rounds of drafts that are right for a random number of places; states in float32 whatever the weights are."""
    target, generator = ReferenceTarget(hybrid), torch.Generator().manual_seed(0)
    text = PROMPT + plain_greedy(hybrid, PROMPT, 420)
    wrong_at = torch.rand(len(text) + 8, generator=generator) < 0.4

    def script(committed, bonus):
        places = range(committed + 1, min(committed + 8, len(text)))
        drafts = [(text[i] + 1) % VOCAB if wrong_at[i] else text[i] for i in places]
        return one_hot_log_probs(drafts, VOCAB, 1 - 1e-6)

    rounds = chains_and_trees(target, script, 7, 420)
    lengths = [[r.acceptance_length for r in arm] for arm in rounds]
    assert lengths[0] == lengths[1] and len(lengths[0]) > 160
    assert [tokens_of(arm) for arm in rounds] == [text[len(PROMPT) :]] * 2
    narrow = ReferenceTarget(tiny_model("qwen3_5_moe_text").to(torch.bfloat16))
    for one in (target, narrow):
        state = one.new_state()
        one.prefill(PROMPT, state)
        one.verify(best_first(one_hot_log_probs([4, 5], VOCAB), root=3, budget=4), state)
        one.commit([0, 1], state)
        recurrent = [layer for layer in state.layers if isinstance(layer, RecurrentState)]
        assert {layer.matrix.dtype for layer in recurrent} == {torch.float32} and len(recurrent) == 6


@pytest.mark.parametrize("budget", [4, 7, 15, 31])
def test_B08_a_tree_that_holds_the_whole_chain_accepts_at_least_as_much(target, truth, budget):
    """From the same committed prefix; a tree of few nodes may be shallower than the chain, and then may accept less."""
    text, generator = PROMPT + truth, torch.Generator().manual_seed(budget)
    noise = 3 * torch.randn(len(text) + 8, VOCAB, generator=generator)

    def script(committed, bonus):
        rows = noise[committed + 1 : committed + 8].clone()
        for depth, token in enumerate(text[committed + 1 : committed + 8]):
            rows[depth, token] += 8
        return rows

    whole = 0
    for done in range(len(PROMPT), len(text) - 9):
        state = target.new_state()
        target.prefill(text[:done], state)
        log_probs = script(done, text[done]).log_softmax(-1)
        trees = [policy(log_probs, root=text[done], budget=budget) for policy in (chain, best_first)]
        lengths = [accept(tree, target.verify(tree, state).logits.argmax(-1)).length for tree in trees]
        spine = {tuple(trees[0].token_ids[: n + 1].tolist()) for n in range(len(trees[0]))}
        paths = {tuple(trees[1].token_ids[path_to(trees[1], node)].tolist()) for node in range(len(trees[1]))}
        if spine <= paths:
            whole += 1
            assert lengths[1] >= lengths[0]
    assert whole or budget <= 7


def test_B27_the_context_is_a_hard_end(truth):
    model = tiny_model("qwen3_5_moe_text", max_position_embeddings=64)
    target = ReferenceTarget(model)
    prompt = [(3 * i) % VOCAB for i in range(60)]
    expected = plain_greedy(model, prompt, 4)
    rounds = list(rounds_of(target, RandomDrafter(VOCAB), Ending(50), prompt=prompt, budget=16))
    assert tokens_of(rounds) == expected and rounds[-1].ended == "length"
    assert list(rounds_of(target, RandomDrafter(VOCAB), Ending(50), prompt=prompt + [1] * 4)) == []
    with pytest.raises(PromptError, match="65 tokens, the target's context is 64"):
        next(rounds_of(target, RandomDrafter(VOCAB), Ending(50), prompt=prompt + [1] * 5))


def test_B27_past_the_drafters_own_limit_decoding_goes_on_plainly(target, truth):
    drafter = RightDrafter(PROMPT + truth, VOCAB)
    drafter.context_length = 24
    rounds = list(rounds_of(target, drafter, Ending(40)))
    assert tokens_of(rounds) == truth
    assert rounds[1].num_nodes > 1 and rounds[-1].num_nodes == 1


def test_B50_B51_generations_in_turns_do_not_touch_each_other(target, hybrid, truth):
    other = [40, 41, 42]
    other_truth = plain_greedy(hybrid, other, 40)
    first = rounds_of(target, RightDrafter(PROMPT + truth, VOCAB), Ending(40))
    second = rounds_of(target, RandomDrafter(VOCAB), Ending(40), prompt=other)
    ours, theirs = [], []
    for _ in range(60):
        ours += tokens_of(filter(None, [next(first, None)]))
        theirs += tokens_of(filter(None, [next(second, None)]))
    assert (ours, theirs) == (truth, other_truth)


def test_B50_an_error_in_the_middle_leaves_the_next_generation_alone(hybrid, truth):
    target = ReferenceTarget(hybrid)
    verify, calls = target.verify, []

    def broken(tree, state):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("target broke")
        return verify(tree, state)

    target.verify = broken
    with pytest.raises(RuntimeError, match="target broke"):
        list(rounds_of(target, RightDrafter(PROMPT + truth, VOCAB), Ending(40)))
    assert tokens_of(rounds_of(target, RightDrafter(PROMPT + truth, VOCAB), Ending(40))) == truth


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.0}, {"temperature": 1e-6}, {"temperature": 1e-5}, {"temperature": 1.0, "top_k": 1},
     {"temperature": 1.0, "top_p": 1e-4}],
)  # fmt: skip
def test_B30_settings_that_leave_one_token_are_greedy(target, truth, options):
    sampler = sampler_for(GenerateOptions(**options))
    assert tokens_of(rounds_of(target, RandomDrafter(VOCAB), Ending(40), sampler=sampler)) == truth


def test_B32_one_seed_one_text_whatever_else_runs(target):
    def sample(seed, disturb=False):
        sampler = sampler_for(GenerateOptions(temperature=1.0, seed=seed))
        tokens = []
        for r in rounds_of(target, RandomDrafter(VOCAB), Ending(30), sampler=sampler):
            tokens += r.token_ids
            if disturb:
                torch.rand(7)
                list(rounds_of(target, NoDrafter(VOCAB), Ending(2)))
        return tokens

    assert sample(3) == sample(3) == sample(3, disturb=True)
    assert sample(3) != sample(4)


def test_B28_B30_draws_follow_the_targets_distribution_not_the_drafters():
    """One draw a visited node: over many seeds the first two tokens have the frequencies of plain sampling."""
    from deltatree.tree import DraftTree, walk

    logits = torch.tensor([[2.0, 1.8, 0.0, -1.0, -2.0]]).expand(3, -1)
    probs = logits[0].softmax(-1)
    tree = DraftTree.from_parents([0, 0, 0], [-1, 0, 1])  # always drafts the argmax, over-confident
    sampler = sampler_for(GenerateOptions(temperature=1.0, seed=1))
    counts = torch.zeros(5, 5)
    draws = 20_000
    for _ in range(draws):
        accepted = walk(tree, sampler.bind(tree, logits, [0]))
        tokens = [0] * (accepted.length - 1) + [accepted.bonus]
        if len(tokens) < 2:
            tokens.append(int(torch.multinomial(probs, 1, generator=sampler.generator)))
        counts[tokens[0], tokens[1]] += 1
    expected = draws * probs[:, None] * probs[None, :]
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 51.2  # 24 degrees of freedom, p = 0.001
