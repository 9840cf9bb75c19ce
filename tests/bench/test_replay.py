"""A replay has the rounds of real decoding, round by round."""

import pytest
import torch

import deltatree
from deltatree.bench.replay import load_recordings, record, rounds_of, save_recordings
from deltatree.decode import Ending, GenerateOptions, decode, sampler_for
from deltatree.transitions import TransitionTable, TransitionTree, table_file
from deltatree.tree import best_first, chain

QUESTIONS = (
    "A box holds 12 pencils. Mia buys 4 boxes and gives 7 pencils away. How many pencils does she have left?",
    "Write a function that returns the largest of three numbers.",
)


@pytest.fixture(scope="module")
def pair():
    return deltatree.load("shipped", device="cpu", dtype="float32")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_replay_has_the_rounds_of_real_decoding(pair, temperature, tmp_path):
    table = TransitionTable.load(table_file("shipped"))
    policies = (
        (lambda: chain, 15),
        (lambda: best_first, 16),
        (lambda: TransitionTree(table, is_chain=True, refines=False), 15),
        (lambda: TransitionTree(table, counts_picks=False), 16),
    )
    options = GenerateOptions(temperature=temperature, seed=3)

    def decoded(prompt_ids, policy, budget):
        sampler = sampler_for(options, prompt_length=len(prompt_ids))
        ending = Ending(48, pair.stop_ids)
        return list(
            decode(
                pair.target, pair.drafter, prompt_ids, build_tree=policy, budget=budget, ending=ending, sampler=sampler
            )
        )

    recordings, real = [], []
    for question in QUESTIONS:
        prompt_ids = pair.encode(question)
        runs = [decoded(prompt_ids, make(), budget) for make, budget in policies]
        texts = [[token for done in run for token in done.token_ids] for run in runs]
        assert all(text == texts[0] for text in texts)
        recordings.append(record(pair.target, pair.drafter, prompt_ids, texts[0], candidates=64))
        real.append([[len(done.token_ids) for done in run[1:]] for run in runs])
    save_recordings(recordings, tmp_path / "r.safetensors")
    for recording, expected in zip(load_recordings(tmp_path / "r.safetensors"), real, strict=True):
        replayed = [rounds_of(recording, make(), budget, pair.target.vocab_size) for make, budget in policies]
        assert replayed == expected


def test_recordings_come_back_from_their_file(pair, tmp_path):
    kept = [record(pair.target, pair.drafter, [5, 6, 7], [8, 9, 10, 11][:n], candidates=5) for n in (4, 2)]
    save_recordings(kept, tmp_path / "r.safetensors")
    for ours, back in zip(kept, load_recordings(tmp_path / "r.safetensors"), strict=True):
        assert (ours.prompt_ids, ours.text_ids) == (back.prompt_ids, back.text_ids)
        assert torch.equal(ours.values, back.values) and torch.equal(ours.token_ids, back.token_ids)
        assert torch.equal(ours.log_probs(0, 4096).topk(5).indices.sort().values, ours.token_ids[0].sort().values)
