"""The heads of block drafters, read from the parts of a checkpoint."""

from __future__ import annotations

from specengine.drafters.block.gru import Gru, GruHead
from specengine.drafters.block.head import BlockHead, PlainHead
from specengine.drafters.block.markov import KINDS, Confidence, Markov, MarkovHead
from specengine.drafters.block.parts import BlockParts
from specengine.drafters.block.selector import Selector, SelectorHead
from specengine.drafters.block.vocabulary import Vocabulary
from specengine.ops.weight import Projection, Weight


def read_head(parts: BlockParts, vocabulary: Vocabulary, embedding: Weight) -> BlockHead:
    """Reads what follows the layers. Raises ValueError naming a tensor or key that does not fit."""
    if parts.settings.family != "dflash":
        for name, value in (
            ("output_multiplier", vocabulary.multiplier != 1),
            ("final_logit_softcapping", vocabulary.softcap),
        ):
            if value:
                raise parts.keys.error(name, f"is not supported in a drafter of family {parts.settings.family}")
    if parts.settings.family == "dspark":
        return _dspark(parts, vocabulary)
    if parts.settings.family == "domino":
        return _domino(parts, vocabulary, embedding)
    if any(name.startswith("candidate_selector.") for name in parts.checkpoint.tensors):
        return _selector(parts, vocabulary)
    return PlainHead(vocabulary)


def _dspark(parts: BlockParts, vocabulary: Vocabulary) -> BlockHead:
    rank = parts.keys.get("markov_rank", int, 0)
    if rank < 0:
        raise parts.keys.error("markov_rank", f"must not be negative, got {rank}")
    markov = _markov(parts, vocabulary, rank) if rank else None
    confidence = _confidence(parts, rank)
    if markov is None and confidence is None:
        return PlainHead(vocabulary)
    return MarkovHead(vocabulary, markov, confidence)


def _markov(parts: BlockParts, vocabulary: Vocabulary, rank: int) -> Markov:
    kind = parts.keys.get("markov_head_type", str, "vanilla")
    if kind not in KINDS:
        raise parts.keys.error("markov_head_type", f"must be {', '.join(KINDS)}, got {kind!r}")
    hidden, inner = parts.config.hidden_size, None
    if kind == "gated":
        inner = parts.matrix("markov_head.gate_proj", rank, hidden + rank)
    elif kind == "rnn":
        inner = parts.matrix("markov_head.joint_proj", 3 * rank, 2 * rank + hidden)
    return Markov(
        kind,
        parts.matrix("markov_head.markov_w1", parts.target.config.vocab_size, rank).weights[0],
        parts.matrix("markov_head.markov_w2", vocabulary.head.rows, rank),
        inner,
        rank,
    )


def _confidence(parts: BlockParts, rank: int) -> Confidence | None:
    """Reads the confidence head; None where there is none."""
    name, keys = "confidence_head.proj.weight", parts.keys
    there = name in parts.checkpoint.tensors
    if there and not keys.get("enable_confidence_head", bool, True):
        raise keys.error("enable_confidence_head", f"is false, and there is a tensor '{name}'")
    if not there and not keys.get("enable_confidence_head", bool, False):
        return None
    hidden = parts.config.hidden_size
    shape = parts.checkpoint.tensors[name].shape if there else ()
    with_markov = keys.get("confidence_head_with_markov", bool, bool(rank) and shape == (1, hidden + rank))
    if with_markov and not rank:
        raise keys.error("confidence_head_with_markov", "is true, and markov_rank is 0")
    rows, ops = parts.floats(name, 1, hidden + rank if with_markov else hidden), parts.target.ops
    weight = ops.empty_weight(*rows.shape, "float32", rows.device)
    ops.pack_linear(rows, weight, 0)
    bias = "confidence_head.proj.bias"
    there = bias in parts.checkpoint.tensors  # optional in llama.cpp's files
    return Confidence(Projection((weight,), parts.floats(bias, 1) if there else None), with_markov)


def _domino(parts: BlockParts, vocabulary: Vocabulary, embedding: Weight) -> BlockHead:
    keys, hidden = parts.keys, parts.config.hidden_size
    size, wide, prefix = (
        keys.get("gru_hidden_dim", int),
        keys.get("emb_dim", int),
        keys.get("pure_draft_prefix_len", int),
    )
    for name, value in (("gru_hidden_dim", size), ("emb_dim", wide)):
        if value < 1:
            raise keys.error(name, f"must be positive, got {value}")
    if prefix < 0:
        raise keys.error("pure_draft_prefix_len", f"must not be negative, got {prefix}")
    gru = Gru(
        embedding,
        hidden,
        read=parts.matrix("prefix_gru.ih", 3 * size, hidden),
        keep=parts.matrix("prefix_gru.hh", 3 * size, size),
        down=parts.matrix("embed_proj.0", wide, hidden + size),
        up=parts.matrix("embed_proj.2", vocabulary.head.rows, wide),
        prefix=prefix,
    )
    return GruHead(vocabulary, gru)


def _selector(parts: BlockParts, vocabulary: Vocabulary) -> BlockHead:
    keys, name, tokens = parts.keys, "candidate_selector", parts.target.config.vocab_size
    rank, count = keys.get("selector_rank", int, 256), keys.get("selector_top_k", int, 16)
    if rank < 1:
        raise keys.error("selector_rank", f"must be positive, got {rank}")
    if not 1 <= count <= min(128, vocabulary.head.rows):
        raise keys.error("selector_top_k", f"must be from 1 to {min(128, vocabulary.head.rows)}, got {count}")
    selector = Selector(
        before=parts.matrix(f"{name}.predecessor_codebook", tokens, rank).weights[0],
        after=parts.matrix(f"{name}.successor_codebook", tokens, rank).weights[0],
        hidden=parts.matrix(f"{name}.hidden_projection", rank, parts.config.hidden_size),
        rank=rank,
        count=count,
    )
    return SelectorHead(vocabulary, selector)
