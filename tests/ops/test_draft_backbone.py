"""What the one call that drafts a backbone refuses; what it drafts is in tests/drafters/test_eagle.py."""

import pytest
import torch

from specengine import _C
from specengine.cache.kv_cache import CacheBatch
from specengine.drafters.hidden_states.pairs import take_pairs
from tests.drafters.test_eagle import PROMPTS, Bench, spec_of


class Call:
    """A draft of two requests whose arguments can be changed."""

    def __init__(self, tmp_path, monkeypatch):
        bench = Bench(spec_of(tmp_path), PROMPTS[2:], "top_k=2,levels=3,beam=1,adaptive=false")
        self.drafter, requests = bench.drafter, bench.requests
        pairs = self.drafter._pairs(requests)
        self.place = self.drafter._place(requests, [own.first for own in pairs])
        self.runs, picked = take_pairs(requests, pairs, [own.count for own in pairs])
        self.hidden_states = self.drafter.network.backbone_features(picked)
        native = _C.draft_backbone
        self.change = lambda arguments: arguments
        monkeypatch.setattr(_C, "draft_backbone", lambda *rest: native(*self.change(list(rest))))

    def __call__(self, levels=3, least=0.0):
        network = self.drafter.network
        return self.drafter._backbone_draft(
            self.runs, self.hidden_states, self.place, self.drafter._pool, network.cos_sin, levels, least
        )


@pytest.fixture
def call(tmp_path, monkeypatch):
    return Call(tmp_path, monkeypatch)


def test_a_draft_has_all_levels_and_falling_scores(call):
    tokens, scores = map(torch.tensor, call())
    assert tokens.shape == scores.shape == (2, 3, 2)
    assert (scores[..., 0] >= scores[..., 1]).all() and (scores <= 0).all()


def test_no_level_is_drafted_that_lengthens_a_run_by_too_little(call):
    _, scores = map(torch.tensor, call())
    reached = scores[..., 0].double().cumsum(1).exp().tolist()  # [requests, levels]
    shares = [
        sum(own[depth - 1] ** (1 + 1 / depth) / (1 + depth * own[depth - 1]) for own in reached) / len(reached)
        for depth in (1, 2)
    ]
    for first, factor in ((0, 1.01), (0, 0.99), (1, 1.01), (1, 0.99)):
        least = factor * shares[first]
        expected = next((depth for depth, share in enumerate(shares, start=1) if share < least), 3)
        assert len(call(least=least)[0][0]) == expected
    assert len({len(call(least=factor * min(shares))[0][0]) for factor in (0.5, 1.01)}) == 2


ARGUMENTS = [
    *("decoder", "embedding", "embedding_norm", "feature_norm", "fuse", "before_residual", "feed_back", "head"),
    *("vocabulary", "tokens", "features", "k_cache", "v_cache", "block_table", "lengths", "row_start", "cos", "sin"),
    *("least", "children", "scores", "levels"),
]


@pytest.mark.parametrize(
    "name, wrong, message",
    [
        ("embedding_norm", torch.zeros(3), "embedding_norm"),
        ("feature_norm", None, "feature_norm"),
        ("vocabulary", torch.zeros(5, dtype=torch.int32), "vocabulary"),
        ("tokens", torch.full((2,), 999, dtype=torch.int32), "tokens: entry 0 is 999"),
        ("tokens", torch.zeros(2, dtype=torch.int64), "tokens: expected .*int32"),
        ("features", torch.zeros(2, 3), "fuse: expected shape .* with C=3"),
        ("lengths", torch.full((2,), 100_000, dtype=torch.int32), "block_table: request 0 needs"),
        ("row_start", torch.tensor([0, 2, 2], dtype=torch.int32), "row_start: request 1 has no pair"),
        ("cos", torch.zeros(1, 8), "lengths: position"),
        ("children", torch.zeros(2, 3, 400, dtype=torch.int32), "children"),
        ("children", torch.zeros(2, 0, 2, dtype=torch.int32), "children"),
        ("scores", torch.zeros(2, 3, 1), "scores"),
        ("levels", torch.zeros(3, dtype=torch.int32), "levels"),
    ],
)
def test_wrong_arguments_are_named(call, name, wrong, message):
    def change(arguments):
        place = ARGUMENTS.index(name)
        arguments[place] = wrong
        if name in ("cos", "children"):  # its pair has the same shape
            arguments[place + 1] = torch.zeros(wrong.shape)
        return arguments

    call.change = change
    with pytest.raises(ValueError, match=message):
        call()


def test_a_draft_past_the_pages_of_a_sequence_is_refused(call):
    call.place = CacheBatch(call.place.block_table[:, :1].contiguous(), call.place.lengths + 64)
    with pytest.raises(ValueError, match="block_table: request 0 needs"):
        call()


def test_features_that_are_no_numbers_are_refused(call):
    call.hidden_states = call.hidden_states * float("nan")
    with pytest.raises(ValueError, match="features: level 0 has no distribution; logits: NaN"):
        call()
