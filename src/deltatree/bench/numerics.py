"""How differently a target rounds one token and trees: the noise that a near tie has to be smaller than."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltatree.bench.verdict import PlainText, measure_noise
from deltatree.decode.options import GenerateOptions

if TYPE_CHECKING:
    from deltatree.pair_api import Pair

PROMPT = "List the numbers from one to forty in words."
NODES, DEPTH, TOKENS = (2, 8, 16, 32, 64), 15, 48


def noise_by_nodes(pair: Pair, nodes: tuple[int, ...] = NODES) -> dict[int, float]:
    """Node count (root included) -> the noise of trees of that size, in logits, over a text that the target writes.

    The measure is the harness's own: see `bench.verdict.measure_noise`.
    """
    prompt_ids = pair.encode(PROMPT)
    text = pair.collect(prompt_ids, GenerateOptions(method="ar", max_new_tokens=TOKENS, ignore_eos=True)).token_ids
    plain = PlainText(pair.target, prompt_ids, text)
    return {count: measure_noise(plain, [(DEPTH, count - 1)]) for count in nodes}
