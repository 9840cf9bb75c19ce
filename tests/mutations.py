"""Would the tests notice? Plants one fault at a time in a copy of the source and runs the test that must fail.

    python tests/mutations.py [WORD ...]     # all, or those whose description contains one of the words

Prints a table, and exits with 1 if a fault was not caught or a test fails without one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "deltatree"


@dataclass(frozen=True, slots=True)
class Mutation:
    """A fault: `old` stands once in `file` and becomes `new`; `test` must fail then."""

    fault: str
    file: str  # below src/deltatree
    old: str
    new: str
    test: str  # a pytest id below tests/

    @property
    def room(self) -> str:
        return self.file.split("/")[0]


MUTATIONS = [
    Mutation(
        "a node's row of the mask knows its parent alone, not the parent's ancestors",
        "tree/draft_tree.py",
        "            rows[node] |= rows[parent]\n",
        "            rows[node, parent] = True\n",
        "models/test_tree_forward.py::test_B10_a_second_child_starts_from_its_parent_not_from_its_sibling",
    ),
    Mutation(
        "a sibling hangs below the node before it instead of below their parent",
        "tree/policies.py",
        "heapq.heappush(heap, (-sibling, (*ranks[:-1], rank + 1), parent))",
        "heapq.heappush(heap, (-sibling, (*ranks[:-1], rank + 1), node))",
        "tree/test_policies.py::test_best_first_is_the_best_set_of_prefixes",
    ),
    Mutation(
        "a child costs nothing beyond its parent",
        "tree/policies.py",
        "heapq.heappush(heap, (-_float32(scores[node] + value[depth][0]), (*ranks, 0), node))",
        "heapq.heappush(heap, (-scores[node], (*ranks, 0), node))",
        "tree/test_policies.py::test_best_first_is_the_best_set_of_prefixes",
    ),
    Mutation(
        "of two equal children the walk takes the later one",
        "tree/accept.py",
        "        child.setdefault(edge, node)\n",
        "        child[edge] = node\n",
        "tree/test_draft_tree.py::test_accept_takes_the_first_of_two_equal_children",
    ),
    Mutation(
        "positions are row numbers instead of depths",
        "models/reference.py",
        "positions = tree_positions(tree.depths, state.length)",
        "positions = tree_positions(torch.arange(len(tree)), state.length)",
        "models/test_tree_forward.py::test_B12_a_nodes_position_is_its_depth_not_its_row",
    ),
    Mutation(
        "the bonus token stands one position too far",
        "kernels/attention/reference.py",
        "    return depths + length\n",
        "    return depths + length + 1\n",
        "models/test_tree_forward.py::test_B12_a_nodes_position_is_its_depth_not_its_row",
    ),
    Mutation(
        "a sliding window sees one token more",
        "kernels/attention/reference.py",
        "positions[:, None] - keys[None, :] < window",
        "positions[:, None] - keys[None, :] <= window",
        "models/test_lossless.py::test_B07_sliding_window_layers_forget_what_plain_decoding_forgets",
    ),
    Mutation(
        "the additive mask is inverted",
        "models/reference.py",
        ".masked_fill(~mask, torch.finfo(self.dtype).min)",
        ".masked_fill(mask, torch.finfo(self.dtype).min)",
        "models/test_tree_forward.py::test_B13_a_backend_that_is_taken_honours_the_mask",
    ),
    Mutation(
        "decays of two nodes are added instead of subtracted",
        "kernels/gated_delta/reference.py",
        "decay = (summed[..., :, None] - summed[..., None, :])",
        "decay = (summed[..., :, None] + summed[..., None, :])",
        "kernels/test_reference.py::test_every_path_of_a_tree_is_the_plain_recurrence",
    ),
    Mutation(
        "at a commit decays are added instead of subtracted",
        "kernels/gated_delta/reference.py",
        "remaining = (total[:, -1:] - total).exp()",
        "remaining = (total[:, -1:] + total).exp()",
        "models/test_state.py::test_B15_only_the_accepted_nodes_stay_wherever_they_stood",
    ),
    Mutation(
        "the convolution takes the row before a node instead of its parent",
        "kernels/conv/reference.py",
        "before = torch.cat([torch.arange(-1, window - 1).clamp(min=0), parents + window])",
        "before = torch.cat([torch.arange(-1, window - 1).clamp(min=0), torch.arange(-1, nodes - 1) + window])",
        "models/test_tree_forward.py::test_B10_a_second_child_starts_from_its_parent_not_from_its_sibling",
    ),
    Mutation(
        "the convolution window is rolled by one",
        "kernels/conv/reference.py",
        "moved = walked[:, :, walked.shape[2] - window.shape[2] :]",
        "moved = walked[:, :, walked.shape[2] - window.shape[2] - 1 : -1]",
        "models/test_state.py::test_B02_the_convolution_window_after_any_number_of_accepted_drafts",
    ),
    Mutation(
        "the window takes the first rows instead of the path's",
        "kernels/conv/reference.py",
        "x[:, path].transpose(1, 2)",
        "x[:, : path.numel()].transpose(1, 2)",
        "models/test_state.py::test_B15_only_the_accepted_nodes_stay_wherever_they_stood",
    ),
    Mutation(
        "a prefill's chunk forgets nothing of the state for its own keys",
        "verify/chain.py",
        "kept, added = kept - keys @ pulls, keys @ values",
        "kept, added = kept + 0 * keys @ pulls, keys @ values",
        "models/test_prefill.py::test_the_chunk_rule_is_the_recurrence",
    ),
    Mutation(
        "a prefill's chunks each start from the first one's state",
        "verify/chain.py",
        "(values - pulls @ states[:-1])",
        "(values - pulls @ states[:1])",
        "models/test_prefill.py::test_the_chunk_rule_is_the_recurrence",
    ),
    Mutation(
        "a later part of a prompt sees one token ahead",
        "models/reference.py",
        "        mask = keys <= queries\n",
        "        mask = keys <= queries + 1\n",
        "models/test_lossless.py::test_B03_any_split_of_the_prompt_gives_the_same_state",
    ),
    Mutation(
        "in a prompt a sliding window sees one token more",
        "models/reference.py",
        "keys > queries - self.config.sliding_window",
        "keys >= queries - self.config.sliding_window",
        "models/test_lossless.py::test_B07_sliding_window_layers_forget_what_plain_decoding_forgets",
    ),
    Mutation(
        "a prefill leaves the window of its first token",
        "verify/gated_delta_net.py",
        "commit_window(layer.window, last, torch.arange(last.shape[1]))",
        "commit_window(layer.window, last, torch.arange(1))",
        "models/test_state.py::test_B04_prompts_shorter_than_the_kernel",
    ),
    Mutation(
        "verify writes the recurrent state",
        "verify/gated_delta_net.py",
        "        layer.leave(stash, inputs)\n",
        "        layer.leave(stash, inputs)\n        layer.matrix.mul_(0.999)\n",
        "models/test_lossless.py::test_verify_leaves_every_committed_byte_and_can_be_called_again",
    ),
    Mutation(
        "a commit takes in every verified node of a recurrent layer",
        "state/layers.py",
        "commit_gated_delta(self.matrix, self.stash, path)",
        "commit_gated_delta(self.matrix, self.stash, torch.arange(self.inputs.shape[1]))",
        "models/test_state.py::test_B01_rejected_drafts_leave_no_trace",
    ),
    Mutation(
        "keys and values of the first rows are kept: depth instead of row",
        "state/layers.py",
        "rows = path.to(self.keys.device) + length",
        "rows = torch.arange(path.numel(), device=self.keys.device) + length",
        "models/test_state.py::test_B15_only_the_accepted_nodes_stay_wherever_they_stood",
    ),
    Mutation(
        "keys and values are gathered in the wrong order",
        "state/layers.py",
        "cache.index_select(2, rows)",
        "cache.index_select(2, rows.flip(0))",
        "models/test_state.py::test_B15_only_the_accepted_nodes_stay_wherever_they_stood",
    ),
    Mutation(
        "the bonus token counts as committed",
        "state/tree_state.py",
        "        self.length += len(path)\n",
        "        self.length += len(path) + 1\n",
        "models/test_state.py::test_B15_only_the_accepted_nodes_stay_wherever_they_stood",
    ),
    Mutation(
        "after a stop one node too many is committed",
        "decode/round.py",
        "path = accepted.path[:kept]",
        "path = accepted.path[: kept + 1]",
        "decode/test_endings.py::test_nothing_after_a_stop_string_is_committed",
    ),
    Mutation(
        "the drafter gets the first rows of the verify instead of the path's",
        "decode/round.py",
        "verified.features[path]",
        "verified.features[: len(path)]",
        "models/test_tree_forward.py::test_B16_the_drafter_gets_the_rows_of_the_accepted_nodes",
    ),
    Mutation(
        "end tokens are looked for at the end of a round alone",
        "decode/stream.py",
        "if token in self.stop_ids or (",
        "if (token in self.stop_ids and count == len(token_ids)) or (",
        "decode/test_stream.py::test_B20_nothing_after_an_end_token_wherever_it_falls",
    ),
    Mutation(
        "the cap is tested at the end of a round alone",
        "decode/stream.py",
        "if len(self.new_ids) >= self.max_new_tokens:",
        "if len(self.new_ids) >= self.max_new_tokens and count == len(token_ids):",
        "decode/test_stream.py::test_B22_B23_exactly_the_tokens_asked_for",
    ),
    Mutation(
        "a conversation goes on although its last committed token differs",
        "decode/stream.py",
        "prompt_ids[: held.state.length] == self.token_ids else 0",
        "prompt_ids[: held.state.length - 1] == self.token_ids[:-1] else 0",
        "serve/test_reuse.py::test_B55_anything_else_starts_afresh",
    ),
    Mutation(
        "the sampler draws for every node of the tree",
        "decode/sampling.py",
        "        tokens, before = tree.token_ids, torch.tensor(history)\n",
        "        tokens, before = tree.token_ids, torch.tensor(history)\n"
        "        torch.rand(len(tree) - 1, generator=self.generator)\n",
        "decode/test_sampling.py::test_one_draw_an_emitted_token_so_every_method_samples_the_same_text",
    ),
    Mutation(
        "only the bonus token is drawn, the path above it is the likeliest",
        "decode/sampling.py",
        "            return self._choose(logits[node][None], input_ids[None].to(logits.device))\n",
        "            if bool((tree.parents == node).any()):\n"
        "                return int(logits[node].argmax())\n"
        "            return self._choose(logits[node][None], input_ids[None].to(logits.device))\n",
        "decode/test_sampling_distribution.py::test_B28_every_token_of_a_round_is_drawn",
    ),
    Mutation(
        "a node is processed without its own token in the history",
        "decode/sampling.py",
        "torch.cat([before, tokens[path[1:]]]) if len(path) > 1",
        "torch.cat([before, tokens[path[1:-1]]]) if len(path) > 1",
        "decode/test_sampling.py::test_greedy_with_processing_is_transformers_own",
    ),
    Mutation(
        "an infinity among the proposals passes",
        "decode/guard.py",
        "log_probs.amax(-1).isfinite().all()",
        "(~log_probs.amax(-1).isnan()).all()",
        "decode/test_faults.py::test_a_drafters_fault_in_any_round_leaves_plain_decoding",
    ),
    Mutation(
        "without memory for the tree its last node is verified instead of its root",
        "decode/guard.py",
        "root = chain_tree(tree.token_ids[:1])",
        "root = chain_tree(tree.token_ids[-1:])",
        "decode/test_faults.py::test_B19_a_tree_that_does_not_fit_into_memory_leaves_plain_decoding",
    ),
    Mutation(
        "taps are layer inputs instead of outputs",
        "drafter/dialects.py",
        'tuple(i + 1 for i in ids) if dialect == "z-lab"',
        'tuple(i for i in ids) if dialect == "z-lab"',
        "drafter/test_dflash.py::test_B38_taps_are_layer_outputs_and_the_last_one_stands_after_the_norm",
    ),
    Mutation(
        "the last tap stands before the final norm",
        "models/reference.py",
        "        hidden = self.text.norm(hidden)\n        tapped[len(self.layer_kinds)] = hidden\n",
        "        tapped[len(self.layer_kinds)] = hidden\n        hidden = self.text.norm(hidden)\n",
        "drafter/test_dflash.py::test_B38_taps_are_layer_outputs_and_the_last_one_stands_after_the_norm",
    ),
    Mutation(
        "slot 0 of the block is read as a draft",
        "drafter/dflash.py",
        "drafter.target.head(hidden[0, 1:])",
        "drafter.target.head(hidden[0, :-1])",
        "drafter/test_dflash.py::test_B41_slot_zero_is_never_a_draft",
    ),
    Mutation(
        "the drafter counts the positions of new context from zero",
        "drafter/dflash.py",
        "positions = torch.arange(self.length, end, device=features.device)",
        "positions = torch.arange(count, device=features.device)",
        "drafter/test_dflash.py::test_B44_the_context_is_appended_never_recomputed",
    ),
    Mutation(
        "the drafter's block stands one position too far",
        "drafter/dflash.py",
        "positions = torch.arange(self.length, self.length + config.block_size, device=features.device)",
        "positions = torch.arange(self.length + 1, self.length + 1 + config.block_size, device=features.device)",
        "drafter/test_dflash.py::test_it_computes_what_transformers_own_drafter_computes",
    ),
    Mutation(
        "borrowed buffers keep the last generation's recurrent state",
        "state/static.py",
        "for tensor in (self.matrices, self.windows, self.length, self.steps):",
        "for tensor in (self.windows, self.length, self.steps):",
        "models/test_fast.py::test_B56_buckets_change_from_round_to_round_and_padding_writes_nothing_real",
    ),
    Mutation(
        "the fast target's convolution takes rows of a chain, whatever the tree is",
        "state/static.py",
        "conv_rows(tree.parents, kernel).T",
        "conv_rows(torch.arange(-1, num_nodes - 1), kernel).T",
        "models/test_tree_forward.py::test_B10_a_second_child_starts_from_its_parent_not_from_its_sibling",
    ),
    Mutation(
        "what a draft appended that came to nothing stays in the drafter's context",
        "drafter/fast_dflash.py",
        "buffers.length.fill_(self.length)",
        "buffers.length",
        "device/test_device_ahead.py::test_any_order_of_rounds_gives_the_text_and_the_state",
    ),
    Mutation(
        "a draft that is made anew appends the same features again",
        "device/rounds.py",
        "self.session.buffers.count.zero_()  # the context has what waited",
        "pass",
        "device/test_device_ahead.py::test_any_order_of_rounds_gives_the_text_and_the_state",
    ),
    Mutation(
        "a plain round that was launched ahead leaves its path to whatever comes next",
        "device/rounds.py",
        "self.buffers.steps.fill_(len(path))",
        "path",
        "device/test_device_ahead.py::test_any_order_of_rounds_gives_the_text_and_the_state",
    ),
    Mutation(
        "the host does not count what a plain round that was launched ahead has committed",
        "device/rounds.py",
        "        if self._flying is not None:  # it commits this path, and has appended its features\n            self._count_committed()\n",
        "        if self._flying is not None:  # it commits this path, and has appended its features\n",
        "device/test_device_ahead.py::test_any_order_of_rounds_gives_the_text_and_the_state",
    ),
    Mutation(
        "what is seen below a sibling counts one depth too late",
        "kernels/calibration/reference.py",
        "(BELOW, here & (misses > 0))",
        "(BELOW, here & (misses > 1))",
        "kernels/test_calibration.py::test_rounds_learn_and_build_what_the_policy_does",
    ),
    Mutation(
        "a second choice counts as the drafter's spine",
        "kernels/tree_build/reference.py",
        "is_other = (behind > 1).long()",
        "is_other = (behind > 2).long()",
        "kernels/test_calibration.py::test_rounds_learn_and_build_what_the_policy_does",
    ),
]


def run_tests(source: Path, tests: list[str]) -> int:
    """pytest's exit code with the package taken from `source`: 0 all passed, 1 some failed."""
    env = os.environ | {"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        *(f"tests/{test}" for test in tests),
    ]
    return subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode


def main(words: list[str]) -> int:
    chosen = [m for m in MUTATIONS if not words or any(word in m.fault for word in words)]
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "src"
        shutil.copytree(PACKAGE.parent, copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        if run_tests(copy, sorted({m.test for m in chosen})) != 0:
            print("some of these tests fail, or are not there, without any fault", file=sys.stderr)
            return 1
        print("| fault | in | caught by |\n|---|---|---|", flush=True)
        for mutation in chosen:
            file = copy / "deltatree" / mutation.file
            whole = file.read_text(encoding="utf-8")
            if whole.count(mutation.old) != 1:
                raise SystemExit(f"{mutation.file} does not hold this exactly once: {mutation.old!r}")
            file.write_text(whole.replace(mutation.old, mutation.new), encoding="utf-8")
            caught = run_tests(copy, [mutation.test]) == 1  # any other code means that no test has run
            file.write_text(whole, encoding="utf-8")
            missed += not caught
            where, name = mutation.test.split("::")
            print(
                f"| {mutation.fault} | `{mutation.file}` | {'' if caught else 'NOT by '}`{name}` in `{where}` |",
                flush=True,
            )
    print(f"{len(chosen) - missed} of {len(chosen)} faults caught", file=sys.stderr)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
