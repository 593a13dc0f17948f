"""P-EAGLE: EAGLE-3's network drafts several tokens in one pass (vLLM, the speculators library).

The last pair of hidden state and token is followed by masks: a mask token beside a learned state. The outputs of that
pair and of the masks are the distributions of the next tokens. Keys and values of masks lie behind those of pairs until
the next draft overwrites them.
"""

from __future__ import annotations

from specengine.drafters.draft_vocabulary import DraftVocabulary
from specengine.drafters.hidden_states.pair_reader import PairReader
from specengine.drafters.network_drafter import NetworkDrafter
from specengine.drafters.one_pass.config import OnePassConfig
from specengine.drafters.p_eagle.checkpoint import load_p_eagle
from specengine.drafters.shipped import open_drafter
from specengine.models.transformer import Transformer


class PEagle(NetworkDrafter):
    """Drafts the tokens of all levels in one pass; no level knows which token the level above it got."""

    name = "p_eagle"
    config_type = OnePassConfig
    config: OnePassConfig

    def __init__(self, config: OnePassConfig, path: str | None, target: Transformer) -> None:
        super().__init__(config, path, target)
        if path is None:
            raise ValueError("drafter: p-eagle:PATH takes a P-EAGLE checkpoint")
        loaded = load_p_eagle(open_drafter(self.name, path, target), target, config.dtype)
        eagle, vocab = loaded.network.eagle, loaded.network.eagle.head.rows
        self.prepare(
            target,
            network=loaded.network,
            reader=PairReader(
                self.name,
                eagle,
                target,
                hidden_state_layers=loaded.hidden_state_layers,
                levels=config.levels,
                beyond=config.levels,
                mask_token=loaded.mask_token,
            ),
            shape=config.shape(vocab, target),
            drawn_shape=config.drawn_shape(vocab),
            columns=DraftVocabulary.of(loaded.tokens, vocab, target.config.vocab_size, target.device),
            projections=eagle.projections,
            nodes=config.most_nodes,
        )
