"""B53: streamed text is whole characters, nothing taken back, nothing lost."""

import pytest
from checkpoints import save_tokenizer

from deltatree.text import detokenize, load_tokenizer, stream_text


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Byte-level: one token a byte, so that every character beyond ASCII is spread over several tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


TEXT = "hi 🙂 日本, naïve — ok\n" * 8


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 64, 10_000])
def test_joined_pieces_are_the_whole_text(tokenizer, size):
    ids = tokenizer.encode(TEXT)
    pieces = list(stream_text(tokenizer, [ids[i : i + size] for i in range(0, len(ids), size)]))
    assert "".join(pieces) == TEXT
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)


def test_text_before_a_half_character_is_not_held_back(tokenizer):
    ids = tokenizer.encode("hi🙂")
    stream = stream_text(tokenizer, [ids[:3], ids[3:]])
    assert next(stream) == "hi"
    assert list(stream) == ["🙂"]


def test_a_text_that_really_ends_in_half_a_character_says_so(tokenizer):
    ids = tokenizer.encode("hi🙂")[:-1]
    assert "".join(stream_text(tokenizer, [ids])) == detokenize(tokenizer, ids) != "hi"


def test_spaces_at_borders_survive(tmp_path):
    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("a b  c " * 30)
    assert "".join(stream_text(tokenizer, [[i] for i in ids])) == detokenize(tokenizer, ids)
