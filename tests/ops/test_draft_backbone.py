"""What the one call that drafts a backbone refuses; what it drafts is in tests/drafters/test_eagle.py."""

import pytest
import torch

from specengine import _C
from specengine.cache.kv_cache import CacheBatch
from tests.drafters.eagle_bench import PROMPTS, Bench, spec_of
from tests.ops.arguments import NETWORK, decoder, draft_backbone, projection


class Call:
    """A draft of two requests whose arguments can be changed."""

    def __init__(self, tmp_path, monkeypatch):
        bench = Bench(spec_of(tmp_path), PROMPTS[2:], "top_k=2,levels=3,beam=1,adaptive=false")
        self.drafter, requests = bench.drafter, bench.requests
        self.runs, picked, self.place = self.drafter.pairs.take_all_runs(requests)
        self.hidden_states = self.drafter.network.backbone_hidden_states(picked)
        native = _C.draft_backbone
        self.change = lambda arguments: arguments
        monkeypatch.setattr(_C, "draft_backbone", lambda *rest: native(*self.change(list(rest))))

    def __call__(self, levels=3, min_level_gain=0.0):
        network = self.drafter.network
        return self.drafter._backbone_draft(
            self.runs, self.hidden_states, self.place, self.drafter.pairs.pool, network.cos_sin, levels, min_level_gain
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
        gain = factor * shares[first]
        expected = next((depth for depth, share in enumerate(shares, start=1) if share < gain), 3)
        assert len(call(min_level_gain=gain)[0][0]) == expected
    assert len({len(call(min_level_gain=factor * min(shares))[0][0]) for factor in (0.5, 1.01)}) == 2


ARGUMENTS = [
    "network",
    "tokens",
    "hidden_states",
    "cache",
    "cos",
    "sin",
    "min_level_gain",
    "children",
    "scores",
    "levels",
]
CACHE = ARGUMENTS.index("cache")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"decoder": _C.Decoder(**decoder())}, "decoder: expected first_columns=12, got 0"),
        ({"embedding": None}, "embedding: expected a tensor, got None"),
        ({"embedding_norm": torch.zeros(3)}, "embedding_norm: expected shape"),
        ({"hidden_state_norm": None}, "hidden_state_norm: expected a tensor, got None"),
        ({"head": projection(20, 7, 7)}, "head: expected shape"),
        ({"vocabulary": torch.zeros(5, dtype=torch.int32)}, "vocabulary: expected shape"),
        ({"vocabulary": torch.full((20,), 32, dtype=torch.int32)}, "vocabulary: entry 0 is 32, expected 0 to 31"),
    ],
)
def test_a_network_refuses_what_does_not_fit(changes, message):
    arguments = draft_backbone()
    with pytest.raises(ValueError, match=f"^{message}"):
        _C.BackboneNetwork(**{name: arguments[name] for name in NETWORK} | changes)


@pytest.mark.parametrize(
    "name, wrong, message",
    [
        ("tokens", torch.full((2,), 999, dtype=torch.int32), "tokens: entry 0 is 999"),
        ("tokens", torch.zeros(2, dtype=torch.int64), "tokens: expected .*int32"),
        ("hidden_states", torch.zeros(2, 3), "fuse: expected shape .* with C=3"),
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
        if name in arguments[CACHE]._fields:
            arguments[CACHE] = arguments[CACHE]._replace(**{name: wrong})
            return arguments
        place = ARGUMENTS.index(name)
        arguments[place] = wrong
        if name in ("cos", "children"):  # its pair has the same shape
            arguments[place + 1] = torch.zeros(wrong.shape)
        return arguments

    call.change = change
    with pytest.raises(ValueError, match=message):
        call()


def test_a_draft_past_the_pages_of_a_request_is_refused(call):
    call.place = CacheBatch(call.place.block_table[:, :1].contiguous(), call.place.lengths + 64)
    with pytest.raises(ValueError, match="block_table: request 0 needs"):
        call()


def test_hidden_states_that_are_no_numbers_are_refused(call):
    call.hidden_states = call.hidden_states * float("nan")
    with pytest.raises(ValueError, match="hidden_states: level 0 has no distribution; logits: NaN"):
        call()
