"""Every kernel compiles for chips that are not here: compute capability 8.0 to 12.1, without a GPU."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")
from kernel_cases import INTERPRETED  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from deltatree.kernels.attention import triton as attention  # noqa: E402
from deltatree.kernels.calibration import Seen  # noqa: E402
from deltatree.kernels.calibration import triton as calibration  # noqa: E402
from deltatree.kernels.candidates import triton as candidates  # noqa: E402
from deltatree.kernels.commit import triton as commit  # noqa: E402
from deltatree.kernels.conv import triton as conv  # noqa: E402
from deltatree.kernels.delta_step import triton as delta_step  # noqa: E402
from deltatree.kernels.draft_record import triton as draft_record  # noqa: E402
from deltatree.kernels.experts import Routing, router  # noqa: E402
from deltatree.kernels.experts import triton as experts  # noqa: E402
from deltatree.kernels.fused import triton as fused  # noqa: E402
from deltatree.kernels.gated_delta import DeltaStash, Gates, PendingCommit, lean  # noqa: E402
from deltatree.kernels.gated_delta import triton as delta  # noqa: E402
from deltatree.kernels.linear import triton as linear  # noqa: E402
from deltatree.kernels.transition_tree import triton as transition_tree  # noqa: E402
from deltatree.kernels.tree_build import triton as tree_build  # noqa: E402
from deltatree.kernels.walk import Walked  # noqa: E402
from deltatree.kernels.walk import triton as walk  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
SHARED_BYTES = {80: 166912, 89: 101376, 90: 232448, 100: 232448, 120: 101376, 121: 101376}  # a block may have
TYPES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.uint8: "u8",
    torch.int64: "i64",
    torch.int32: "i32",
}
EVERY_SIZE = (90, 120)  # capabilities with much and with little shared memory


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
        special = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1 and special):
            signature[parameter.name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name], hints[(i,)] = "*" + TYPES[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32"
            if value % 16 == 0 and special:
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

    def recur(nodes, **launch):
        delta.tree_gated_delta(
            state, q=empty(1, nodes, 16, 128, dtype=bf16), k=empty(1, nodes, 16, 128, dtype=bf16),
            v=empty(1, nodes, heads, 128, dtype=bf16), beta=empty(1, nodes, heads), log_decay=empty(1, nodes, heads),
            ancestors=torch.ones(nodes, nodes, dtype=torch.uint8).tril(), max_depth=15,
            pending=PendingCommit(stash, path, length), launch=launch,
        )  # fmt: skip

    window, x = empty(1, 8192, 3, dtype=bf16), empty(1, nodes, 8192, dtype=bf16)
    rows = torch.zeros(nodes, 4, dtype=torch.int64)
    cache = empty(1, 1, 2, 4096, 256, dtype=bf16)
    q = empty(1, 16, nodes, 256, dtype=bf16)
    return [
        *launches_of(delta, "_tree_gated_delta_kernel", lambda: recur(32, KIND="one"), monkeypatch),
        *lean_launches(recur, monkeypatch),
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


def round_launches(dtype, monkeypatch) -> list:
    """Candidates, tree, its record and walk of one round: 15 depths, the published vocabulary, 256 nodes."""
    logits = torch.empty(15, 248320, dtype=dtype)
    values, ids = torch.empty(15, 256), torch.zeros(15, 256, dtype=torch.int64)
    nodes, count = torch.zeros(257, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    seen, walked = Seen.empty(15, "cpu"), Walked.empty(15, "cpu")

    def record(size: int) -> None:
        fields = values.flatten()[:size], nodes[:size], nodes[:size]
        draft_record.draft_record(*fields, num_nodes=count, max_depth=15, limit=9.0, scale=4.0)

    calls = [
        (candidates, ("_groups_kernel", "_select_kernel"), lambda: candidates.top_candidates(logits, 256)),
        (tree_build, ("_grow_kernel", "_relate_kernel"), lambda: tree_build.build_tree(values, ids, nodes, budget=256)),
        (tree_build, ("_grow_kernel", "_relate_kernel"), lambda: tree_build.build_tree(values, ids, 9, budget=256)),
        (
            tree_build,
            ("_grow_kernel", "_relate_kernel"),
            lambda: tree_build.build_tree(values, ids.int(), nodes, budget=16),
        ),
        (
            tree_build,
            ("_grow_kernel", "_relate_kernel"),
            lambda: tree_build.build_tree(values.expand(2, 15, 256), ids, nodes, budget=256),
        ),
        (calibration, ("_corrected_kernel",), lambda: calibration.corrected(values, seen)),
        (calibration, ("_learn_kernel",), lambda: calibration.learn_calibration(values, ids, walked, seen)),
        *((draft_record, ("_record_kernel",), partial(record, count)) for count in (257, 32)),
        (walk, ("_walk_kernel",), lambda: walk.walk(nodes, nodes, nodes, num_nodes=count, max_depth=15)),
    ]
    launches = []
    for module, names, call in calls:
        with monkeypatch.context() as patch:
            for other in names:
                patch.setattr(module, other, Recorder())
            call()
            recorded = [(name, getattr(module, name).launches) for name in names]
        launches += [(getattr(module, name), *launch) for name, kept in recorded for launch in kept]
    return launches


def lean_launches(recur, monkeypatch) -> list:
    """The three launches for trees of many nodes, as bfloat16 inputs take them."""
    names = ("_read_kernel", "_pair_kernel", "_solve_kernel")
    kernels, recorders = {name: getattr(lean, name) for name in names}, {name: Recorder() for name in names}
    with monkeypatch.context() as patch:
        for name in names:
            patch.setattr(lean, name, recorders[name])
        recur(160, **delta.LEAN)
        recur(160, **delta.LEAN, **delta.SMALL_READS)
    return [(kernels[name], *launch) for name in names for launch in recorders[name].launches]


def attention_launches(q, cache, seen, length, monkeypatch, shares: int = 16) -> list:
    def attend():
        attention.tree_attention(q, cache, cache, ancestors=seen, length=length, launch={"shares": shares})

    names = ("_combine_kernel", "_combine_rows_kernel")
    kernels, recorders = [getattr(attention, name) for name in names], [Recorder() for _ in names]
    with monkeypatch.context() as patch:
        for name, recorder in zip(names, recorders, strict=True):
            patch.setattr(attention, name, recorder)
        launches = launches_of(attention, "_share_kernel", attend, monkeypatch)
    combines = zip(kernels, recorders, strict=True)
    return launches + [(kernel, *launch) for kernel, recorder in combines for launch in recorder.launches]


def compile_all(capability: int, launches: list) -> None:
    """Every launch on the chips of EVERY_SIZE, on the others the first one of every kernel."""
    if capability not in EVERY_SIZE:
        launches = list({kernel.__name__: (kernel, *launch) for kernel, *launch in reversed(launches)}.values())
    for kernel, args, options in launches:
        compiled = compile_for(capability, kernel, args, options)
        assert compiled.asm["cubin"]
        assert compiled.metadata.shared <= SHARED_BYTES[capability], kernel.__name__


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_every_kernel_compiles(capability, monkeypatch):
    monkeypatch.setattr(attention, "_shared_bytes", lambda device: SHARED_BYTES[capability])
    launches = all_launches(monkeypatch) + round_launches(torch.float32, monkeypatch)
    assert len(launches) == 28
    compile_all(capability, launches)


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [*((capability, torch.bfloat16) for capability in SHARED_BYTES), *((chip, torch.float32) for chip in EVERY_SIZE)],
)
def test_the_step_of_one_token_compiles(capability, dtype, monkeypatch):
    def empty(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype)

    def call():
        gates = Gates(empty(32, dtype=torch.float32), empty(32, dtype=torch.float32))
        delta_step.gated_delta_step(
            empty(2, 32, 128, 128, dtype=torch.float32), q=empty(2, 16, 128), k=empty(2, 16, 128), v=empty(2, 32, 128),
            beta=empty(2, 32), log_decay=empty(2, 32), gates=gates, out=empty(2, 32, 128),
        )  # fmt: skip

    ((kernel, args, options),) = launches_of(delta_step, "_gated_delta_step_kernel", call, monkeypatch)
    compiled = compile_for(capability, kernel, args, options)
    assert compiled.asm["cubin"] and compiled.metadata.shared <= SHARED_BYTES[capability]


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize(("nodes", "shares"), [(1, 132), (16, 11)])
def test_attention_compiles_in_deeper_blocks(capability, nodes, shares, monkeypatch):
    """Chips of 220 KB of shared memory and more; the second time with shares that reach over two heads.

    The masks of trees of 16 nodes and more are copied in words, beside the keys.
    """
    monkeypatch.setattr(attention, "_shared_bytes", lambda device: SHARED_BYTES[capability])
    q, cache = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((1, 24, nodes, 256), (1, 4, 512, 256)))
    seen, length = torch.ones(nodes, nodes, dtype=torch.uint8).tril(), torch.zeros(1, dtype=torch.int32)
    share, combine = attention_launches(q, cache, seen, length, monkeypatch, shares)
    assert combine[0].__name__ == ("_combine_kernel" if nodes == 1 else "_combine_rows_kernel")
    share = compile_for(capability, *share)
    assert share.metadata.shared <= SHARED_BYTES[capability]
    if nodes >= 16:
        assert re.search(r"async_copy_global_to_local .*xi8, ", share.asm["ttgir"])
    assert compile_for(capability, *combine).metadata.shared <= SHARED_BYTES[capability]


def expert_launches(tokens: int, dtype: torch.dtype, monkeypatch, **options) -> list:
    """The router and the products of 256 experts and a shared one of their width, hidden size 2048."""
    top_k, num_experts, hidden, width = 8, 256, 2048, 512

    def meta(*shape: int) -> torch.Tensor:  # 1.6 GB of weights that nobody reads
        return torch.empty(shape, dtype=dtype, device="meta")

    routing = Routing.empty(tokens, top_k, num_experts, shared=True)
    gate_up, down = meta(num_experts, 2 * width, hidden), meta(num_experts, hidden, width)

    def choose():
        experts.route(meta(tokens, num_experts), top_k, True, meta(tokens), routing, **options)

    def multiply():
        experts.expert_mlp(meta(tokens, hidden), routing, gate_up, down, gate_up[0], down[0], **options)

    calls = {
        "_choose_kernel": choose,
        "_group_kernel": choose,
        "_gate_up_kernel": multiply,
        "_down_kernel": multiply,
        "_combine_kernel": lambda: experts.combine(meta(tokens, top_k + 1, hidden), **options),
    }
    kernels = {name: getattr(experts, name) for name in calls}
    with monkeypatch.context() as patch:
        for name in calls:  # no kernel but the one that is looked at may run either
            patch.setattr(experts, name, Recorder())
        return [
            (kernels[name], args, options)
            for name, call in calls.items()
            for _, args, options in launches_of(experts, name, call, monkeypatch)
        ]


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_every_expert_kernel_compiles(capability, monkeypatch):
    monkeypatch.setattr(experts, "_shared_bytes", lambda device: SHARED_BYTES[capability])
    launches = [
        *expert_launches(1, torch.bfloat16, monkeypatch),
        *expert_launches(64, torch.bfloat16, monkeypatch),
        *expert_launches(64, torch.float32, monkeypatch),
        *expert_launches(512, torch.bfloat16, monkeypatch)[1:2],  # sequences in lock step; only the grouping differs
    ]
    assert len(launches) == 4 + 5 + 5 + 1
    if capability >= 90:  # launches that overlap the end of the kernel before
        launches = expert_launches(64, torch.bfloat16, monkeypatch, chained=True) + launches
    compile_all(capability, launches)


def router_launches(tokens: int, num_experts: int, dtype: torch.dtype, monkeypatch, **options) -> list:
    """From tokens of size 2,048 to their blocks, with a shared expert where there are more than 128 others."""
    x, weight = torch.empty(tokens, 2048, dtype=dtype), torch.empty(num_experts + 1, 2048, dtype=dtype)
    kernels = {name: getattr(router, name) for name in ("_shares_kernel", "_choose_kernel", "_group_kernel")}
    with monkeypatch.context() as patch:
        for name in kernels:
            patch.setattr(router, name, Recorder())
        router.route_tokens(x, weight, num_experts, 8, True, num_experts > 128, **options)
        return [(kernel, *launch) for name, kernel in kernels.items() for launch in getattr(router, name).launches]


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_every_router_kernel_compiles(capability, monkeypatch):
    chained = capability >= 90
    launches = [
        *router_launches(16, 256, torch.bfloat16, monkeypatch, chained=chained),
        *router_launches(1, 512, torch.bfloat16, monkeypatch, chained=chained),
        *router_launches(257, 128, torch.bfloat16, monkeypatch, chained=chained),
        *router_launches(64, 256, torch.float32, monkeypatch),
    ]
    assert len(launches) == 3 + 2 + 3 + 3
    compile_all(capability, launches)


@pytest.mark.parametrize("tokens", [1, 17, 256])
def test_the_router_reads_its_weight_before_it_waits(tokens, monkeypatch):
    """On Hopper, in bfloat16: every load of the first launch before the wait is of the weight; the tokens come behind it."""
    launches = router_launches(tokens, 256, torch.bfloat16, monkeypatch, chained=True)
    kernel, args, options = launches[0]
    code = compile_for(90, kernel, args, options).asm["ptx"]
    before, behind = code.split("griddepcontrol.wait")
    loads = "ld.global.v4.b32"
    assert before.count(loads) == 32 * 256 * 2 // 16 // 128  # 16 bytes a thread, 128 threads
    assert behind.count(loads) == (16 if tokens <= 64 else 32) * 256 * 2 // 16 // 128
    assert "st.global" not in before and "wgmma" not in code


def linear_launches(tokens: int, rows: int, dtype: torch.dtype, monkeypatch, **options) -> list:
    """2,048 columns; few rows are split into shares, and the result is float32 then (as a router's logits are)."""
    x, weight = torch.empty(tokens, 2048, dtype=dtype), torch.empty(rows, 2048, dtype=dtype)
    out = torch.empty(tokens, rows, dtype=torch.float32 if rows < 1000 else dtype)

    def call():
        linear.linear(x, weight, out=out, **options)

    return launches_of(linear, "_linear_kernel", call, monkeypatch)


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_the_linear_kernel_compiles(capability, monkeypatch):
    monkeypatch.setattr(linear, "_shared_bytes", lambda device: SHARED_BYTES[capability])
    launches = []
    for tokens, rows, dtype in [
        (256, 12352, torch.bfloat16),
        (1, 12352, torch.bfloat16),
        (1, 256, torch.bfloat16),
        (64, 12352, torch.bfloat16),
        (256, 256, torch.bfloat16),
        (64, 256, torch.float32),
    ]:
        chained = capability >= 90 and tokens > 1  # launches that overlap the end of the kernel before
        launches += linear_launches(tokens, rows, dtype, monkeypatch, chained=chained)
    compile_all(capability, launches)


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize(("tokens", "columns"), [(1, 4096), (24, 4096), (16, 6144)])
def test_two_programs_of_a_product_in_parts_share_a_multiprocessor(capability, tokens, columns, monkeypatch):
    """The weights that they hold are in shared memory before they wait."""
    monkeypatch.setattr(linear, "chaining", lambda device: {"CHAINED": True, "launch_pdl": True})
    x, weight = (torch.empty(rows, columns, dtype=torch.bfloat16, device="meta") for rows in (tokens, 2048))
    ((kernel, args, options),) = launches_of(
        linear, "_parts_kernel", lambda: linear.linear_parts(x, weight), monkeypatch
    )
    compiled = compile_for(capability, kernel, args, options)
    before, _ = compiled.asm["ptx"].split("griddepcontrol.wait")
    assert "st.shared" in before and 2 * compiled.metadata.shared <= SHARED_BYTES[capability]


def transition_launches(budget: int, chain: bool, monkeypatch) -> list:
    """Building and learning at 15 depths of 64 candidates, over the published vocabulary."""
    known = transition_tree.Transitions.empty(248320, num_buckets=1 << 18, device="cpu")
    values, ids = torch.empty(15, 64), torch.zeros(15, 64, dtype=torch.int64)
    nodes, count = torch.zeros(budget + 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    calls = [
        lambda: transition_tree.build_transition_tree(values, ids, nodes[:1], known, budget=budget, chain=chain),
        lambda: transition_tree.learn_transitions(
            nodes, nodes, nodes, num_nodes=count, path=torch.zeros(16, dtype=torch.int32), steps=count, known=known,
            drafted=(values, ids),
        ),
    ]  # fmt: skip
    names = [f"_{name}_kernel" for name in ("lists", "grow", "fit", "grams", "plan", "insert")]
    kernels = {name: getattr(transition_tree, name) for name in names}
    with monkeypatch.context() as patch:
        for name in names:
            patch.setattr(transition_tree, name, Recorder())
        patch.setattr(transition_tree, "_relate_kernel", Recorder())  # the tree builder's own
        for call in calls:
            call()
        return [(kernels[name], *launch) for name in names for launch in getattr(transition_tree, name).launches]


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_every_transition_kernel_compiles(capability, monkeypatch):
    monkeypatch.setattr(transition_tree, "chaining", lambda device: {"CHAINED": capability >= 90})
    launches = transition_launches(256, False, monkeypatch)
    assert len(launches) == 6
    launches += [
        launch for launch in transition_launches(15, True, monkeypatch) if launch[0].__name__ == "_grow_kernel"
    ]
    compile_all(capability, launches)


def fused_launches(nodes: int, dtype: torch.dtype, monkeypatch) -> list:
    """Head norms of published shapes: 32 heads of 128; 16 and 2 of 256, a quarter of which turns; 32 and 4 of 128."""

    def empty(*shape: int, dtype=dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def rotate(heads: int, key_heads: int, dim: int, half: int, gated: bool):
        cache = empty(key_heads, 512, dim)
        fused.norm_rotate(
            empty(nodes, heads * dim * (2 if gated else 1) + 2 * key_heads * dim), cache, cache, num_heads=heads, gated=gated,
            depths=torch.zeros(nodes, dtype=torch.int64), length=torch.zeros(1, dtype=torch.int64), zero_centred=gated,
            frequencies=torch.zeros(half), q_weight=empty(dim), k_weight=empty(dim),
        )  # fmt: skip

    def norm():
        z = empty(nodes, 12352)[:, 8192:12288].unflatten(-1, (32, 128))
        fused.gated_norm(empty(nodes, 32, 128), z, weight=empty(128), eps=1e-6)

    return [
        *launches_of(fused, "_gated_norm_kernel", norm, monkeypatch),
        *launches_of(fused, "_norm_rotate_kernel", lambda: rotate(16, 2, 256, 32, True), monkeypatch),
        *launches_of(fused, "_norm_rotate_kernel", lambda: rotate(32, 4, 128, 64, False), monkeypatch),
    ]


def order_of_sums(compiled) -> set[tuple[str, ...]]:
    """How the threads hold what a kernel adds up along the last dimension, but for how many warps there are."""
    code = compiled.asm["ttgir"]
    layouts = set(re.findall(r"}\) : \(tensor<\w+, (#\w+)>\) -> tensor<\w+, #ttg.slice<{dim = 1", code))
    assert layouts
    definitions = [re.search(re.escape(name) + r" = #ttg.blocked<{(.*?)}>", code).group(1) for name in layouts]
    assert all(re.search(r"warpsPerCTA = \[\d+, 1\]", text) for text in definitions), "a row lies in one warp"
    return {tuple(re.findall(r"(?:sizePerThread|threadsPerWarp) = \[.*?\]", text)) for text in definitions}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_head_norms_add_up_in_one_order_for_any_tree(dtype, monkeypatch):
    """Threads hold a head's values in the same way in every launch, so its bits do not tell how many nodes there are."""
    sizes = [fused_launches(nodes, dtype, monkeypatch) for nodes in (1, 64, 256)]
    for launches in zip(*sizes, strict=True):
        compiled = [compile_for(90, *launch) for launch in launches]
        assert len(set().union(*map(order_of_sums, compiled))) == 1, launches[0][0].__name__
    if dtype == torch.bfloat16:
        compile_all(120, sizes[-1])
