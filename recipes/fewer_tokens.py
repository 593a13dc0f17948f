"""Keeps the most frequent tokens of a drafter's vocabulary: python recipes/fewer_tokens.py DRAFTER DATA COUNT

DRAFTER is changed in place: the rows of the other tokens leave its head and its Markov head. DATA is a folder of
dialogues whose answers are counted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from specengine.train.data.corpus import Corpus

ROWS = ("lm_head.", "markov_w1.", "markov_w2.")


def main(drafter: Path, data: Path, count: int) -> None:
    """Rewrites model.safetensors and config.json."""
    tensors = load_file(drafter / "model.safetensors")
    tokens = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    corpus = Corpus(sorted(data.glob("dialogues-*.safetensors")), 0, 0)
    for most in range(count, 1 << 20, 16):
        kept = torch.isin(tokens, corpus.frequent_tokens(most))
        if kept.sum() >= count:
            break
    for name in tensors:
        if name.startswith(ROWS):
            tensors[name] = tensors[name][kept].contiguous()
    tensors["d2t"] = tokens[kept] - torch.arange(int(kept.sum()))
    config = json.loads((drafter / "config.json").read_text(encoding="utf-8"))
    config["draft_vocab_size"] = int(kept.sum())
    save_file(tensors, drafter / "model.safetensors", {"format": "pt"})
    (drafter / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    print(f"{int(kept.sum())} tokens")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
