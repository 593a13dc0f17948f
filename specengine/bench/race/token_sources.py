"""Where the tokens of an answer come from: which drafter proposed each, or the target itself."""

from __future__ import annotations

from specengine.tokenizer import Tokenizer
from specengine.types import GenerationOutput

TARGET = "target"  # a bonus token: nobody's draft
MOST = 96  # tokens that are recorded


def provenance(output: GenerationOutput, drafter: str, tokenizer: Tokenizer | None) -> list[tuple[str, str]]:
    """The first tokens of a traced answer as (text, source).

    source: the drafter's name, those of its parts that drafted the token joined by `+`, or `target`. A token in the
    middle of a character has no text, its last one has the whole; without a tokenizer texts are token ids.
    """
    sources = []
    for cycle in output.trace or ():
        parts = cycle.sources or ((drafter,),) * len(cycle.accepted)
        sources += ["+".join(names) for names in parts]
        sources += [TARGET] if cycle.bonus is not None else []
    tokens = output.token_ids[:MOST]
    if tokenizer is None:
        texts = [f"{token} " for token in tokens]
    else:
        detokenizer = tokenizer.detokenizer()
        detokenizer.feed(output.prompt_token_ids[-4:])  # a leading space depends on what stands before
        texts = [detokenizer.feed([token]) for token in tokens]
    return list(zip(texts, sources, strict=False))
