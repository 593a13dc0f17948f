"""A random FastEagle drafter for the tiny model, as a folder."""

import dataclasses

from specengine.models.presets import PRESETS
from tests.drafters.draft_files import RandomWeights

TAPS = (0, 1, 2)
LEVELS, DRAFT_VOCAB = 3, 40
TINY = PRESETS["tiny-llama"]
SHAPE = dataclasses.replace(TINY, num_layers=LEVELS, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=48)


def random_fasteagle(
    folder,
    *,
    parallel: bool = False,
    output_norm: bool = False,
    vocabulary: int = DRAFT_VOCAB,
    own_head: bool = False,
    markov: int = 0,
    **fields,
):
    """A folder and its tensors.  markov: the rank of a Markov head; 0: there is none."""
    weights, size = RandomWeights(3), TINY.hidden_size
    concat = fields.get("entry") == "concat"
    weights.linear("fc_features", size, len(TAPS) * size)
    if concat:
        weights.norms("layers.0.hidden_norm", size=size)
    else:
        weights.linear("fc_input", size, 2 * size)
        weights.norms(*(f"fc_norm.{i}" for i in range(len(TAPS))), size=size)
    for i in range(LEVELS):
        weights.layer(f"layers.{i}", SHAPE, inputs=2 * size if concat and i == 0 else None)
    rows = vocabulary or TINY.vocab_size
    if own_head:
        weights.linear("lm_head", rows, size)
    if markov:
        weights.linear("markov_w1", rows, markov)
        weights.linear("markov_w2", rows, markov)
    if output_norm:
        weights.norms("norm", size=size)
    if vocabulary:
        weights.vocabulary(TINY.vocab_size, vocabulary)
    fields = {"eagle_aux_hidden_state_layer_ids": TAPS, "parallel": parallel, **fields}
    return weights.save(folder, SHAPE, **fields), weights.tensors
