"""The table against counting by hand."""

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from deltatree.errors import CheckpointError
from deltatree.transitions.table import BIGRAM_BACKOFF, NOTHING, TRIGRAM_BACKOFF, TransitionTable

VOCAB = 7


def sequences(seed, rows=6, length=30, vocab=VOCAB):
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(vocab, (rows, length), generator=generator)
    for row, end in enumerate(torch.randint(1, length + 1, (rows,), generator=generator).tolist()):
        text[row, end:] = -1
    return text


def by_hand(text, before, last, token, vocab=VOCAB):
    """log(p(token | before, last) / p(token)), from the definition."""
    rows = [[t for t in row if t >= 0] for row in text.tolist()]
    single = Counter(t for row in rows for t in row[1:])
    double = Counter((a, b) for row in rows for a, b in itertools.pairwise(row))
    triple = Counter(t for row in rows for t in zip(row, row[1:], row[2:], strict=False))
    p = (single[token] + 0.5) / (sum(single.values()) + 0.5 * vocab)
    followed = sum(n for (a, _), n in double.items() if a == last)
    p2 = (double[last, token] + BIGRAM_BACKOFF * p) / (followed + BIGRAM_BACKOFF)
    context, count = double[before, last], triple[before, last, token]
    p3 = (count + TRIGRAM_BACKOFF * p2) / (max(context, count) + TRIGRAM_BACKOFF)
    return math.log(p3 / p)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_scores_are_the_back_off_of_the_counts(seed):
    text = sequences(seed)
    table = TransitionTable.count(text, VOCAB, num_buckets=256)
    contexts = torch.cartesian_prod(torch.arange(NOTHING, VOCAB), torch.arange(VOCAB))
    scores = table.scores(contexts[:, 0], contexts[:, 1], torch.arange(VOCAB))
    expected = [[by_hand(text, a, b, t) for t in range(VOCAB)] for a, b in contexts.tolist()]
    torch.testing.assert_close(scores, torch.tensor(expected), atol=1e-5, rtol=1e-5)
    view = table.view().scores(contexts[:, 0].numpy(), contexts[:, 1].numpy(), torch.arange(VOCAB).numpy())
    torch.testing.assert_close(torch.from_numpy(view).float(), scores)


def test_an_empty_table_says_nothing():
    table = TransitionTable.empty(VOCAB, num_buckets=2)
    scores = table.scores(torch.tensor([NOTHING, 3]), torch.tensor([1, 2]), torch.arange(VOCAB))
    torch.testing.assert_close(scores, torch.zeros(2, VOCAB))


def test_candidates_may_differ_by_row():
    table = TransitionTable.count(sequences(1), VOCAB, num_buckets=64)
    before, last = torch.tensor([1, 2]), torch.tensor([3, 4])
    candidates = torch.tensor([[5, 0, 2], [6, 1, 1]])
    whole = table.scores(before, last, torch.arange(VOCAB))
    assert torch.equal(table.scores(before, last, candidates), whole.gather(1, candidates))


def test_adding_is_counting_more():
    first, second = sequences(2), sequences(3)
    table = TransitionTable.count(torch.cat([first, second]), VOCAB, num_buckets=64)
    grown = TransitionTable.count(first, VOCAB, num_buckets=64)
    for row in second:
        row = torch.cat([torch.tensor([NOTHING]), row[row >= 0]])
        if len(row) > 2:
            grown.add(*row.unfold(0, 3, 1).T)
    grown.single = table.single  # which adding leaves alone
    contexts = torch.cartesian_prod(torch.arange(VOCAB), torch.arange(VOCAB))
    args = contexts[:, 0], contexts[:, 1], torch.arange(VOCAB)
    torch.testing.assert_close(grown.scores(*args), table.scores(*args))
    assert grown.num_entries == table.num_entries


def test_a_weight_counts_as_often():
    table, once = (TransitionTable.empty(VOCAB, num_buckets=16) for _ in range(2))
    gram = (torch.tensor([1]), torch.tensor([2]), torch.tensor([3]))
    table.add(*gram, torch.tensor([3.0]))
    for _ in range(3):
        once.add(*gram)
    assert torch.equal(table.counts, once.counts) and torch.equal(table.followed, once.followed)


def test_a_full_table_keeps_its_size_and_the_frequent():
    vocab = 300
    generator = torch.Generator().manual_seed(0)
    rare = torch.randint(vocab, (2000,), generator=generator)
    text = torch.cat([torch.tensor([5, 6, 7] * 40), rare])[None]
    table = TransitionTable.count(text, vocab, num_buckets=16)
    assert table.num_entries == 16 * 8 and table.keys.shape == (16, 8)
    frequent = table.scores(torch.tensor([5]), torch.tensor([6]), torch.tensor([7]))
    assert float(frequent) > 2
    assert table.scores(torch.arange(50), torch.arange(50), torch.arange(vocab)).isfinite().all()


def test_no_vocabulary_makes_it_larger_than_64_megabytes():
    assert TransitionTable.empty(248_320).num_bytes <= 64e6


def test_a_table_comes_back_from_its_file(tmp_path):
    table = TransitionTable.count(sequences(4), VOCAB, num_buckets=64)
    table.save(tmp_path / "t.safetensors", {"seed": "4"})
    back = TransitionTable.load(tmp_path / "t.safetensors")
    contexts = torch.cartesian_prod(torch.arange(VOCAB), torch.arange(VOCAB))
    args = contexts[:, 0], contexts[:, 1], torch.arange(VOCAB)
    assert torch.equal(back.scores(*args), table.scores(*args))
    assert (back.num_entries, back.num_bytes) == (table.num_entries, table.num_bytes)


def test_what_is_no_table_is_refused_in_one_sentence(tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    (tmp_path / "text.safetensors").write_text("not a table")
    for name, sentence in (("absent", "does not exist"), ("other", "no table"), ("text", "cannot be read")):
        with pytest.raises(CheckpointError, match=sentence) as refused:
            TransitionTable.load(tmp_path / f"{name}.safetensors")
        assert "deltatree transitions TARGET" in str(refused.value)
