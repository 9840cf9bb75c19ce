"""Structured output: every path obeys the grammar, whatever is drafted, and equals masked plain decoding."""

from __future__ import annotations

import json
import re

import pytest
import torch
from byte_tokenizer import VOCAB, byte_tokenizer
from tiny import tiny_model

from deltatree import GenerateOptions, Pair, ReferenceTarget
from deltatree.drafter.scripted import RandomDrafter, RightDrafter
from deltatree.errors import OptionError
from deltatree.tree import DraftTree

pytest.importorskip("llguidance")
from deltatree.structured import grammar_for

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["tree", "chain", "plain"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}
GRAMMAR = 'start: "say " WORD ("," WORD)*\nWORD: /[a-c]{2,3}/'
TOKENIZER = byte_tokenizer()
PROMPT = TOKENIZER.encode("give me")
END = TOKENIZER.eos_token_id


@pytest.fixture(scope="module")
def target():
    return ReferenceTarget(tiny_model("qwen3_5_text", vocab_size=VOCAB))


def grammar(**asked):
    return grammar_for(GenerateOptions(**asked), TOKENIZER, vocab_size=VOCAB, prompt_length=0, stop_ids={END})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_method_writes_the_same_valid_json(target, temperature):
    options = dict(max_new_tokens=80, temperature=temperature, seed=2, json_schema=SCHEMA, logit_bias={220: -100.0})
    pair = Pair(target, TOKENIZER, RandomDrafter(VOCAB), frozenset({END}))
    plain = pair.collect(PROMPT, GenerateOptions(method="ar", **options))
    for drafter in (RandomDrafter(VOCAB), RightDrafter(PROMPT + plain.token_ids, VOCAB)):
        pair = Pair(target, TOKENIZER, drafter, frozenset({END}))
        for method in ("dflash", "ddtree"):
            got = pair.collect(PROMPT, GenerateOptions(method=method, budget=12, **options))
            assert got.token_ids == plain.token_ids
    if plain.stop_reason == "stop":
        value = json.loads(plain.text)
        assert (
            set(value) == {"ok", "kind"}
            and isinstance(value["ok"], bool)
            and value["kind"] in SCHEMA["properties"]["kind"]["enum"]
        )
    assert got.rounds < plain.rounds  # what the right drafter knows is accepted under the masks


def test_a_grammar_is_kept(target):
    pair = Pair(target, TOKENIZER, RandomDrafter(VOCAB), frozenset({END}))
    for seed in range(3):
        options = GenerateOptions(max_new_tokens=30, temperature=1.5, seed=seed, grammar=GRAMMAR)
        got = pair.collect(PROMPT, options)
        whole = r"say [a-c]{2,3}(,[a-c]{2,3})*"
        assert re.fullmatch(whole, got.text) or got.stop_reason == "length", got.text


def test_masks_follow_any_path_and_come_back():
    rules = grammar(json_schema=SCHEMA)
    text = TOKENIZER.encode('{"ok":true,"kind":"tree"}')
    there = {n: (rules.follow(text[:n]), rules.allowed(VOCAB))[1] for n in range(len(text) + 1)}
    assert there[len(text)].nonzero().flatten().tolist() == [END]
    for n in (0, 5, 2, len(text), 3):
        assert not rules.follow(TOKENIZER.encode('{"no'))
        assert rules.follow(text[:n]) and torch.equal(rules.allowed(VOCAB), there[n])


def test_forbidden_nodes_leave_the_tree_with_all_below_them():
    rules = grammar(json_schema=SCHEMA)
    quote, brace, o, k = (TOKENIZER.encode(c)[0] for c in '"{ok')
    #        {root}  "     {      o under "   k under o   o under {
    tree = DraftTree.from_parents([brace, quote, brace, o, k, o], [-1, 0, 0, 1, 3, 2])
    pruned = rules.prune(tree, [brace])
    assert pruned.token_ids.tolist() == [brace, quote, o, k] and pruned.parents.tolist() == [-1, 0, 1, 2]


@pytest.mark.parametrize("wrong", [dict(json_schema={"type": "nonsense"}), dict(grammar="start: (((")])
def test_what_cannot_be_read_is_one_sentence(wrong):
    with pytest.raises(OptionError, match="cannot be used"):
        grammar(**wrong)


def test_a_checkpoint_without_end_token_cannot_end_a_grammar(target):
    with pytest.raises(OptionError, match="needs an end token"):
        Pair(target, TOKENIZER).collect(PROMPT, GenerateOptions(method="ar", json_schema={}))
