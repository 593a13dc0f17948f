"""The MTP network in a GGUF file: the block behind the text model's, under the names that folders have.

llama.cpp's converter renames `mtp.*` before it adds 1 to every tensor whose name ends in norm.weight. The names of all
norms of the network do so by then: model.layers.N.enorm, .hnorm, .shared_head.norm and those of the layer. The rows of
q are in the order of folders, and the columns of eh_proj read the embedding first, as `mtp.fc` does.
"""

from __future__ import annotations

import re
from pathlib import Path

from specengine.models.checkpoint_base import Checkpoint
from specengine.models.checkpoint_gguf import GGUFCheckpoint
from specengine.models.renamed import RenamedCheckpoint

_BLOCK = re.compile(r"(?:blk|model\.layers)\.(\d+)\.(.+)")
_NAMES = {
    "nextn.eh_proj.weight": "mtp.fc.weight",
    "nextn.enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "nextn.hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "nextn.shared_head_norm.weight": "mtp.norm.weight",
}


def gguf_mtp(path: Path) -> Checkpoint | None:
    """Opens the network of a GGUF file; None where the file has none. Norms are stored as 1 + w."""
    file = GGUFCheckpoint(path, with_drafter=True)
    first = file.config.num_layers
    names: dict[str, str] = {}
    for stored in file.tensors:
        block = _BLOCK.fullmatch(stored)
        if block is not None and int(block[1]) >= first:
            layer = int(block[1]) - first
            own = _NAMES.get(block[2]) if layer == 0 else None
            names[own or f"mtp.layers.{layer}.{block[2]}"] = stored
    return RenamedCheckpoint(file, names) if names else None
