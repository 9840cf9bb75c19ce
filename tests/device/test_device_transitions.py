"""Trees over transitions on the device are the host policy's, learn what it learns, and move no token of the text."""

import pytest
import torch
from checkpoints import drafter_config, save_drafter
from test_device_rounds import PROMPT, host_rounds, model, pair, rounds_of, tokens_of  # noqa: F401
from tiny import VOCAB, tiny_model

from deltatree.decode import Ending, Sampler, decode, stream
from deltatree.decode.auto import AutoBudget, Experience
from deltatree.decode.costs import RoundCosts
from deltatree.device import DeviceRounds
from deltatree.device.loop import has_device_tree
from deltatree.drafter import FastDFlashDrafter, NoDrafter, load_drafter, read_drafter_config
from deltatree.models import FastTarget, ReferenceTarget
from deltatree.transitions import TransitionTable, TransitionTree
from deltatree.tree import no_draft


class Watched(TransitionTree):
    """Keeps the trees that the host builds."""

    def __init__(self, table, **options):
        super().__init__(table, **options)
        self.trees = []

    def __call__(self, log_probs, *, root, budget):
        self.trees.append(super().__call__(log_probs, root=root, budget=budget))
        return self.trees[-1]


def truth_of(target, count=40):
    return [token for tokens, _ in host_rounds(target, NoDrafter(VOCAB), no_draft, 0, count) for token in tokens]


def table_of(kind, truth):
    """right: of the text that is to come    random: of any    wrong: of that text backwards"""
    text = {
        "right": torch.tensor([PROMPT + truth]),
        "random": torch.randint(VOCAB, (30, 60), generator=torch.Generator().manual_seed(1)),
        "wrong": torch.tensor([(PROMPT + truth)[::-1]]),
    }[kind]
    return TransitionTable.count(text, VOCAB, num_buckets=64)


def started(target, drafter, policy):
    state = target.new_state()
    verified = target.prefill(PROMPT, state)
    policy.begin(PROMPT)
    return DeviceRounds(
        target, state, drafter.start(), verified.features, int(verified.logits.argmax()), policy
    )  # fmt: skip


@pytest.mark.parametrize(
    "kind, budget, options",
    [
        ("right", 16, {}),
        ("random", 31, {"counts_picks": False}),
        ("wrong", 5, {"refines": False}),
        ("right", 7, {"is_chain": True}),
    ],
    ids=["tree", "path alone", "fixed table", "chain"],
)
def test_every_round_is_the_hosts(pair, kind, budget, options):  # noqa: F811
    target, drafter = pair
    table = table_of(kind, truth_of(target))
    host, policy = Watched(table, **options), TransitionTree(table, **options)
    expected = host_rounds(target, drafter, host, budget, 20)
    rounds = started(target, drafter, policy)
    is_chain = policy.is_chain
    assert len(host.trees) == len(expected) - 1
    for (token_ids, num_nodes), tree in zip(expected[1:-1], host.trees, strict=False):
        ours = rounds.run(budget, chain=is_chain)
        assert ours.token_ids == token_ids and ours.num_nodes == num_nodes
        built = rounds.work.tree(num_nodes)
        for name in ("token_ids", "parents", "depths"):
            assert torch.equal(getattr(built, name).cpu(), getattr(tree, name)), name
    assert budget != 16 or max(len(tokens) for tokens, _ in expected[1:]) > 1  # something is accepted
    # The host has seen one round more: taught the same, the device would be where it is.
    again = Watched(table, **options)
    emitted = sum(len(tokens) for tokens, _ in expected[:-1])
    host_rounds(target, drafter, again, budget, emitted)
    known = rounds.work.trees.known
    assert int(known.before) == again.before
    torch.testing.assert_close(known.strengths.double().cpu(), torch.from_numpy(again.strengths), atol=1e-5, rtol=0)
    held = again.base if again._table is None else again._table
    assert all(torch.equal(a.cpu(), b) for a, b in zip(known.table.tensors(), held.tensors(), strict=True))


