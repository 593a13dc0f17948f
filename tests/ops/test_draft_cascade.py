"""What the one call that drafts FastEagle's levels refuses, and how its levels and requests depend on each other.

What it drafts is in tests/drafters/test_fasteagle.py.
"""

import pytest
import torch

from specengine import _C
from tests.ops.arguments import CASCADE, OPS, call, decoder, decoder_layer, ints, projection, randn

BOTH = ("draft_cascade", "draft_cascade halves")


def drafted(op, **changes):
    arguments = {**OPS[op](), **changes}
    call(op, arguments)
    return arguments["children"], arguments["scores"]


def room(batch, levels, top_k):
    return {
        "children": torch.zeros(batch, levels, top_k, dtype=torch.int32),
        "scores": torch.zeros(batch, levels, top_k),
    }


@pytest.mark.parametrize("op", BOTH)
def test_fewer_levels_are_the_first_of_all(op):
    children, scores = drafted(op)
    first_children, first_scores = drafted(op, **room(2, 1, 2))
    assert torch.equal(first_children, children[:, :1]) and torch.equal(first_scores, scores[:, :1])


@pytest.mark.parametrize("op", BOTH)
def test_a_request_gets_the_same_bits_alone_as_beside_others(op):
    children, scores = drafted(op)
    arguments = OPS[op]()
    alone = {name: arguments[name][5:].clone() for name in ("tokens", "rows")}
    alone |= {name: arguments[name][1:].clone() for name in ("block_table", "lengths")}
    own_children, own_scores = drafted(op, **alone, row_start=ints(0, 3), **room(1, 2, 2))
    assert torch.equal(own_children[0], children[1]) and torch.equal(own_scores[0], scores[1])
    assert not torch.equal(scores[0], scores[1])


@pytest.mark.parametrize("op", BOTH)
def test_children_are_the_likeliest_tokens_and_scores_their_log_probabilities(op):
    children, scores = drafted(op, **room(2, 2, 20))
    assert all(sorted(level) == [*range(20)] for request in children.tolist() for level in request)
    assert (scores[..., :-1] >= scores[..., 1:]).all()
    torch.testing.assert_close(scores.exp().sum(-1), torch.ones(2, 2), atol=1e-5, rtol=0)


