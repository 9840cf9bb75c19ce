"""Every kernel compiles for chips that are not here: compute capability 8.0 to 12.1, without a GPU."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")
from kernel_cases import INTERPRETED  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from deltatree.kernels.attention import triton as attention  # noqa: E402
from deltatree.kernels.commit import triton as commit  # noqa: E402
from deltatree.kernels.conv import triton as conv  # noqa: E402
from deltatree.kernels.gated_delta import DeltaStash, PendingCommit, wide  # noqa: E402
from deltatree.kernels.gated_delta import triton as delta  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
SHARED_BYTES = {80: 166912, 89: 101376, 90: 232448, 100: 232448, 120: 101376, 121: 101376}  # a block may have
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.uint8: "u8", torch.int64: "i64", torch.int32: "i32"}


class Recorder:
    """Stands in for a kernel and keeps what it was launched with."""

    def __init__(self) -> None:
        self.launches = []

    def __getitem__(self, grid):
        return lambda *args, **options: self.launches.append((args, options))


def launches_of(module, name: str, call, monkeypatch) -> list:
    kernel, recorder = getattr(module, name), Recorder()
    with monkeypatch.context() as patch:
        patch.setattr(module, name, recorder)
        call()
    return [(kernel, args, options) for args, options in recorder.launches]


def compile_for(capability: int, kernel, args, options):
    options = dict(options)
    knobs = {name: options.pop(name) for name in ("num_warps", "num_stages") if name in options}
    given = dict(zip(kernel.arg_names, args, strict=False)) | options
    signature, constants, hints = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[parameter.name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name], hints[(i,)] = "*" + TYPES[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32"
            if value % 16 == 0:
                hints[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=hints)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=knobs)


def all_launches(monkeypatch):
    def empty(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype)

    bf16, nodes, heads = torch.bfloat16, 64, 32
    seen = torch.ones(nodes, nodes, dtype=torch.uint8).tril()
    path, length = torch.zeros(16, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    stash = DeltaStash(empty(1, nodes, 16, 128), empty(1, nodes, heads, 128), empty(1, nodes, heads))
    state = empty(1, heads, 128, 128)

    def recur(nodes):
        delta.tree_gated_delta(
            state, q=empty(1, nodes, 16, 128, dtype=bf16), k=empty(1, nodes, 16, 128, dtype=bf16),
            v=empty(1, nodes, heads, 128, dtype=bf16), beta=empty(1, nodes, heads), log_decay=empty(1, nodes, heads),
            ancestors=torch.ones(nodes, nodes, dtype=torch.uint8).tril(), max_depth=15,
            pending=PendingCommit(stash, path, length),
        )  # fmt: skip

    window, x = empty(1, 8192, 3, dtype=bf16), empty(1, nodes, 8192, dtype=bf16)
    rows = torch.zeros(nodes, 4, dtype=torch.int64)
    cache = empty(1, 1, 2, 4096, 256, dtype=bf16)
    q = empty(1, 16, nodes, 256, dtype=bf16)
    return [
        *launches_of(delta, "_tree_gated_delta_kernel", lambda: recur(32), monkeypatch),
        *wide_launches(recur, monkeypatch),
        *launches_of(delta, "_commit_kernel", lambda: delta.commit_gated_delta(state, stash, path, length=length), monkeypatch),
        *launches_of(
            conv, "_tree_conv_kernel",
            lambda: conv.tree_conv(window, x, weight=empty(8192, 4, dtype=bf16), bias=None, rows=rows), monkeypatch,
        ),
        *launches_of(conv, "_commit_window_kernel", lambda: conv.commit_window(window, x, path, length=length), monkeypatch),
        *launches_of(
            commit, "_commit_rows_kernel",
            lambda: commit.commit_rows(cache, cache, path, committed=length, length=length), monkeypatch,
        ),
        *attention_launches(q, cache[0], seen, length, monkeypatch),
    ]  # fmt: skip


def wide_launches(recur, monkeypatch) -> list:
    """Both launches for trees whose solve is one panel, and for one that takes two."""
    launches = []
    for nodes in (64, 160):
        solve, solved = wide._solve_kernel, Recorder()
        with monkeypatch.context() as patch:
            patch.setattr(wide, "_solve_kernel", solved)
            launches += launches_of(wide, "_prepare_kernel", lambda nodes=nodes: recur(nodes), monkeypatch)
        launches += [(solve, args, options) for args, options in solved.launches]
    return launches


def attention_launches(q, cache, seen, length, monkeypatch) -> list:
    combine = Recorder()
    kernel = attention._combine_kernel
    with monkeypatch.context() as patch:
        patch.setattr(attention, "_combine_kernel", combine)
        call = lambda: attention.tree_attention(q, cache, cache, ancestors=seen, length=length, launch={"shares": 16})  # noqa: E731
        shares = launches_of(attention, "_share_kernel", call, monkeypatch)
    return shares + [(kernel, args, options) for args, options in combine.launches]


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_every_kernel_compiles(capability, monkeypatch):
    monkeypatch.setattr(attention, "_shared_bytes", lambda device: SHARED_BYTES[capability])
    launches = all_launches(monkeypatch)
    assert len(launches) == 11
    for kernel, args, options in launches:
        compiled = compile_for(capability, kernel, args, options)
        assert compiled.asm["cubin"]
        assert compiled.metadata.shared <= SHARED_BYTES[capability], kernel.__name__
