"""A constraint's masks, cuts and forced texts, against matchers that never take anything back."""

import random

import numpy as np
import pytest

from specengine import SamplingParams
from specengine.draft_trees.tree import DraftTree
from specengine.types import ConstraintFailed
from tests.constraints.masks import FreshMatchers, allowed_tokens, masks_of, tokens_of
from tests.constraints.vocabulary import CALL, CONSTRAINTS, END, ENDS, SCHEMA, THINK_END, TOKENIZER, TURN, grammars

FREE = "start: /[a-z ]{0,20}/ </think> /[a-z]*/"


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def constraint_of(given, *text: int, **options):
    constraint = grammars().constraint(SamplingParams(**given, **options))
    constraint.advance(text)
    return constraint


def random_text(fresh: FreshMatchers, rng: random.Random, most: int) -> tuple[int, ...]:
    """An allowed text that has not ended."""
    text: tuple[int, ...] = ()
    while len(text) < most:
        going_on = [token for token in fresh(text) if token not in ENDS]
        if not going_on:
            break
        text = (*text, rng.choice(going_on))
    return text


def random_tree(fresh: FreshMatchers, text, rng: random.Random, nodes: int) -> tuple[DraftTree, list]:
    """A tree of allowed and of random tokens, ends of the text among them, and each node's text."""
    tokens, parents, paths = [0], [-1], [text]
    while len(tokens) < nodes:
        parent = rng.randrange(len(tokens))
        allowed = fresh.after(paths[parent]) if not set(paths[parent]) & ENDS else None
        token = rng.choice(allowed) if allowed and rng.random() < 0.8 else rng.randrange(320)
        tokens.append(token), parents.append(parent), paths.append((*paths[parent], token))
    return DraftTree(tokens, parents), paths


@pytest.mark.parametrize("given", CONSTRAINTS, ids=lambda given: next(iter(given)))
def test_masks_and_cuts_are_those_of_a_fresh_matcher(given):
    rng, fresh = random.Random(5), FreshMatchers(SamplingParams(**given))
    cut_some = forced_some = ends = 0
    for _ in range(12):
        text = random_text(fresh, rng, rng.randrange(20))
        tree, paths = random_tree(fresh, text, rng, 20)
        constraint = constraint_of(given, *text)
        right = [not set(path[:-1]) & ENDS and fresh.after(path[:-1]) is not None for path in paths]
        right = [
            node == 0 or (ok and path[-1] in fresh.after(path[:-1]))
            for node, (ok, path) in enumerate(zip(right, paths, strict=True))
        ]
        cut = constraint.cut(tree)
        assert cut.drafted == [node for node, ok in enumerate(right) if ok]
        assert [cut.tree.tokens[new] for new in range(len(cut.drafted))] == [tree.tokens[old] for old in cut.drafted]
        for text_behind in cut.forced:
            path = paths[cut.drafted[text_behind.node]]
            for token in text_behind.tokens:  # each is the only one
                assert fresh.after(path) == [token]
                path = (*path, token)
            forced_some += 1
        assert constraint.cut(tree, whole=True).drafted == [*range(20)]
        masks = masks_of(constraint, tree)
        for mask, path, ok in zip(masks, paths, right, strict=True):
            if not ok:
                assert mask == [*range(320)]
            elif not set(path) & ENDS:
                assert mask == fresh.after(path)
            else:
                ends += 1
        assert masks_of(constraint, cut.tree) == [mask for mask, ok in zip(masks, right, strict=True) if ok]
        cut_some += len(cut.drafted) < 20
        assert allowed_tokens(constraint) == fresh.after(text)  # nothing of the tree is left
    assert cut_some and (forced_some or "regex" in given) and (ends or "grammar" not in given)


@pytest.mark.parametrize("given", [*CONSTRAINTS, {"regex": "😀's [a-z ]{8}"}, {"choices": ["é's", "é's name", "no"]}])
def test_plain_decoding_and_a_tree_have_the_same_masks_along_a_path(given):
    rng, fresh, crossed = random.Random(7), FreshMatchers(SamplingParams(**given)), 0
    for _ in range(6):
        path = random_text(fresh, rng, 16)
        tree = DraftTree([0, *path], [-1, *range(len(path))])
        plain, rows = constraint_of(given), []
        for token in path:
            rows.append(allowed_tokens(plain))
            plain.advance([token])
        masks = masks_of(constraint_of(given), tree)
        assert [*rows, allowed_tokens(plain)] == masks
        crossed += any(ids(TOKENIZER.decode(path[at:])) != [*path[at:]] for at in range(len(path)))
    assert crossed or "'s" not in str(given)


