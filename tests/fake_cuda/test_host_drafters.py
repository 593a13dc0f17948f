"""Drafters on the host read what they draft off the device, and wait for nothing else."""

from collections import Counter

import pytest

from specengine._C import MAX_NODES
from specengine.draft_trees.tree import DraftTree, TreeBatch
from specengine.drafters import drawn_trees
from tests.drafters.requests import sequence_of
from tests.fake_cuda.mode import CUDA

COLUMNS = 4  # nodes of each tree; of each node the token, the parent and the row of its logits
SPECS = {
    "a chain": "draft_model:self,layers={layers},length=3",
    "a tree": "draft_model:self,layers={layers},tree=2x2x1,adaptive=false",
    "a level of one node": "draft_model:self,layers={layers},tree=1x1x2,adaptive=false",
}


def waits_of_a_draft(machine, spec, requests=2):
    """The waits of the second draft; the first one reads the prompts."""
    drafter = machine.engine(machine.target(), spec).drafter
    batch = [sequence_of([5, 9, 13]) for _ in range(requests)]
    for request in batch:
        request.pages = [0]
    drafter.draft(batch)
    for request in batch:
        request.tokens += [0, 0, 0, 7]
    machine.device.waits.clear()
    assert len(drafter.draft(batch).trees) == requests
    return Counter(machine.device.waits)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
@pytest.mark.parametrize("name", SPECS)
def test_a_draft_waits_for_the_columns_of_its_trees_alone(machine, name, monkeypatch):
    """However many layers and levels it has."""
    monkeypatch.setattr(drawn_trees, "DraftTree", lambda *_: DraftTree([7], [-1]))  # a fake device gives no nodes
    few, many = (waits_of_a_draft(machine, SPECS[name].format(layers=layers)) for layers in (1, 2))
    assert few == many and few.total() == COLUMNS + (name == "a chain")  # whose tokens it has cached


def test_a_chain_that_is_longer_than_a_tree_may_be_is_read_as_a_prompt(device):
    short, long = (TreeBatch.chains([[1] * n, [1]], CUDA, masked=True) for n in (MAX_NODES, MAX_NODES + 1))
    assert short.ancestors is not None and long.ancestors is None
