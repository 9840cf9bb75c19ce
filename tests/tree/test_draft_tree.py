"""Laws of the draft tree."""

import pytest
import torch

from deltatree.errors import TreeError
from deltatree.tree import Acceptance, DraftTree, accept, ancestors, chain_tree, path_to


def test_from_parents_works_out_depths():
    tree = DraftTree.from_parents([5, 6, 7, 8, 9, 10], [-1, 0, 1, 2, 1, 5 - 1])
    assert tree.depths.tolist() == [0, 1, 2, 3, 2, 3]
    assert (len(tree), tree.num_drafted, tree.max_depth) == (6, 5, 3)


@pytest.mark.parametrize("parents", [[-1, 2, 0], [-1, 1], [-1, 7], [0, 0], [-1, -1], [-1, -2]])
def test_a_list_that_is_no_parent_first_tree_is_refused(parents):
    with pytest.raises(TreeError):
        DraftTree.from_parents(list(range(len(parents))), parents)
    with pytest.raises(TreeError):
        DraftTree(torch.arange(len(parents)), torch.tensor(parents), torch.tensor([0] + [1] * (len(parents) - 1)))


def test_a_wrong_depth_is_refused():
    with pytest.raises(TreeError, match="depth"):
        DraftTree(torch.tensor([1, 2]), torch.tensor([-1, 0]), torch.tensor([0, 2]))


def test_an_empty_tree_is_refused():
    empty = torch.tensor([], dtype=torch.int64)
    with pytest.raises(TreeError):
        DraftTree(empty, empty, empty)


def test_ancestors_are_the_path_and_nothing_else():
    tree = DraftTree.from_parents([5, 6, 7, 8, 9, 10], [-1, 0, 1, 2, 1, 4])
    rows = ancestors(tree)
    for node in range(len(tree)):
        assert rows[node].nonzero().flatten().tolist() == path_to(tree, node)
    assert path_to(tree, 5) == [0, 1, 4, 5]


def test_ancestors_of_a_chain():
    assert torch.equal(ancestors(chain_tree([4, 4, 4, 4])), torch.ones(4, 4, dtype=torch.bool).tril())


def test_accept_walks_as_far_as_the_target_agrees():
    tree = DraftTree.from_parents([0, 1, 2, 3, 4], [-1, 0, 0, 2, 3])
    assert accept(tree, torch.tensor([2, 9, 3, 8, 9])) == Acceptance([0, 2, 3], bonus=8)
    assert accept(tree, torch.tensor([2, 9, 3, 4, 7])) == Acceptance([0, 2, 3, 4], bonus=7)
    assert accept(tree, torch.tensor([7, 9, 3, 4, 7])) == Acceptance([0], bonus=7)
    assert accept(tree, torch.tensor([7, 9, 3, 4, 7])).length == 1


def test_accept_takes_the_first_of_two_equal_children():
    tree = DraftTree.from_parents([0, 1, 1, 5], [-1, 0, 0, 1])
    assert accept(tree, torch.tensor([1, 5, 9, 6])).path == [0, 1, 3]
