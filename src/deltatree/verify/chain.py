"""The gated delta rule over a long chain, for prefill: chunks side by side, and only the state goes from one to the next.

For a chunk with log decay `G` summed from its start, `X` as in `kernels.gated_delta.reference` and incoming state `S`:

    U, W = (I + X)^-1 diag(beta) V, (I + X)^-1 diag(beta exp G) K    so that the pseudo-values are u = U - W S
    S'   = (exp(G_last) I - R^T W) S + R^T U                         R_j = exp(G_last - G_j) k_j

Everything but the last line's product with `S` is computed for all chunks at once. Rule and chunk form: Yang et al. 2024,
arXiv:2412.06464. `fla_chain` is the same over the kernels of flash-linear-attention.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from deltatree.errors import OptionError
from deltatree.kernels.gated_delta.reference import l2_normalise

CHUNK = 64  # tokens that are solved at once; the work of one solve grows with its square
PREFILL_RULES = ("own", "fla")

ChainRule = Callable[..., tuple[Tensor, Tensor]]
"""What `own_chain` and `fla_chain` are."""


def chain_rule(name: str, device: torch.device) -> ChainRule:
    """The rule that prefill goes by. It may differ from another in the last digits, so one target keeps one rule.

    name: "own", or "fla" for flash-linear-attention's chunk kernels, which die on a CPU's tensors. They have to be asked for:
        they are tuned anew in every process, for minutes on an H200, and their products of float32 numbers are TF32
    Raises OptionError for another name, and for "fla" on a CPU or where it cannot be imported.
    """
    if name not in PREFILL_RULES:
        raise OptionError(f"prefill={name!r} is not known; possible are {', '.join(PREFILL_RULES)}")
    if name == "own":
        return own_chain
    if device.type != "cuda":
        raise OptionError(f"prefill='fla' needs a GPU, and the device is {device}; leave it out, or name a GPU")
    if importlib.util.find_spec("fla") is None:
        raise OptionError(
            "prefill='fla' needs flash-linear-attention; pip install flash-linear-attention, or leave it out"
        )
    try:
        import fla.ops.gated_delta_rule  # noqa: F401
    except Exception as error:
        raise OptionError(f"flash-linear-attention cannot be imported ({error}); leave prefill='fla' out") from error
    return fla_chain


def own_chain(
    state: Tensor, *, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs of a chain's tokens and the state after the last one.

    state: [B, HV, K, V] float32 or float64; its dtype is the dtype of the computation
    q, k: [B, T, HK, K], not yet normalised (done here; q is also scaled by K^-1/2)
    v: [B, T, HV, V]    beta, log_decay: [B, T, HV], log_decay <= 0
    Returns [B, T, HV, V] and [B, HV, K, V], both new, in the state's dtype. Writes nothing else.
    """
    (batch, heads), length = state.shape[:2], v.shape[1]
    size = min(CHUNK, length)
    q, k, v, beta = (_in_chunks(x.to(state.dtype), size, heads) for x in (q, k, v, beta[..., None]))
    q, k = l2_normalise(q) * q.shape[-1] ** -0.5, l2_normalise(k)
    # A small difference of two long sums keeps its digits this way.
    summed = _in_chunks(log_decay[..., None].double(), size, heads).cumsum(-2)  # [M, B*HV, C, 1]
    seen = torch.ones(size, size, dtype=torch.bool, device=state.device).tril()
    decay = (summed - summed.mT).masked_fill(~seen, -torch.inf).to(state.dtype).exp()
    carried, remaining = summed.exp().to(state.dtype), (summed[..., -1:, :] - summed).to(state.dtype).exp()

    rhs = beta * torch.cat([v, carried * k], dim=-1)
    # The diagonal is taken as ones, and what stands above it is not read.
    solved = torch.linalg.solve_triangular(beta * decay * (k @ k.mT), rhs, upper=False, unitriangular=True)
    values, pulls = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    keys = (remaining * k).mT
    kept = torch.eye(k.shape[-1], dtype=state.dtype, device=state.device) * carried[..., -1:, :]
    kept, added = kept - keys @ pulls, keys @ values

    states = state.new_empty(len(added) + 1, *added.shape[1:])  # before each chunk, and after the last
    states[0] = state.flatten(0, 1)
    for chunk in range(len(added)):
        torch.baddbmm(added[chunk], kept[chunk], states[chunk], out=states[chunk + 1])
    out = carried * (q @ states[:-1]) + (decay * (q @ k.mT)) @ (values - pulls @ states[:-1])
    out = out.unflatten(1, (batch, heads)).permute(1, 0, 3, 2, 4).flatten(1, 2)
    return out[:, :length], states[-1].unflatten(0, (batch, heads))


def fla_chain(
    state: Tensor,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    kernel: Callable[..., tuple[Tensor, Tensor]] | None = None,
) -> tuple[Tensor, Tensor]:
    """As `own_chain`, by flash-linear-attention: products in the inputs' dtype, the state in float32.

    kernel: what runs instead of `fla.ops.gated_delta_rule.chunk_gated_delta_rule`, for tests
    """
    if kernel is None and not state.is_cuda:  # a model that was moved; the kernels would die
        return own_chain(state, q=q, k=k, v=v, beta=beta, log_decay=log_decay)
    if kernel is None:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as kernel
    group = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, dim=2) if group > 1 else x for x in (q, k))  # not every release groups heads
    return kernel(
        q=q.contiguous(),
        k=k.contiguous(),
        v=v.contiguous(),
        g=log_decay.float().contiguous(),
        beta=beta.contiguous(),
        scale=q.shape[-1] ** -0.5,
        initial_state=state.contiguous(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )


def _in_chunks(x: Tensor, size: int, heads: int) -> Tensor:
    """[B, T, H, d] -> [M, B*heads, size, d], the end filled with zeros: tokens that write nothing and decay nothing."""
    x = pad(x, (0, 0, 0, 0, 0, -x.shape[1] % size)).unflatten(1, (-1, size))
    return x.permute(1, 0, 3, 2, 4).repeat_interleave(heads // x.shape[3], dim=2).flatten(1, 2)
