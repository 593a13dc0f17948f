"""PARD and PARD-2 (An et al. 2025): a small model drafts several tokens in one pass, from mask tokens.

PARD-2 adds the target's hidden states to the embeddings.
"""

from __future__ import annotations

from specengine.draft_policy.cost_model import CycleCosts
from specengine.drafters.draft_model.small_model import SmallModel
from specengine.drafters.draft_vocabulary import DraftVocabulary
from specengine.drafters.network_drafter import NetworkDrafter
from specengine.drafters.pard.checkpoint import PardCheckpoint
from specengine.drafters.pard.config import Config
from specengine.drafters.pard.network import PardNetwork
from specengine.drafters.pard.row_reader import RowReader
from specengine.models.transformer import Transformer
from specengine.tokenizer import Tokenizer


class Pard(NetworkDrafter):
    """Drafts the tokens of all levels in one pass; no level knows which token the level above it got.

    Captured cycles draft without features: those of a page's last position are kept for requests that share the page,
    which the host does.

    costs: of cycles; by default learned from them.
    """

    name = "pard"
    config_type = Config
    config: Config

    def __init__(self, config: Config, path: str | None, target: Transformer, costs: CycleCosts | None = None) -> None:
        super().__init__(config, path, target)
        checkpoint = PardCheckpoint.open(path)
        self._model = SmallModel(self.name, 0, config.dtype, path, target)
        model, features = self._model.model, None
        if config.features and checkpoint.reads_features:
            features = checkpoint.features(model.config.hidden_size, target, config.dtype)
        self.drafts_in_cycle = features is None
        network = PardNetwork(model, features is not None)
        vocab = model.config.vocab_size
        self.prepare(
            target,
            network=network,
            reader=RowReader(self.name, network, checkpoint.mask_token, features, target, config.levels),
            shape=config.shape(vocab, target),
            drawn_shape=config.drawn_shape(vocab),
            columns=DraftVocabulary.of(None, vocab, target.config.vocab_size, target.device),
            projections=[*network.projections, *([features.projection] if features else [])],
            nodes=config.most_nodes,
            costs=costs,
        )

    def check_tokenizer(self, tokenizer: Tokenizer | None) -> None:
        self._model.check_tokenizer(tokenizer)
