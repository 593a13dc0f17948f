"""verify_tree with masks of allowed tokens, on the CPU and in the CUDA kernels."""

from dataclasses import replace

import pytest
import torch

from specengine.draft_trees.token_masks import mask_words, pack_masks, unpack_masks
from specengine.draft_trees.tree import DraftLogits, DraftTree, TreeBatch
from specengine.ops.sampling_table import SamplingTable
from specengine.ops.verify_tree import Accepted, VerifyWorkspace, verify_tree, verify_tree_on_host
from specengine.ops.verify_tree import verify_tree_reference as reference
from specengine.rules import parse_rule
from specengine.types import SamplingParams
from tests.backends import cpu_kernels
from tests.ops.cases import chain, comb, randn, random_tree, star
from tests.ops.verifying import CPU, PARAMS, Batch, history_of, make_batch, random_masks, to_device
from tests.selection import looped

RULES = (
    *("match", "rejection", "traversal", "block", "lossy:alpha=0.3,beta=0.8", "typical:epsilon=0.2,delta=0.4"),
    *(f"margin:theta=0.5,mode={mode}" for mode in ("strict", "lossless-base", "reference")),
    *("cascade:chow,alpha=0.4", "cascade:diff,alpha=0.1", "cascade:opt,alpha=0.2", "bild:alpha=1.5"),
    *(f"cascade:token-{version},alpha=0.3" for version in ("v1", "v2", "v3")),
)


def run(backend, batch: Batch, masks, rule="match", draft: DraftLogits | None = None) -> Accepted:
    """What the backend accepts.  masks: bool [M, V], or None."""
    (rows, vocab), device = batch.logits.shape, backend.device
    workspace = VerifyWorkspace.empty(len(batch.params.seed), vocab, device=device, rows=rows, weights=rule != "match")
    accepted = verify_tree(
        *(*batch.to(device).arguments(), workspace, parse_rule(rule), draft and draft.to(device)),
        None if masks is None else backend.put(pack_masks(masks)),
    )
    return to_device(accepted, CPU)


def assert_equal(a: Accepted, b: Accepted) -> None:
    for name in ("path", "path_length", "bonus", "relaxed"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name


def drafted_batch(spec: str, names, vocab: int, seed: int) -> tuple[Batch, DraftLogits]:
    """Trees, or chains for `block`, and a draft distribution at every second node."""
    shapes = [chain(4), chain(7)] if spec == "block" else [random_tree(12, seed), chain(5), star(4)]
    batch = make_batch(
        [shapes[i % len(shapes)] for i in range(len(names))], [PARAMS[n] for n in names], vocab, seed=seed
    )
    rows = torch.arange(len(batch.logits), dtype=torch.int32)
    rows[1::2] = -1
    return batch, DraftLogits(batch.logits + randn(*batch.logits.shape, seed=seed + 9), rows)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100])
