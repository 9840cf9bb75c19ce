"""The product of a handful of tokens with a large weight, at the speed of memory."""

import torch
from torch import Tensor

from deltatree.kernels.dispatch import backend_for, dispatched
from deltatree.kernels.linear import reference
from deltatree.kernels.linear.reference import Partials

linear = dispatched(reference.linear, "deltatree.kernels.linear.triton")
linear_parts = dispatched(reference.linear_parts, "deltatree.kernels.linear.triton")

MOST_TOKENS, FEWEST_ROWS, MOST_NUMBERS = 64, 9000, 100_000_000
"""Where `linear` was faster than the library's product on an H200: few tokens, weights of many rows that need no shares."""

MOST_TOKENS_OF_A_HEAD, MOST_COLUMNS_OF_A_HEAD = 16, 2048
"""The same for weights of more than MOST_NUMBERS, which are the output heads of the smaller models."""

IN_PARTS = ((16, 100_000_000), (32, 8_700_000))
"""Tokens and numbers of a weight up to which `linear_parts` and the norm behind it were faster: few of both. In the second
case the whole weight waits on the chip."""


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x weight^T + bias, by the faster of `linear` and the library's product. x: [N, K]    weight: [M, K]    bias: [M]

    out: [N, M], written and returned instead of a new tensor in x's dtype
    """
    (rows, columns), tokens = weight.shape, len(x)
    fits = tokens <= MOST_TOKENS and rows >= FEWEST_ROWS and rows * columns <= MOST_NUMBERS
    is_small_head = (
        tokens <= MOST_TOKENS_OF_A_HEAD and rows * columns > MOST_NUMBERS and columns <= MOST_COLUMNS_OF_A_HEAD
    )
    if (fits or is_small_head) and _takes_kernels(x):
        return linear(x, weight, bias, out, chained=_chains(x))
    if out is None:
        return torch.nn.functional.linear(x, weight, bias)
    return torch.mm(x, weight.T, out=out) if bias is None else torch.addmm(bias, x, weight.T, out=out)


def summed_later(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias for a norm that adds it to the residual stream: [N, M], or [N, P, M] whose parts the norm adds up."""
    fits = bias is None and any(len(x) <= tokens and weight.numel() <= numbers for tokens, numbers in IN_PARTS)
    if fits and _takes_kernels(x) and _chains(x):
        return linear_parts(x, weight)
    return torch.nn.functional.linear(x, weight, bias)


def _takes_kernels(x: Tensor) -> bool:
    """Whether the kernels that were measured can run on x at all."""
    return x.dtype == torch.bfloat16 and backend_for(x) == "triton"


def _chains(x: Tensor) -> bool:
    """Whether launches on x's device overlap. Only where Triton is there."""
    from deltatree.kernels.chaining import chaining

    return chaining(x.device)["CHAINED"]


__all__ = ["Partials", "linear", "linear_parts", "product", "summed_later"]