@pytest.mark.parametrize("kind, budget", [("right", "auto"), ("random", "auto"), ("wrong", 31)])
def test_decode_takes_the_device_and_gives_the_hosts_text(pair, kind, budget, monkeypatch):  # noqa: F811
    """Through `decode`: ends in mid-round, budgets chosen in between, a second turn, a second generation."""
    target, drafter = pair
    truth = truth_of(target)
    table = table_of(kind, truth)
    taken = []
    monkeypatch.setattr(
        stream, "device_loop", lambda *a, _make=stream.device_loop, **k: taken.append(1) or _make(*a, **k)
    )
    experience = Experience(RoundCosts(target.node_buckets, captured=True))

    def run(prompt, count, conversation=None):
        policy = TransitionTree(table)
        if budget == "auto":
            policy = AutoBudget(policy, experience)
        most = 31 if budget == "auto" else budget
        ending = Ending(count)
        return list(
            decode(
                target, drafter, prompt, build_tree=policy, budget=most, ending=ending, sampler=Sampler(),
                conversation=conversation,
            )
        )  # fmt: skip

    for count in (2, 30):
        assert tokens_of(run(PROMPT, count)) == truth[:count]
    assert taken
    talk = stream.Conversation()
    following = [*PROMPT, *tokens_of(run(PROMPT, 9, talk)), 5, 6]
    assert tokens_of(run(following, 9, talk)) == tokens_of(run(following, 9))
    assert talk.reused_length == len(PROMPT) + 8
    assert table.num_entries == table_of(kind, truth).num_entries  # a generation counts into a copy


def test_budgets_may_change_and_drafting_may_rest(pair):  # noqa: F811
    """Chosen between draft and verify, skipped, a chain now and then: the text stays plain decoding's."""
    target, drafter = pair
    truth = truth_of(target)
    rounds = started(target, drafter, TransitionTree(table_of("right", truth)))
    text = truth[:1]
    for budget in (0, 5, 31, 0, 1, 16, 0, 7):
        if budget:
            drafted = rounds.draft(31)
            assert len(drafted) == 32 and (drafted.parents < range(32)).all() and drafted.spine().size > 1
            text += rounds.verify(budget, chain=budget == 7).token_ids
        else:
            text += rounds.run(0).token_ids
        assert int(rounds.work.trees.known.before) == [*PROMPT, *text][-2]
    assert text == truth[: len(text)]


def test_which_trees_are_built_here():
    table = TransitionTable.empty(VOCAB, num_buckets=2)
    tree, chain = TransitionTree(table), TransitionTree(table, is_chain=True)
    assert has_device_tree(tree) and has_device_tree(chain) and has_device_tree(AutoBudget(tree, Experience()))
    assert not has_device_tree(AutoBudget(chain, Experience()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [{}, {"is_chain": True}], ids=["tree", "chain"])
def test_captured_rounds_on_a_gpu_are_those_of_the_host(tmp_path, options):
    """Graphs captured in mid-text: plain decoding's tokens in as many rounds as the host takes, give or take a tie."""
    config = read_drafter_config(str(save_drafter(tmp_path, drafter_config())))
    reference = ReferenceTarget(tiny_model("qwen3_5_moe_text").cuda(), config.taps)
    target = FastTarget(reference, context_length=256, buckets=(1, 8, 17, 32), device_rounds=True)
    drafter = FastDFlashDrafter(load_drafter(config, target), context_length=200)
    truth = truth_of(target, 100)
    for budget in (7, 16, 31, "auto"):
        lengths = []
        for on_device in (True, False):
            target.device_rounds = on_device
            policy = TransitionTree(table_of("right", truth), **options)
            if budget == "auto":
                policy = AutoBudget(policy, Experience(RoundCosts(target.node_buckets, captured=True)))
            rounds = rounds_of(target, drafter, policy, 31 if budget == "auto" else budget, 100)
            assert [token for tokens, _ in rounds for token in tokens] == truth
            lengths.append(len(rounds))
        assert budget == "auto" or abs(lengths[0] - lengths[1]) <= 2
