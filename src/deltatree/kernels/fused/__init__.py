"""The small steps between a layer's products, each in one launch: norms, rotary positions, gates."""

from deltatree.kernels.dispatch import dispatched
from deltatree.kernels.fused import reference

_TWIN = "deltatree.kernels.fused.triton"
add_norm = dispatched(reference.add_norm, _TWIN)
gated_norm = dispatched(reference.gated_norm, _TWIN)
norm_rotate = dispatched(reference.norm_rotate, _TWIN)
swiglu = dispatched(reference.swiglu, _TWIN)

__all__ = ["add_norm", "gated_norm", "norm_rotate", "swiglu"]
