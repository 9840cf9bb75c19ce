"""A target and a drafter that are tables, so that bench tests need no model and can plant what they look for."""

from __future__ import annotations

import json
import string
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from deltatree import Pair
from deltatree.bench import BenchPlan, Sample
from deltatree.drafter import ScriptedDrafter
from deltatree.models.protocol import Verified
from deltatree.tree import DraftTree

VOCAB = 101
TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}"
    "{% if enable_thinking %}!{% endif %}{% if add_generation_prompt %}<a>{% endif %}"
)
SAMPLES = [
    Sample("a", "sums", ("1+1?",)),
    Sample("b", "sums", ("What is two and three?",)),
    Sample("c", "chat", ("Hello.", "And now?")),
]
PLAN = BenchPlan(budgets=(2, 6), max_new_tokens=20, noise_samples=1)


@dataclass
class TableState:
    tokens: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.tokens)


class TableTarget:
    """The next token depends on the last one and on the place, by a table.

    delays: seconds that a verb takes, by its name; "first" for the first verify of every width
    tree_error: how far the logits of a tree's nodes (not of a lone root) are off, alternately up and down by token
    tie: how far the second-best logit lies below the best
    """

    context_length = 4096
    device = torch.device("cpu")
    vocab_size = VOCAB

    def __init__(self, delays: dict[str, float] | None = None, tree_error: float = 0.0, tie: float = 1.0) -> None:
        self.delays, self.tree_error = defaultdict(float, delays or {}), tree_error
        self.widths: set[int] = set()
        noise = torch.rand(7, VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))
        best, second = noise.topk(2)[1].unbind(-1)
        self.table = noise.scatter(-1, best[..., None], 2.0).scatter(-1, second[..., None], 2.0 - tie)

    def new_state(self) -> TableState:
        return TableState()

    def prefill(self, token_ids: list[int], state: TableState) -> Verified:
        time.sleep(self.delays["prefill"])
        state.tokens += token_ids
        return Verified(self._row(token_ids[-1], state.length)[None], torch.zeros(len(token_ids), 1))

    def verify(self, tree: DraftTree, state: TableState) -> Verified:
        first = 0.0 if len(tree) in self.widths else self.delays["first"]
        self.widths.add(len(tree))
        time.sleep(self.delays["verify"] + first)
        state.pending = tree.token_ids.tolist()
        places = zip(state.pending, tree.depths.tolist(), strict=True)
        logits = torch.stack([self._row(token, state.length + depth + 1) for token, depth in places])
        if len(tree) > 1:
            logits = logits + self.tree_error * (torch.arange(VOCAB) % 2 * 2 - 1)
        return Verified(logits, torch.zeros(len(tree), 1))

    def commit(self, path: list[int], state: TableState) -> None:
        time.sleep(self.delays["commit"])
        state.tokens += [state.pending[node] for node in path]

    def embed(self, token_ids: Tensor) -> Tensor:
        return torch.zeros(*token_ids.shape, 1)

    def _row(self, token: int, length: int) -> Tensor:
        return self.table[length % 7, token]


def table_drafter(target: TableTarget, depth: int = 4, delay: float = 0.0) -> ScriptedDrafter:
    """Follows the target's table, and is wrong now and then, the same at the same place."""

    def script(committed: int, bonus: int) -> Tensor:
        time.sleep(delay)
        rows = []
        for step in range(1, depth + 1):
            row = 3 * target._row(bonus, committed + step)
            bonus = int(row.argmax())
            if (committed + step) % 3 == 0:
                row = row.roll(1)
            rows.append(row)
        return torch.stack(rows)

    return ScriptedDrafter(script, depth)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Every token is one character, so that any random text has a decoding."""
    characters = dict.fromkeys(string.printable[:95] + "\n" + "".join(chr(0xC0 + i) for i in range(VOCAB - 97)))
    vocab = {"?unk?": 0} | {character: i for i, character in enumerate(characters, start=1)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?unk?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?unk?", chat_template=TEMPLATE)


def table_pair(target: TableTarget | None = None, draft_delay: float = 0.0, names=("table", "script")) -> Pair:
    target = target or TableTarget()
    return Pair(target, character_tokenizer(), table_drafter(target, delay=draft_delay), frozenset(), names)


def write_samples(file: Path, samples: list[Sample] = SAMPLES) -> Path:
    rows = (json.dumps({"id": s.id, "dataset": s.dataset, "turns": s.turns}) for s in samples)
    file.write_text("\n".join(rows), encoding="utf-8")
    return file
