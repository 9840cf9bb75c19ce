"""What keeps a text going when drafting fails: plain decoding from the same state, and a warning that says why.

A draft only chooses which tokens are verified, so leaving drafting out changes nothing but speed. Verify writes scratch
only, so that one that ran out of memory leaves the committed state as it was.
"""

from __future__ import annotations

import warnings
from collections import deque

import torch
from torch import Tensor

from deltatree.drafter.protocol import DraftSession
from deltatree.models.protocol import Target, Verified
from deltatree.state import TreeState
from deltatree.tree import DraftTree, chain_tree

NEVER = -1e4
"""What stands for a log-probability of minus infinity, so that sums of them stay numbers."""
WATCHED_ROUNDS = 50
FLOOR = 0.05
"""Drafted tokens accepted a round, over the watched rounds, below which a drafter hardly belongs to its target."""


class GuardedSession:
    """A draft session that proposes nothing any more after its first fault, instead of ending the generation."""

    def __init__(self, session: DraftSession, vocab_size: int) -> None:
        self._session: DraftSession | None = session
        self._vocab_size = vocab_size
        self.failure: str | None = None  # why it stopped drafting, if it failed
        self._accepted: deque[int] | None = deque(maxlen=WATCHED_ROUNDS)  # drafted tokens a round; None once warned

    def propose(self, features: Tensor, *, bonus: int) -> Tensor:
        """As `DraftSession.propose`; without rows if drafting has ended, now or before."""
        if self._session is None:
            return torch.empty(0, self._vocab_size)
        try:
            log_probs = self._session.propose(features, bonus=bonus)
            fault = fault_of(log_probs, self._vocab_size)
        except Exception as error:  # a drafter may be anyone's code
            fault = f"raised {_in_words(error)}"
        if fault is not None:
            self.fail(f"the drafter {fault}")
            return torch.empty(0, self._vocab_size)
        return log_probs.clamp(min=NEVER)

    def fail(self, why: str) -> None:
        """Stop drafting, with a warning."""
        self.rest()
        self.failure = why
        warnings.warn(f"{why}; this text goes on by plain decoding, with the same tokens", RuntimeWarning, stacklevel=2)

    def rest(self) -> None:
        """Stop drafting, and let go of the drafter's context."""
        self._session = None

    def watch(self, acceptance_length: int, num_nodes: int) -> None:
        """Warn once if nearly nothing that is drafted is accepted. num_nodes: verified in this round, root included."""
        if num_nodes < 2 or self._accepted is None:
            return
        self._accepted.append(acceptance_length - 1)
        accepted = sum(self._accepted)
        if len(self._accepted) == WATCHED_ROUNDS and accepted < FLOOR * WATCHED_ROUNDS:
            self._accepted = None
            warnings.warn(
                f"in {WATCHED_ROUNDS} rounds {accepted} drafted tokens were accepted; is this the drafter that was "
                "trained for this target? method='ar' gives the same tokens without it",
                RuntimeWarning,
                stacklevel=2,
            )


def fault_of(log_probs: Tensor, vocab_size: int) -> str | None:
    """What is wrong with a drafter's proposals, or None. A probability of zero is no fault, a row without any other is."""
    if not isinstance(log_probs, Tensor):
        return f"returned {type(log_probs).__name__} instead of a tensor"
    if log_probs.dim() != 2 or log_probs.shape[-1] != vocab_size:
        return f"returned log-probabilities of shape {tuple(log_probs.shape)} instead of [depth, {vocab_size}]"
    # One number a row: NaN and infinities survive the maximum, and a row of zero probabilities is minus infinity.
    return None if bool(log_probs.amax(-1).isfinite().all()) else "returned log-probabilities that are no numbers"


def verify_within_memory(
    target: Target, tree: DraftTree, state: TreeState, drafter: DraftSession
) -> tuple[DraftTree, Verified]:
    """Verify the tree; if the memory does not suffice for it, its root alone, and nothing is drafted from then on."""
    try:
        return tree, target.verify(tree, state)
    except (RuntimeError, MemoryError) as error:
        if len(tree) == 1 or not _is_out_of_memory(error):
            raise
        why = f"a tree of {len(tree)} nodes does not fit into memory ({_in_words(error)}; try a smaller budget)"
    # Outside of the handler, where the failed forward's tensors are no longer held by its traceback.
    if isinstance(drafter, GuardedSession):
        drafter.fail(why)
    else:
        warnings.warn(why, RuntimeWarning, stacklevel=2)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    root = chain_tree(tree.token_ids[:1])
    return root, target.verify(root, state)


def _is_out_of_memory(error: BaseException) -> bool:
    # On a CPU PyTorch raises a plain RuntimeError.
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)


def _in_words(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