def test_the_rest_of_a_forced_text_may_be_cut_into_other_tokens_and_plain_decoding_follows():
    given = {"regex": "😀's [a-z ]{8}"}
    ((_, chain),) = constraint_of(given).cut(DraftTree([0], [-1])).forced
    behind = len("😀".encode())
    path, joined = chain[:behind], TOKENIZER.encode("'s", add_special_tokens=False)
    assert [*chain[behind : behind + 2]] == [ord("'"), ord("s")] and len(joined) == 1
    plain = constraint_of(given)
    for token in path:
        assert allowed_tokens(plain) == [token]
        plain.advance([token])
    assert allowed_tokens(plain) == joined  # and not the apostrophe alone


def test_forced_text_becomes_a_chain_behind_each_leaf():
    constraint = constraint_of({"json_schema": SCHEMA})
    cut = constraint.cut(DraftTree([0], [-1]))
    ((leaf, forced),) = cut.forced
    assert leaf == 0 and TOKENIZER.decode(forced) == '{"name":'
    grown = cut.grown([2])
    assert (grown.tree.tokens, grown.tree.parents, grown.drafted) == ([0, *forced[:2]], [-1, 0, 1], [0, -1, -1])
    assert cut.grown([0]) is cut
    drafted = constraint.cut(DraftTree([0, ids("x")[0], forced[0], forced[1]], [-1, 0, 0, 2]))
    assert drafted.drafted == [0, 2, 3] and drafted.forced == [(2, forced[2:])]


def test_the_end_is_allowed_where_the_text_may_end_and_under_ignore_eos_where_it_must():
    may, must = constraint_of({"regex": "a{1,2}"}, *ids("a")), constraint_of({"regex": "a{1,2}"}, *ids("aa"))
    assert allowed_tokens(may) == [*ids("a"), END, TURN] and allowed_tokens(must) == [END, TURN]
    tree = DraftTree([0, END, ids("a")[0]], [-1, 0, 0])
    assert may.cut(tree).drafted == [0, 1, 2] and must.cut(tree).drafted == [0, 1]
    on = constraint_of({"regex": "a{1,2}"}, *ids("a"), ignore_eos=True)
    assert allowed_tokens(on) == ids("a") and on.cut(tree).drafted == [0, 2]
    on.advance(ids("a"))
    assert allowed_tokens(on) == [END, TURN]


def test_a_special_token_comes_only_where_the_grammar_names_it_and_ends_nothing():
    constraint = constraint_of({"grammar": FREE})
    allowed = allowed_tokens(constraint)
    assert THINK_END in allowed and CALL not in allowed and not ENDS & {*allowed}
    tree = DraftTree([0, CALL, ids("a")[0], THINK_END, ids("b")[0]], [-1, 0, 0, 2, 3])
    assert constraint.cut(tree).drafted == [0, 2, 3, 4]
    masks = masks_of(constraint, tree)
    assert THINK_END in masks[2] and THINK_END not in masks[3] and {*masks[4]} >= ENDS
    constraint.advance([*ids("a"), THINK_END, *ids("b")])
    assert {*allowed_tokens(constraint)} >= ENDS


def test_text_that_spells_a_special_token_is_no_special_token():
    constraint = constraint_of({"choices": ["<call> me", "<call>er"]})
    ((_, forced),) = constraint.cut(DraftTree([0], [-1])).forced
    assert CALL not in forced and TOKENIZER.decode(forced) == "<call>"


def test_an_end_of_the_text_is_no_token_of_the_grammar():
    constraint = constraint_of({"choices": ["yes"]}, *ids("yes"), END)
    assert allowed_tokens(constraint) == [END, TURN]


def test_a_token_that_is_not_allowed_is_a_failure():
    with pytest.raises(ConstraintFailed, match=r"^constraint: "):
        constraint_of({"regex": "ab"}).advance(ids("b"))


class Failing:
    """A matcher that runs out of its limits once a text has one more letter."""

    def __init__(self, matcher, text=(), failed=False):
        self._matcher, self._text, self._failed = matcher, [*text], failed

    def deep_copy(self):
        return Failing(self._matcher.deep_copy(), self._text, self._failed)

    def try_consume_tokens(self, tokens):
        count = self._matcher.try_consume_tokens(tokens)
        self._text += tokens[:count]
        return count

    def rollback(self, count):
        assert not self._failed
        del self._text[-count:]
        return self._matcher.rollback(count)

    def unsafe_compute_mask_ptr(self, *place):
        self._failed = self._failed or len(self._text) > 2
        self._matcher.unsafe_compute_mask_ptr(*place)

    def compute_bitmask(self):
        self._failed = self._failed or len(self._text) > 2

    def is_error(self):
        return self._failed

    def get_error(self):
        return "too many letters"

    def __getattr__(self, name):
        return getattr(self._matcher, name)


