"""Options of sampling: greedy with penalties is Transformers' own; seeds repeat; edges are refused or mean greedy."""

from __future__ import annotations

import pytest
import torch
from tiny import ARCHITECTURES, VOCAB, tiny_model

from deltatree import GenerateOptions, Pair, ReferenceTarget
from deltatree.decode.sampling import CountPenalty, sampler_for
from deltatree.drafter import ScriptedDrafter
from deltatree.drafter.scripted import RandomDrafter, RightDrafter
from deltatree.errors import OptionError
from deltatree.tree import best_first, chain_tree

PROMPT = [5, 7, 9, 11, 7, 5]
METHODS = ("ar", "dflash", "ddtree")


class Letters:
    """A tokenizer of the fewest words: token i is one character."""

    def decode(self, token_ids, **_):
        return "".join(chr(0x100 + i) for i in token_ids)

    def encode(self, text, add_special_tokens=False):
        return [ord(c) - 0x100 for c in text if c != " "]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request):
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def attention_pair():
    target = ReferenceTarget(tiny_model("qwen3"))
    return Pair(target, Letters(), RandomDrafter(VOCAB))


@torch.inference_mode()
def transformers_greedy(model, count: int, processors=None, **config) -> list[int]:
    ids = torch.tensor([PROMPT])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0,
        logits_processor=processors, **config,
    )  # fmt: skip
    return out[0, len(PROMPT) :].tolist()


def test_greedy_with_processing_is_transformers_own(model):
    """Penalties, bias, bad words and minimum length: token for token, for drafts of every quality."""
    plain = transformers_greedy(model, 16)
    bias = {plain[3]: -4.0, (plain[5] + 1) % VOCAB: 3.0}
    bad = [[plain[0]], plain[6:8], plain[9:12]]
    cases = [
        (dict(repetition_penalty=1.3), dict(repetition_penalty=1.3), None),
        (dict(logit_bias=bias), dict(sequence_bias=[[[k], v] for k, v in bias.items()]), None),
        (dict(bad_words=bad), dict(bad_words_ids=bad), None),
        (dict(min_new_tokens=9, stop_token_ids=[plain[4]]), dict(min_new_tokens=9, eos_token_id=plain[4]), None),
        (dict(presence_penalty=0.7, frequency_penalty=0.4), {}, [CountPenalty(0.7, 0.4, len(PROMPT))]),
        (
            dict(repetition_penalty=1.2, logit_bias=bias, bad_words=bad, frequency_penalty=0.5),
            dict(repetition_penalty=1.2, sequence_bias=[[[k], v] for k, v in bias.items()], bad_words_ids=bad),
            [CountPenalty(0.0, 0.5, len(PROMPT))],
        ),
    ]
    target = ReferenceTarget(model)
    for options, config, processors in cases:
        expected = transformers_greedy(model, 16, processors, **{"eos_token_id": None} | config)
        right, random = RightDrafter(PROMPT + expected, VOCAB), RandomDrafter(VOCAB)
        for drafter, method in ((right, "ar"), (right, "dflash"), (right, "ddtree"), (random, "ddtree")):
            chosen = GenerateOptions(max_new_tokens=16, method=method, budget=12, **options)
            got = Pair(target, Letters(), drafter).collect(PROMPT, chosen)
            assert got.token_ids == expected, (method, options)


def test_a_right_drafter_is_accepted_under_processing(model):
    """The processing acts on each node with its own history, so long paths survive it."""
    expected = transformers_greedy(model, 24, repetition_penalty=1.3, eos_token_id=None)
    pair = Pair(ReferenceTarget(model), Letters(), RightDrafter(PROMPT + expected, VOCAB))
    got = pair.collect(PROMPT, GenerateOptions(max_new_tokens=24, method="dflash", repetition_penalty=1.3))
    assert got.token_ids == expected and got.rounds == 3


def test_one_draw_an_emitted_token_so_every_method_samples_the_same_text(model):
    pair = Pair(ReferenceTarget(model), Letters(), RandomDrafter(VOCAB))
    options = dict(max_new_tokens=16, temperature=0.8, top_p=0.95, seed=4, budget=12)
    texts = {tuple(pair.collect(PROMPT, GenerateOptions(method=m, **options)).token_ids) for m in METHODS}
    assert len(texts) == 1


def test_B32_a_seed_is_the_requests_own(attention_pair):
    options = GenerateOptions(max_new_tokens=12, temperature=1.0, seed=7, budget=8)
    alone = attention_pair.collect(PROMPT, options).token_ids
    assert attention_pair.collect(PROMPT, options).token_ids == alone
    between, other = [], attention_pair.rounds(PROMPT, GenerateOptions(max_new_tokens=12, temperature=1.0, seed=8))
    for done in attention_pair.rounds(PROMPT, options):
        between += done.token_ids
        next(other, None)  # another request runs in turns with it
    assert between == alone
    other.close()
    assert (
        attention_pair.collect(PROMPT, GenerateOptions(max_new_tokens=12, temperature=1.0, seed=9)).token_ids != alone
    )
    torch.manual_seed(1)
    torch.rand(3)
    assert attention_pair.collect(PROMPT, options).token_ids == alone


