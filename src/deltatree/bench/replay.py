"""Acceptance of any tree policy on a text that is known already, without decoding it again.

With one draw per emitted token the text of a target does not depend on the trees it was drafted with: in greedy decoding it is
the text, at a temperature it is the text of that seed. What the drafter proposes after a prefix depends on the prefix alone. So
the proposals after every prefix are recorded once, and any policy is then walked along the text: exactly the rounds of
real decoding, up to rounding of the drafter's features, which here come out of one prefill.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from deltatree.drafter.protocol import Drafter
from deltatree.models.protocol import Target
from deltatree.tree import DraftTree, accept, top_candidates

BELOW = -100.0
"""Log-probability of a token that was not recorded: behind every recorded one."""


@dataclass(frozen=True, slots=True)
class Recording:
    """One text with the drafter's best candidates after each of its prefixes.

    Position p is the round whose root is `text_ids[p]`; the last token is nobody's root.
    """

    prompt_ids: list[int]
    text_ids: list[int]  # the target's, first token (which prefill emits) included
    values: Tensor  # [T - 1, D, C] float32, log-probabilities, best first
    token_ids: Tensor  # [T - 1, D, C] int64

    def log_probs(self, position: int, vocab_size: int) -> Tensor:
        """What the drafter proposed there: [D, vocab], all but the recorded candidates at `BELOW`."""
        full = torch.full((self.values.shape[1], vocab_size), BELOW)
        return full.scatter_(1, self.token_ids[position], self.values[position])


def record(target: Target, drafter: Drafter, prompt_ids: list[int], text_ids: list[int], candidates: int) -> Recording:
    """Ask the drafter after every prefix of a text. candidates: how many tokens of each depth are kept."""
    features = target.prefill([*prompt_ids, *text_ids[:-1]], target.new_state()).features
    session, committed = drafter.start(), 0
    values, token_ids = [], []
    for position, root in enumerate(text_ids[:-1]):
        length = len(prompt_ids) + position
        log_probs = session.propose(features[committed:length], bonus=root)
        committed = length
        for kept, found in zip((values, token_ids), top_candidates(log_probs, candidates), strict=True):
            kept.append(found)
    return Recording(prompt_ids, text_ids, torch.stack(values), torch.stack(token_ids))


def rounds_of(recording: Recording, policy: Callable[..., DraftTree], budget: int, vocab_size: int) -> list[int]:
    """Tokens that each round emits when this policy drafts the text; the last round is cut where the text ends.

    A policy that learns is told of every round, with logits that know the text alone: a node on the accepted path picks the next
    token, all others pick nothing (rows of zeros).
    """
    begin, observe = getattr(policy, "begin", None), getattr(policy, "observe", None)
    if begin is not None:
        begin(recording.prompt_ids)
    text, position, emitted = recording.text_ids, 0, []
    while position < len(text) - 1:
        tree = policy(recording.log_probs(position, vocab_size), root=text[position], budget=budget)
        choices = _choices(tree, text[position:])
        accepted = accept(tree, choices)
        if observe is not None and accepted.bonus >= 0:  # else the text is over
            logits = torch.zeros(len(tree), vocab_size)
            path = torch.tensor(accepted.path)
            logits[path, choices[path].clamp_min(0)] = (choices[path] >= 0).float()
            observe(tree, accepted, logits)
        emitted.append(min(accepted.length, len(text) - 1 - position))
        position += accepted.length
    return emitted


def _choices(tree: DraftTree, text: list[int]) -> Tensor:
    """The token that the text has after each node's depth, -1 past its end: what the target picks on the text's own path."""
    known = torch.tensor([*text[1:], *[-1] * (tree.max_depth + 1)])
    return known[tree.depths]


def save_recordings(recordings: list[Recording], file: Path) -> None:
    """One safetensors file, offsets of texts and prompts beside the joined tokens."""
    from safetensors.torch import save_file

    save_file(
        {
            "prompt_ids": torch.tensor([token for r in recordings for token in r.prompt_ids], dtype=torch.int32),
            "prompt_lengths": torch.tensor([len(r.prompt_ids) for r in recordings]),
            "text_ids": torch.tensor([token for r in recordings for token in r.text_ids], dtype=torch.int32),
            "text_lengths": torch.tensor([len(r.text_ids) for r in recordings]),
            "values": torch.cat([r.values for r in recordings]),
            "token_ids": torch.cat([r.token_ids for r in recordings]).int(),
        },
        file,
    )


def load_recordings(file: Path) -> list[Recording]:
    """What `save_recordings` wrote."""
    from safetensors.torch import load_file

    held = load_file(file)
    prompt_lengths, text_lengths = held["prompt_lengths"].tolist(), held["text_lengths"].tolist()
    rows = [length - 1 for length in text_lengths]
    return [
        Recording(prompt.tolist(), text.tolist(), values, token_ids.long())
        for prompt, text, values, token_ids in zip(
            held["prompt_ids"].split(prompt_lengths),
            held["text_ids"].split(text_lengths),
            held["values"].split(rows),
            held["token_ids"].split(rows),
            strict=True,
        )
    ]
