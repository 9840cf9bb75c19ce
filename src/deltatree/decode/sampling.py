"""How the target's next token is chosen after a node: greedily, or by one draw from its processed distribution."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from deltatree.decode.options import GenerateOptions
from deltatree.errors import OptionError
from deltatree.tree import DraftTree

REMOVED = 50.0
"""How far below its log-probability a draft stands that the processing removes: behind every other one, yet finite."""

Processor = Callable[[Tensor, Tensor], Tensor]


class Constraint(Protocol):
    """Which tokens may follow: a processor for the target's scores, and a filter for draft trees. A grammar is one."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor: ...

    def prune(self, tree: DraftTree, history: list[int]) -> DraftTree:
        """The tree without the nodes that can never be accepted."""


@dataclass
class Sampler:
    """Chooses tokens for one generation; owns its random generator, so that requests cannot disturb each other.

    processor: Transformers' logits processors, called as processor(input_ids [1, T], scores [1, vocab]), each node with
        its own history; None leaves the logits as they are
    generator: draws on the CPU, one number per emitted token whatever the method; None is greedy
    draft_processor: what the drafter's proposals go through before the tree is built; only chooses nodes
    draft_filter: what it removes from them comes last in the tree; it does not rescale the others, because a drafter that
        is made surer of itself builds worse trees
    constraint: part of `processor` then; here it removes drafts that can never be accepted
    """

    processor: Processor | None = None
    generator: torch.Generator | None = None
    draft_processor: Processor | None = None
    draft_filter: Processor | None = None
    constraint: Constraint | None = None
    _level: float = field(default=0.0, init=False)  # log-sum-exp of the target's scores after the root

    def draft(
        self,
        build_tree: Callable[..., DraftTree],
        log_probs: Tensor,
        *,
        history: list[int],
        root: int,
        budget: int,
    ) -> DraftTree:
        """Build the tree from proposals that went through the target's processing. log_probs: [D, vocab]."""
        if log_probs.shape[0] and (self.draft_processor or self.draft_filter):
            log_probs = self._process_drafts(log_probs, history)
        tree = build_tree(log_probs, root=root, budget=budget)
        return tree if self.constraint is None else self.constraint.prune(tree, history)

    def bind(self, tree: DraftTree, logits: Tensor, history: list[int]) -> Callable[[int, list[int]], int]:
        """The `choose` of one walk. logits: [N, vocab] float32; history: all tokens up to the root, included."""
        if self.processor is None and self.generator is None:
            choices = logits.argmax(-1).tolist()
            return lambda node, path: choices[node]
        if self.draft_processor is not None:
            self._level = float(logits[0].logsumexp(-1))
        tokens, before = tree.token_ids, torch.tensor(history)

        def choose(node: int, path: list[int]) -> int:
            input_ids = torch.cat([before, tokens[path[1:]]]) if len(path) > 1 else before
            return self._choose(logits[node][None], input_ids[None].to(logits.device))

        return choose

    def _choose(self, scores: Tensor, input_ids: Tensor) -> int:
        if self.generator is None:
            return int(self._scores(scores, input_ids).argmax())
        return int(self._draw(self._cumulative(scores, input_ids)))

    def _scores(self, scores: Tensor, input_ids: Tensor) -> Tensor:
        """The processed scores [vocab] of one node. Raises OptionError if every token is forbidden, or a score is no number."""
        if self.processor is None:
            return scores[0]
        scores = self.processor(input_ids, scores)
        if not scores.amax().isfinite():
            raise OptionError(
                f"after {input_ids.shape[-1]} tokens these options leave no token to choose; "
                "loosen bad_words, min_new_tokens, top_p or the grammar"
            )
        return scores[0]

    def _cumulative(self, scores: Tensor, input_ids: Tensor) -> Tensor:
        """The distribution after one node, summed up: [vocab] float64."""
        return self._scores(scores, input_ids).softmax(-1, dtype=torch.float64).cumsum(-1)

    def _draw(self, cumulative: Tensor, count: int = 1) -> Tensor:
        """[count] tokens, each the first one above a uniform number: never one of probability 0."""
        uniform = torch.rand(count, generator=self.generator, dtype=torch.float64).to(cumulative.device)
        drawn = torch.searchsorted(cumulative, uniform * cumulative[-1], right=True)
        return torch.minimum(drawn, torch.searchsorted(cumulative, cumulative[-1]))

    def _process_drafts(self, log_probs: Tensor, history: list[int]) -> Tensor:
        """Every depth under the processing that holds after the root; what is removed comes last instead."""
        input_ids = torch.tensor(history, device=log_probs.device).expand(log_probs.shape[0], -1)
        scores = log_probs
        if self.draft_processor is not None:
            # Repetition penalties scale scores, so the drafts must stand where the target's scores stand.
            scores = self.draft_processor(input_ids, log_probs + self._level).log_softmax(-1)
        kept = scores if self.draft_filter is None else self.draft_filter(input_ids, scores)
        return torch.where(kept > -torch.inf, scores, log_probs - REMOVED)


