"""How the target's next token is chosen after a node: greedily, or by one draw from its processed distribution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deltatree.decode.options import GenerateOptions
from deltatree.tree import DraftTree


@dataclass
class Sampler:
    """Chooses tokens for one generation; owns its random generator, so that requests cannot disturb each other.

    processor: Transformers' logits processors, called as processor(input_ids [1, T], scores [1, vocab]), each node with
        its own history; None leaves the logits as they are
    generator: draws on the CPU; None is greedy
    """

    processor: Callable[[Tensor, Tensor], Tensor] | None = None
    generator: torch.Generator | None = None

    def bind(self, tree: DraftTree, logits: Tensor, history: list[int]) -> Callable[[int, list[int]], int]:
        """The `choose` of one walk. logits: [N, vocab] float32; history: all tokens up to the root, included."""
        if self.processor is None and self.generator is None:
            choices = logits.argmax(-1).tolist()
            return lambda node, path: choices[node]
        tokens = tree.token_ids.tolist()
        return lambda node, path: self._choose(logits[node], history + [tokens[i] for i in path[1:]])

    def _choose(self, scores: Tensor, history: list[int]) -> int:
        scores = scores[None]
        if self.processor is not None:
            scores = self.processor(torch.tensor([history], device=scores.device), scores)
        if self.generator is None:
            return int(scores[0].argmax())
        return int(torch.multinomial(scores[0].softmax(-1).cpu(), 1, generator=self.generator))


def sampler_for(options: GenerateOptions) -> Sampler:
    """Transformers' own warpers in its own order: temperature, top-k, top-p, min-p."""
    if options.is_greedy:
        return Sampler()
    from transformers.generation import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    warpers = LogitsProcessorList()
    if options.temperature != 1:
        warpers.append(TemperatureLogitsWarper(float(options.temperature)))
    if options.top_k:
        warpers.append(TopKLogitsWarper(options.top_k))
    if options.top_p < 1:
        warpers.append(TopPLogitsWarper(float(options.top_p)))
    if options.min_p:
        warpers.append(MinPLogitsWarper(float(options.min_p)))
    generator = torch.Generator()
    if options.seed is None:
        generator.seed()
    else:
        generator.manual_seed(options.seed)
    return Sampler(warpers or None, generator)
