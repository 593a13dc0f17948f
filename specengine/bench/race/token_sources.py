"""The source of each token of an answer: the drafter that proposed it, or the target."""

from __future__ import annotations

from specengine.tokenizer import Tokenizer
from specengine.types import GenerationOutput

TARGET = "target"  # the source of a bonus token
MOST = 96  # tokens recorded of an answer


def token_sources(output: GenerationOutput, drafter: str, tokenizer: Tokenizer | None) -> list[tuple[str, str]]:
    """Returns the first tokens of a traced answer as (text, source).

    source: the drafter's name, `target`, or the names of all parts that drafted the token joined by `+`.
    A token that ends inside a character has no text; the last token of the character has all of it.
    Without a tokenizer the texts are token ids.
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
        detokenizer.feed(output.prompt_token_ids[-4:])  # a leading space depends on the text before it
        texts = [detokenizer.feed([token]) for token in tokens]
    return list(zip(texts, sources, strict=False))
