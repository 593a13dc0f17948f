"""What the one call that drafts GLIDE's levels refuses; what it drafts is in tests/drafters/test_glide.py."""

import pytest
import torch

from specengine import _C
from tests.ops.arguments import GLIDE, OPS, call, decoder, ints, projection, randn


def drafted(**changes):
    arguments = {**OPS["draft_glide"](), **changes}
    call("draft_glide", arguments)
    return arguments["children"], arguments["scores"], arguments["levels"].tolist()


def room(batch, levels, top_k):
    shape = (batch, levels, top_k)
    counts = torch.zeros(batch, dtype=torch.int32)
    return {"children": torch.zeros(shape, dtype=torch.int32), "scores": torch.zeros(shape), "levels": counts}


def test_a_request_gets_the_same_bits_alone_as_beside_others():
    children, scores, _ = drafted()
    arguments = OPS["draft_glide"]()
    alone = {name: arguments[name][1:].clone() for name in ("block_table", "lengths", "verified")}
    alone |= {"tokens": arguments["tokens"][5:].clone(), "row_start": ints(0, 3)}
    own_children, own_scores, _ = drafted(**alone, **room(1, 3, 2))
    assert torch.equal(own_children[0], children[1]) and torch.equal(own_scores[0], scores[1])
    assert not torch.equal(scores[0], scores[1])


def test_no_level_is_drafted_that_is_expected_to_add_too_few_tokens():
    _, scores, levels = drafted()
    assert levels == [3, 3]
    reached = scores[..., 0].double().cumsum(1).exp().tolist()  # [requests, levels]
    added = [sum(own[depth - 1] ** (1 + 1 / depth) for own in reached) for depth in (1, 2)]
    for least in (0.99 * min(added), 1.01 * min(added), 1.01 * max(added)):
        expected = next((depth for depth, tokens in enumerate(added, start=1) if tokens < least), 3)
        assert drafted(min_level_tokens=least)[2] == [expected] * 2


def test_what_the_target_cached_matters_by_its_projections_alone():
    _, scores, _ = drafted()
    other = {"target_v": randn(3, len(OPS["draft_glide"]()["target_v"][0]), 2, 64, 4, seed=17)}
    assert not torch.equal(drafted(**other)[1], scores)
    plain = {"queries": (), "outs": ()}
    assert torch.equal(drafted(**plain, **other)[1], drafted(**plain)[1])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"decoder": _C.Decoder(**decoder())}, "decoder: expected one without first_columns and hidden_state_layers"),
        ({"embedding": None}, "embedding: expected a tensor, got None"),
        ({"embedding_rows": 0}, "embedding_rows: expected 1 to 32, got 0"),
        ({"embedding_rows": 33}, "embedding_rows: expected 1 to 32, got 33"),
        ({"queries": ()}, "queries: expected one of each layer"),
        ({"outs": (projection(6, 24, 1),), "queries": (projection(24, 6, 1),)}, "queries: expected one of each layer"),
        ({"queries": (projection(20, 6, 1),) * 2}, "queries: expected 24 rows, got 20"),
        ({"outs": (projection(6, 20, 1),) * 2}, "outs: expected shape"),
        ({"target_heads": 0}, "target_heads: expected 1 to"),
        ({"target_head_dim": 3}, "target_head_dim: expected an even number"),
        ({"reach": -1}, "reach: expected 0"),
        ({"block": 0}, "block: expected a positive number of tokens, got 0"),
        ({"head": projection(20, 7, 7)}, "head: expected shape"),
        ({"vocabulary": torch.zeros(5, dtype=torch.int32)}, "vocabulary: expected shape"),
    ],
)
def test_a_network_refuses_what_does_not_fit(changes, message):
    arguments = OPS["draft_glide"]()
    with pytest.raises(ValueError, match=f"^{message}"):
        _C.GlideNetwork(**{name: arguments[name] for name in GLIDE} | changes)


@pytest.mark.parametrize(
    "changes, message",
    [
        (room(2, 0, 2), "children: expected at least one level"),
        (room(2, 3, 21), "children: expected at least one level of 1 to 20 tokens, got 3 of 21"),
        (room(2, 40, 2), "lengths: position 104 is past the 96 rows of cos"),
        (
            {"target_cos": randn(67, 2), "target_sin": randn(67, 2)},
            "lengths: position 67 is past the 67 rows of target",
        ),
        ({"target_k": torch.zeros(1, 5, 2, 64, 4), "target_v": torch.zeros(1, 5, 2, 64, 4)}, "target_k: expected "),
        ({"target_heads": 5, "queries": (), "outs": ()}, "target_k: 5 query heads do not divide among K=2"),
        ({"embedding": torch.full((2, 6, 16), torch.nan)}, "tokens: they lead to no distribution; logits: NaN"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        drafted(**changes)
