"""A random FastEagle drafter for the tiny model, as a folder."""

import dataclasses

from specengine.models.presets import PRESETS
from tests.drafters.draft_files import RandomWeights

TAPS = (0, 1, 2)
LEVELS, DRAFT_VOCAB = 3, 40
TINY = PRESETS["tiny-llama"]
SHAPE = dataclasses.replace(TINY, num_layers=LEVELS, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=48)


def random_cascade(
    folder, *, parallel: bool = False, output_norm: bool = False, vocabulary: int = DRAFT_VOCAB, **fields
):
    weights, size = RandomWeights(3), TINY.hidden_size
    weights.linear("fc_features", size, len(TAPS) * size)
    weights.linear("fc_input", size, 2 * size)
    weights.norms(*(f"fc_norm.{i}" for i in range(len(TAPS))), size=size)
    for i in range(LEVELS):
        weights.layer(f"layers.{i}", SHAPE)
    if output_norm:
        weights.norms("norm", size=size)
    if vocabulary:
        weights.vocabulary(TINY.vocab_size, vocabulary)
    fields = {"eagle_aux_hidden_state_layer_ids": TAPS, "parallel": parallel, **fields}
    return weights.save(folder, SHAPE, **fields), weights.tensors
