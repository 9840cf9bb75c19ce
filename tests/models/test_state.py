"""Commits that must be refused."""

import pytest
from tiny import VOCAB

from deltatree.errors import ArchitectureError, TreeError
from deltatree.models import ReferenceTarget
from deltatree.state import TreeState
from deltatree.tree import DraftTree

TREE = DraftTree.from_parents([5, 6, 7, 8], [-1, 0, 0, 2])


@pytest.fixture
def ready(hybrid):
    target = ReferenceTarget(hybrid)
    state = target.new_state()
    target.prefill([1, 2, 3], state)
    return target, state


@pytest.mark.parametrize("path", [[], [1], [0, 3], [0, 1, 2], [0, 9], [0, -1], [0, 2, 3, 3]])
def test_only_a_path_of_the_verified_tree_can_be_committed(ready, path):
    target, state = ready
    target.verify(TREE, state)
    with pytest.raises(TreeError, match="not a path"):
        target.commit(path, state)
    target.commit([0, 2, 3], state)
    assert state.length == 6


def test_a_commit_needs_a_verify_and_uses_it_up(ready):
    target, state = ready
    with pytest.raises(TreeError, match="verify"):
        target.commit([0], state)
    target.verify(TREE, state)
    target.commit([0], state)
    with pytest.raises(TreeError, match="verify"):
        target.commit([0], state)


def test_B07_a_layer_kind_without_a_state_is_refused_by_name():
    with pytest.raises(ArchitectureError, match="chunked_attention"):
        TreeState(("full_attention", "chunked_attention"))


def test_B19_scratch_grows_by_the_stash_not_by_a_state_per_node(hybrid):
    target = ReferenceTarget(hybrid)
    state = target.new_state()
    target.prefill([1, 2, 3], state)
    target.verify(DraftTree.from_parents([i % VOCAB for i in range(65)], [-1, *[i // 2 for i in range(64)]]), state)
    recurrent = state.layers[0]
    assert recurrent.stash.bytes_per_node == 4 * (2 * 16 + 6 * 16 + 6)
    assert recurrent.stash.bytes_per_node * 10 < recurrent.matrix.numel() * 4
