"""Drafted trees fitted to grammars: what a node keeps of its draft, how far trees grow, and who waits for masks."""

import dataclasses
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specengine import Engine, SamplingParams
from specengine.constraints.background import begin_fill, finish_fills
from specengine.constraints.cut_tree import CutTree, ForcedText
from specengine.draft_policy.draft import Draft
from specengine.draft_policy.forced import ForcedPolicy
from specengine.draft_trees.tree import DraftLogits, DraftTree
from specengine.engine.constrained import ConstrainedTrees
from specengine.tensor_parallel.loading import load_model
from tests.constraints.vocabulary import ENDS, SCHEMA, TOKENIZER

DRAFTER = SimpleNamespace(max_nodes=8, spare_slots=4, reads_choices=False, policy=None)


class Grammar:
    """Forbids the nodes of some tokens, and forces texts behind the nodes that are left."""

    def __init__(self, forbidden: set[int], forced: list[ForcedText]) -> None:
        self._forbidden, self._forced = forbidden, forced

    def cut(self, tree: DraftTree, whole: bool = False) -> CutTree:
        kept = [node for node, token in enumerate(tree.tokens) if token not in self._forbidden]
        parents = [-1, *(kept.index(tree.parents[node]) for node in kept[1:])]
        return CutTree(DraftTree([tree.tokens[node] for node in kept], parents), kept, self._forced)

    def fill(self, tree: DraftTree, rows: np.ndarray) -> None:
        rows[:] = len(tree.tokens)


class Greedy:
    """Takes as many forced tokens as there is room for."""

    def lengths(self, runs, rooms, nodes, prefix) -> list[int]:
        left, lengths = [*rooms], []
        for run in runs:
            lengths.append(min(run.length, left[run.request]))
            left[run.request] -= lengths[-1]
        return lengths


def request_of(grammar: Grammar, limit: int = 9):
    return SimpleNamespace(constraint=grammar, draft_limit=limit, tokens=[1])


def test_nodes_keep_their_draft_distributions_whichever_nodes_before_them_are_cut():
    grammars = Grammar({12, 13}, [ForcedText(1, [5, 6])]), Grammar({22}, [])
    fitted = ConstrainedTrees([request_of(grammar) for grammar in grammars], 40, DRAFTER, Greedy())
    trees = [DraftTree([10, 11, 12, 13], [-1, 0, 0, 2]), DraftTree([20, 21, 22, 23], [-1, 0, 0, 1])]
    rows = torch.arange(100, 108, dtype=torch.int32)
    draft = fitted.fit(Draft([], trees, DraftLogits(torch.zeros(1, 40), rows)))
    assert [tree.tokens for tree in draft.trees] == [[10, 11, 5, 6], [20, 21, 23]]
    assert draft.logits.rows.tolist() == [100, 101, -1, -1, 104, 105, 107]
    assert fitted.masks()[:, 0].tolist() == [4] * 4 + [3] * 3


def test_a_tree_grows_no_wider_than_the_slots_of_its_request():
    texts = [ForcedText(node, [5] * 20) for node in (1, 2, 3)]
    fitted = ConstrainedTrees([request_of(Grammar(set(), texts), limit=3)], 40, DRAFTER, Greedy())
    (tree,) = fitted.fit(Draft([], [DraftTree([1, 2, 3, 4], [-1, 0, 0, 0])])).trees
    assert len(tree.tokens) == 3 + 1 + DRAFTER.spare_slots and tree.levels == 3
    fitted.masks()


def test_a_failed_mask_waits_for_the_other_masks():
    release = threading.Event()

    class Slow(Grammar):
        def fill(self, tree, rows):
            release.wait(5)
            rows[:] = 7

    class Failing(Grammar):
        def fill(self, tree, rows):
            threading.Timer(0.05, release.set).start()
            raise RuntimeError("no mask")

    rows, tree = np.zeros((2, 1), dtype=np.int32), DraftTree([1], [-1])
    fills = [begin_fill(kind(set(), []), tree, rows[place : place + 1]) for place, kind in enumerate((Failing, Slow))]
    with pytest.raises(RuntimeError, match="no mask"):
        finish_fills(fills)
    assert rows.tolist() == [[0], [7]]


def test_the_policy_of_forced_tokens_learns_from_the_experts_that_passes_read(monkeypatch):
    told, observe = [], ForcedPolicy.observe

    def noted(policy, *cycle):
        told.append(cycle[-1])
        observe(policy, *cycle)

    monkeypatch.setattr(ForcedPolicy, "observe", noted)
    mixture = load_model("random:tiny-qwen3-moe", device="cpu")
    model = dataclasses.replace(mixture, tokenizer=TOKENIZER, eos_token_ids=ENDS)
    output = Engine(model, drafter="prompt-lookup").generate(
        TOKENIZER.encode("name a thing", add_special_tokens=False),
        SamplingParams(max_new_tokens=30, json_schema=SCHEMA),
    )
    assert told and sum(told) == pytest.approx(output.stats.experts_per_layer * output.stats.cycles)
    assert max(told) > 4.0 == min(told)  # one row takes 4 of 16
