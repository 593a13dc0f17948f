"""commit_tokens against its reference: what becomes history, what ends a request, what the host is told."""

import random

import pytest
import torch

from specengine.draft_trees.tree import TreeBatch
from specengine.ops.commit_tokens import Limits, commit_tokens, commit_tokens_reference, record_width
from specengine.ops.sampling_table import TokenHistory
from specengine.ops.verify_tree import Accepted
from tests.ops.cases import path_to, random_tree

EOS = 3


def make(batch: int, nodes: int, seed: int, *, active=None, ignores=None, room=None):
    """Random trees with a random accepted path each, as the arguments of commit_tokens; tokens are small."""
    rng = random.Random(seed)
    tokens, parents, paths, counts = [], [], [], []
    for _ in range(batch):
        used = rng.randint(1, nodes)
        tree = random_tree(used, rng.randrange(1000))
        path = path_to(tree, rng.randrange(used))
        tokens += [*(rng.randrange(20) for _ in tree), *[-1] * (nodes - used)]
        parents += [*tree, *[-1] * (nodes - used)]
        paths.append([*path, *[-1] * (nodes - len(path))])
        counts.append(len(path))

    def ints(values):
        return torch.tensor(values, dtype=torch.int32)

    length = ints([rng.randint(1, 9) for _ in range(batch)])
    final = length + ints([room or rng.randint(1, 2 * nodes) for _ in range(batch)])
    tree = TreeBatch(ints(tokens), ints(parents), None, None, None, nodes)
    bonus = ints([rng.randrange(20) for _ in range(batch)])
    accepted = Accepted(ints(paths), ints(counts), bonus, ints(range(1, batch + 1)))
    history = TokenHistory(torch.full((batch, 20 + 2 * nodes), -7, dtype=torch.int32), length, length.clone())
    flags = [rng.randint(0, 1) for _ in range(batch)]
    limits = Limits(ints([EOS, 17]), ints(ignores or flags), final, ints(active or [1] * batch))
    record = torch.full((batch, record_width(nodes)), -7, dtype=torch.int32)
    return tree, accepted, history, length + 100, limits, record


def copied(arguments, put):
    def copy(value):
        if isinstance(value, torch.Tensor):
            return put(value.clone())
        if value is None or isinstance(value, int):
            return value
        return type(value)(*(copy(getattr(value, name)) for name in value.__dataclass_fields__))

    return [copy(argument) for argument in arguments]


def check(backend, arguments):
    """Runs both on copies and returns the reference's arguments after the call."""
    found, expected = copied(arguments, backend.put), copied(arguments, lambda t: t)
    commit_tokens(*found)
    commit_tokens_reference(*expected)
    for a, b in zip(found, expected, strict=True):
        for name in getattr(a, "__dataclass_fields__", ()):
            x, y = getattr(a, name), getattr(b, name)
            assert x is None or isinstance(x, int) or torch.equal(x.cpu(), y), name
    _, accepted, _, cached, _, record = expected
    assert torch.equal(found[-1].cpu(), record) and torch.equal(found[3].cpu(), cached)
    assert torch.equal(cached, arguments[3] + accepted.path_length)
    return expected


@pytest.mark.parametrize("nodes", [1, 2, 31, 32, 33, 100])
@pytest.mark.parametrize("seed", range(4))
def test_random_cycles_give_the_reference_s_history_and_record(cuda_backend, nodes, seed):
    _, accepted, *_, limits, record = check(cuda_backend, make(7, nodes, seed))
    assert torch.equal(record[:, 0], accepted.path_length)
    assert nodes < 30 or len(set(limits.active.tolist())) == 2  # some ended, some did not


def test_a_run_is_cut_behind_the_first_end_of_text_token_unless_it_is_ignored(cuda_backend):
    nodes = 4
    tree, accepted, *others = make(2, nodes, 0, ignores=[0, 1], room=50)
    tree.tokens.copy_(torch.tensor([1, 5, EOS, 6] * 2)), tree.parents.copy_(torch.tensor([-1, 0, 1, 2] * 2))
    accepted.path.copy_(torch.arange(4).repeat(2, 1)), accepted.path_length.fill_(4), accepted.bonus.fill_(9)
    _, accepted, *_, limits, _ = check(cuda_backend, (tree, accepted, *others))
    assert accepted.path_length.tolist() == [2, 4] and limits.active.tolist() == [0, 1]


def test_a_run_is_cut_at_the_final_length(cuda_backend):
    arguments = make(5, 8, 3, ignores=[1] * 5, room=2)
    *_, limits, record = check(cuda_backend, arguments)
    assert record[:, 0].max() == 2 and not limits.active[record[:, 0] == 2].any()


def test_idle_requests_are_left_alone(cuda_backend):
    arguments = make(4, 6, 5, active=[0, 1, 0, 1])
    before = arguments[2].tokens.clone()
    _, accepted, history, *_, record = check(cuda_backend, arguments)
    assert accepted.path_length[[0, 2]].tolist() == [0, 0] and record[[0, 2], 0].tolist() == [0, 0]
    assert record[:, 3].tolist() == [0, int(accepted.relaxed[1]), 0, int(accepted.relaxed[3])]
    assert torch.equal(history.tokens[[0, 2]], before[[0, 2]]) and not torch.equal(history.tokens[1], before[1])


def test_a_walk_without_a_token_ends_its_request_and_keeps_nothing(cuda_backend):
    arguments = make(3, 6, 8, room=50)
    arguments[1].bonus[1] = -1
    _, accepted, *_, limits, record = check(cuda_backend, arguments)
    assert accepted.path_length[1] == 0 and limits.active[1] == 0 and record[1, 2] == -1
