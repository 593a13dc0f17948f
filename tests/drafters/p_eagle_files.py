"""P-EAGLE checkpoints of random weights, and a straight-line reading of what they compute."""

import torch

from tests.drafters.eagle_bench import reading_of
from tests.drafters.eagle_files import CONFIG, HIDDEN, Reading, draw, eagle3_state, write_drafter

MASK = 317
FIELDS = CONFIG | {"pard_token": MASK, "num_hidden_layers": 2}


def mask_state(layers=3):
    return {"mask_hidden": draw(1, 1, layers * HIDDEN, scale=1.0)}


def layouts():
    """name -> (config, state): the published layouts and their variants."""
    torch.manual_seed(9)
    other = {name: value for name, value in FIELDS.items() if name != "pard_token"}
    nested = {"transformer_layer_config": other, "speculators_model_type": "peagle", "norm_before_residual": True}
    grouped = {name: value for name, value in other.items() if name != "eagle_aux_hidden_state_layer_ids"}
    each = {f"fc_norm.{i}.weight": 1 + draw(HIDDEN, scale=0.2) for i in range(3)}
    return {
        "vllm": (
            FIELDS | {"parallel_drafting": True},
            eagle3_state(FIELDS, "layers.0", embedding=True) | mask_state(),
        ),
        "speculators": (
            nested | {"mask_token_id": MASK},
            eagle3_state(FIELDS, "layers.0", embedding=True) | mask_state(),
        ),
        "one layer": (
            FIELDS | {"num_hidden_layers": 1},
            eagle3_state(FIELDS | {"num_hidden_layers": 1}, d2t=False) | mask_state(),
        ),
        "norms, layers out of order": (
            grouped | {"ptd_token_id": MASK, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 0, 0]}},
            eagle3_state(FIELDS, "layers.0") | each | mask_state(),
        ),
    }


LAYOUTS = layouts()


def write_p_eagle(folder, name="vllm", tensors=None, **changes):
    """Writes a folder. tensors: instead of some of the layout's, or None to leave one out."""
    config, state = LAYOUTS[name]
    state = {key: tensor for key, tensor in (state | (tensors or {})).items() if tensor is not None}
    return write_drafter(folder, config | changes, state)


class MaskReading(Reading):
    """One pass over all pairs and masks, dense, everything anew for every draft."""

    def draft_logits(self, fused, tokens, length):
        """Logits [length, Vd] of what follows `tokens`, whose hidden states are those before each."""
        rows = torch.cat([fused, self.masked().expand(length - 1, -1)])
        out = self.outputs(rows, torch.tensor([*tokens, *[MASK] * (length - 1)]))
        return self.norm(out[-length:], "norm.weight") @ self.head.T

    def masked(self):
        """What enters in place of a mask's hidden state, [1, hidden]."""
        return self.joined([*self.state["mask_hidden"][0].split(HIDDEN, -1)])


def mask_reading(name="vllm", kind=MaskReading, **changes):
    config, state = LAYOUTS[name]
    return reading_of("eagle3", config | changes, state, kind)
