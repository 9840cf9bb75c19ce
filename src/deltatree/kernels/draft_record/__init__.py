"""A draft tree as a choice of the budget looks at it, in one piece for the host."""

from deltatree.kernels.dispatch import dispatched
from deltatree.kernels.draft_record import reference

draft_record = dispatched(reference.draft_record, "deltatree.kernels.draft_record.triton")

__all__ = ["draft_record"]
