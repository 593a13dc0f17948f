"""Small networks of every kind, and drafts of two requests by them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from specengine import _C
from tests.ops.arguments import Arguments, decoder, decoder_layer, decoder_pass, projection, randn

NOTHING = _C.Projection((), (), None, None, False)
SHAPE = ("children", "beam", "nodes", "thresholds", "widths", "parents", "depths", "ranks")
DRAFT = ("runs", "hidden_states", "rows", "pages", "cached", "caches", "limits", "levels", "min_gain", "min_reach")


def layers(**first: Any) -> Arguments:
    """Two layers, of which the first is changed."""
    return {"layers": [_C.DecoderLayer(**{**decoder_layer(), **first}), _C.DecoderLayer(**decoder_layer())]}


def native(outputs: tuple[int, ...], **changes: Any) -> _C.Decoder:
    return _C.Decoder(**{**decoder(), "embedding": None, "hidden_state_layers": outputs, **changes})


def shape() -> Arguments:
    lists = dict.fromkeys(("thresholds", "widths", "parents", "depths", "ranks"), ())
    return {"children": 3, "beam": 1, "nodes": 256, **lists}


def inputs() -> Arguments:
    """Two requests with chains of 5 and 3 tokens; the last cached slots are those of the op tests."""
    passed = decoder_pass()
    cache = tuple(passed[name].clone() for name in ("k_cache", "v_cache"))
    return {
        "runs": [[0, 1, 2, 3, 4], [5, 6, 7]],
        "hidden_states": None,
        "rows": (),
        "pages": passed["block_table"].tolist(),
        "cached": passed["lengths"].tolist(),
        "caches": ((*cache, randn(96, 4), randn(96, 4, seed=3)),),
        "limits": [3, 2],
        "levels": 3,
        "min_gain": 0.0,
        "min_reach": 0.0,
        **shape(),
    }


def eagle() -> Arguments:
    """EAGLE-3: three levels, of which the best two nodes have children."""
    first = layers(attention_norm=None, qkv=projection(64, 12, 1))
    return {
        "decoder": native((2,), first_columns=12, **first),
        "embedding": randn(2, 6, 16),
        "embedding_norm": randn(6),
        "hidden_state_norm": randn(6),
        "fuse": NOTHING,
        "before_residual": False,
        "feed_back": False,
        "head": projection(20, 6, 7),
        "vocabulary": torch.arange(20, dtype=torch.int32) + 5,
        **inputs(),
        "hidden_states": randn(9, 6, seed=5),
        "rows": [*range(8)],
        "beam": 2,
    }


def eagle_fused() -> Arguments:
    """Its hidden states are made of two of five columns."""
    return {**eagle(), "fuse": projection(6, 10, 9), "hidden_states": randn(9, 2, 5, seed=5)}


def eagle_joined() -> Arguments:
    """EAGLE-1, which has no norms of the halves."""
    norms = {"embedding_norm": None, "hidden_state_norm": None}
    return {**eagle(), "decoder": native((2,), **layers(attention_norm=None)), **norms, "fuse": projection(6, 12, 9)}


def eagle_predicting() -> Arguments:
    """Multi-token prediction: norms of the halves before the product, and one after the layers."""
    return {**eagle(), "decoder": native((2,)), "fuse": projection(6, 12, 9), "feed_back": True}


def fasteagle() -> Arguments:
    """Two levels of three tokens."""
    return {
        "decoder": native((1, 2)),
        "embedding": randn(2, 6, 16),
        "fuse": projection(6, 18, 9),
        "embedding_norm": None,
        "hidden_state_norm": None,
        "head_norm": randn(6),
        "head": projection(20, 6, 7),
        "markov_rank": 0,
        "markov_tokens": None,
        "markov_head": NOTHING,
        "vocabulary": torch.arange(20, dtype=torch.int32) + 5,
        **inputs(),
        "hidden_states": randn(9, 2, 6, seed=5),
        "rows": [*range(1, 9)],
        "levels": 2,
    }


def fasteagle_halves() -> Arguments:
    """Its first layer reads two halves, and a level knows the token above."""
    first = layers(attention_norm=None, qkv=projection(64, 12, 1))
    norms = {"embedding_norm": randn(6), "hidden_state_norm": randn(6), "head_norm": None}
    markov = {"markov_rank": 4, "markov_tokens": randn(2, 4, 16), "markov_head": projection(20, 4, 8)}
    return {
        **fasteagle(),
        "decoder": native((1, 2), first_columns=12, **first),
        "fuse": projection(6, 12, 9),
        **norms,
        **markov,
    }


def heads() -> Arguments:
    """Three heads, of which the last two share their logits, and a tree of ranks."""
    shared = projection(20, 6, 7)
    own = [([projection(6, 6, 1)], projection(20, 6, 8)), ([], shared), ([projection(6, 6, 2)] * 2, shared)]
    return {
        "hidden": 6,
        "heads": [_C.DraftHead(*head) for head in own],
        "vocabulary": torch.arange(20, dtype=torch.int32) + 5,
        **inputs(),
        "hidden_states": randn(3, 6),
        "runs": [[4], [7]],
        "rows": [2, 1],
        "pages": (),
        "cached": [0, 0],
        "caches": (),
        "parents": (0, 0, 1, 1, 3),
        "depths": (1, 1, 2, 2, 3),
        "ranks": (0, 2, 1, 0, 0),
    }


def glide() -> Arguments:
    """Three levels of three tokens; the target has three layers."""
    given = inputs()
    (own,) = given["caches"]
    pages = own[0].shape[1]
    target = (*(randn(3, pages, 2, 64, 4, seed=seed) for seed in (15, 16)), randn(96, 2), randn(96, 2, seed=3))
    return {
        "decoder": native(()),
        "embedding": randn(2, 6, 16),
        "embedding_rows": 30,
        "queries": (projection(24, 6, 11), projection(24, 6, 12)),
        "outs": (projection(6, 24, 13), projection(6, 24, 14)),
        "target_heads": 6,
        "target_head_dim": 4,
        "reach": 0,
        "block": 5,
        "head": projection(20, 6, 7),
        "vocabulary": torch.arange(20, dtype=torch.int32) + 5,
        **given,
        "caches": (own, target),
    }


NETWORKS: dict[str, Callable[[], Arguments]] = {
    make.__name__.replace("_", " "): make
    for make in (eagle, eagle_fused, eagle_joined, eagle_predicting, fasteagle, fasteagle_halves, heads, glide)
}
CLASSES = {"eagle": _C.EagleWeights, "fasteagle": _C.FastEagleWeights, "heads": _C.HeadsWeights}
CLASSES["glide"] = _C.GlideWeights


def weights_of(name: str, arguments: Arguments) -> Any:
    kind = CLASSES[name.partition(" ")[0]]
    return kind(**{key: value for key, value in arguments.items() if key not in (*SHAPE, *DRAFT)})


def drafted(name: str, **changes: Any) -> tuple[list[tuple[list[int], list[int], list[float]]], int]:
    """Returns the trees of a draft, and its levels."""
    arguments = {**NETWORKS[name](), **changes}
    grown = _C.GrowthShape(**{key: arguments[key] for key in SHAPE})
    return _C.draft_trees(weights_of(name, arguments), grown, **{key: arguments[key] for key in DRAFT})
