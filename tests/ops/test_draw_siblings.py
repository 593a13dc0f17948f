"""draw_siblings against its reference and, with the noise of rule `match`, against verify_tree's own draws."""

import pytest
import torch

from specengine.draft_trees.tree import TreeBatch
from specengine.ops.draw_siblings import draw_siblings, draw_siblings_reference
from specengine.ops.verify_tree import verify_tree
from tests.ops.cases import comb, path_to, randn
from tests.ops.verifying import CPU, PARAMS, Batch, history_of, make_batch

pytestmark = pytest.mark.usefixtures("instruction_set")
SIBLINGS = 5


def case(vocab: int, seed: int) -> tuple[Batch, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every set of parameters, the draft's logits [R, V] at one node each, those nodes and their requests."""
    count = len(PARAMS)
    batch = make_batch([comb(7)] * count, list(PARAMS.values()), vocab, seed=seed)
    requests = torch.arange(count, dtype=torch.int32)
    return batch, 2 * randn(count, vocab, seed=seed + 50), (requests * 3 + seed) % 7, requests


def drawn_at_roots(logits: torch.Tensor, batch: Batch, nodes: torch.Tensor) -> list[int]:
    """What `match` draws of the same logits where the text is already committed up to the node."""
    texts = []
    for b, node in enumerate(nodes.tolist()):
        tokens = batch.tree.tokens[batch.tree.row_start[b] :].tolist()
        committed = batch.history.tokens[b, : batch.history.length[b]].tolist()
        texts.append([*committed, *(tokens[above] for above in path_to(comb(7), node)[1:])])
    roots = TreeBatch.chains([text[-1:] for text in texts], CPU)
    history = history_of(texts, batch.history.prompt_length.tolist())
    return verify_tree(logits, roots, batch.params, history).bonus.tolist()


@pytest.mark.parametrize("how", [{}, {"replacement": True}, {"as_match": True}], ids=["distinct", "repeated", "match"])
@pytest.mark.parametrize("vocab", [5, 17, 64, 130, 700])
def test_siblings_are_those_of_the_reference(vocab, how):
    for seed in range(3):
        batch, logits, nodes, requests = case(vocab, seed)
        index = torch.arange(vocab, dtype=torch.int32).roll(1) if seed == 2 else None
        if index is not None:
            index[::3] = -1
        where = (logits, nodes, batch.tree, requests, batch.params, batch.history, SIBLINGS)
        options = {"replacement": False, "index": index, **how}
        assert torch.equal(draw_siblings(*where, **options), draw_siblings_reference(*where, **options))


@pytest.mark.parametrize("vocab", [5, 64, 1400])
def test_the_first_sibling_as_match_is_what_match_draws_of_the_same_logits(vocab):
    alone = own = 0
    for seed in range(8):
        batch, logits, nodes, requests = case(vocab, seed)
        where = (logits, nodes, batch.tree, requests, batch.params, batch.history)
        expected = drawn_at_roots(logits, batch, nodes)
        for count in (1, SIBLINGS):
            drawn = draw_siblings(*where, count, False, as_match=True)
            assert drawn[:, 0].tolist() == expected
        for siblings in drawn.tolist():
            left = [token for token in siblings if token >= 0]
            assert left == siblings[: len(left)] and len(set(left)) == len(left)
            alone += len(left) == 1
        own += draw_siblings(*where, 1, False)[:, 0].tolist() == expected
    assert alone and not own  # temperature 0 and filters leave one; noise of their own draws others


def test_no_filtered_token_is_drawn_as_match():
    batch, logits, nodes, requests = case(700, 1)
    logits[:, 1::2] = -torch.inf
    where = (logits, nodes, batch.tree, requests, batch.params, batch.history)
    drawn = dict(zip(PARAMS, draw_siblings(*where, SIBLINGS, False, as_match=True), strict=True))
    assert all((row[row >= 0] % 2 == 0).all() for row in drawn.values())
    assert (drawn["top_k"] >= 0).sum() == PARAMS["top_k"].top_k < SIBLINGS
    assert (drawn["greedy"] >= 0).sum() == 1 and (drawn["hot"] >= 0).all()


def test_the_noise_of_match_and_replacement_are_refused_together():
    batch, logits, nodes, requests = case(5, 0)
    with pytest.raises(ValueError, match=r"^replacement: expected False, the noise of match would repeat one token"):
        draw_siblings(logits, nodes, batch.tree, requests, batch.params, batch.history, 2, True, as_match=True)
