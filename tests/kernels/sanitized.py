"""One small call of every kernel, to run under a checker:

compute-sanitizer --tool memcheck python tests/kernels/sanitized.py
compute-sanitizer --tool racecheck python tests/kernels/sanitized.py
"""

import torch
from kernel_cases import agrees, ancestors_of, delta_case, make_tree, path_to

from deltatree.kernels.attention import tree_attention
from deltatree.kernels.candidates import top_candidates
from deltatree.kernels.commit import commit_rows
from deltatree.kernels.conv import commit_window, conv_rows, tree_conv
from deltatree.kernels.draft_record import draft_record
from deltatree.kernels.gated_delta import PendingCommit, commit_gated_delta, tree_gated_delta
from deltatree.kernels.gated_delta import triton as gated_delta
from deltatree.kernels.tree_build import build_tree
from deltatree.kernels.walk import walk

for nodes, max_depth, dtype, dims in (
    (20, None, torch.float32, (16, 16)),
    (64, 15, torch.bfloat16, (128, 32)),
    (70, 15, torch.bfloat16, (128, 32)),
):
    case = delta_case(make_tree("spine", nodes, 0, max_depth=15), heads=(1, 2), dims=dims, dtype=dtype)
    path = path_to(case.parents, nodes - 1).cuda()
    expected, stash = tree_gated_delta(case.state, **case.inputs, backend="reference")
    out, _ = tree_gated_delta(case.state, **case.inputs, max_depth=max_depth, backend="triton")
    assert agrees(out, expected)
    commit_gated_delta(case.state, stash, path)
    tree_gated_delta(
        case.state, **case.inputs, max_depth=max_depth, pending=PendingCommit(stash, path), backend="triton"
    )

# The launches for trees of many nodes, a path committed in them, blocks that are not full.
for launch, nodes, dtype in (
    (gated_delta.LEAN, 33, torch.float32),
    (gated_delta.LEAN, 100, torch.bfloat16),
    (gated_delta.LEAN | gated_delta.SMALL_READS, 100, torch.bfloat16),
):
    case = delta_case(make_tree("wide", nodes, 1, max_depth=15), heads=(1, 2), dims=(128, 64), dtype=dtype)
    path = path_to(case.parents, nodes - 1).cuda()
    _, stash = tree_gated_delta(case.state, **case.inputs, backend="reference")
    pending, state = PendingCommit(stash, path, torch.tensor([len(path)], device="cuda")), case.state.clone()
    expected, _ = tree_gated_delta(state.clone(), **case.inputs, pending=pending, backend="reference")
    out, _ = gated_delta.tree_gated_delta(state, **case.inputs, max_depth=15, pending=pending, launch=launch)
    assert agrees(out, expected)

parents = make_tree("bushy", 20, 0)
path, seen = path_to(parents, 19).cuda(), ancestors_of(parents).cuda()
window, x = torch.randn(1, 70, 3, device="cuda"), torch.randn(1, 20, 70, device="cuda")
rows = conv_rows(torch.tensor(parents), 4).cuda()
tree_conv(window, x, weight=torch.randn(70, 4, device="cuda"), bias=None, rows=rows)
commit_window(window, x, path, out=window)
for dtype in (torch.float32, torch.bfloat16):
    keys, values = (torch.randn(1, 1, 2, 400, 64, device="cuda", dtype=dtype) for _ in range(2))
    q = torch.randn(1, 8, 20, 64, device="cuda", dtype=dtype)
    tree_attention(q, keys[0], values[0], ancestors=seen, length=torch.tensor([300], device="cuda"))
    commit_rows(keys, values, path, committed=300)
values, ids = top_candidates(torch.randn(15, 5000, device="cuda").round(), 64)
built = build_tree(values, ids, torch.tensor([9], device="cuda"), budget=64)
walk(built.token_ids, built.parents, built.token_ids.roll(-1), num_nodes=built.num_nodes, max_depth=15)
fields = built.scores, built.parents, built.depths
draft_record(*fields, num_nodes=built.num_nodes, max_depth=15, limit=9.0, scale=4.0)
torch.cuda.synchronize()
print("done")
