"""Streamed text is whole characters, nothing taken back, nothing lost."""

from dataclasses import replace

import pytest
import torch
from checkpoints import save_tokenizer
from tiny import tiny_model

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
def test_B53_joined_pieces_are_the_whole_text(tokenizer, size):
    ids = tokenizer.encode(TEXT)
    pieces = list(stream_text(tokenizer, [ids[i : i + size] for i in range(0, len(ids), size)]))
    assert "".join(pieces) == TEXT
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)


def test_B53_text_before_a_half_character_is_not_held_back(tokenizer):
    ids = tokenizer.encode("hi🙂")
    stream = stream_text(tokenizer, [ids[:3], ids[3:]])
    assert next(stream) == "hi"
    assert list(stream) == ["🙂"]


def test_B53_a_text_that_really_ends_in_half_a_character_says_so(tokenizer):
    ids = tokenizer.encode("hi🙂")[:-1]
    assert "".join(stream_text(tokenizer, [ids])) == detokenize(tokenizer, ids) != "hi"


def test_spaces_at_borders_survive(tmp_path):
    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("a b  c " * 30)
    assert "".join(stream_text(tokenizer, [[i] for i in ids])) == detokenize(tokenizer, ids)


@pytest.mark.parametrize("cap", range(1, 20))
def test_B53_blocks_with_borders_inside_characters(tokenizer, cap):
    """Through the whole loop: a drafter of the bytes of "hi", an emoji and two ideographs; the cap cuts anywhere."""
    from deltatree import GenerateOptions, Pair
    from deltatree.drafter import RightDrafter
    from deltatree.models import ReferenceTarget

    ids, prompt = tokenizer.encode("hi🙂日本 ok, hi🙂"), [1, 2, 3]
    model = tiny_model("qwen3", vocab_size=256)
    target = ReferenceTarget(model)
    said = torch.full((len(prompt) + len(ids) + 9, 256), -9.0)
    for place, token in enumerate(ids):
        said[len(prompt) + place, token] = 9.0
    target.prefill = lambda token_ids, state, run=target.prefill: replace(
        run(token_ids, state), logits=said[state.length][None]
    )
    target.verify = lambda tree, state, run=target.verify: replace(
        run(tree, state), logits=said[(tree.depths + state.length + 1).clamp(max=len(said) - 1)]
    )
    pair = Pair(target, tokenizer, RightDrafter(prompt + ids, 256, depth=3))
    running = pair.start(prompt, GenerateOptions(max_new_tokens=cap, budget=3))
    pieces = [piece for piece in running if piece]
    assert "".join(pieces) == running.generation().text == detokenize(tokenizer, ids[:cap])
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces[:-1])
    if cap > 5:
        assert running.generation().acceptance_lengths[0] == 4 and pieces[:2] == ["h", "i"]
