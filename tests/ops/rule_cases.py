"""Random trees and rules to verify them by, and what each backend says to them."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from specengine.draft_trees.tree import DraftLogits, DraftTree, TreeBatch
from specengine.ops.draw_siblings import draw_siblings
from specengine.ops.sampling_table import SamplingTable
from specengine.ops.verify_tree import Accepted, VerifyWorkspace, verify_tree
from tests.backends import cpu_kernels
from tests.ops.cases import chain, randn, random_tree
from tests.ops.verifying import CPU, Batch, history_of, random_params, to_device

RULES = (
    "rejection",
    "traversal",
    "block",
    "lossy:alpha=0.3,beta=0.8",
    "margin:theta=0.5,mode=strict",
    "margin:theta=0.5,mode=lossless-base",
    "margin:theta=0.5,mode=reference",
    "typical:epsilon=0.2,delta=0.4",
    "cascade:chow,alpha=0.4",
    "cascade:diff,alpha=0.1",
    "cascade:opt,alpha=0.2",
    "cascade:token-v1,alpha=0.2",
    "cascade:token-v2,alpha=0.2",
    "cascade:token-v3,alpha=0.5",
    "bild:alpha=1.5",
)
VOCABULARIES = (1, 2, 5, 17, 64, 130, 700, 1400)


@dataclass
class Case:
    batch: Batch
    draft: DraftLogits
    masks: torch.Tensor | None = None


def grow(rng: random.Random, logits, index, params, history, replacement: bool, depth: int, width: int):
    """A tree of siblings drawn by the op for each of its nodes, and the row of the logits that each one's come from."""
    tokens, parents, rows, level, used = [int(history.tokens[0, int(history.length[0]) - 1])], [-1], [-1], [0], 0
    for _ in range(depth):
        below = []
        for node in level:
            if used == len(logits):
                break
            tree = TreeBatch.of([DraftTree(tokens, parents)], CPU)
            at, own = torch.tensor([node], dtype=torch.int32), logits[used : used + 1]
            count = rng.randint(1, width)
            first = torch.zeros(1, dtype=torch.int32)
            drawn = draw_siblings(own, at, tree, first, params, history, count, replacement, index)[0].tolist()
            drawn = [token for token in drawn if token >= 0]
            rows[node] = used
            used += 1
            below += range(len(tokens), len(tokens) + len(drawn))
            tokens += drawn
            parents += [node] * len(drawn)
            rows += [-1] * len(drawn)
        level = below
    return DraftTree(tokens, parents), rows


def random_case(seed: int, cases: int, vocab: int, only_chains: bool) -> Case:
    """Sampled trees and chains with likely ones that have no distribution, idle ones aside."""
    rng = random.Random(seed)
    likely = rng.sample(range(vocab), min(4, vocab))
    index, columns = None, vocab
    if seed % 2 and vocab > 2:  # the drafter's vocabulary is another one and lacks some tokens
        columns = max(vocab // 2, 2)
        places = [*range(columns), *[-1] * (vocab - columns)]
        rng.shuffle(places)
        index = torch.tensor(places, dtype=torch.int32)
    replacement = bool(rng.getrandbits(1))
    drafts, all_rows, draft_logits, texts, prompts, given, seeds = [], [], [], [], [], [], []
    with cpu_kernels():
        for _ in range(cases):
            text = rng.choices(likely + rng.sample(range(vocab), min(9, vocab)), k=rng.randint(1, 20))
            sampling, key = random_params(rng, vocab, likely), rng.randrange(2**63)
            params, history = SamplingTable.of([sampling], [key]), history_of([text], [rng.randint(0, len(text))])
            logits = randn(6, columns, seed=rng.randrange(10**6)) * rng.choice([0.0, 1.0, 4.0])
            if rng.random() < 0.25:  # chosen without a distribution
                shape = chain(rng.randint(1, 5)) if only_chains else random_tree(rng.randint(1, 9), rng.randrange(99))
                draft, rows = DraftTree([text[-1], *rng.choices(likely, k=len(shape) - 1)], shape), [-1] * len(shape)
            else:
                width = 1 if only_chains else 3
                draft, rows = grow(rng, logits, index, params, history, replacement, rng.randint(1, 4), width)
            all_rows += [row + len(draft_logits) * 6 if row >= 0 else -1 for row in rows]
            drafts.append(draft)
            draft_logits.append(logits)
            texts.append(text)
            prompts.append(int(history.prompt_length[0]))
            given.append(sampling)
            seeds.append(key)
    tree, known = TreeBatch.of(drafts, CPU), torch.cat(draft_logits)
    rows = torch.tensor(all_rows, dtype=torch.int32)
    logits = randn(len(rows), vocab, seed=seed) * torch.tensor(rng.choices([0.5, 2.0, 4.0], k=len(rows)))[:, None]
    logits[:, likely] += 2
    near = known[rows.clamp(min=0)][:, (index if index is not None else torch.arange(vocab)).clamp(min=0).long()]
    logits += near * (rows >= 0)[:, None]  # a draft is close to the target
    tied = torch.tensor(rng.choices([False, True], [3, 1], k=len(rows)))
    logits[tied] = logits[tied].round()
    batch = Batch(logits, tree, SamplingTable.of(given, seeds), history_of(texts, prompts))
    return Case(batch, DraftLogits(known, rows, index, replacement))


def run(backend, case: Case, rule, noted: bool = True) -> Accepted:
    """What the backend accepts.  noted: whether the workspace has room for notes on rows, made before the walk."""
    requests, (rows, vocab) = len(case.batch.params.seed), case.batch.logits.shape
    workspace = VerifyWorkspace.empty(requests, vocab, device=backend.device, rows=rows * noted, weights=True)
    workspace.weights.fill_(-77)
    if noted:
        workspace.row_states.fill_(-77)
    draft = case.draft.to(backend.device)
    masks = None if case.masks is None else backend.put(case.masks)
    accepted = verify_tree(*case.batch.to(backend.device).arguments(), workspace, rule, draft, masks)
    assert not workspace.counts.any() and not workspace.scores.any(), "a workspace that must be zero again"
    return to_device(accepted, CPU)


def on_cpu(case: Case, rule) -> Accepted:
    with cpu_kernels():
        return verify_tree(*case.batch.arguments(), None, rule, case.draft, case.masks)


def assert_equal(a: Accepted, b: Accepted) -> None:
    for name in ("path", "path_length", "bonus", "relaxed"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
