"""The weights of a tiny random target, and its outputs on random tokens."""

from dataclasses import replace

import torch

from specengine.models.checkpoint import RandomCheckpoint
from specengine.models.config import ModelConfig
from specengine.models.rope import rope_tables
from specengine.train.objectives.llama_layer import rotated
from specengine.train.objectives.target_weights import TargetWeights
from specengine.train.objectives.training_batch import TrainingBatch

CONFIG = ModelConfig("llama", 61, 32, 48, 8, 4, 2, 8, 1e-5, 64, eos_token_ids=(2,))


def target_weights(vocabulary=(0, 2, 3, 5, *range(20, 55)), config=CONFIG):
    checkpoint = RandomCheckpoint(config)
    vocabulary = None if vocabulary is None else torch.tensor(vocabulary)
    head = checkpoint.read("lm_head.weight")
    return TargetWeights(
        config,
        checkpoint.read("model.embed_tokens.weight"),
        head if vocabulary is None else head[vocabulary],
        vocabulary,
        checkpoint.read,
    )


def batch(lengths=(17, 11), wanted_from=(6, 4), hidden_state_layers=0, kv_layers=0, seed=0, config=CONFIG):
    """Random hidden states with the spread of a real target's; the greedy tokens follow from them."""
    g = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    counts = torch.tensor(lengths)
    row = torch.arange(shape[1])
    real = row < counts[:, None]
    last = torch.randn(*shape, config.hidden_size, generator=g) * real[..., None]
    head = RandomCheckpoint(config).read("lm_head.weight")
    at_layers = (
        torch.randn(*shape, hidden_state_layers, config.hidden_size, generator=g)
        * torch.tensor([3.0, 61, 65])[:hidden_state_layers, None]
    )
    cached = torch.randn(2, kv_layers, shape[0], config.num_kv_heads, shape[1], config.head_dim, generator=g)
    keys = rotated(cached[0], *rope_tables(config, shape[1]))
    return TrainingBatch(
        tokens=torch.randint(config.vocab_size, shape, generator=g) * real,
        lengths=counts,
        wanted=(row >= torch.tensor(wanted_from)[:, None]) & (row < counts[:, None] - 1),
        greedy=(last @ head.T).argmax(-1) * real,
        last=last,
        at_layers=at_layers * real[..., None, None] if hidden_state_layers else None,
        keys=keys * real[:, None, :, None] if kv_layers else None,
        values=cached[1] * real[:, None, :, None] if kv_layers else None,
    )


def batch_for(objective, **changes):
    return batch(hidden_state_layers=len(objective.hidden_state_layers), kv_layers=len(objective.kv_layers), **changes)


def padded(given, rows):
    """Adds rows of padding to the same dialogues."""

    def longer(x, dim):
        shape = list(x.shape)
        shape[dim] = rows
        return torch.cat([x, x.new_zeros(shape)], dim)

    return replace(
        given,
        **{name: longer(getattr(given, name), 1) for name in ("tokens", "wanted", "greedy", "last")},
        at_layers=None if given.at_layers is None else longer(given.at_layers, 1),
        keys=None if given.keys is None else longer(given.keys, 3),
        values=None if given.values is None else longer(given.values, 3),
    )


def randomised(objective, seed=1):
    """Makes every parameter random: the zeros and ones of a fresh network would hide mistakes."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for x in objective.network.parameters():
            if x.ndim == 1:
                x.copy_(1 + 0.3 * torch.randn(x.shape, generator=g))
            else:
                x.copy_(torch.randn(x.shape, generator=g) * x.shape[-1] ** -0.5)
    return objective
