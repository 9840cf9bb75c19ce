"""The law: any table, the same tokens as plain decoding, greedy and drawn."""

import pytest
import torch
from markov import VOCAB as MARKOV_VOCAB
from markov import MarkovTarget
from markov import drafter as markov_drafter
from tiny import VOCAB, plain_greedy

from deltatree.decode import Ending, GenerateOptions, Sampler, decode, sampler_for
from deltatree.decode.methods import plan
from deltatree.drafter import RandomDrafter, RightDrafter, WrongDrafter
from deltatree.models import ReferenceTarget
from deltatree.transitions import TransitionTable, TransitionTree
from deltatree.tree import no_draft

PROMPTS = ([5, 6, 7, 8, 9, 10, 3], [40], [1, 1, 1, 1])
TABLES = ("right", "wrong", "random", "empty")


def table_of(kind, text, vocab):
    """right: counted on this text; wrong: on its tokens in reverse order, shifted; random: on noise."""
    if kind == "empty":
        return TransitionTable.empty(vocab, num_buckets=64)
    noise = torch.randint(vocab, (8, 64), generator=torch.Generator().manual_seed(1))
    text = torch.as_tensor(text)[None]
    found = {"right": text, "wrong": (text.flip(1) + 1) % vocab, "random": noise}[kind]
    return TransitionTable.count(found.repeat(9, 1), vocab, num_buckets=256)


def run(target, drafter, prompt, count, policy, budget, sampler=None):
    ending = Ending(count)
    sampler = sampler or Sampler()
    rounds = list(decode(target, drafter, prompt, build_tree=policy, budget=budget, ending=ending, sampler=sampler))
    return [token for r in rounds for token in r.token_ids], rounds


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("fixture", ["hybrid", "attention_moe"])
def test_any_table_and_drafter_gives_the_tokens_of_plain_transformers(fixture, kind, request):
    model = request.getfixturevalue(fixture)
    target = ReferenceTarget(model)
    trees = [(True, 7), (False, 1), (False, 20)]  # is_chain, budget
    for place, prompt in enumerate(PROMPTS):
        truth = plain_greedy(model, prompt, 14)
        text = prompt + truth
        table = table_of(kind, text, VOCAB)
        for number, drafter in enumerate((RightDrafter(text, VOCAB), WrongDrafter(text, VOCAB), RandomDrafter(VOCAB))):
            for is_chain, budget in trees if place == 0 else [trees[(place + number) % len(trees)]]:
                assert run(target, drafter, prompt, 14, TransitionTree(table, is_chain=is_chain), budget)[0] == truth


def test_a_right_table_is_worth_rounds(hybrid):
    """A drafter that knows nothing: only the table can tell what comes."""
    prompt = PROMPTS[0]
    truth = plain_greedy(hybrid, prompt, 30)
    drafter = RandomDrafter(VOCAB)
    rounds = {}
    for kind in ("right", "empty"):
        policy = TransitionTree(table_of(kind, prompt + truth, VOCAB), refines=False)
        rounds[kind] = len(run(ReferenceTarget(hybrid), drafter, prompt, 30, policy, 16)[1])
    assert rounds["right"] < rounds["empty"]


@pytest.mark.parametrize("kind", TABLES)
def test_a_seed_draws_the_tokens_of_plain_sampling(kind):
    """Draw by draw the same text for every seed, so the law of the text is the same."""
    target = MarkovTarget()
    for drafting in ("right", "wrong", "over-confident"):
        drafter = markov_drafter(drafting, target)
        for seed in range(12):
            options = GenerateOptions(temperature=1.0, seed=seed, top_p=0.9 if seed % 2 else 1.0)
            plain, _ = run(target, drafter, [3, 7], 25, no_draft, 0, sampler_for(options, prompt_length=2))
            table = table_of(kind, [3, 7, *plain], MARKOV_VOCAB)
            policy = TransitionTree(table, is_chain=seed % 3 == 0)
            assert run(target, drafter, [3, 7], 25, policy, 9, sampler_for(options, prompt_length=2))[0] == plain


def test_a_hybrid_draws_the_tokens_of_plain_sampling(hybrid):
    target, drafter = ReferenceTarget(hybrid), RandomDrafter(VOCAB)
    for seed in range(3):
        options = GenerateOptions(temperature=1.0, seed=seed)
        plain, _ = run(target, drafter, [5, 6, 7], 16, no_draft, 0, sampler_for(options, prompt_length=3))
        table = table_of("right", plain, VOCAB)
        sampler = sampler_for(options, prompt_length=3)
        assert run(target, drafter, [5, 6, 7], 16, TransitionTree(table), 12, sampler)[0] == plain


def test_options_choose_the_policy():
    table, drafter = TransitionTable.empty(VOCAB, num_buckets=16), RandomDrafter(VOCAB)
    _, policy, budget = plan(GenerateOptions(tree="transitions", budget=9), drafter, VOCAB, transitions=table)
    assert isinstance(policy, TransitionTree) and not policy.is_chain and budget == 9
    _, policy, _ = plan(GenerateOptions(tree="transitions-chain", budget=9), drafter, VOCAB, transitions=table)
    assert policy.is_chain
    for tree, plain in (("transitions", "best-first"), ("transitions-chain", "chain")):
        _, policy, _ = plan(GenerateOptions(tree=tree, transitions="none", budget=9), drafter, VOCAB)
        assert policy is plan(GenerateOptions(tree=plain, budget=9), drafter, VOCAB)[1]
    with pytest.raises(ValueError, match="needs a table"):
        plan(GenerateOptions(tree="transitions", budget=9), drafter, VOCAB)