class CountPenalty:
    """Presence and frequency penalties, which Transformers lacks: they count the tokens of the answer alone.

    A token that the answer has `n` times loses `presence + n * frequency`, if n > 0.
    """

    def __init__(self, presence: float, frequency: float, prompt_length: int) -> None:
        self.presence, self.frequency, self.prompt_length = presence, frequency, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        new = input_ids[:, self.prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(1, new, torch.ones_like(new, dtype=scores.dtype))
        return scores - (counts > 0) * self.presence - counts * self.frequency


def sampler_for(
    options: GenerateOptions,
    *,
    prompt_length: int = 0,
    stop_ids: Iterable[int] = (),
    bad_words: Iterable[Iterable[int]] = (),
    constraint: Constraint | None = None,
) -> Sampler:
    """Transformers' own logits processors, in the order of its `generate`.

    prompt_length: tokens    stop_ids: end tokens, which `min_new_tokens` and never `bad_words` forbid
    bad_words: token sequences, in place of the options' own texts
    """
    penalties = [*_penalties(options, prompt_length, list(stop_ids), [list(word) for word in bad_words])]
    grammar = [constraint] if constraint is not None else []
    if options.is_greedy:
        return Sampler(_chain(penalties + grammar), None, _chain(penalties), None, constraint)
    generator = torch.Generator()
    if options.seed is None:
        generator.seed()
    else:
        generator.manual_seed(options.seed)
    warpers = [*_warpers(options)]  # after the grammar, so that top-k and top-p choose among the tokens that may follow
    return Sampler(_chain(penalties + grammar + warpers), generator, _chain(penalties), _chain(warpers), constraint)


def _chain(processors: list[Processor]) -> Processor | None:
    from transformers.generation import LogitsProcessorList

    return LogitsProcessorList(processors) if processors else None


def _penalties(
    options: GenerateOptions, prompt_length: int, stop_ids: list[int], bad_words: list[list[int]]
) -> Iterable[Processor]:
    """What holds for greedy decoding, too."""
    from transformers.generation import (
        MinNewTokensLengthLogitsProcessor,
        NoBadWordsLogitsProcessor,
        RepetitionPenaltyLogitsProcessor,
        SequenceBiasLogitsProcessor,
    )

    if options.logit_bias:
        yield SequenceBiasLogitsProcessor({(token,): float(bias) for token, bias in options.logit_bias.items()})
    if options.repetition_penalty != 1:
        yield RepetitionPenaltyLogitsProcessor(float(options.repetition_penalty))
    bad_words = [word for word in bad_words if len(word) > 1 or word[0] not in stop_ids]
    if bad_words:
        yield NoBadWordsLogitsProcessor(bad_words)
    if options.min_new_tokens and stop_ids:
        yield _MinNewTokens(MinNewTokensLengthLogitsProcessor, prompt_length, options.min_new_tokens, stop_ids)
    if options.presence_penalty or options.frequency_penalty:
        yield CountPenalty(options.presence_penalty, options.frequency_penalty, prompt_length)


class _MinNewTokens:
    """Transformers' minimum length, made when the device of the scores is known."""

    def __init__(self, make, prompt_length: int, min_new_tokens: int, stop_ids: list[int]) -> None:
        self._make = lambda device: make(prompt_length, min_new_tokens, stop_ids, device=device)
        self._processor = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._processor is None:
            self._processor = self._make(scores.device)
        return self._processor(input_ids, scores)


def _warpers(options: GenerateOptions) -> Iterable[Processor]:
    """What shapes the distribution that is drawn from."""
    from transformers.generation import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    if options.temperature != 1:
        yield TemperatureLogitsWarper(float(options.temperature))
    if options.top_k:
        yield TopKLogitsWarper(options.top_k)
    if options.top_p < 1:
        yield TopPLogitsWarper(float(options.top_p))
    if options.min_p:
        yield MinPLogitsWarper(float(options.min_p))
