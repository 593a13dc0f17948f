"""Keeps the most frequent tokens of a drafter's vocabulary: python recipes/fewer_tokens.py DRAFTER DATA COUNT

DRAFTER is changed in place: the rows of the other tokens leave its head and its Markov head. COUNT tokens stay, or up
to 15 more. DATA is a folder of dialogues whose answers are counted.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from specengine.train.data.corpus import Corpus

ROWS = ("lm_head.", "markov_w1.", "markov_w2.")


def main(drafter: Path, data: Path, count: int) -> None:
    """Rewrites model.safetensors and config.json.

    Raises ValueError for a drafter that has all tokens, and where there are not as many tokens as wanted.
    """
    tensors = load_file(drafter / "model.safetensors")
    if "d2t" not in tensors:
        raise ValueError(f"DRAFTER: {drafter} has no tensor 'd2t'; expected a drafter with a vocabulary of its own")
    tokens = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    if not 0 < count <= len(tokens):
        raise ValueError(f"COUNT: expected 1 to {len(tokens)}, the drafter's tokens, got {count}")
    corpus = Corpus(sorted(data.glob("dialogues-*.safetensors")), 0, 0)
    kept, most = torch.zeros(len(tokens), dtype=torch.bool), count
    while kept.sum() < count:
        frequent = corpus.frequent_tokens(most)
        kept = torch.isin(tokens, frequent)
        if len(frequent) < most and kept.sum() < count:
            raise ValueError(f"DATA: the answers have {int(kept.sum())} of the drafter's tokens, fewer than {count}")
        most += 16
    for name in tensors:
        if name.startswith(ROWS):
            tensors[name] = tensors[name][kept].contiguous()
    tensors["d2t"] = tokens[kept] - torch.arange(int(kept.sum()))
    if "t2d" in tensors:
        tensors["t2d"] = torch.zeros_like(tensors["t2d"]).index_fill(0, tokens[kept], True)
    config = json.loads((drafter / "config.json").read_text(encoding="utf-8"))
    config["draft_vocab_size"] = int(kept.sum())
    save_file(tensors, drafter / "model.safetensors", {"format": "pt"})
    (drafter / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    print(f"{int(kept.sum())} tokens")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Keeps the most frequent tokens of a drafter's vocabulary.")
    parser.add_argument("drafter", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("count", type=int)
    main(**vars(parser.parse_args()))
