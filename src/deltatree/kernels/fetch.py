"""What a Triton kernel can do before the kernel ahead of it has finished: ask for weights, which nobody writes."""

import triton
import triton.language as tl


@triton.jit
def fetch_ahead(weight, rows, mask, stride, start, end, BLOCK_K: tl.constexpr):
    """Ask the L2 cache for columns start .. end - 1 of some rows of a weight, a line of 128 bytes at a time.

    weight: pointer to [*, K] with K contiguous    rows, mask: [R], which rows, and which of them exist
    stride: between rows    Only for NVIDIA GPUs; reads and writes nothing that a kernel could see.
    """
    LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
    for k in range(start, end, BLOCK_K):
        at = k + tl.arange(0, BLOCK_K // LINE) * LINE
        inside = mask[:, None] & (at < end)[None, :]
        where = weight + tl.where(inside, rows.to(tl.int64)[:, None] * stride + at[None, :], start)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [where], dtype=tl.int32, is_pure=False, pack=1
        )