def failing_constraint(text=()):
    constraint = constraint_of({"regex": "[ab]*"})
    constraint._start = Failing(constraint._start)
    constraint._matcher = constraint._start.deep_copy()
    constraint.advance(text)
    return constraint


def test_limits_that_a_draft_runs_into_end_no_text_that_goes_another_way():
    a, b = ids("a")[0], ids("b")[0]
    constraint, tree = failing_constraint([a]), DraftTree([0, a, a, b], [-1, 0, 1, 0])
    rows = np.zeros((4, 10), dtype=np.int32)
    constraint.fill(tree, rows)
    assert tokens_of(rows[3]) == [a, b, END, TURN] and tokens_of(rows[2]) == [*range(320)]
    constraint.advance([b])
    assert allowed_tokens(constraint) == [a, b, END, TURN]


def test_limits_that_the_text_itself_runs_into_are_a_failure():
    a = ids("a")[0]
    constraint, tree = failing_constraint([a]), DraftTree([0, a, a], [-1, 0, 1])
    constraint.fill(tree, np.zeros((3, 10), dtype=np.int32))
    with pytest.raises(ConstraintFailed, match=r"^constraint: too many letters after 3 tokens"):
        constraint.advance([a, a, CALL])  # the last token came from a row without a mask


class Tiring(Failing):
    """A matcher that runs out of its limits after some questions, whatever the text."""

    asked = 0

    def deep_copy(self):
        return Tiring(self._matcher.deep_copy(), self._text)

    def _ask(self):
        self.asked += 1
        self._failed = self._failed or self.asked > 12

    def try_consume_tokens(self, tokens):
        self._ask()
        return 0 if self._failed else super().try_consume_tokens(tokens)

    def unsafe_compute_mask_ptr(self, *place):
        self._ask()
        self._matcher.unsafe_compute_mask_ptr(*place)

    def compute_ff_tokens(self):
        self._ask()
        return [] if self._failed else self._matcher.compute_ff_tokens()

    def compute_bitmask(self):
        self._ask()


def test_whether_a_text_fails_does_not_depend_on_how_much_was_drafted():
    rng, given = random.Random(3), CONSTRAINTS[0]
    fresh, text = FreshMatchers(SamplingParams(**given)), ()
    constraint = constraint_of(given)
    constraint._start = Tiring(constraint._start)
    constraint._matcher = constraint._start.deep_copy()
    for _ in range(12):
        tree, _ = random_tree(fresh, text, rng, 16)
        expected = constraint_of(given, *text)
        assert constraint.cut(tree).drafted == expected.cut(tree).drafted
        assert masks_of(constraint, tree) == masks_of(expected, tree)
        text = (*text, next(token for token in fresh(text) if token not in ENDS))
        constraint.advance(text[-1:])


def test_a_rule_of_too_many_alternatives_fails_with_the_engine_s_reason(monkeypatch):
    monkeypatch.setattr("specengine.constraints.grammars.ITEMS", 100)
    alternatives = " | ".join(f'"x{number}"' for number in range(300))
    constraint = constraint_of({"grammar": f"start: WORD ({alternatives})\nWORD: /[a-z]+ /"})
    with pytest.raises(ConstraintFailed, match=r"(?s)^constraint: .*max is 100"):
        constraint.advance(ids("go x"))
    with pytest.raises(ValueError, match=r"(?s)^grammar: .*max is 100"):
        constraint_of({"grammar": f"start: {alternatives}"})


class Panic(BaseException):
    """The grammar engine's panics are no Exception."""


@pytest.mark.parametrize("place", ["cut", "fill"])
def test_what_the_grammar_engine_raises_fails_the_request_when_it_goes_on(place):
    a = ids("a")[0]
    constraint, tree = constraint_of({"regex": "a+"}), DraftTree([0, a], [-1, 0])

    class Panicking:
        def __getattr__(self, name):
            raise Panic("at lexer.rs")

    healthy, constraint._matcher = constraint._matcher, Panicking()
    if place == "cut":
        assert constraint.cut(tree).tree == tree
        constraint._matcher = healthy
    else:
        constraint.fill(tree, np.zeros((2, 10), dtype=np.int32))
    with pytest.raises(ConstraintFailed, match=r"^constraint: the grammar engine failed: .*lexer"):
        constraint.advance([a])


def test_a_key_of_the_keyboard_is_no_failure_of_the_grammar_engine():
    constraint = constraint_of({"regex": "a+"})

    class Stopped:
        def __getattr__(self, name):
            raise KeyboardInterrupt

    constraint._matcher = Stopped()
    with pytest.raises(KeyboardInterrupt):
        constraint.fill(DraftTree([0], [-1]), np.zeros((1, 10), dtype=np.int32))
