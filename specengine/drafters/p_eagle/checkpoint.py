"""P-EAGLE's checkpoints: those of EAGLE-3 with a mask token and what stands for the hidden states that masks lack."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specengine.drafters.eagle.checkpoint import MASK_STATE, read_eagle3
from specengine.drafters.eagle.checkpoint_parts import CheckpointParts
from specengine.drafters.eagle.eagle3_network import Eagle3Network
from specengine.drafters.p_eagle.network import PEagleNetwork
from specengine.models.draft_checkpoint import DraftCheckpoint
from specengine.models.transformer import Transformer
from specengine.utils.json_fields import Fields

MASK_TOKENS = ("pard_token", "ptd_token_id", "mask_token_id")  # of vLLM's files, the last one of speculators and NeMo


@dataclass(frozen=True)
class LoadedPEagle:
    """A drafter's network and its relation to the target.

    hidden_state_layers, tokens: as of LoadedEagle.  mask_token: the target's token of masks.
    """

    network: PEagleNetwork
    hidden_state_layers: tuple[int, ...]
    tokens: torch.Tensor | None
    mask_token: int


def load_p_eagle(checkpoint: DraftCheckpoint, target: Transformer, dtype: str) -> LoadedPEagle:
    """Loads P-EAGLE. Raises ValueError naming a part that does not fit the target, is missing or unexpected."""
    parts = CheckpointParts(checkpoint, target, dtype)
    if MASK_STATE not in parts.checkpoint.tensors:
        raise checkpoint.error(f"tensor '{MASK_STATE}' is missing; is this EAGLE-3 (eagle3:PATH)?")
    loaded = read_eagle3(parts, (), MASK_STATE)
    network = loaded.network
    assert isinstance(network, Eagle3Network)
    if network.fc is None:
        raise checkpoint.error("tensor 'fc.weight' is missing, which the hidden states of masks pass")
    fields = parts.checkpoint.fields
    if not fields.get("parallel_drafting", bool, True):
        raise fields.error("parallel_drafting", f"contradicts the tensors: '{MASK_STATE}' is there")
    count, width = len(network.order), target.config.hidden_size
    parts.checkpoint.expect(MASK_STATE, 1, 1, count * width)
    states = parts.checkpoint.read(MASK_STATE).float().view(1, count, width).to(target.device)
    token = _mask_token(fields, target.config.vocab_size)
    masked = PEagleNetwork(network, network.fuse_in_order(states))
    return LoadedPEagle(masked, loaded.hidden_state_layers, loaded.tokens, token)


def _mask_token(fields: Fields, vocab: int) -> int:
    """Returns the token of masks. Raises ValueError where no field names it, or two differ."""
    named = {name: fields.get(name, int) for name in MASK_TOKENS if fields.data.get(name) is not None}
    if not named:
        raise fields.error(MASK_TOKENS[0], f"is missing; expected it, {MASK_TOKENS[1]} or {MASK_TOKENS[2]}")
    (name, token), *others = named.items()
    for other, value in others:
        if value != token:
            raise fields.error(other, f"is {value}, but '{name}' is {token}")
    if not 0 <= token < vocab:
        raise fields.error(name, f"must be a token from 0 to {vocab - 1}, got {token}")
    return token
