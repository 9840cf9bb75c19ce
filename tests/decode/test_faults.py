"""What breaks in the middle: the text goes on by plain decoding and says why, or ends with one clear error.

Either way what was emitted is plain decoding's text, and the next generation is as if nothing had happened.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from checkpoints import save_drafter, save_target
from tiny import VOCAB, plain_greedy, tiny_model

import deltatree
from deltatree import GenerateOptions, Pair
from deltatree.decode import Conversation, Ending, Sampler, decode
from deltatree.drafter import RightDrafter, ScriptedDrafter, WrongDrafter
from deltatree.drafter.scripted import one_hot_log_probs
from deltatree.errors import CheckpointError
from deltatree.models import FastTarget, ReferenceTarget
from deltatree.tree import best_first

PROMPT = [5, 6, 7, 8, 9, 10, 3]
COUNT = 40


@pytest.fixture(scope="module")
def target(hybrid):
    return ReferenceTarget(hybrid)


@pytest.fixture(scope="module")
def truth(hybrid):
    return plain_greedy(hybrid, PROMPT, COUNT)


def rounds_of(target, drafter, count=COUNT, budget=8, **more):
    return decode(
        target, drafter, PROMPT, build_tree=best_first, budget=budget, ending=Ending(count), sampler=Sampler(), **more
    )


def tokens_of(rounds):
    return [token for done in rounds for token in done.token_ids]


class FaultyDrafter(ScriptedDrafter):
    """Right, until its proposals of round `at` (from 0 on) go through `fault`. Counts its calls."""

    def __init__(self, text, at: int, fault) -> None:
        super().__init__(RightDrafter(text, VOCAB).script)
        self.at, self.fault, self.calls = at, fault, 0

    def start(self):
        session, right = super().start(), super().start().propose

        def propose(features, *, bonus):
            log_probs = right(features, bonus=bonus)
            self.calls += 1
            return self.fault(log_probs) if self.calls - 1 == self.at else log_probs

        session.propose = propose
        return session


def planted(value):
    def fault(log_probs):
        log_probs = log_probs.clone()
        log_probs[2, 11] = value
        return log_probs

    return fault


def raises(error):
    def fault(log_probs):
        raise error

    return fault


FAULTS = {
    "one NaN": (planted(float("nan")), "no numbers"),
    "one infinity": (planted(float("inf")), "no numbers"),
    "all NaN": (lambda x: x * float("nan"), "no numbers"),
    "a row of zero probabilities": (lambda x: torch.full_like(x, -torch.inf), "no numbers"),
    "another vocabulary": (lambda x: x[:, 1:], r"shape \(7, 130\) instead of \[depth, 131\]"),
    "a vector": (lambda x: x[0], r"shape \(131,\)"),
    "a batch": (lambda x: x[None], r"shape \(1, 7, 131\)"),
    "no tensor": (lambda x: None, "NoneType instead of a tensor"),
    "an exception": (raises(RuntimeError("size mismatch\nat line 7")), "raised RuntimeError: size mismatch;"),
    "an exception without words": (raises(KeyError()), "raised KeyError;"),
    "no memory": (raises(torch.OutOfMemoryError("CUDA out of memory. Tried 4 GiB.")), "raised OutOfMemoryError"),
}


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("name", FAULTS)
def test_a_drafters_fault_in_any_round_leaves_plain_decoding(target, truth, name, at):
    fault, cause = FAULTS[name]
    drafter = FaultyDrafter(PROMPT + truth, at, fault)
    with pytest.warns(RuntimeWarning, match=cause) as caught:
        rounds = list(rounds_of(target, drafter))
    assert len(caught) == 1 and "plain decoding" in str(caught[0].message) and "\n" not in str(caught[0].message)
    assert tokens_of(rounds) == truth and drafter.calls == at + 1
    assert [r.num_nodes > 1 for r in rounds[1:]] == [True] * at + [False] * (len(rounds) - 1 - at)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = list(rounds_of(target, drafter))  # the same drafter is asked again by the next generation
    assert tokens_of(again) == truth and again[1].acceptance_length == 8


def test_a_zero_probability_is_no_fault(target, truth):
    text = PROMPT + truth
    certain = ScriptedDrafter(lambda done, bonus: one_hot_log_probs(text[done + 1 : done + 8], VOCAB, confidence=1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rounds = list(rounds_of(target, certain, budget=32))
    assert tokens_of(rounds) == truth and rounds[1].acceptance_length == 8


@pytest.mark.parametrize("device_error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4 GiB."),
                                          RuntimeError("DefaultCPUAllocator: can't allocate memory"), MemoryError()])  # fmt: skip
def test_B19_a_tree_that_does_not_fit_into_memory_leaves_plain_decoding(hybrid, truth, device_error):
    """The failed verify has written half of its scratch: that must not be seen again."""
    target = ReferenceTarget(hybrid)
    layer, wide = hybrid.model.layers[5], []

    def fails(module, arguments):
        if arguments[0].shape[1] > 5 and target.prefilled:
            wide.append(1)
            if len(wide) > 2:
                raise device_error

    prefill, target.prefilled = target.prefill, False

    def watched(token_ids, state):
        target.prefilled = False
        verified = prefill(token_ids, state)
        target.prefilled = True
        return verified

    target.prefill = watched
    hook = layer.register_forward_pre_hook(fails)
    try:
        with pytest.warns(RuntimeWarning, match="a tree of 9 nodes does not fit into memory") as caught:
            rounds = list(rounds_of(target, RightDrafter(PROMPT + truth, VOCAB)))
    finally:
        hook.remove()
    assert len(caught) == 1 and tokens_of(rounds) == truth
    assert [r.num_nodes > 1 for r in rounds[1:4]] == [True, True, False] and {r.num_nodes for r in rounds[3:]} == {1}
    assert tokens_of(rounds_of(target, RightDrafter(PROMPT + truth, VOCAB))) == truth


def test_B19_the_fast_target_goes_on_plainly_too(hybrid, truth):
    target = FastTarget(ReferenceTarget(hybrid), context_length=128, buckets=(1, 9))
    step, wide = target.step, []

    def fails(buffers, nodes, depth):
        step(buffers, nodes, depth)  # all scratch is written, and then there is no memory for the answer
        if len(nodes.token_ids) > 1:
            wide.append(1)
            if len(wide) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")

    target.step = fails
    with pytest.warns(RuntimeWarning, match="a tree of 9 nodes does not fit into memory"):
        rounds = list(rounds_of(target, RightDrafter(PROMPT + truth, VOCAB)))
    assert tokens_of(rounds) == truth and {r.num_nodes for r in rounds[3:]} == {1}


def test_no_memory_even_for_the_root_is_the_error_itself(hybrid, truth):
    target = ReferenceTarget(hybrid)

    def fails(tree, state):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    target.verify = fails
    for drafter in (RightDrafter(PROMPT + truth, VOCAB), RightDrafter([], VOCAB)):
        with warnings.catch_warnings(), pytest.raises(torch.OutOfMemoryError):
            warnings.simplefilter("ignore")
            list(rounds_of(target, drafter))


def test_another_error_in_verify_is_not_taken_for_want_of_memory(hybrid, truth):
    target = ReferenceTarget(hybrid)

    def fails(tree, state):
        raise RuntimeError("a device-side assert")

    target.verify = fails
    with pytest.raises(RuntimeError, match="device-side"):
        list(rounds_of(target, RightDrafter(PROMPT + truth, VOCAB)))


def test_a_conversation_does_not_inherit_a_failed_drafter(target, truth):
    text, held = PROMPT + truth, Conversation()
    with pytest.warns(RuntimeWarning):
        list(rounds_of(target, drafter := FaultyDrafter(text, 1, lambda x: None), count=12, conversation=held))
    assert held.token_ids == text[: len(PROMPT) + 11]
    rounds = list(
        decode(
            target, drafter, text[: len(PROMPT) + 12], build_tree=best_first, budget=8, ending=Ending(20),
            sampler=Sampler(), conversation=held,
        )
    )  # fmt: skip
    assert tokens_of(rounds) == truth[12:32] and held.reused_length == 0 and rounds[1].acceptance_length == 8


def test_B46_a_drafter_that_is_hardly_ever_right_gets_one_warning(hybrid, target):
    long = plain_greedy(hybrid, PROMPT, 130)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert tokens_of(rounds_of(target, WrongDrafter(PROMPT + long, VOCAB), 130, budget=4)) == long
    assert ["in 50 rounds 0 drafted tokens" in str(w.message) for w in caught] == [True]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(rounds_of(target, WrongDrafter(PROMPT + long, VOCAB), 50, budget=4))  # 49 rounds are no 50
        list(rounds_of(target, RightDrafter(PROMPT + long, VOCAB, depth=1), 130))


@pytest.fixture(scope="module")
def pair(target, truth):
    class Letters:
        def decode(self, token_ids, **_):
            return "".join(chr(0x100 + i) for i in token_ids)

    return Pair(target, Letters(), RightDrafter(PROMPT + truth, VOCAB))


@pytest.mark.parametrize("after", [1, 2, 4])
def test_a_stream_that_is_closed_or_interrupted_has_streamed_the_truth(pair, truth, after):
    options, held = GenerateOptions(max_new_tokens=COUNT, budget=8), Conversation()
    expected = pair.tokenizer.decode(truth)
    running = pair.start(PROMPT, options, held)
    pieces = [piece for _, piece in zip(range(after), running, strict=False)]
    running.close()
    assert expected.startswith("".join(pieces)) and pieces[0]
    assert held.token_ids == (PROMPT + truth)[: len(held.token_ids)]

    calls, verify = [], pair.target.verify

    def interrupted(tree, state):
        calls.append(1)
        if len(calls) > after:
            raise KeyboardInterrupt
        return verify(tree, state)

    pair.target.verify, pieces = interrupted, []
    try:
        with pytest.raises(KeyboardInterrupt):
            pieces.extend(iter(pair.start(PROMPT, options, held)))
    finally:
        del pair.target.verify
    assert held.token_ids == []  # a round was cut off in the middle: nothing of it is kept
    assert pair.collect(PROMPT, options, conversation=held).token_ids == truth


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    save_target(folder)
    tiny_model("qwen3_5_moe_text").save_pretrained(folder / "shards", max_shard_size="200KB")
    (folder / "model.safetensors").unlink()
    for file in (folder / "shards").iterdir():
        file.rename(folder / file.name)
    (folder / "shards").rmdir()
    return folder


def broken_copies(folder, tmp_path):
    """(what was done, the folder) for every way a download can be incomplete."""
    import shutil

    names = [file.name for file in sorted(folder.iterdir())]
    shards = [name for name in names if name.endswith(".safetensors")]
    assert len(shards) > 2 and "model.safetensors.index.json" in names
    for name in [shards[1], "model.safetensors.index.json", "config.json", "tokenizer.json"]:
        for how in ("missing", "empty", "cut", "overwritten"):
            copy = tmp_path / f"{how}-{name}"
            shutil.copytree(folder, copy)
            whole = (folder / name).read_bytes()
            if how == "missing":
                (copy / name).unlink()
            elif how == "empty":
                (copy / name).write_bytes(b"")
            elif how == "cut":
                (copy / name).write_bytes(whole[: len(whole) // 2])
            else:
                (copy / name).write_bytes(b"\xff" * len(whole))
            yield f"{name} {how}", copy


def test_every_broken_checkpoint_is_one_sentence(sharded, tmp_path):
    assert deltatree.load(str(sharded), device="cpu").target.vocab_size == VOCAB
    for what, folder in broken_copies(sharded, tmp_path):
        with pytest.raises(CheckpointError) as caught:
            deltatree.load(str(folder), device="cpu")
        assert "\n" not in str(caught.value) and str(folder) in str(caught.value), what


def test_a_broken_drafter_is_one_sentence(sharded, tmp_path):
    drafter = save_drafter(tmp_path / "drafter")
    whole = (drafter / "model.safetensors").read_bytes()
    for broken in (b"", whole[:-100], b"\xff" * len(whole), None):
        (drafter / "model.safetensors").unlink()
        if broken is not None:
            (drafter / "model.safetensors").write_bytes(broken)
        with pytest.raises(CheckpointError, match=r"corrupt|no weights") as caught:
            deltatree.load(str(sharded), str(drafter), device="cpu")
        assert "\n" not in str(caught.value)
