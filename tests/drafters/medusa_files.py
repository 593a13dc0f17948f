"""A folder of Medusa heads."""

import torch
from safetensors.torch import save_file

from specengine.models.presets import PRESETS

TARGET = PRESETS["tiny-llama"]
HIDDEN, VOCAB = TARGET.hidden_size, TARGET.vocab_size


def heads_state(heads=4, blocks=1, vocab=VOCAB, hidden=HIDDEN, prefix="", seed=0):
    """Random heads under the published names; vocab=0: without their last layers."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    state = {}
    for i in range(heads):
        for j in range(blocks):
            state[f"{prefix}{i}.{j}.linear.weight"] = draw(hidden, hidden)
            state[f"{prefix}{i}.{j}.linear.bias"] = draw(hidden)
        if vocab:
            state[f"{prefix}{i}.{blocks}.weight"] = draw(vocab, hidden)
    return state


def write(folder, state, name="medusa_lm_head.pt"):
    folder.mkdir(exist_ok=True)
    if name.endswith(".pt"):
        torch.save(state, folder / name)
    else:
        save_file(state, folder / name)
    return folder
