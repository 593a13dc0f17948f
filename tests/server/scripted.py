"""A server whose model says what a test wants: the engine's requests are real, only their tokens are given."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from specengine.draft_trees.tree import DraftTree
from specengine.engine.async_engine import AsyncEngine
from specengine.engine.request import Request
from specengine.rules import parse_rule
from specengine.tensor_parallel.loading import LoadedModel, load_model
from specengine.types import SamplingParams, TokenLogprob
from tests.models.files import write_chat_model

EOS = "</s>"
CONTEXT = 4096  # a token is a byte, and tools take hundreds


@dataclass
class Script:
    """The texts that the model will say, and what the engine was asked.

    sizes: tokens of each cycle, in turn.  prompts: the texts of the prompts.
    """

    texts: list[str] = field(default_factory=list)
    sizes: Sequence[int] = (1,)
    prompts: list[str] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)


def model_with(template: str, special: Sequence[str] = (), plain: Sequence[str] = ()) -> LoadedModel:
    """Makes a tiny model with a chat template. special, plain: texts of additional tokens."""
    folder = write_chat_model(Path(tempfile.mkdtemp(prefix="specengine-test-")) / "tiny")
    tokenizer = Backend.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in plain])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": EOS}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return load_model(folder, device="cpu")


@contextlib.contextmanager
def scripted() -> Iterator[Script]:
    """Yields the script of all servers of this process."""
    script = Script()

    async def stream(self, prompts, params, *, deadline=None):
        tokenizer = self.engine.tokenizer
        script.prompts = [tokenizer.decode(prompt, skip_special_tokens=False) for prompt in prompts]
        script.params = list(params)
        requests = [
            Request(list(prompt), own, own.seed, own.max_new_tokens, tokenizer.eos_token_ids, tokenizer, index=index)
            for index, (prompt, own) in enumerate(
                (prompt, own) for prompt, own in zip(prompts, params, strict=True) for _ in range(own.n)
            )
        ]
        for request, text in zip(requests, script.texts, strict=True):
            tokens = tokenizer.encode(text + EOS, add_special_tokens=False)
            for number in range(len(tokens)):
                size = script.sizes[number % len(script.sizes)]
                cycle, tokens = tokens[:size], tokens[size:]
                if not cycle or request.finish_reason:
                    break
                request.logprobs += [TokenLogprob(token, -1.0, ((token, -1.0),)) for token in cycle]
                parents = [*range(-1, len(cycle) - 1)]
                request.record_trace(DraftTree([0, *cycle[:-1]], parents), range(len(cycle)), len(cycle), cycle[-1])
                request.commit(cycle[:-1], cycle[-1])
                yield request.take_event(parse_rule("match"))
            assert request.finish_reason, "the text does not end"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncEngine, "stream", stream)
        yield script
