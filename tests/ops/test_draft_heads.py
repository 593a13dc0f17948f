"""What the one call that drafts Medusa's levels computes and refuses; tests/drafters/test_medusa.py has more."""

import pytest
import torch
from torch.nn.functional import silu

from specengine import _C
from tests.ops.arguments import OPS, call, projection, randn

NETWORK = ("hidden", "heads", "vocabulary")


def drafted(**changes):
    arguments = {**OPS["draft_heads"](), **changes}
    call("draft_heads", arguments)
    return arguments["children"], arguments["scores"]


def room(batch, levels, ranks):
    return {
        "children": torch.zeros(batch, levels, ranks, dtype=torch.int32),
        "scores": torch.zeros(batch, levels, ranks),
    }


def product(x, rows, seed):
    """What projection(rows, 6, seed) makes of x."""
    packed = randn(-(-rows // 16), 6, 16, seed=seed)
    return x @ packed.transpose(1, 2).reshape(-1, 6)[:rows].T + randn(rows, seed=seed)


def test_every_head_adds_its_blocks_and_reads_its_logits():
    children, scores = drafted(**room(3, 3, 20))
    x = randn(3, 6)
    first = x + silu(product(x, 6, 1))
    third = x + silu(product(x, 6, 2))
    third = third + silu(product(third, 6, 2))
    for level, logits in enumerate([product(first, 20, 8), product(x, 20, 7), product(third, 20, 7)]):
        log_probs = logits.log_softmax(-1)
        tokens = children[:, level].long() - 5  # the vocabulary names token i + 5
        torch.testing.assert_close(scores[:, level], log_probs.gather(1, tokens), atol=1e-5, rtol=1e-5)
        assert (scores[:, level, :-1] >= scores[:, level, 1:]).all()
        assert (tokens.sort().values == torch.arange(20)).all()


def test_fewer_levels_are_the_first_of_all_and_a_request_is_the_same_alone():
    children, scores = drafted()
    first_children, first_scores = drafted(**room(3, 2, 2))
    assert torch.equal(first_children, children[:, :2]) and torch.equal(first_scores, scores[:, :2])
    own_children, own_scores = drafted(rows=randn(3, 6)[1:2].clone(), **room(1, 3, 2))
    assert torch.equal(own_children[0], children[1]) and torch.equal(own_scores[0], scores[1])


def head(blocks=(), logits=None):
    return _C.DraftHead(blocks, logits or projection(20, 6, 7))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"hidden": 0}, "hidden: expected 1 to"),
        ({"heads": ()}, "heads: expected at least one"),
        ({"heads": (head([projection(7, 6, 1)]),)}, "heads: head 0: blocks: expected 6 rows, got 7"),
        ({"heads": (head(), head([projection(6, 7, 1)]))}, "heads: head 1: blocks: expected shape"),
        ({"heads": (head(), head(logits=projection(19, 6, 7)))}, "heads: head 1: logits: expected 20 rows, got 19"),
        ({"vocabulary": torch.zeros(5, dtype=torch.int32)}, "vocabulary: expected shape"),
    ],
)
def test_a_network_refuses_what_does_not_fit(changes, message):
    arguments = OPS["draft_heads"]()
    with pytest.raises(ValueError, match=f"^{message}"):
        _C.HeadsNetwork(**{name: arguments[name] for name in NETWORK} | changes)


@pytest.mark.parametrize(
    "changes, message",
    [
        (room(3, 4, 2), "children: expected at most 3 levels, one per head, got 4"),
        (room(3, 0, 2), "children: expected at least one level"),
        (room(3, 3, 21), "children: expected at least one level of 1 to 20 tokens, got 3 of 21"),
        (room(2, 3, 2), "children: expected shape"),
        ({"rows": randn(3, 7)}, "rows: expected shape"),
        ({"rows": torch.full((3, 6), torch.nan)}, "rows: they lead to no distribution; logits: NaN"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        drafted(**changes)