def test_a_level_depends_on_the_token_above_by_the_markov_head_alone():
    arguments = OPS["draft_cascade halves"]()
    none = {"markov_rank": 0, "markov_tokens": None, "markov_head": _C.Projection((), (), None, None, False)}
    ours, plain = (
        drafted("draft_cascade halves", **room(2, 2, 20)),
        drafted("draft_cascade halves", **none, **room(2, 2, 20)),
    )
    assert torch.equal(ours[1][:, 0], plain[1][:, 0]) and not torch.equal(ours[1][:, 1], plain[1][:, 1])
    (weight,), (bias,) = (randn(2, 4, 16, seed=8),), (randn(20, seed=8),)
    product = weight.transpose(1, 2).reshape(32, 4)[:20]
    tokens = arguments["markov_tokens"].transpose(1, 2).reshape(32, 4)
    for b in range(2):
        before = torch.empty(20).scatter(0, plain[0][b, 1].long(), plain[1][b, 1])
        after = torch.empty(20).scatter(0, ours[0][b, 1].long(), ours[1][b, 1])
        added = product @ tokens[ours[0][b, 0, 0]] + bias
        torch.testing.assert_close(after, (before + added).log_softmax(-1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "op, changes, message",
    [
        ("draft_cascade", {"decoder": _C.Decoder(**decoder())}, "decoder: expected every layer's output"),
        ("draft_cascade", {"embedding": None}, "embedding: expected a tensor, got None"),
        ("draft_cascade", {"embedding_norm": randn(6)}, "embedding_norm: expected no norms"),
        ("draft_cascade", {"fuse": projection(7, 18, 9)}, "fuse: expected 6 rows"),
        ("draft_cascade", {"fuse": _C.Projection((), (), None, None, False)}, "fuse: expected 6 rows"),
        ("draft_cascade", {"head": projection(20, 7, 7)}, "head: expected shape"),
        ("draft_cascade", {"head_norm": torch.zeros(3)}, "head_norm: expected shape"),
        ("draft_cascade", {"vocabulary": torch.zeros(5, dtype=torch.int32)}, "vocabulary: expected shape"),
        ("draft_cascade", {"markov_head": projection(20, 4, 8)}, "markov_rank: expected columns"),
        ("draft_cascade", {"markov_rank": -1}, "markov_rank: expected 0 or more, got -1"),
        ("draft_cascade halves", {"hidden_state_norm": None}, "hidden_state_norm: expected a tensor, got None"),
        ("draft_cascade halves", {"markov_rank": 5}, "markov_tokens: expected shape"),
        ("draft_cascade halves", {"markov_tokens": randn(1, 4, 16)}, "markov_tokens: expected 20 rows"),
        ("draft_cascade halves", {"markov_head": projection(19, 4, 8)}, "markov_head: expected 20 rows, got 19"),
    ],
)
def test_a_network_refuses_what_does_not_fit(op, changes, message):
    arguments = OPS[op]()
    with pytest.raises(ValueError, match=f"^{message}"):
        _C.CascadeNetwork(**{name: arguments[name] for name in CASCADE} | changes)


def test_a_first_layer_of_another_width_is_refused():
    first = {**decoder_layer(), "attention_norm": None, "qkv": projection(64, 18, 1)}
    layers = [_C.DecoderLayer(**first), _C.DecoderLayer(**decoder_layer())]
    changes = {"embedding": None, "layers": layers, "first_columns": 18, "hidden_state_layers": (1, 2)}
    arguments = OPS["draft_cascade halves"]() | {"decoder": _C.Decoder(**{**decoder(), **changes})}
    with pytest.raises(ValueError, match=r"^decoder: expected first_columns=0 or 12, got 18"):
        _C.CascadeNetwork(**{name: arguments[name] for name in CASCADE})


@pytest.mark.parametrize(
    "changes, message",
    [
        (room(2, 3, 2), "children: expected at most 2 levels, one per layer, got 3"),
        (room(2, 0, 2), "children: expected at least one level"),
        (room(2, 2, 21), "children: expected at least one level of 1 to 20 tokens, got 2 of 21"),
        ({"hidden_states": randn(9, 2, 7)}, "hidden_states: expected shape"),
        ({"hidden_states": randn(9, 3, 6)}, "fuse: expected shape .* with C=24"),
        ({"hidden_states": randn(9, 2, 6) * torch.nan}, "hidden_states: they lead to no distribution; logits: NaN"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        drafted("draft_cascade", **changes)


def lists(op, **changes):
    """The same draft, with lists for arguments."""
    arguments = OPS[op]()
    network = _C.CascadeNetwork(**{name: arguments[name] for name in CASCADE})
    place = {name: arguments[name] for name in ("hidden_states", "k_cache", "v_cache", "cos", "sin")}
    return network.draft(
        **{
            "runs": [arguments["tokens"][:5].tolist(), arguments["tokens"][5:].tolist()],
            "rows": arguments["rows"].tolist(),
            "pages": arguments["block_table"].tolist(),
            "cached": arguments["lengths"].tolist(),
            **place,
            "limits": [2, 1],
            "levels": 2,
            "top_k": 3,
        }
        | changes
    )


@pytest.mark.parametrize("op", BOTH)
def test_lists_make_backbones_of_what_the_op_drafts(op):
    children, scores = drafted(op, **room(2, 2, 3))
    deep, shallow = lists(op)
    assert deep[0] == [4, *children[0].flatten().tolist()] and deep[1] == [-1, 0, 0, 0, 1, 1, 1]
    assert shallow[0] == [7, *children[1, 0].tolist()] and shallow[1] == [-1, 0, 0, 0]
    assert deep[2] == pytest.approx([1, *scores[0].exp().flatten().tolist()], rel=1e-6)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"pages": [[0]]}, "pages: expected 2 lists, one per request, got 1"),
        ({"limits": [1]}, "limits: expected 2 numbers, one per request, got 1"),
        ({"levels": 0}, "levels: expected 1 to 256, got 0"),
        ({"levels": 3}, "children: expected at most 2 levels, one per layer, got 3"),
        ({"top_k": 0}, "top_k: expected 1 to 256, got 0"),
        ({"top_k": 21}, "children: expected at least one level of 1 to 20 tokens"),
        ({"runs": [[1, 2, 3, 4, 5, 6, 7, 8], []]}, "row_start: request 1 has no pair"),
        ({"rows": [0, 1]}, "rows: expected shape"),
    ],
)
def test_wrong_lists_are_named(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        lists("draft_cascade", **changes)