def test_packed_masks_unpack_to_the_same(vocab):
    allowed = randn(9, vocab) > 0
    packed = pack_masks(allowed)
    assert packed.dtype == torch.int32 and packed.shape == (9, mask_words(vocab))
    assert torch.equal(unpack_masks(packed, vocab), allowed)
    assert all(
        bool(int(packed[m, t // 32]) >> t % 32 & 1) == bool(allowed[m, t]) for m in range(9) for t in range(vocab)
    )


@pytest.mark.parametrize("vocab", [5, 33])
def test_match_under_masks_is_the_reference(backend, vocab):
    lengths = []
    for number, name in enumerate(PARAMS):
        batch = make_batch([random_tree(20, 1), comb(16), star(12), [-1]], [PARAMS[name]] * 4, vocab, seed=number)
        masks = random_masks(batch.tree, vocab, number)
        expected = reference(*batch.arguments(), masks=pack_masks(masks))
        assert_equal(run(backend, batch, masks), expected)
        lengths += expected.path_length.tolist()
    assert max(lengths) > 2, "the cases are meant to accept something"


@looped("spec", RULES)
def test_masks_that_allow_everything_change_nothing(backend, spec):
    for vocab in (33, 64):
        batch, draft = drafted_batch(spec, list(PARAMS), vocab, 3)
        everything = torch.ones_like(batch.logits, dtype=torch.bool)
        assert_equal(run(backend, batch, everything, spec, draft), run(backend, batch, None, spec, draft))


@looped("spec", RULES)
def test_a_forbidden_token_has_score_minus_infinity_and_no_draft_probability(backend, spec):
    """The same rows made by hand; masks allow the drafter's favourites and children, so its weights are the same."""
    batch, draft = drafted_batch(spec, ["plain", "hot", "greedy"] * 4, 45, 5)
    allowed = random_masks(batch.tree, 45, 2, legal=1.0)
    allowed[range(len(allowed)), draft.logits.argmax(1)] = True
    forbidden = torch.where(allowed, 0.0, -torch.inf)
    by_hand = run(
        backend,
        replace(batch, logits=batch.logits + forbidden),
        *(None, spec, replace(draft, logits=draft.logits + forbidden)),
    )
    batch.logits[~allowed & (randn(*allowed.shape, seed=1) > 1)] = torch.nan
    assert_equal(run(backend, batch, allowed, spec, draft), by_hand)
    assert by_hand.path_length.max() > 1


@looped("spec", RULES)
def test_no_rule_follows_or_emits_a_forbidden_token(backend, spec):
    accepted = 0
    for seed, vocab in enumerate((7, 33, 130)):
        batch, draft = drafted_batch(spec, list(PARAMS), vocab, seed)
        batch.logits[:, 0] += 6
        allowed = random_masks(batch.tree, vocab, seed, legal=0.6)
        out = run(backend, batch, allowed, spec, draft)
        for b, first in enumerate(batch.tree.row_start[:-1].tolist()):
            path = out.path[b, : int(out.path_length[b])].tolist()
            emitted = [*batch.tree.tokens[[first + node for node in path[1:]]].tolist(), int(out.bonus[b])]
            assert all(allowed[first + node, token] for node, token in zip(path, emitted, strict=True))
            accepted += len(path) - 1
        with cpu_kernels():
            assert_equal(out, verify_tree(*batch.arguments(), None, parse_rule(spec), draft, pack_masks(allowed)))
    assert accepted > 5


@looped("spec", RULES)
def test_a_mask_of_one_token_gives_it(backend, spec):
    batch, draft = drafted_batch(spec, ["plain", "everything", "greedy", "bias"], 70, 1)
    only = torch.randint(70, (len(batch.logits),), generator=torch.Generator().manual_seed(4))
    for first in batch.tree.row_start[:-1].tolist():
        only[first] = batch.tree.tokens[first + 1]  # the first child of a root
    allowed = torch.zeros_like(batch.logits, dtype=torch.bool)
    allowed[range(len(only)), only] = True
    out = run(backend, batch, allowed, spec, draft)
    assert (out.path[:, 1] > 0).all()
    last = out.path.gather(1, out.path_length.long()[:, None] - 1)[:, 0]
    assert torch.equal(out.bonus, only[batch.tree.row_start[:-1] + last].int())


@pytest.mark.parametrize("name", ["greedy", "cold"])
@pytest.mark.parametrize("spec", ["match", "rejection", "typical", "traversal"])
def test_a_row_without_an_allowed_token_ends_the_walk_that_meets_it(backend, spec, name):
    batch = make_batch([chain(4), comb(9)], [PARAMS[name]] * 2, 20, seed=2)
    allowed = torch.ones(13, 20, dtype=torch.bool)
    reached = run(backend, batch, allowed, spec)
    path = reached.path[1, : int(reached.path_length[1])].tolist()
    assert len(path) > 1
    for node in (path[-1], max(set(range(9)) - set(path))):
        nothing = allowed.clone()
        nothing[4 + node] = False
        if node not in path and spec in ("match", "rejection"):
            assert_equal(run(backend, batch, nothing, spec), reached)
        elif node in path and backend.name == "cpu":
            position = int(batch.history.length[1]) + path.index(node)
            message = rf"^masks: row {4 + node} \(request 1, position {position}\) allows no token with a finite score"
            with pytest.raises(ValueError, match=message):
                run(backend, batch, nothing, spec)
        elif node in path:
            out = run(backend, batch, nothing, spec)
            assert out.bonus[1] == -1 and out.path[1, out.path_length[1] - 1] == node
            assert out.bonus[0] == reached.bonus[0]


def test_only_the_mask_is_blamed_for_what_it_takes():
    batch = make_batch([[-1]], [PARAMS["plain"]], 20)
    masks = torch.arange(20)[None] < 3
    batch.logits[0, :3] = -torch.inf
    with pytest.raises(ValueError, match=r"^masks: row 0 "):
        verify_tree(*batch.arguments(), masks=pack_masks(masks))
    batch.logits[0, 1] = torch.nan
    with pytest.raises(ValueError, match=r"^logits: row 0 .* has NaN"):
        verify_tree(*batch.arguments(), masks=pack_masks(masks))
    batch.logits[0] = -torch.inf
    with pytest.raises(ValueError, match=r"^logits: row 0 .* has NaN or infinite"):
        verify_tree(*batch.arguments(), masks=pack_masks(masks))


def test_tokens_in_the_place_of_logits_are_refused_with_masks():
    batch = make_batch([chain(3)], [PARAMS["greedy"]], 20)
    chosen, masks = batch.logits.argmax(1).int(), torch.full((3, 1), -1, dtype=torch.int32)
    for verify in (verify_tree, verify_tree_on_host):
        with pytest.raises(ValueError, match=r"^scores: expected logits, as there are masks"):
            verify(chosen, *batch.arguments()[1:], masks=masks)
        assert_equal(verify(*batch.arguments(), masks=masks), verify_tree(*batch.arguments()))


def test_masks_of_another_shape_are_refused():
    batch = make_batch([chain(3)], [PARAMS["greedy"]], 20)
    with pytest.raises(ValueError, match=r"^masks: expected shape \[M, 1\]"):
        verify_tree(*batch.arguments(), masks=torch.full((2, 1), -1, dtype=torch.int32))


def by_path(path: tuple[int, ...], vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A model and a grammar: logits [V] and allowed tokens [V] behind a path."""
    rng = torch.Generator().manual_seed(hash(path) % 2**31)
    logits, allowed = 2 * torch.randn(vocab, generator=rng), torch.rand(vocab, generator=rng) < 0.4
    allowed[torch.randint(vocab, (1,), generator=rng)] = True
    return logits, allowed


def cycle(text: list[int], draft: DraftTree, params: SamplingParams, vocab: int, masked: bool = True) -> list[int]:
    """The tokens that a cycle with a tree adds to a text."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        paths.append((*text,) if parent < 0 else (*paths[parent], token))
    logits, allowed = (torch.stack(rows) for rows in zip(*(by_path(path, vocab) for path in paths), strict=True))
    tree, table = TreeBatch.of([draft], CPU), SamplingTable.of([params], [params.seed])
    out = verify_tree(logits, tree, table, history_of([text], [1]), masks=pack_masks(allowed) if masked else None)
    return [*(draft.tokens[node] for node in out.path[0, 1 : int(out.path_length)].tolist()), int(out.bonus)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_match_with_any_tree_draws_what_constrained_decoding_draws(temperature):
    vocab, lengths = 37, []
    for seed in range(12):
        params = SamplingParams(temperature=temperature, seed=seed, repetition_penalty=1.2, top_p=0.9)
        plain, unmasked = [5], [5]
        while len(plain) < 16:
            plain += cycle(plain, DraftTree([plain[-1]], [-1]), params, vocab)
            unmasked += cycle(unmasked, DraftTree([unmasked[-1]], [-1]), params, vocab, masked=False)
        assert plain != unmasked[:16]
        text = [5]
        while len(text) < 16:  # the right next tokens, with wrong siblings, legal or not
            right = plain[len(text) : len(text) + 3]
            wrong = [(token + 1 + seed) % vocab for token in right]
            parents = [-1, *(0 if i == 0 else 2 * i for i in range(len(right)) for _ in range(2))]
            tokens = [text[-1], *(token for pair in zip(wrong, right, strict=True) for token in pair)]
            added = cycle(text, DraftTree(tokens, parents), params, vocab)
            text += added
            lengths.append(len(added))
        assert text[:16] == plain[:16]
    assert max(lengths) == 4