def test_B30_nearly_greedy_is_greedy(attention_pair):
    greedy = attention_pair.collect(PROMPT, GenerateOptions(max_new_tokens=10, method="ar")).token_ids
    for near in (
        dict(temperature=1.0, top_p=0.0001), dict(temperature=1.0, top_k=1), dict(temperature=1e-6),
        dict(temperature=1e-5), dict(temperature=0),
    ):  # fmt: skip
        for method in METHODS:
            for _ in range(3):
                options = GenerateOptions(max_new_tokens=10, method=method, budget=8, **near)
                assert attention_pair.collect(PROMPT, options).token_ids == greedy, near


def test_B30_a_tie_under_top_k_one_is_always_the_same_token():
    options = GenerateOptions(temperature=1.0, top_k=1)
    logits = torch.zeros(1, 6)
    logits[0, [2, 4]] = 5.0
    assert {sampler_for(options).bind(chain_tree([1]), logits, [1])(0, [0]) for _ in range(10)} == {2}


def test_B30_top_k_beyond_the_vocabulary_keeps_all(attention_pair):
    options = dict(max_new_tokens=8, temperature=1.0, seed=3)
    every = attention_pair.collect(PROMPT, GenerateOptions(**options)).token_ids
    assert attention_pair.collect(PROMPT, GenerateOptions(top_k=10**6, **options)).token_ids == every


@pytest.mark.parametrize(
    "wrong",
    [
        dict(top_p=0), dict(top_p=1.5), dict(top_p=float("nan")), dict(temperature=-1), dict(temperature=float("inf")),
        dict(top_k=-1), dict(min_p=2), dict(seed=-1), dict(seed=1 << 63), dict(repetition_penalty=0),
        dict(logit_bias={1: float("nan")}), dict(logit_bias={-1: 1.0}), dict(logit_bias=[1]), dict(stop=[""]),
        dict(stop=7), dict(bad_words=[[]]), dict(bad_words=[[-3]]), dict(min_new_tokens=9, max_new_tokens=8),
        dict(json_schema={}, grammar="start: /a/"), dict(json_schema={}, ignore_eos=True), dict(max_new_tokens=True),
    ],
)  # fmt: skip
def test_B30_what_is_not_possible_is_refused(wrong):
    with pytest.raises(OptionError):
        GenerateOptions(**wrong)


def test_token_ids_outside_the_vocabulary_are_refused(attention_pair):
    for wrong in (dict(logit_bias={VOCAB: 1.0}), dict(stop_token_ids=[VOCAB]), dict(bad_words=[[VOCAB]])):
        with pytest.raises(OptionError, match="outside the vocabulary"):
            attention_pair.collect(PROMPT, GenerateOptions(max_new_tokens=2, **wrong))


def test_no_token_left_is_an_error_not_a_choice(attention_pair):
    every = [[token] for token in range(VOCAB)]
    for temperature in (0.0, 1.0):
        options = GenerateOptions(max_new_tokens=2, bad_words=every, temperature=temperature)
        with pytest.raises(OptionError, match="leave no token"):
            attention_pair.collect(PROMPT, options)


def test_bad_words_may_be_texts(attention_pair):
    greedy = attention_pair.collect(PROMPT, GenerateOptions(max_new_tokens=6, method="ar"))
    without = attention_pair.collect(PROMPT, GenerateOptions(max_new_tokens=6, method="ar", bad_words=[greedy.text[1]]))
    assert greedy.text[1] not in without.text


def test_drafts_are_scored_under_the_same_processing():
    """No node is spent on tokens that a bias or bad words rule out, and penalised tokens come later."""
    log_probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    options = GenerateOptions(logit_bias={0: -100.0}, bad_words=[[1]])
    sampler = sampler_for(options, bad_words=[[1]])
    tree = sampler.draft(best_first, log_probs, history=[3], root=3, budget=2)
    assert tree.token_ids.tolist() == [3, 2, 3]
    nucleus = sampler_for(GenerateOptions(temperature=1.0, top_p=0.7))
    deep = torch.tensor([[0.6, 0.25, 0.1, 0.05], [0.3, 0.25, 0.25, 0.2]]).log()
    tree = nucleus.draft(best_first, deep, history=[3], root=3, budget=3)
    assert set(tree.token_ids[1:][tree.depths[1:] == 1].tolist()) <= {0, 1}  # the others were cut by top-p


def test_what_stays_of_the_drafts_keeps_its_scores():
    """Top-p and temperature remove and reorder nothing among the tokens that stay."""
    seen = []

    def build(log_probs, *, root, budget):
        seen.append(log_probs)
        return chain_tree([root])

    log_probs = torch.tensor([[0.6, 0.25, 0.1, 0.05]]).log()
    sampler_for(GenerateOptions(temperature=1.0, top_k=2)).draft(build, log_probs, history=[1], root=1, budget=4)
    assert torch.equal(seen[0][:, :2], log_probs[:, :2]) and seen[0][:, 2:].max() < seen[0][:, :2].min() - 20
    assert seen[0].isfinite().all()


def test_a_drafter_of_nothing_samples_plainly(attention_pair):
    silent = ScriptedDrafter(lambda committed, bonus: torch.empty(0, VOCAB), depth=0)
    pair = Pair(attention_pair.target, Letters(), silent)
    options = dict(max_new_tokens=8, temperature=0.9, top_p=0.9, seed=2)
    plain = attention_pair.collect(PROMPT, GenerateOptions(method="ar", **options)).token_ids
    assert pair.collect(PROMPT, GenerateOptions(method="ddtree", **options)).token_ids == plain
